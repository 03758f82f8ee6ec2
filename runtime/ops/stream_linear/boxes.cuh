// The common part of tiles.cu and wide.cu: asking for boxes of the weight and of x, the norm's factors, and the sums
// for the next norm's.

constexpr int ROW_BYTES = 128, COLUMNS = SCALED ? ROW_BYTES : ROW_BYTES / 2;  // of a panel: one swizzled row

// From `row` on; of a gated one the tile's rows are of gates and ups by turns.
__device__ __forceinline__ void load_weight(u32 to, const TensorMap* map, int row, int panel, u32 barrier, u64 policy) {
#if GATED  // eight rows of gate, then eight of up: a thread has both
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %2, %2, %3, %4}], [%5], %6;" ::"r"(to), "l"(map), "r"(0), "r"(row / 16), "r"(panel),
      "r"(barrier), "l"(policy) : "memory");
#else
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(map), "r"(0), "r"(row), "r"(panel), "r"(barrier),
      "l"(policy) : "memory");
#endif
}
// As many tokens as the map's box has, and no more: boxes that reach past the last one arrive later (33 tokens as 64
// took longer than 64).
__device__ __forceinline__ void load_x(u32 to, const TensorMap* map, int token, int panel, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      ::"r"(to), "l"(map), "r"(panel * COLUMNS), "r"(token), "r"(barrier) : "memory");
}

// A sum of squares is of 16 outputs here. Where there is room for lanes.cu's, of 8 outputs each and so twice as many,
// these are the first half and zeros the second. With more than 8 tokens lanes.cu has written none, so that need not be
// read.
constexpr int SUM_OUTPUTS = 16, READ_SUMS = TOKENS > 8 && NORM_BLOCKS > K / SUM_OUTPUTS ? K / SUM_OUTPUTS : NORM_BLOCKS;
// The norm's factor of each token from `begin` on, by three warps: four lanes a token, each LOADS at a time.
template <int LOADS>
__device__ void compute_factors(const float* squares, float* factors, float eps, int begin, int end) {
  const int quad = threadIdx.x % 4, last = begin + (end - begin + 7) / 8 * 8;
#pragma unroll 1
  for (int t = begin + threadIdx.x / 4 - 8; t < last; t += 24) {
    float sum = 0.f;
    if (t < end)
#pragma unroll LOADS
      for (int j = quad * 4; j < READ_SUMS; j += 16) {
        const float4 v = *(const float4*)(squares + t * NORM_BLOCKS + j);
        sum += v.x + v.y + v.z + v.w;
      }
    sum = sum_of_lanes(sum, 4);
    if (quad == 0 && t < end) factors[t] = rsqrtf(sum / K + eps);
  }
}
// Of the group of `row`.
__device__ __forceinline__ void store_squares(bool is_there, float* to, int token, int row, float squares) {
  constexpr int GROUPS_OF_ROWS = N / SUM_OUTPUTS;
  to += token * NEXT_BLOCKS + row / SUM_OUTPUTS;
  store_if(is_there, to, squares);
  if (NEXT_BLOCKS > GROUPS_OF_ROWS) store_if(is_there, to + GROUPS_OF_ROWS, 0.f);
}
