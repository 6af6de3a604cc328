// FP8 (E4M3) mixture-of-experts for a few tokens up to prefill: gate/up, SiLU, down, weighted sum over top-k.
//
// Weights are the A operand of the tensor cores (their rows are M), tokens are the B operand (N). A weight byte
// goes from memory straight into the register of the lane whose fragment holds it, 16 bytes a load, and becomes
// FP16 there: E4M3 to FP16 is exact, products are exact in FP32, and sums are FP32.
//
// Two routes. Direct (few tokens): every (token, choice) pair streams its expert on its own; two kernels.
// Grouped: pairs are sorted by expert on the device, so an expert's weights are read once for up to a tile of
// tokens; four kernels. Every sum has a fixed order, so results do not change from run to run.
//
// No headers but our own, so NVRTC compiles this without a CUDA toolkit.
#include "fp8_experts.h"

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 700
#endif

namespace {

// ---------------------------------------------------------------- loads, stores, conversions

__device__ __forceinline__ uint4 load_weights(const u8* p) {  // read once: keep out of L1
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

__device__ __forceinline__ uint4 load16(const void* p) { return *reinterpret_cast<const uint4*>(p); }

__device__ __forceinline__ float to_float(u16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}

__device__ __forceinline__ u16 to_half(float f) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}

__device__ __forceinline__ u32 pack(float low, float high) {
  return to_half(low) | (u32(to_half(high)) << 16);
}

// Two E4M3 bytes, each in the high byte of a 16-bit half, to FP16 times kDecoded: sign in place, exponent and
// mantissa shifted into FP16's fields, so only the bias differs. Exact, subnormals too. NaN is not recognised.
#if __CUDA_ARCH__ >= 890
constexpr float kDecoded = 1.0f;
__device__ __forceinline__ void decode4(u32 bytes, u32& low, u32& high) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
      : "=r"(low), "=r"(high) : "r"(bytes));
}
#else
constexpr float kDecoded = 256.0f;  // 2^(15 - 7), folded into the scales
__device__ __forceinline__ u32 decode2(u32 spread) {
  return (spread & 0x80008000u) | ((spread >> 1) & 0x3f803f80u);
}
__device__ __forceinline__ void decode4(u32 bytes, u32& low, u32& high) {
  low = decode2(__byte_perm(bytes, 0, 0x1404));
  high = decode2(__byte_perm(bytes, 0, 0x3424));
}
#endif

__device__ __forceinline__ void decode16(uint4 raw, u32 (&h)[8]) {
  decode4(raw.x, h[0], h[1]);
  decode4(raw.y, h[2], h[3]);
  decode4(raw.z, h[4], h[5]);
  decode4(raw.w, h[6], h[7]);
}

// Programmatic dependent launch (sm_90 on): a kernel starts while the one before it ends, and waits here
// before it reads that kernel's results.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ int expert_of(const Params& p, int pair) {  // -1: not an expert of ours
  long long id = p.ids_are_64bit ? static_cast<const long long*>(p.topk_ids)[pair]
                                 : static_cast<const int*>(p.topk_ids)[pair];
  return id >= 0 && id < p.experts ? int(id) : -1;
}

// ---------------------------------------------------------------- tensor cores
//
// One K step is 64 values: 4 chunks of 16. A lane holds one chunk (16 bytes) of one row of each of two 8-row
// weight tiles, and the same chunk of one token. `Sums` holds both tiles times 8 tokens; `finish` leaves a lane
// with 4 of them: tile 0 and tile 1 at row `out_row`, tokens `out_column` and `out_column + 1`.

