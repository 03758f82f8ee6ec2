// A linear of up to 8 tokens on Hopper whose weight the multiprocessors hold: out = x . weight^T, with the norm before
// it and what follows it.
//
// Most of the few µs that such a linear takes begin when x is there. So until sums are added up no lane waits for
// another. Each loads just the weights that it will multiply (by cp.async, before the kernel that makes x has ended).
// Inputs are ordered so that 16 bytes of a row serve two products; the lane then loads its inputs in the same order
// into registers. A block takes all inputs of TILES times 8 outputs. Its warps divide them, and each leaves its sums
// where its weights were. A product takes two tiles, or a tile's gates and ups.
//
// Only weights are read before the wait, so the next kernel is let in ahead of it. Then weights of several linears are
// loaded at the same time, while attention leaves the memory idle. A later kernel may not count on this one having
// waited.
//
// Defined by lanes.py: N outputs (of a gated one: gate and up rows), K, TILES, WARPS, RESIDENT (blocks of a
// multiprocessor, of registers), SHARED_BYTES, NORM_BLOCKS (sums of squares a token to read; 0: no norm), GATED,
// RESIDUAL, NEXT_BLOCKS (sums of squares a token to leave), PLUS_ONE (the next norm's weight has 1 added), BIAS (in the
// place of the norm's weight), SQUARED_RELU, GELU.

constexpr int TILE = 8, TOKENS = 8;  // of m16n8k16 half of the rows, and all columns
constexpr int OUTPUTS = GATED ? N / 2 : N, GROUPS = OUTPUTS / TILE, PARTS = GATED ? 2 : 1, ALL_TILES = TILES * PARTS;
// Inputs of a step; a warp's steps.
constexpr int STEP = 32, ALL_STEPS = K / STEP, STEPS = (ALL_STEPS + WARPS - 1) / WARPS;
// Bytes of shared memory: a lane's; a warp's, for weights of a tile and a step, then for a tile's sums; a block's.
constexpr int PLACE = 16, WARP_PLACES = 32 * PLACE, PLACES = WARPS * WARP_PLACES,
              WEIGHT_BYTES = STEPS * ALL_TILES * PLACES;
// True if a warp has a step, and a block a tile.
__device__ __forceinline__ bool is_step(int step) { return ALL_STEPS % WARPS == 0 || step < ALL_STEPS; }
__device__ __forceinline__ bool is_group(int group) { return GROUPS % TILES == 0 || group < GROUPS; }
static_assert(TILES <= WARPS && TOKENS <= WARPS, "a warp finishes one tile, and adds up the squares of one token");
static_assert(OUTPUTS % TILE == 0 && K % STEP == 0 && NORM_BLOCKS % 4 == 0,
              "whole tiles, whole steps, four sums at a time");
static_assert(NEXT_BLOCKS == 0 || NEXT_BLOCKS == GROUPS, "a sum of squares of each tile");
static_assert(WEIGHT_BYTES + TOKENS * 4 <= SHARED_BYTES, "as it is launched");

