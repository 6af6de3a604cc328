// FP8 (E4M3) mixture-of-experts for a few tokens up to prefill: gate/up, SiLU, down, weighted sum over top-k.
//
// Weights are the A operand of the tensor cores (their rows are M), tokens are the B operand (N). Weights travel
// 16 bytes a load to the lane whose fragments hold them, through a queue that is the lane's own, and become FP16
// there: E4M3 to FP16 is exact, products are exact in FP32, and sums are FP32.
//
// Two routes. Direct (few tokens): every (token, choice) pair streams its expert on its own. Grouped: pairs are
// first sorted by expert on the device, so an expert's weights are read once for up to a tile of tokens. Then
// gate/up, down, and the sum over choices, a kernel each. Every sum has a fixed order, so results do not change
// from run to run.
//
// No headers but our own, so NVRTC compiles this without a CUDA toolkit.
#include "fp8_experts.h"

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#ifndef __CUDA_ARCH__  // nvcc's pass over the host side
#define __CUDA_ARCH__ 700
#endif

namespace {

// ---------------------------------------------------------------- loads, stores, conversions

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

// Four E4M3 bytes to FP16 over kDecoded, exactly, subnormals too. NaN need not be recognised.
#if __CUDA_ARCH__ >= 890
constexpr float kDecoded = 1.0f;
__device__ __forceinline__ void decode4(u32 bytes, u32& low, u32& high) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
      : "=r"(low), "=r"(high) : "r"(bytes));
}
#else
// A byte in the high half of 16 bits: the sign stays, exponent and mantissa shift into FP16's fields, and only the
// bias differs, by 15 - 7; that factor goes into the scales.
constexpr float kDecoded = 256.0f;
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

// A lane's own first-in, first-out queue of D slots of W 16-byte words on their way from memory: in shared memory,
// filled by asynchronous copies, where the hardware has them, else in registers (then D slots must be unrolled).
template <int D, int W>
struct Queue {
#if __CUDA_ARCH__ >= 800
  char* mine;
  __device__ __forceinline__ explicit Queue(void* shared) {  // room for queue_bytes(warps, D, W)
    mine = static_cast<char*>(shared) + (threadIdx.x >> 5) * (D * W * 512) + (threadIdx.x & 31) * 16;
  }
  // Zeros unless `valid`.
  __device__ __forceinline__ void push(int slot, int word, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address(slot, word)), "l"(from),
                 "r"(valid ? 16 : 0) : "memory");
  }
  // The same for what other blocks read too: by way of L1.
  __device__ __forceinline__ void push_shared(int slot, int word, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(address(slot, word)), "l"(from),
                 "r"(valid ? 16 : 0) : "memory");
  }
  // Call once after the pushes of each slot.
  __device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  // Until the oldest of D committed slots has arrived.
  __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(D - 1) : "memory"); }
  __device__ __forceinline__ uint4 get(int slot, int word) const {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address(slot, word)) : "memory");
    return v;
  }
  __device__ __forceinline__ u32 address(int slot, int word) const {
    return u32(__cvta_generic_to_shared(mine)) + (slot * W + word) * 512;
  }
