// Shared by the kernels (fp8_experts.cu) and the host (extension.cpp): launch shapes and the parameter block.
#pragma once

#ifdef __CUDACC__
#define ON_BOTH __host__ __device__
#else
#define ON_BOTH
#endif

// Warps a gate/up block splits K over, and 8-row groups (gate and up each) it owns.
constexpr int kGateWarps = 4;
constexpr int kDirectGateGroups = 1;
constexpr int kStreamGateGroups = 2;
// Warps of a prefill gate/up block, each with 16 gate and 16 up rows, and stages of x in shared memory.
constexpr int kTiledWarps = 5;
constexpr int kTiledStages = 4;
constexpr int kTiledPitch = 64 + 8;  // FP16 values between rows of x in shared memory; 8 avoid bank conflicts
// Rows of H a down-projection warp owns at a time, warps in a grouped block.
constexpr int kDownRows = 32;
constexpr int kDownWarps = 4;
// Slots of the queues that weights pass through, in shared memory from sm_80 on (Queue in fp8_experts.cu).
constexpr int kGateStages = 3;
constexpr int kDownSlots = 2;
// K steps of w2 in one slot: three cover I = 160. Volta's queue is in registers, so shorter.
ON_BOTH constexpr int down_steps(int arch) { return arch >= 800 ? 3 : 1; }
ON_BOTH constexpr int queue_bytes(int warps, int slots, int words) { return warps * slots * words * 512; }
constexpr int kRouteThreads = 1024;
constexpr int kReduceThreads = 256;

struct ExpertTile {  // up to Params::tile_tokens pairs of one expert: sorted[begin .. begin + count)
  int expert, begin, count, unused;
};

// A step of up to 64 values of w2's K, 4 chunks of 16, all in one scale block.
constexpr int kMaxDownSteps = 96;
struct alignas(4) KStep {
  unsigned char chunk, chunks, block, unused;
};

struct Params {
  const unsigned short* x;       // [M, H] FP16
  const unsigned char* w13;      // [E, 2I, H] E4M3, gate rows then up rows
  const float* w13_scale;        // [E, 2I], or [E, 2 * w13_row_blocks, w13_k_blocks]
  const unsigned char* w2;       // [E, H, I] E4M3
  const float* w2_scale;         // [E, H], or [E, w2_row_blocks, w2_k_blocks]
  const float* topk_weights;     // [M, top_k]
  const void* topk_ids;          // [M, top_k], int32 or int64
  unsigned short* out;           // [M, H] FP16
  unsigned short* act;           // [M * top_k, I] FP16, silu(gate) * up; a row a pair (sorted order if grouped)
  unsigned short* partial;       // [M * top_k, H] FP16, weighted expert outputs, pair order
  int* rank;                     // [M * top_k], a pair's place among its expert's; grouped route
  int* sorted;                   // [M * top_k], pairs (token * top_k + choice) by expert; grouped route
  ExpertTile* tiles;             // grouped route
  int* num_tiles;                // [1], grouped route
  int tokens, experts, hidden, local, top_k;
  int ids_are_64bit;
  int tile_tokens;
  int block_n, block_k;          // 0, 0: one scale a row
  int w13_offset;                // rows of the first block before this slice
  int w13_row_blocks, w13_k_blocks;
  int w2_row_blocks, w2_k_blocks;
  int w2_steps;
  KStep w2_step[kMaxDownSteps + 2];  // then steps of no chunks
};
