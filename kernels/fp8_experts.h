// Shared by the kernels (fp8_experts.cu) and the host (extension.cpp): launch shapes and the parameter block.
#pragma once

// Warps a gate/up block splits K over, and 8-row groups (gate and up each) it owns.
constexpr int kGateWarps = 8;
constexpr int kDirectGateGroups = 1;
constexpr int kStreamGateGroups = 2;
// Warps of a prefill gate/up block, each with 16 gate and 16 up rows, and stages of x in shared memory.
constexpr int kTiledWarps = 5;
constexpr int kTiledStages = 4;
constexpr int kTiledPitch = 64 + 8;  // FP16 values between rows of x in shared memory; 8 avoid bank conflicts
// Rows of H a down-projection warp owns, warps in a grouped block, most warps in a direct one.
constexpr int kDownRows = 32;
constexpr int kDownWarps = 8;
constexpr int kDirectDownWarps = 10;
constexpr int kRouteThreads = 1024;
constexpr int kReduceThreads = 256;

struct ExpertTile {  // up to Params::tile_tokens pairs of one expert: sorted[begin .. begin + count)
  int expert, begin, count, unused;
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
  unsigned short* partial;       // [M * top_k, H] FP16, weighted expert outputs, pair order; grouped route
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
  int w2_first_chunks;           // 16-byte chunks of K in the slice's first block of w2
  int w2_steps;                  // K steps of w2, see k_step
};