#else
  static __device__ __forceinline__ uint4 load_once(const void* p) {  // keeps out of L1
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
  }
  uint4 words[D][W];
  __device__ __forceinline__ explicit Queue(void*) {}
  __device__ __forceinline__ void push(int slot, int word, const void* from, bool valid) {
    words[slot][word] = valid ? load_once(from) : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void push_shared(int slot, int word, const void* from, bool valid) {
    words[slot][word] = valid ? load16(from) : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void commit() {}
  __device__ __forceinline__ void wait() {}
  __device__ __forceinline__ uint4 get(int slot, int word) const { return words[slot][word]; }
#endif
};

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
  const int id = static_cast<const int*>(p.topk_ids)[pair << p.ids_are_64bit];  // the low word tells enough
  return id >= 0 && id < p.experts ? id : -1;
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
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The j-th 4 of each lane's 16 values of K.
__device__ __forceinline__ void mma_quarter(Sums& s, const u32 (&a)[2][8], int j, u32 b_low, u32 b_high) {
  mma(s.v, a[0][2 * j], a[1][2 * j], a[0][2 * j + 1], a[1][2 * j + 1], b_low, b_high);
}
__device__ __forceinline__ void finish(const Sums& s, float (&r)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) r[i] = s.v[i];
}
#else
__device__ __forceinline__ void mma(float* d, u32 a0, u32 a1, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11}, {%0, %1, %2, %3, %4, %5, %6, %7};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}
// The j-th 4 of each lane's 16 values of K.
__device__ __forceinline__ void mma_quarter(Sums& s, const u32 (&a)[2][8], int j, u32 b_low, u32 b_high) {
  mma(s.v, a[0][2 * j], a[0][2 * j + 1], b_low, b_high);
  mma(s.v + 8, a[1][2 * j], a[1][2 * j + 1], b_low, b_high);
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

constexpr int kDownSteps = down_steps(__CUDA_ARCH__);

// 8-token tiles multiplied side by side where there are many (prefill).
[[maybe_unused]] constexpr int kTogether = 2;

// total[n][g] += scale * (weight tiles g, decoded in `a`) x (tokens n, in `b`), over one K step. From sm_80 on
// the products of all n and g are interleaved, so none waits for the one before it; Volta lacks the registers.
template <int N, int G>
__device__ __forceinline__ void multiply(Sums (&total)[N][G], const u32 (&a)[G][2][8], const uint4 (&b)[N][2],
                                         float scale0, float scale1) {
  constexpr int kAtOnce = __CUDA_ARCH__ >= 800 ? N * G : 1;
#pragma unroll
  for (int base = 0; base < N * G; base += kAtOnce) {
    Sums part[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) part[i].clear();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint4 tokens = b[(base + i) / G][j / 2];
        mma_quarter(part[i], a[(base + i) % G], j, j % 2 ? tokens.z : tokens.x, j % 2 ? tokens.w : tokens.y);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) total[(base + i) / G][(base + i) % G].add(part[i], scale0, scale1);
  }
}

__device__ __forceinline__ float silu(float v) { return v / (1.0f + __expf(-v)); }

// ---------------------------------------------------------------- routing (grouped route)