#if __CUDA_ARCH__ >= 800
constexpr int kSums = 4;
__device__ __forceinline__ int in_row(int lane) { return lane >> 2; }
__device__ __forceinline__ int in_chunk(int lane) { return lane & 3; }
__device__ __forceinline__ int out_row(int lane) { return lane >> 2; }
__device__ __forceinline__ int out_column(int lane) { return (lane & 3) * 2; }
#else
// mma.m8n8k4 works in four quad-pairs of lanes (i..i+3, i+16..i+19); each takes one chunk of K.
constexpr int kSums = 16;
__device__ __forceinline__ int in_row(int lane) { return (lane & 3) | ((lane >> 2) & 4); }
__device__ __forceinline__ int in_chunk(int lane) { return (lane >> 2) & 3; }
__device__ __forceinline__ int out_row(int lane) {
  return (lane & 1) | ((lane >> 1) & 2) | ((lane >> 2) & 4);
}
__device__ __forceinline__ int out_column(int lane) { return ((lane >> 1) & 4) | (lane & 2); }
#endif

struct Sums {
  float v[kSums];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kSums; ++i) v[i] = 0.0f;
  }
  // this += (scale0 * tile 0, scale1 * tile 1)
  __device__ __forceinline__ void add(const Sums& s, float scale0, float scale1) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) v[i] += (i < kSums / 2 ? scale0 : scale1) * s.v[i];
  }
};

#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_step(Sums& s, const u32 (&a)[2][8], uint4 b0, uint4 b1) {
  mma(s.v, a[0][0], a[1][0], a[0][1], a[1][1], b0.x, b0.y);
  mma(s.v, a[0][2], a[1][2], a[0][3], a[1][3], b0.z, b0.w);
  mma(s.v, a[0][4], a[1][4], a[0][5], a[1][5], b1.x, b1.y);
  mma(s.v, a[0][6], a[1][6], a[0][7], a[1][7], b1.z, b1.w);
}
__device__ __forceinline__ void finish(const Sums& s, float (&r)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) r[i] = s.v[i];
}
#else
__device__ __forceinline__ void mma(float* d, u32 a0, u32 a1, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, "
               "{%10, %11}, {%0, %1, %2, %3, %4, %5, %6, %7};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
               : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_step(Sums& s, const u32 (&a)[2][8], uint4 b0, uint4 b1) {
  const u32 b[8] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    mma(s.v, a[0][j], a[0][j + 1], b[j], b[j + 1]);
    mma(s.v + 8, a[1][j], a[1][j + 1], b[j], b[j + 1]);
  }
}
// Add up the four quad-pairs; quad-pair q is left with its values 2q and 2q + 1 of each tile.
__device__ __forceinline__ void finish(const Sums& s, float (&r)[4]) {
  const int lane = threadIdx.x & 31;
  const bool upper = lane & 8, odd = lane & 4;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const float* v = s.v + 8 * tile;
    float h[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      h[i] = (upper ? v[i + 4] : v[i]) + __shfl_xor_sync(~0u, upper ? v[i] : v[i + 4], 8);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      r[2 * tile + i] = (odd ? h[i + 2] : h[i]) + __shfl_xor_sync(~0u, odd ? h[i] : h[i + 2], 4);
  }
}
#endif

// K steps whose weights a lane loads before it uses any; Volta's fragments leave fewer registers for them.
#if __CUDA_ARCH__ >= 800
constexpr int kGateHeldSteps = 5, kDownHeldSteps = 3;  // 5 * 8 warps * 64 = 2560 = H, 3 * 64 > 160 = I
#else
constexpr int kGateHeldSteps = 3, kDownHeldSteps = 2;
#endif

// A K step never crosses a scale block: chunks [chunk, min(chunk + 4, end)) lie in scale block `block`.
struct KStep {
  int chunk, end, block;
};
// `first`: chunks in the first (perhaps partial) block; `total`: chunks in K.
__device__ __forceinline__ KStep k_step(int step, int first, int block_k, int total) {
  const int first_steps = (first + 3) / 4;
  if (step < first_steps) return {4 * step, first, 0};
  const int block_chunks = block_k / 16, block_steps = (block_chunks + 3) / 4;
  const int block = (step - first_steps) / block_steps;
  const int begin = first + block * block_chunks;
  const int end = begin + block_chunks < total ? begin + block_chunks : total;
  return {begin + 4 * (step - first_steps - block * block_steps), end, block + 1};
}

