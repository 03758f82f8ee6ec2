// Norm, rotation and KV write of a decode's new tokens, where the piece before has left them to attention.
//
// A warp takes a head: a lane has pair `lane` of each 32 of its columns' pairs, and so those that are rotated together,
// which are half a head apart. HEAD_DIM is defined by kernel.py.
// Sums and products are in float32 and rounded once, as in runtime/ops/attention/rope_cache.py.

struct Rotation {
  const u32 *k, *v;                  // new keys and values; null: queries are rotated, keys and values are in the cache
  const u32 *q_weight, *k_weight;    // of the norms before the rotation, or null
  const u32 *cos, *sin;              // of each new token; null: heads are neither normed nor rotated
  u32 *keys, *values;                // the cache
  int q_stride, k_stride, v_stride;  // from one token to the next, in pairs
  float eps;
  float k_factor, v_factor;          // of what is written into a cache of e4m3
};

constexpr int HEAD_PAIRS = HEAD_DIM / 2, A_LANE = HEAD_PAIRS / 32;  // of a head, and those that a lane has
// The stride of heads on their way from the lanes that rotate them to those that multiply: rows of other banks.
constexpr int ROW_PAIRS = HEAD_PAIRS + 4;
typedef u32 Row[ROW_PAIRS];
// Heads of 64: two KV heads are taken as one of 128 (TOGETHER), and so are their query heads. Of such a query's columns
// those of its own KV head have numbers, and the others zeros; of what it sums those are wanted.
constexpr int HEAD_COLUMNS = HEAD_DIM / TOGETHER, MEMBERS = GROUP / TOGETHER;  // of a head; query heads of a KV head
static_assert(TOGETHER == 1 || TOGETHER == 2 && HEAD_DIM == 128 && TOKENS == 1, "as loads have it");
__device__ __forceinline__ bool is_own(int query, int column) {
  return TOGETHER == 1 || column / HEAD_COLUMNS == query / MEMBERS;
}

struct Head {
  u32 pairs[A_LANE];
};
__device__ __forceinline__ Head load_head(const u32* head) {
  Head its;
#pragma unroll
  for (int i = 0; i < A_LANE; i++) its.pairs[i] = head[i * 32 + threadIdx.x % 32];
  return its;
}

// The columns of a KV head's query; `heads`: of its first one.
__device__ __forceinline__ Head load_query(const u32* heads, int query) {
  if constexpr (TOGETHER == 1) return load_head(heads + query * HEAD_PAIRS);
  Head its = {};
  its.pairs[query / MEMBERS] = heads[query * (HEAD_COLUMNS / 2) + threadIdx.x % 32];
  return its;
}

struct Weights {  // the norms': may be read without a wait
  Head q, k;
};
__device__ __forceinline__ Weights load_weights(const Rotation& rotation) {
  Weights its = {};
  if (rotation.q_weight) its = {load_head(rotation.q_weight), load_head(rotation.k_weight)};
  return its;
}
struct Angle {  // of a token; in the first layer the kernel ahead may be the one that computes it
  Head cos, sin;
};
__device__ __forceinline__ Angle load_angle(const Rotation& rotation, int token) {
  const u64 place = (u64)token * HEAD_PAIRS;
  return {load_head(rotation.cos + place), load_head(rotation.sin + place)};
}
// N heads by one token's angle. Sums over lanes side by side: one takes as long as many.
template <int N>
__device__ __forceinline__ void rotate(Head (&heads)[N], const Head& weight, const Angle& by,
                                       const Rotation& rotation) {
  float norms[N];
  if (rotation.q_weight) {
#pragma unroll
    for (int n = 0; n < N; n++) {
      norms[n] = sum_of_squares(heads[n].pairs[0]);
#pragma unroll
      for (int i = 1; i < A_LANE; i++) norms[n] += sum_of_squares(heads[n].pairs[i]);
    }
#pragma unroll
    for (int other = 16; other; other /= 2)
#pragma unroll
      for (int n = 0; n < N; n++) norms[n] += __shfl_xor_sync(~0u, norms[n], other);
  }
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int i = 0; i < A_LANE / 2; i++) {
      const int j = i + A_LANE / 2;
      u32 &x = heads[n].pairs[i], &y = heads[n].pairs[j];
      float a = first_of(x), b = second_of(x), c = first_of(y), d = second_of(y);
      if (rotation.q_weight) {
        const float norm = rsqrtf(norms[n] / (2 * HEAD_PAIRS) + rotation.eps);
        a = a * norm * first_of(weight.pairs[i]), b = b * norm * second_of(weight.pairs[i]);
        c = c * norm * first_of(weight.pairs[j]), d = d * norm * second_of(weight.pairs[j]);
      }
      const u32(&cos)[A_LANE] = by.cos.pairs, (&sin)[A_LANE] = by.sin.pairs;
      x = pack(a * first_of(cos[i]) - c * first_of(sin[i]), b * second_of(cos[i]) - d * second_of(sin[i]));
      y = pack(c * first_of(cos[j]) + a * first_of(sin[j]), d * second_of(cos[j]) + b * second_of(sin[j]));
    }
}

