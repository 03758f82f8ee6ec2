// A warp's sums over keys, of 128 columns of values, in the layout that its products give them.

// Over bfloat16 queries are rows of products: values[n] are of columns 8 n + 2 quad and the next one, of query lane /
// 4, in rows 0 to 7; the others, [2] and [3], are zero.
struct LargeSums {
  float values[16][4], top[1], total[1];  // the largest logit; the sum of weights, of this lane's keys
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
constexpr int QUERIES = FP8 ? 2 : 1;  // a lane has sums of them

// The query head of a lane's i-th sums; GROUP or more without one.
__device__ __forceinline__ int query_of(int i) { return FP8 ? threadIdx.x % 4 * 2 + i : threadIdx.x % 32 / 4; }
// Calls store(column, sums of this column and the next one) for the columns that the lane has of its i-th query.
template <typename Store>
__device__ __forceinline__ void each_pair(const Sums& sums, int i, const Store& store) {
  const int quad = threadIdx.x % 4, member = threadIdx.x % 32 / 4;
#pragma unroll
  for (int n = 0; n < 16 / QUERIES; n++) {
    const float(&its)[4] = sums.values[n];
    if constexpr (FP8) store(n * 16 + member * 2, its[i], its[i + 2]);
    else store(n * 8 + quad * 2, its[0], its[1]);
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