__device__ __forceinline__ float silu(float v) { return v / (1.0f + __expf(-v)); }

// ---------------------------------------------------------------- routing (grouped route)

// One block. Counts pairs per expert, lays experts out one after the other in `sorted`, cuts tiles.
// The order inside an expert varies; nothing computed from a pair depends on its place.
__device__ void route_pairs(const Params& p) {
  extern __shared__ int place[];  // [experts]: pairs, then next free place
  __shared__ int warp_pairs[32], warp_tiles[32];
  const int t = threadIdx.x, pairs = p.tokens * p.top_k;
  constexpr int kBatch = 4;
  let_next_kernel_start();
  for (int e = t; e < p.experts; e += kRouteThreads) place[e] = 0;
  __syncthreads();
  for (int base = t; base < pairs; base += kBatch * kRouteThreads) {
    int e[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int pair = base + i * kRouteThreads;
      e[i] = pair < pairs ? expert_of(p, pair) : -1;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (e[i] >= 0) atomicAdd(&place[e[i]], 1);
  }
  __syncthreads();
  // Exclusive sums of pairs and tiles over experts; a thread owns a run of them.
  const int run = (p.experts + kRouteThreads - 1) / kRouteThreads;
  const int first = t * run, last = first + run < p.experts ? first + run : p.experts;
  int my_pairs = 0, my_tiles = 0;
  for (int e = first; e < last; ++e) {
    my_pairs += place[e];
    my_tiles += (place[e] + p.tile_tokens - 1) / p.tile_tokens;
  }
  int sum_pairs = my_pairs, sum_tiles = my_tiles;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int up_pairs = __shfl_up_sync(~0u, sum_pairs, d), up_tiles = __shfl_up_sync(~0u, sum_tiles, d);
    if ((t & 31) >= d) sum_pairs += up_pairs, sum_tiles += up_tiles;
  }
  if ((t & 31) == 31) warp_pairs[t >> 5] = sum_pairs, warp_tiles[t >> 5] = sum_tiles;
  __syncthreads();
  for (int w = 0; w < t >> 5; ++w) sum_pairs += warp_pairs[w], sum_tiles += warp_tiles[w];
  int begin = sum_pairs - my_pairs, tile = sum_tiles - my_tiles;
  for (int e = first; e < last; ++e) {
    const int count = place[e];
    place[e] = begin;
    for (int done = 0; done < count; done += p.tile_tokens) {
      const int rest = count - done;
      p.tiles[tile++] = {e, begin + done, rest < p.tile_tokens ? rest : p.tile_tokens, 0};
    }
    begin += count;
  }
  if (t == kRouteThreads - 1) *p.num_tiles = sum_tiles;
  __syncthreads();
  for (int base = t; base < pairs; base += kBatch * kRouteThreads) {
    int e[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int pair = base + i * kRouteThreads;
      e[i] = pair < pairs ? expert_of(p, pair) : -1;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (e[i] >= 0) p.sorted[atomicAdd(&place[e[i]], 1)] = base + i * kRouteThreads;
  }
}

// ---------------------------------------------------------------- gate, up, SiLU

// Scales of a gate row tile and the matching up row tile at a K step (block scales), or of single rows.
__device__ __forceinline__ const float* w13_block_scale(const Params& p, int expert, int row, bool up) {
  const int block = (p.w13_offset + row) / p.block_n + (up ? p.w13_row_blocks : 0);
  return p.w13_scale + (size_t(expert) * 2 * p.w13_row_blocks + block) * p.w13_k_blocks;
}
__device__ __forceinline__ float w13_row_scale(const Params& p, int expert, int row, bool up) {
  return p.block_n ? 1.0f : p.w13_scale[size_t(expert) * 2 * p.local + row + (up ? p.local : 0)];
}

// A block owns 8 * G gate rows and the same up rows of one tile of tokens; its warps split K and their sums
// meet in shared memory. A lane's rows are `row0 + in_row * G + g`.
template <int G, int U, int N, bool kGrouped>
__device__ __forceinline__ void gate_up_streaming(const Params& p) {
  __shared__ float sums[kGateWarps][N][G][2][8][8];  // [.., tile, token, row]
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int row0 = blockIdx.x * 8 * G;
  ExpertTile tile;
  if (kGrouped) {
    wait_for_previous_kernel();
    let_next_kernel_start();  // only now: the next kernel reads the tiles before it waits
    if (int(blockIdx.y) >= *p.num_tiles) return;
    tile = p.tiles[blockIdx.y];
  } else {
    let_next_kernel_start();
    tile = {expert_of(p, blockIdx.y), int(blockIdx.y), 1, 0};
    if (tile.expert < 0) return;
  }
  const u16* tokens[N];  // this lane's token and chunk, or null
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int column = n * 8 + in_row(lane);
    tokens[n] = nullptr;
    if (column < tile.count) {
      const int pair = kGrouped ? p.sorted[tile.begin + column] : tile.begin;
      tokens[n] = p.x + size_t(pair / p.top_k) * p.hidden + in_chunk(lane) * 16;
    }
  }
  const u8* gate = p.w13 + (size_t(tile.expert) * 2 * p.local + row0 + in_row(lane) * G) * p.hidden +
                   in_chunk(lane) * 16;
  const size_t to_up = size_t(p.local) * p.hidden;
  const float* gate_scale = p.block_n ? w13_block_scale(p, tile.expert, row0, false) : nullptr;
  const float* up_scale = p.block_n ? w13_block_scale(p, tile.expert, row0, true) : nullptr;

  Sums total[N][G];
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int g = 0; g < G; ++g) total[n][g].clear();

  const int steps = p.hidden / 64;
  for (int first = warp; first < steps; first += kGateWarps * U) {
    uint4 a[U][G][2], b[U][N][2];
    float scale[U][2];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int k = (first + u * kGateWarps) * 64;
      if (k < p.hidden) {
#pragma unroll
        for (int g = 0; g < G; ++g) {
          a[u][g][0] = load_weights(gate + g * p.hidden + k);
          a[u][g][1] = load_weights(gate + to_up + g * p.hidden + k);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int k = (first + u * kGateWarps) * 64;
      scale[u][0] = scale[u][1] = kDecoded;
      if (k < p.hidden && p.block_n) {
        scale[u][0] *= gate_scale[k / p.block_k];
        scale[u][1] *= up_scale[k / p.block_k];
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
        b[u][n][0] = b[u][n][1] = make_uint4(0, 0, 0, 0);
        if (k < p.hidden && tokens[n]) {
          b[u][n][0] = load16(tokens[n] + k);
          b[u][n][1] = load16(tokens[n] + k + 8);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if ((first + u * kGateWarps) * 64 >= p.hidden) break;
#pragma unroll
      for (int g = 0; g < G; ++g) {
        u32 h[2][8];
        decode16(a[u][g][0], h[0]);
        decode16(a[u][g][1], h[1]);
#pragma unroll
        for (int n = 0; n < N; ++n) {
          Sums step;
          step.clear();
          mma_step(step, h, b[u][n][0], b[u][n][1]);
          total[n][g].add(step, scale[u][0], scale[u][1]);
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int g = 0; g < G; ++g) {
      float r[4];
      finish(total[n][g], r);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[warp][n][g][i / 2][out_column(lane) + i % 2][out_row(lane)] = r[i];
    }
  __syncthreads();
  for (int i = threadIdx.x; i < 8 * G * tile.count; i += 32 * kGateWarps) {
    const int row = i % (8 * G), column = i / (8 * G);
    float gate_sum = 0.0f, up_sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kGateWarps; ++w) {
      gate_sum += sums[w][column / 8][row % G][0][column % 8][row / G];
      up_sum += sums[w][column / 8][row % G][1][column % 8][row / G];
    }
    gate_sum *= w13_row_scale(p, tile.expert, row0 + row, false);
    up_sum *= w13_row_scale(p, tile.expert, row0 + row, true);
    p.act[size_t(tile.begin + column) * p.local + row0 + row] = to_half(silu(gate_sum) * up_sum);
  }
}

#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void copy16_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(u32(__cvta_generic_to_shared(to))), "l"(from));
}

// Prefill: a warp owns 16 gate and 16 up rows over all of K; the block's tokens pass through shared memory.
template <int N>
__device__ __forceinline__ void gate_up_tiled(const Params& p) {
  extern __shared__ uint4 shared[];
  u16* xs = reinterpret_cast<u16*>(shared);  // [kTiledStages][8 * N][kTiledPitch]
  __shared__ int token_of[8 * N];
  constexpr int kThreads = 32 * kTiledWarps, kStage = 8 * N * kTiledPitch;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (int(blockIdx.y) >= *p.num_tiles) return;
  const ExpertTile tile = p.tiles[blockIdx.y];
  for (int i = threadIdx.x; i < tile.count; i += kThreads) token_of[i] = p.sorted[tile.begin + i] / p.top_k;
  for (int i = threadIdx.x; i < kTiledStages * kStage / 8; i += kThreads) shared[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();

  const int row0 = (blockIdx.x * kTiledWarps + warp) * 16;
  const bool active = row0 < p.local;  // the last block may have warps to spare; they still copy
  const u8* gate = p.w13 + (size_t(tile.expert) * 2 * p.local + (active ? row0 : 0) + in_row(lane) * 2) * p.hidden +
                   in_chunk(lane) * 16;
  const size_t to_up = size_t(p.local) * p.hidden;
  const float* gate_scale = p.block_n ? w13_block_scale(p, tile.expert, active ? row0 : 0, false) : nullptr;
  const float* up_scale = p.block_n ? w13_block_scale(p, tile.expert, active ? row0 : 0, true) : nullptr;

  const int steps = p.hidden / 64;
  auto copy_stage = [&](int step) {
    if (step < steps)
      for (int i = threadIdx.x; i < tile.count * 8; i += kThreads)
        copy16_async(xs + (step % kTiledStages) * kStage + (i / 8) * kTiledPitch + (i % 8) * 8,
                     p.x + size_t(token_of[i / 8]) * p.hidden + step * 64 + (i % 8) * 8);
    asm volatile("cp.async.commit_group;");
  };
  uint4 next[2][2];
  auto load_step = [&](int step) {
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      next[g][0] = load_weights(gate + g * p.hidden + step * 64);
      next[g][1] = load_weights(gate + to_up + g * p.hidden + step * 64);
    }
  };

  Sums total[N][2];
#pragma unroll
  for (int n = 0; n < N; ++n) total[n][0].clear(), total[n][1].clear();
  load_step(0);
  for (int s = 0; s < kTiledStages - 1; ++s) copy_stage(s);
  for (int step = 0; step < steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kTiledStages - 2));
    __syncthreads();
    copy_stage(step + kTiledStages - 1);
    u32 h[2][2][8];
#pragma unroll
    for (int g = 0; g < 2; ++g) decode16(next[g][0], h[g][0]), decode16(next[g][1], h[g][1]);
    if (step + 1 < steps) load_step(step + 1);
    float scale0 = kDecoded, scale1 = kDecoded;
    if (p.block_n) {
      scale0 *= gate_scale[step * 64 / p.block_k];
      scale1 *= up_scale[step * 64 / p.block_k];
    }
    const u16* b = xs + (step % kTiledStages) * kStage + in_row(lane) * kTiledPitch + in_chunk(lane) * 16;
    if (active) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (n * 8 >= tile.count) break;
        const uint4 b0 = load16(b + n * 8 * kTiledPitch), b1 = load16(b + n * 8 * kTiledPitch + 8);
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          Sums part;
          part.clear();
          mma_step(part, h[g], b0, b1);
          total[n][g].add(part, scale0, scale1);
        }
      }
    }
  }
  if (!active) return;
  const int row = row0 + out_row(lane) * 2;
  float row_scale[2][2];
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    row_scale[g][0] = w13_row_scale(p, tile.expert, row + g, false);
    row_scale[g][1] = w13_row_scale(p, tile.expert, row + g, true);
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    float value[2][2];  // [token, row]
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      float r[4];
      finish(total[n][g], r);