// One block. Counts pairs per expert, lays experts out one after the other in `sorted`, cuts tiles.
// The order inside an expert varies; nothing computed from a pair depends on its place.
__device__ void route_pairs(const Params& p) {
  extern __shared__ int counts[];  // [experts]: pairs, then where they begin
  __shared__ int warp_pairs[32], warp_tiles[32];
  const int t = threadIdx.x, pairs = p.tokens * p.top_k;
  constexpr int kBatch = 8;
  let_next_kernel_start();
  for (int e = t; e < p.experts; e += kRouteThreads) counts[e] = 0;
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
      if (e[i] >= 0) p.rank[base + i * kRouteThreads] = atomicAdd(&counts[e[i]], 1);
  }
  __syncthreads();
  // Exclusive sums of pairs and tiles over experts; a thread owns a run of them.
  const int run = (p.experts + kRouteThreads - 1) / kRouteThreads;
  const int first = t * run, last = first + run < p.experts ? first + run : p.experts;
  int my_pairs = 0, my_tiles = 0;
  for (int e = first; e < last; ++e) {
    my_pairs += counts[e];
    my_tiles += (counts[e] + p.tile_tokens - 1) / p.tile_tokens;
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
    const int count = counts[e];
    counts[e] = begin;
    for (int done = 0; done < count; done += p.tile_tokens) {
      const int rest = count - done;
      p.tiles[tile++] = {e, begin + done, rest < p.tile_tokens ? rest : p.tile_tokens, 0};
    }
    begin += count;
  }
  if (t == kRouteThreads - 1) *p.num_tiles = sum_tiles;
  __syncthreads();
  for (int base = t; base < pairs; base += kBatch * kRouteThreads) {
    int e[kBatch], rank[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int pair = base + i * kRouteThreads;
      e[i] = pair < pairs ? expert_of(p, pair) : -1;
      rank[i] = e[i] >= 0 ? p.rank[pair] : 0;  // written above by this thread
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (e[i] >= 0) p.sorted[counts[e[i]] + rank[i]] = base + i * kRouteThreads;
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
template <int G, int N, int D, bool kGrouped>
__device__ __forceinline__ void gate_up_streaming(const Params& p) {
  extern __shared__ uint4 shared[];
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
  const u8* gate = p.w13 + (size_t(tile.expert) * 2 * p.local + row0 + in_row(lane) * G) * p.hidden +
                   in_chunk(lane) * 16;
  const size_t to_up = size_t(p.local) * p.hidden;
  Queue<D, 2 * G + 2 * N> queue(shared);
  auto push_weights = [&](int slot, int step) {
    if (step * 64 >= p.hidden) return;
#pragma unroll
    for (int g = 0; g < G; ++g) {
      queue.push(slot, 2 * g, gate + g * p.hidden + step * 64, true);
      queue.push(slot, 2 * g + 1, gate + to_up + g * p.hidden + step * 64, true);
    }
  };
#pragma unroll
  for (int slot = 0; slot < D; ++slot) push_weights(slot, warp + slot * kGateWarps);

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
  auto push_tokens = [&](int slot, int step) {
    if (step * 64 < p.hidden) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const u16* from = tokens[n] ? tokens[n] + step * 64 : p.x;
        queue.push_shared(slot, 2 * G + 2 * n, from, tokens[n]);
        queue.push_shared(slot, 2 * G + 2 * n + 1, from + 8, tokens[n]);
      }
    }
    queue.commit();
  };
#pragma unroll
  for (int slot = 0; slot < D; ++slot) push_tokens(slot, warp + slot * kGateWarps);

  // Of the row this thread finishes at the end; asked for now, since memory is far away.
  const float my_gate_scale = w13_row_scale(p, tile.expert, row0 + threadIdx.x % (8 * G), false);
  const float my_up_scale = w13_row_scale(p, tile.expert, row0 + threadIdx.x % (8 * G), true);
  const float* gate_scale = p.block_n ? w13_block_scale(p, tile.expert, row0, false) : nullptr;
  const float* up_scale = p.block_n ? w13_block_scale(p, tile.expert, row0, true) : nullptr;
  Sums total[N][G];
#pragma unroll
  for (int i = 0; i < N * G; ++i) total[i / G][i % G].clear();

  const int steps = p.hidden / 64;
  for (int first = warp; first < steps; first += D * kGateWarps) {
#pragma unroll
    for (int slot = 0; slot < D; ++slot) {
      const int step = first + slot * kGateWarps;
      if (step >= steps) break;
      queue.wait();
      u32 h[G][2][8];
      uint4 b[N][2];
#pragma unroll
      for (int g = 0; g < G; ++g) decode16(queue.get(slot, 2 * g), h[g][0]), decode16(queue.get(slot, 2 * g + 1), h[g][1]);
#pragma unroll
      for (int n = 0; n < N; ++n) b[n][0] = queue.get(slot, 2 * G + 2 * n), b[n][1] = queue.get(slot, 2 * G + 2 * n + 1);
      push_weights(slot, step + D * kGateWarps);
      push_tokens(slot, step + D * kGateWarps);
      float scale0 = kDecoded, scale1 = kDecoded;
      if (p.block_n) scale0 *= gate_scale[step * 64 / p.block_k], scale1 *= up_scale[step * 64 / p.block_k];
      multiply(total, h, b, scale0, scale1);
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
    p.act[size_t(tile.begin + column) * p.local + row0 + row] =
        to_half(silu(gate_sum * my_gate_scale) * (up_sum * my_up_scale));
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
  constexpr int kThreads = 32 * kTiledWarps, kStage = 8 * N * kTiledPitch;
  Queue<kTiledStages, 4> queue(shared);
  uint4* x_stages = shared + queue_bytes(kTiledWarps, kTiledStages, 4) / 16;
  u16* xs = reinterpret_cast<u16*>(x_stages);  // [kTiledStages][8 * N][kTiledPitch]
  __shared__ int token_of[8 * N];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (int(blockIdx.y) >= *p.num_tiles) return;
  const ExpertTile tile = p.tiles[blockIdx.y];
  for (int i = threadIdx.x; i < tile.count; i += kThreads) token_of[i] = p.sorted[tile.begin + i] / p.top_k;
  for (int i = threadIdx.x; i < kTiledStages * kStage / 8; i += kThreads) x_stages[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();

  const int row0 = (blockIdx.x * kTiledWarps + warp) * 16;
  const bool active = row0 < p.local;  // the last block may have warps to spare; they still copy
  const u8* gate = p.w13 + (size_t(tile.expert) * 2 * p.local + (active ? row0 : 0) + in_row(lane) * 2) * p.hidden +
                   in_chunk(lane) * 16;
  const size_t to_up = size_t(p.local) * p.hidden;
  const float* gate_scale = p.block_n ? w13_block_scale(p, tile.expert, active ? row0 : 0, false) : nullptr;
  const float* up_scale = p.block_n ? w13_block_scale(p, tile.expert, active ? row0 : 0, true) : nullptr;

  const int steps = p.hidden / 64;
  auto push = [&](int step) {
    const int slot = step % kTiledStages;
    if (step < steps) {
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        queue.push(slot, 2 * g, gate + g * p.hidden + step * 64, true);
        queue.push(slot, 2 * g + 1, gate + to_up + g * p.hidden + step * 64, true);
      }
      for (int i = threadIdx.x; i < tile.count * 8; i += kThreads)
        copy16_async(xs + slot * kStage + (i / 8) * kTiledPitch + (i % 8) * 8,
                     p.x + size_t(token_of[i / 8]) * p.hidden + step * 64 + (i % 8) * 8);
    }
    queue.commit();
  };

  Sums total[N / kTogether][kTogether][2];
#pragma unroll
  for (int n = 0; n < N; ++n)
    total[n / kTogether][n % kTogether][0].clear(), total[n / kTogether][n % kTogether][1].clear();
  for (int step = 0; step < kTiledStages - 1; ++step) push(step);
  for (int step = 0; step < steps; ++step) {
    const int slot = step % kTiledStages;
    asm volatile("cp.async.wait_group %0;" ::"n"(kTiledStages - 2) : "memory");
    __syncthreads();  // this stage of x is here, and everyone is done with the one that is filled next
    push(step + kTiledStages - 1);
    u32 h[2][2][8];
#pragma unroll
    for (int g = 0; g < 2; ++g) decode16(queue.get(slot, 2 * g), h[g][0]), decode16(queue.get(slot, 2 * g + 1), h[g][1]);
    float scale0 = kDecoded, scale1 = kDecoded;
    if (p.block_n) {
      scale0 *= gate_scale[step * 64 / p.block_k];
      scale1 *= up_scale[step * 64 / p.block_k];
    }
    const u16* b = xs + slot * kStage + in_row(lane) * kTiledPitch + in_chunk(lane) * 16;
    if (active) {
#pragma unroll
      for (int n = 0; n < N; n += kTogether) {
        if (n * 8 >= tile.count) break;
        uint4 tokens[kTogether][2];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          tokens[i][0] = load16(b + (n + i) * 8 * kTiledPitch);
          tokens[i][1] = load16(b + (n + i) * 8 * kTiledPitch + 8);
        }
        multiply(total[n / kTogether], h, tokens, scale0, scale1);
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
      finish(total[n / kTogether][n % kTogether][g], r);
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

// The weights of kDownRows rows of H over kDownSteps K steps, in a slot of this lane's queue. The lane's rows are
// `row0 + in_row * kLaneRows + i`; of the results it finishes rows `row0 + out_row * kLaneRows + i`.
constexpr int kLaneRows = kDownRows / 8;

struct DownWeights {
  static constexpr int L = kLaneRows, kWords = kDownSteps * L;
  static __device__ __forceinline__ int shared_units(int warps) {  // 16-byte units before what is behind the queues
    return __CUDA_ARCH__ >= 800 ? queue_bytes(warps, kDownSlots, kWords) / 16 : 0;
  }
  const Params& p;
  const int expert;
  Queue<kDownSlots, kWords> queue;
  float row_scales[kDownSlots][L];
  const u8* const weights;  // of this expert, this lane's first row
  const float* const scales;

  __device__ __forceinline__ DownWeights(const Params& params, int of_expert, void* shared)
      : p(params),
        expert(of_expert),
        queue(shared),
        weights(p.w2 + (size_t(expert) * p.hidden + in_row(threadIdx.x & 31) * L) * p.local),
        scales(p.w2_scale + (p.block_n ? size_t(expert) * p.w2_row_blocks * p.w2_k_blocks
                                       : size_t(expert) * p.hidden + out_row(threadIdx.x & 31) * L)) {}

  __device__ __forceinline__ void push(int slot, int row0, int first_step) {
    const u8* rows = weights + size_t(row0) * p.local;
#pragma unroll
    for (int s = 0; s < kDownSteps; ++s) {
      const KStep step = p.w2_step[first_step + s];
      const bool valid = in_chunk(threadIdx.x & 31) < step.chunks;
      const u8* chunk = valid ? rows + (step.chunk + in_chunk(threadIdx.x & 31)) * 16 : rows;
#pragma unroll
      for (int i = 0; i < L; ++i) queue.push(slot, s * L + i, chunk + i * p.local, valid);
    }
#pragma unroll
    for (int i = 0; i < L; ++i) row_scales[slot][i] = p.block_n ? 1.0f : scales[row0 + i];
  }
  __device__ __forceinline__ void decode(int slot, int s, u32 (&h)[L / 2][2][8]) const {
#pragma unroll
    for (int i = 0; i < L; ++i) decode16(queue.get(slot, s * L + i), h[i / 2][i % 2]);
  }
  __device__ __forceinline__ void block_scales(int row0, int first_step, float (&scale)[kDownSteps]) const {
#pragma unroll
    for (int s = 0; s < kDownSteps; ++s) scale[s] = kDecoded;
    if (!p.block_n) return;
    const float* of_rows = scales + row0 / p.block_n * p.w2_k_blocks;
#pragma unroll
    for (int s = 0; s < kDownSteps; ++s) scale[s] *= of_rows[p.w2_step[first_step + s].block];
  }
};

// 16-byte units of this lane's chunk of an activation row at a K step. Lanes past the step's chunks have zero
// weights, so it only matters that what they read is in the row.
__device__ __forceinline__ int act_unit(const Params& p, int step) {
  return min(p.w2_step[step].chunk + in_chunk(threadIdx.x & 31), p.local / 16 - 1) * 2;
}

// Calls compute(weights, slot, row block, first K step) for row blocks `begin`, `begin + stride`, ... and, in each,
// for every kDownSteps steps of K, with the next weights already on their way. `ready` runs once the first are.
template <class Ready, class Compute>
__device__ __forceinline__ void stream_down_weights(const Params& p, int expert, int begin, int stride, void* shared,
                                                    Ready ready, Compute compute) {
  DownWeights w(p, expert, shared);
  const int row_blocks = p.hidden / kDownRows;
  int next_block = begin, next_step = 0;
  auto push_next = [&](int slot) {
    if (next_block < row_blocks) w.push(slot, next_block * kDownRows, next_step);
    w.queue.commit();
    next_step += kDownSteps;
    if (next_step >= p.w2_steps) next_step = 0, next_block += stride;
  };
#pragma unroll
  for (int slot = 0; slot < kDownSlots; ++slot) push_next(slot);
  ready();
  int block = begin, step = 0;
  while (block < row_blocks) {
#pragma unroll
    for (int slot = 0; slot < kDownSlots; ++slot) {
      if (block >= row_blocks) break;
      w.queue.wait();
      compute(w, slot, block, step);
      push_next(slot);
      step += kDownSteps;
      if (step >= p.w2_steps) step = 0, block += stride;
    }
  }
}

// A block holds a tile's activations and walks over row blocks of H.
template <int N, int kSideBySide, bool kGrouped>
__device__ __forceinline__ void down_tile(const Params& p) {
  constexpr int L = kLaneRows, kThreads = 32 * kDownWarps;
  extern __shared__ uint4 shared[];
  __shared__ int pair_of[8 * N];
  __shared__ float weight_of[8 * N];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int units = p.local / 8, pitch = units + 1;  // in 16-byte units; an odd number: no bank conflicts
  uint4* acts = shared + DownWeights::shared_units(kDownWarps);  // [8 * N][pitch]
  let_next_kernel_start();
  ExpertTile tile = {0, int(blockIdx.y), 1, 0};
  if (kGrouped) {
    // Tiles and pairs come from the kernel before the previous one, which had ended when that one let us start.
    if (int(blockIdx.y) >= *p.num_tiles) return wait_for_previous_kernel();
    tile = p.tiles[blockIdx.y];
  } else {
    tile.expert = expert_of(p, blockIdx.y);
    if (tile.expert < 0) return wait_for_previous_kernel();
  }
  auto fetch_activations = [&] {
    for (int i = threadIdx.x; i < tile.count; i += kThreads) {
      pair_of[i] = kGrouped ? p.sorted[tile.begin + i] : tile.begin;
      weight_of[i] = p.topk_weights[pair_of[i]];
    }
    wait_for_previous_kernel();
    constexpr int kTokens = 8 * kSideBySide;
    const int padded = (tile.count + kTokens - 1) / kTokens * kTokens;
#pragma unroll 1
    for (int i = threadIdx.x; i < padded * units; i += kThreads) {
      const int column = i / units, unit = i % units;
      const u16* from = p.act + size_t(tile.begin + column) * p.local + unit * 8;
      acts[column * pitch + unit] = column < tile.count ? load16(from) : make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
  };
  Sums total[N / kSideBySide][kSideBySide][L / 2];
  auto compute = [&](const DownWeights& w, int slot, int block, int first_step) {
    if (first_step == 0)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int g = 0; g < L / 2; ++g) total[n / kSideBySide][n % kSideBySide][g].clear();
    float scale[kDownSteps];
    w.block_scales(block * kDownRows, first_step, scale);
#pragma unroll
    for (int s = 0; s < kDownSteps; ++s) {
      const uint4* from = acts + in_row(lane) * pitch + act_unit(p, first_step + s);
      u32 h[L / 2][2][8];
      w.decode(slot, s, h);
#pragma unroll
      for (int n = 0; n < N; n += kSideBySide) {
        if (n * 8 >= tile.count) break;
        uint4 b[kSideBySide][2];
#pragma unroll
        for (int i = 0; i < kSideBySide; ++i) b[i][0] = from[(n + i) * 8 * pitch], b[i][1] = from[(n + i) * 8 * pitch + 1];
        multiply(total[n / kSideBySide], h, b, scale[s], scale[s]);
      }
    }
    if (first_step + kDownSteps < p.w2_steps) return;
    const int row = block * kDownRows + out_row(lane) * L;
    const float* row_scale = w.row_scales[slot];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (n * 8 >= tile.count) break;
      float r[L / 2][4];
#pragma unroll
      for (int g = 0; g < L / 2; ++g) finish(total[n / kSideBySide][n % kSideBySide][g], r[g]);
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
  };
  stream_down_weights(p, tile.expert, blockIdx.x * kDownWarps + warp, gridDim.x * kDownWarps, shared,
                         fetch_activations, compute);
}

// out[m] = sum of the token's weighted expert outputs, in the order of its choices.
__device__ __forceinline__ void sum_choices(const Params& p) {
  constexpr int kAtOnce = 10;
  const int units = p.hidden / 8, i = blockIdx.x * kReduceThreads + threadIdx.x;
  const int token = i / units, unit = i % units, first = token * p.top_k;
  if (token >= p.tokens) return wait_for_previous_kernel();
  float sum[8] = {};
  for (int base = 0; base < p.top_k; base += kAtOnce) {
    bool valid[kAtOnce];
    uint4 v[kAtOnce];
#pragma unroll
    for (int c = 0; c < kAtOnce; ++c) valid[c] = base + c < p.top_k && expert_of(p, first + base + c) >= 0;
    wait_for_previous_kernel();
    // Rows nobody wrote are read too, and dropped below: loads that wait for no branch overlap.
#pragma unroll
    for (int c = 0; c < kAtOnce; ++c)
      v[c] = load16(p.partial + size_t(first + min(base + c, p.top_k - 1)) * p.hidden + unit * 8);
#pragma unroll
    for (int c = 0; c < kAtOnce; ++c) {
      const u32 word[4] = {v[c].x, v[c].y, v[c].z, v[c].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum[2 * j] += valid[c] ? to_float(u16(word[j])) : 0.0f;
        sum[2 * j + 1] += valid[c] ? to_float(u16(word[j] >> 16)) : 0.0f;
      }
    }
  }
  *reinterpret_cast<uint4*>(p.out + size_t(token) * p.hidden + unit * 8) =
      make_uint4(pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7]));
}

}  // namespace

// ---------------------------------------------------------------- entry points

#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)

KERNEL(kRouteThreads, 1) route(const __grid_constant__ Params p) { route_pairs(p); }
KERNEL(kReduceThreads, 1) reduce(const __grid_constant__ Params p) { sum_choices(p); }
KERNEL(32 * kGateWarps, 3) gate_up_direct(const __grid_constant__ Params p) {
  gate_up_streaming<kDirectGateGroups, 1, kGateStages, false>(p);
}
KERNEL(32 * kGateWarps, 2) gate_up_8(const __grid_constant__ Params p) {
  gate_up_streaming<kStreamGateGroups, 1, kGateStages, true>(p);
}
#if __CUDA_ARCH__ >= 800
KERNEL(32 * kDownWarps, 3) down_direct(const __grid_constant__ Params p) { down_tile<1, 1, false>(p); }
KERNEL(32 * kDownWarps, 4) down_8(const __grid_constant__ Params p) { down_tile<1, 1, true>(p); }
KERNEL(32 * kTiledWarps, 4) gate_up_16(const __grid_constant__ Params p) { gate_up_tiled<2>(p); }
KERNEL(32 * kDownWarps, 4) down_16(const __grid_constant__ Params p) { down_tile<2, kTogether, true>(p); }
KERNEL(32 * kTiledWarps, 3) gate_up_32(const __grid_constant__ Params p) { gate_up_tiled<4>(p); }
KERNEL(32 * kDownWarps, 3) down_32(const __grid_constant__ Params p) { down_tile<4, kTogether, true>(p); }
#else
KERNEL(32 * kDownWarps, 1) down_direct(const __grid_constant__ Params p) { down_tile<1, 1, false>(p); }
KERNEL(32 * kDownWarps, 1) down_8(const __grid_constant__ Params p) { down_tile<1, 1, true>(p); }
KERNEL(32 * kGateWarps, 2) gate_up_16(const __grid_constant__ Params p) {
  gate_up_streaming<kStreamGateGroups, 2, 2, true>(p);  // two slots: registers
}
KERNEL(32 * kDownWarps, 1) down_16(const __grid_constant__ Params p) { down_tile<2, 1, true>(p); }
#endif