// 16 bytes; or zeros.
__device__ __forceinline__ void copy(u32 to, const char* from, bool is_there, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
               ::"r"(to), "l"(from), "r"(is_there ? PLACE : 0), "l"(policy) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ u32 rounded(float2 sum, u32 bias) {
  const u32 both = BIAS ? pack(sum.x + first_of(bias), sum.y + second_of(bias)) : pack(sum.x, sum.y);
  return SQUARED_RELU ? squared_relu(both) : GELU ? gelu(both) : both;
}
// Adds up the warps' values at `sums`, a place of each.
__device__ __forceinline__ float2 add_up(const char* sums, float factor) {
  float2 all = {0.f, 0.f};
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    const float2 part = *(const float2*)(sums + w * WARP_PLACES);
    all.x += part.x, all.y += part.y;
  }
  return {all.x * factor, all.y * factor};
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
    stream_linear(const char* weight, const char* x, const float* squares, const u32* residual, const u32* norm_weight,
                  u32* out, u32* scaled, float* out_squares, float eps, int num_tokens) {
  extern __shared__ __align__(128) char memory[];
  float* factors = (float*)(memory + WEIGHT_BYTES);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = lane / 4, quad = lane % 4,
            first = blockIdx.x * TILES;
  char* mine = memory + warp * WARP_PLACES;
  const u64 once = read_once();
  const char* from = weight + ((u64)(first * TILE + lane / 4) * K + warp * STEP + quad * 8) * 2;
#pragma unroll
  for (int s = 0; s < STEPS; s++)
#pragma unroll
    for (int t = 0; t < ALL_TILES; t++) {
      const u64 offset = ((u64)(t / PARTS * TILE + t % PARTS * OUTPUTS) * K + s * WARPS * STEP) * 2;
      const bool is_there = is_step(s * WARPS + warp) && is_group(first + t / PARTS);
      copy(shared_address(mine) + lane * PLACE + (s * ALL_TILES + t) * PLACES, from + offset, is_there, once);
    }
  // A warp finishes one tile, a lane two neighbouring outputs of a token.
  const int row = (first + warp) * TILE + quad * 2, at = (token * OUTPUTS + row) / 2;
  const bool is_mine = warp < TILES && is_group(first + warp), is_there = is_mine && token < num_tokens;
  const u32 weights = (NEXT_BLOCKS || BIAS) && is_mine ? norm_weight[row / 2] : 0;
  start_dependents();
  wait_for_prerequisites();

  uint4 xs[STEPS];
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    const int step = s * WARPS + warp;
    const bool is_there = token < num_tokens && is_step(step);
    xs[s] = is_there ? *(const uint4*)(x + (token * K + step * STEP + quad * 8) * 2) : uint4{0, 0, 0, 0};
  }
  const u32 added = RESIDUAL && is_there ? residual[at] : 0;
  if (NORM_BLOCKS && warp < num_tokens) {
    float sum = 0.f;
#pragma unroll
    for (int j = lane * 4; j < NORM_BLOCKS; j += 128) {
      const float4 v = *(const float4*)(squares + warp * NORM_BLOCKS + j);
      sum += v.x + v.y + v.z + v.w;
    }
    sum = sum_of_lanes(sum, 32);
    if (lane == 0) factors[warp] = rsqrtf(sum / K + eps);
  }

  __syncwarp();  // or ptxas asks for x only when the weights are there
  wait_for_copies();
#pragma unroll
  for (int t = 0; t < ALL_TILES; t += 2) {
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      const char* at = mine + lane * PLACE + (s * ALL_TILES + t) * PLACES;
      const uint4 upper = *(const uint4*)at,
                  lower = t + 1 < ALL_TILES ? *(const uint4*)(at + PLACES) : uint4{0, 0, 0, 0};
      multiply_add(even, upper.x, lower.x, upper.y, lower.y, xs[s].x, xs[s].y);
      multiply_add(odd, upper.z, lower.z, upper.w, lower.w, xs[s].z, xs[s].w);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++)  // of a token's 8 outputs each: tokens quad * 2 and the next one, in both tiles
      if (t + i / 2 < ALL_TILES)
        ((float*)(mine + (t + i / 2) * PLACES))[(quad * 2 + i % 2) * TILE + lane / 4] = even[i] + odd[i];
  }
  __syncthreads();
  if (!is_mine) return;

  const char* sums = memory + warp * PARTS * PLACES + lane * sizeof(float2);
  const float factor = NORM_BLOCKS ? factors[token] : 1.f;
  u32 both = rounded(add_up(sums, factor), weights);
  if (GATED) {
    const float2 ups = add_up(sums + PLACES, factor);
    if (is_there) out[at] = silu_times(both, pack(ups.x, ups.y));
    return;
  }
  if (RESIDUAL) both = add(added, both);
  if (is_there) out[at] = both;
  if (NEXT_BLOCKS) {
    if (is_there) scaled[at] = times_norm_weight(both, weights, PLUS_ONE);
    const float squares_of_tile = sum_of_lanes(sum_of_squares(both), 4);
    store_if(is_there && quad == 0, out_squares + token * GROUPS + first + warp, squares_of_tile);
  }
}