#pragma unroll
      for (int c = 0; c < 2; ++c) value[c][g] = silu(r[c] * row_scale[g][0]) * (r[2 + c] * row_scale[g][1]);
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = n * 8 + out_column(lane) + c;
      if (column < tile.count)
        *reinterpret_cast<u32*>(p.act + size_t(tile.begin + column) * p.local + row) = pack(value[c][0], value[c][1]);
    }
  }
}
#endif

// ---------------------------------------------------------------- down, weighted sum

// A down warp owns kDownRows rows of H: a lane's rows are `row0 + in_row * kLaneRows + i`.
constexpr int kLaneRows = kDownRows / 8;

struct DownWeights {
  uint4 a[kDownHeldSteps][kLaneRows];
  float scale[kDownHeldSteps];
  int chunk[kDownHeldSteps];  // this lane's chunk of K, or -1

  __device__ __forceinline__ void load(const Params& p, int expert, int row0, int first_step) {
    const int lane = threadIdx.x & 31;
    const u8* rows = p.w2 + (size_t(expert) * p.hidden + row0 + in_row(lane) * kLaneRows) * p.local;
    const float* block_scale =
        p.block_n ? p.w2_scale + (size_t(expert) * p.w2_row_blocks + row0 / p.block_n) * p.w2_k_blocks : nullptr;
#pragma unroll
    for (int s = 0; s < kDownHeldSteps; ++s) {
      chunk[s] = -1;
      scale[s] = kDecoded;
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) a[s][i] = make_uint4(0, 0, 0, 0);
      if (first_step + s >= p.w2_steps) continue;
      const KStep step = k_step(first_step + s, p.w2_first_chunks, p.block_k, p.local / 16);
      if (block_scale) scale[s] *= block_scale[step.block];
      if (step.chunk + in_chunk(lane) >= step.end) continue;
      chunk[s] = step.chunk + in_chunk(lane);
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) a[s][i] = load_weights(rows + i * p.local + chunk[s] * 16);
    }
  }
};

