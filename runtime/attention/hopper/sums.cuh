// A warp's sums over keys, of 128 columns of values, in the layout that its products give them.

constexpr int QUERIES = FP8 || ROWS > 8 ? 2 : 1;  // a lane has sums of them

// Over bfloat16 queries are rows of products: values[n] are of columns 8 n + 2 quad and the next one, of query lane /
// 4, and [2] and [3] of the one eight behind: zero if there are no more than eight.
struct LargeSums {
  float values[16][4], top[QUERIES], total[QUERIES];  // the largest logit; the sum of weights, of this lane's keys
};
template <bool>
struct SumsOf {
  typedef LargeSums Type;
};
template <>
struct SumsOf<true> {
  typedef Fp8Sums Type;
};
typedef SumsOf<FP8>::Type Sums;

// The query of a lane's i-th sums; of 16, or of 8.
__device__ __forceinline__ int query_of(int i) {
  return FP8 ? threadIdx.x % 4 * 2 + i : threadIdx.x % 32 / 4 + i * 8;
}
// Calls store(column, sums of this column and the next one) for the columns that the lane has of its i-th query.
template <typename Store>
__device__ __forceinline__ void each_pair(const Sums& sums, int i, const Store& store) {
  const int quad = threadIdx.x % 4, member = threadIdx.x % 32 / 4;
#pragma unroll
  for (int n = 0; n < (FP8 ? 8 : 16); n++) {
    const float(&its)[4] = sums.values[n];
    if constexpr (FP8) store(n * 16 + member * 2, its[i], its[i + 2]);
    else store(n * 8 + quad * 2, its[i * 2], its[i * 2 + 1]);
  }
}
__device__ __forceinline__ Sums no_sums() {
  Sums its = {};
#pragma unroll
  for (int i = 0; i < QUERIES; i++) its.top[i] = NOTHING;
  return its;
}
// Sums of weights, of all keys' lanes.
__device__ __forceinline__ void add_up_totals(Sums& sums) {
#pragma unroll
  for (int i = 0; i < QUERIES; i++)
#pragma unroll
    for (int by = FP8 ? 4 : 1; by < (FP8 ? 32 : 4); by *= 2) sums.total[i] += __shfl_xor_sync(~0u, sums.total[i], by);
}