// Into a row that others read.
__device__ __forceinline__ void put_head(Row& row, const Head& head) {
#pragma unroll
  for (int i = 0; i < A_LANE; i++) row[i * 32 + threadIdx.x % 32] = head.pairs[i];
}
// 128 columns of up to `count` queries of a KV head, `stride` pairs from one to the next, as rows 0 to 7 of a product's
// operand, or with N = 4 as all 16, in the order of multiply_add; over keys of e4m3 as float16, in the order in
// which a lane has these (fp8_keys.cuh). With IS_NARROW heads are as a model has them.
template <bool IS_NARROW = false, int N>
__device__ __forceinline__ void load_operand(u32 (&query)[8][N], const u32* heads, int stride, int count) {
  const int lane = threadIdx.x % 32, member = lane / 4, quad = lane % 4;
#pragma unroll
  for (int k = 0; k < 8; k++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int pair = FP8 ? k * 8 + quad * 2 + j : k * 8 + j * 4 + quad;
#pragma unroll
      for (int half = 0; half < N / 2; half++) {
        u32& its = query[k][j * (N / 2) + half];
        const int row = member + half * 8, column = IS_NARROW ? pair % (HEAD_COLUMNS / 2) : pair;
        its = row < count && (!IS_NARROW || is_own(row, pair * 2)) ? heads[row * stride + column] : 0;
        if constexpr (FP8) its = half_query(its);
      }
    }
}

// Of a KV head.
__device__ __forceinline__ Head load_new_key(const Rotation& rotation, int token, int head) {
  return load_head(rotation.k + (u64)token * rotation.k_stride + head * HEAD_PAIRS);
}
__device__ __forceinline__ Head load_new_value(const Rotation& rotation, int token, int head) {
  return load_head(rotation.v + (u64)token * rotation.v_stride + head * HEAD_PAIRS);
}
// Of the cache, where the token at `position` of a request is.
__device__ __forceinline__ u64 slot_in(u32 page, int position) { return (u64)page * PAGE + position % PAGE; }
// A pair times a factor as e4m3; numbers beyond its range become the largest.
__device__ __forceinline__ unsigned short fp8_pair(u32 pair, float factor) {
  unsigned short both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(both)
      : "f"(second_of(pair) * factor), "f"(first_of(pair) * factor));
  return both;
}
__device__ __forceinline__ void write_to_cache(const Rotation& rotation, const Head& key, const Head& value,
                                               u64 slot, int head) {
  const u64 place = (slot * KV_HEADS + head) * HEAD_PAIRS + threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < A_LANE; i++) {
    const u64 at = place + i * 32;
    if constexpr (FP8) {
      ((unsigned short*)rotation.keys)[at] = fp8_pair(key.pairs[i], rotation.k_factor);
      ((unsigned short*)rotation.values)[at] = fp8_pair(value.pairs[i], rotation.v_factor);
    } else {
      rotation.keys[at] = key.pairs[i];
      rotation.values[at] = value.pairs[i];
    }
  }
}
// Into the rows of a tile: `chunk_of(c)` is where chunk c (16 bytes) of the row begins.
template <typename ChunkOf>
__device__ __forceinline__ void put_into_tile(const Head& head, float factor, const ChunkOf& chunk_of) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < A_LANE; i++)
    if constexpr (FP8)
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(chunk_of(i * 4 + lane / 8) + lane % 8 * 2),
                   "h"(fp8_pair(head.pairs[i], factor)) : "memory");
    else
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(chunk_of(i * 8 + lane / 4) + lane % 4 * 4), "r"(head.pairs[i])
                   : "memory");
}
// A row of such a tile; FP8: pairs of e4m3.
template <typename ChunkOf>
__device__ __forceinline__ Head head_in_tile(const ChunkOf& chunk_of) {
  const int lane = threadIdx.x % 32;
  Head its;
#pragma unroll
  for (int i = 0; i < A_LANE; i++)
    if constexpr (FP8) {
      unsigned short pair;
      asm volatile("ld.shared.u16 %0, [%1];"
                   : "=h"(pair)
                   : "r"(chunk_of(i * 4 + lane / 8) + lane % 8 * 2)
                   : "memory");
      its.pairs[i] = pair;
    } else {
      asm volatile("ld.shared.u32 %0, [%1];"
                   : "=r"(its.pairs[i])
                   : "r"(chunk_of(i * 8 + lane / 4) + lane % 4 * 4)
                   : "memory");
    }
  return its;
}