__device__ __forceinline__ float w2_row_scale(const Params& p, int expert, int row) {
  return p.block_n ? 1.0f : p.w2_scale[size_t(expert) * p.hidden + row];
}

// Direct route: a block owns kDownRows of one token's output; warp w takes the token's choices w, w + warps, ...
__device__ __forceinline__ void down_one_token(const Params& p) {
  __shared__ float sums[kDirectDownWarps][kDownRows];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  const int row0 = blockIdx.x * kDownRows, row = row0 + out_row(lane) * kLaneRows;
  float value[kLaneRows] = {};
  for (int choice = warp; choice < p.top_k; choice += warps) {
    const int pair = blockIdx.y * p.top_k + choice, expert = expert_of(p, pair);
    if (expert < 0) continue;
    Sums total[kLaneRows / 2];
#pragma unroll
    for (int g = 0; g < kLaneRows / 2; ++g) total[g].clear();
    for (int first = 0; first < p.w2_steps; first += kDownHeldSteps) {
      DownWeights w;
      w.load(p, expert, row0, first);  // weights do not depend on the kernel before this one
      wait_for_previous_kernel();
#pragma unroll
      for (int s = 0; s < kDownHeldSteps; ++s) {
        uint4 b0 = make_uint4(0, 0, 0, 0), b1 = b0;
        if (in_row(lane) == 0 && w.chunk[s] >= 0) {
          const u16* act = p.act + size_t(pair) * p.local + w.chunk[s] * 16;
          b0 = load16(act), b1 = load16(act + 8);
        }
#pragma unroll
        for (int g = 0; g < kLaneRows / 2; ++g) {
          u32 h[2][8];
          decode16(w.a[s][2 * g], h[0]);
          decode16(w.a[s][2 * g + 1], h[1]);
          Sums part;
          part.clear();
          mma_step(part, h, b0, b1);
          total[g].add(part, w.scale[s], w.scale[s]);
        }
      }
    }
    const float weight = p.topk_weights[pair];
#pragma unroll
    for (int g = 0; g < kLaneRows / 2; ++g) {
      float r[4];
      finish(total[g], r);
      value[2 * g] += weight * w2_row_scale(p, expert, row + 2 * g) * r[0];
      value[2 * g + 1] += weight * w2_row_scale(p, expert, row + 2 * g + 1) * r[2];
    }
  }
  if (out_column(lane) == 0)
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) sums[warp][out_row(lane) * kLaneRows + i] = value[i];
  __syncthreads();
  if (threadIdx.x < kDownRows) {
    float sum = 0.0f;
    for (int w = 0; w < warps; ++w) sum += sums[w][threadIdx.x];
    p.out[size_t(blockIdx.y) * p.hidden + row0 + threadIdx.x] = to_half(sum);
  }
  wait_for_previous_kernel();  // a block whose choices were all out of range has not waited yet
}

// Grouped route: a block holds a tile's activations and walks over row blocks of H.
template <int N>
__device__ __forceinline__ void down_tile(const Params& p) {
  extern __shared__ uint4 shared[];
  u16* acts = reinterpret_cast<u16*>(shared);  // [8 * N][pitch]
  __shared__ int pair_of[8 * N];
  __shared__ float weight_of[8 * N];
  constexpr int kThreads = 32 * kDownWarps;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int pitch = p.local + 8;  // an odd number of 16-byte units: no bank conflicts
  let_next_kernel_start();
  // Tiles and sorted pairs come from the kernel before the previous one, which had ended when that one let us start.
  if (int(blockIdx.y) >= *p.num_tiles) return wait_for_previous_kernel();
  const ExpertTile tile = p.tiles[blockIdx.y];
  const int row_blocks = p.hidden / kDownRows, stride = gridDim.x * kDownWarps;
  int row_block = blockIdx.x * kDownWarps + warp;
  DownWeights w;
  if (row_block < row_blocks) w.load(p, tile.expert, row_block * kDownRows, 0);
  for (int i = threadIdx.x; i < tile.count; i += kThreads) {
    pair_of[i] = p.sorted[tile.begin + i];
    weight_of[i] = p.topk_weights[pair_of[i]];
  }
  wait_for_previous_kernel();
  const int row_units = p.local / 8, padded = (tile.count + 7) / 8 * 8;
  for (int i = threadIdx.x; i < padded * row_units; i += kThreads) {
    const int column = i / row_units, unit = i % row_units;
    shared[column * (pitch / 8) + unit] =
        column < tile.count ? load16(p.act + size_t(tile.begin + column) * p.local + unit * 8) : make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
  const u16* my_act = acts + in_row(lane) * pitch;

  for (; row_block < row_blocks; row_block += stride) {
    const int row0 = row_block * kDownRows;
    Sums total[N][kLaneRows / 2];
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int g = 0; g < kLaneRows / 2; ++g) total[n][g].clear();
    for (int first = 0; first < p.w2_steps; first += kDownHeldSteps) {
      if (first || row_block >= stride) w.load(p, tile.expert, row0, first);
#pragma unroll
      for (int s = 0; s < kDownHeldSteps; ++s) {
        u32 h[kLaneRows / 2][2][8];
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) decode16(w.a[s][i], h[i / 2][i % 2]);
#pragma unroll
        for (int n = 0; n < N; ++n) {
          if (n * 8 >= tile.count) break;
          uint4 b0 = make_uint4(0, 0, 0, 0), b1 = b0;
          if (w.chunk[s] >= 0) {
            b0 = load16(my_act + n * 8 * pitch + w.chunk[s] * 16);
            b1 = load16(my_act + n * 8 * pitch + w.chunk[s] * 16 + 8);
          }
#pragma unroll
          for (int g = 0; g < kLaneRows / 2; ++g) {
            Sums part;
            part.clear();
            mma_step(part, h[g], b0, b1);
            total[n][g].add(part, w.scale[s], w.scale[s]);
          }
        }
      }
    }
    const int row = row0 + out_row(lane) * kLaneRows;
    float row_scale[kLaneRows];
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) row_scale[i] = w2_row_scale(p, tile.expert, row + i);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float r[kLaneRows / 2][4];
#pragma unroll
      for (int g = 0; g < kLaneRows / 2; ++g) finish(total[n][g], r[g]);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = n * 8 + out_column(lane) + c;
        if (column >= tile.count) continue;
        const float weight = weight_of[column];
        uint2 packed;
        packed.x = pack(weight * row_scale[0] * r[0][c], weight * row_scale[1] * r[0][2 + c]);
        packed.y = pack(weight * row_scale[2] * r[1][c], weight * row_scale[3] * r[1][2 + c]);
        *reinterpret_cast<uint2*>(p.partial + size_t(pair_of[column]) * p.hidden + row) = packed;
      }
    }
  }
}

// Grouped route: out[m] = sum of the token's weighted expert outputs, in the order of its choices.
__device__ __forceinline__ void sum_choices(const Params& p) {
  const int units = p.hidden / 8;
  const int i = blockIdx.x * kReduceThreads + threadIdx.x;
  const int token = i / units, unit = i % units;
  wait_for_previous_kernel();
  if (token >= p.tokens) return;
  float sum[8] = {};
#pragma unroll 5
  for (int choice = 0; choice < p.top_k; ++choice) {
    const int pair = token * p.top_k + choice;
    if (expert_of(p, pair) < 0) continue;
    const uint4 v = load16(p.partial + size_t(pair) * p.hidden + unit * 8);
    const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum[2 * j] += to_float(u16(word[j]));
      sum[2 * j + 1] += to_float(u16(word[j] >> 16));
    }
  }
  *reinterpret_cast<uint4*>(p.out + size_t(token) * p.hidden + unit * 8) =
      make_uint4(pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7]));
}

}  // namespace

// ---------------------------------------------------------------- entry points

#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)

KERNEL(kRouteThreads, 1) route(Params p) { route_pairs(p); }
KERNEL(kReduceThreads, 1) reduce(Params p) { sum_choices(p); }
KERNEL(32 * kGateWarps, 2) gate_up_direct(Params p) { gate_up_streaming<kDirectGateGroups, kGateHeldSteps, 1, false>(p); }
KERNEL(32 * kDirectDownWarps, 1) down_direct(Params p) { down_one_token(p); }
KERNEL(32 * kGateWarps, 1) gate_up_8(Params p) { gate_up_streaming<kStreamGateGroups, kGateHeldSteps, 1, true>(p); }
KERNEL(32 * kDownWarps, 2) down_8(Params p) { down_tile<1>(p); }
#if __CUDA_ARCH__ >= 800
KERNEL(32 * kTiledWarps, 4) gate_up_32(Params p) { gate_up_tiled<4>(p); }
KERNEL(32 * kTiledWarps, 2) gate_up_64(Params p) { gate_up_tiled<8>(p); }
KERNEL(32 * kTiledWarps, 2) gate_up_96(Params p) { gate_up_tiled<12>(p); }
KERNEL(32 * kDownWarps, 2) down_32(Params p) { down_tile<4>(p); }
KERNEL(32 * kDownWarps, 1) down_64(Params p) { down_tile<8>(p); }
KERNEL(32 * kDownWarps, 1) down_96(Params p) { down_tile<12>(p); }
#else
KERNEL(32 * kGateWarps, 1) gate_up_16(Params p) { gate_up_streaming<kStreamGateGroups, 2, 2, true>(p); }
KERNEL(32 * kDownWarps, 1) down_16(Params p) { down_tile<2>(p); }
#endif
