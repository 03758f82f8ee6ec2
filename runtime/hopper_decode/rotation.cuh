// Norm, rotation and KV write of a decode's new tokens, where the piece before has left them to attention.
//
// Sums and products are in float32 and rounded once, as in runtime/rope_cache_ops.py. What does not depend on the kernel
// ahead (weights, angles, places) is read before the wait for it.

struct Rotation {
  const u32 *k, *v;                // new keys and values; null: queries are rotated, keys and values are in the cache
  const u32 *q_weight, *k_weight;  // of the norms before the rotation; null: there are none
  const u32 *cos, *sin;            // of each request's new token
  u32 *keys, *values;              // the cache
  int q_stride, k_stride, v_stride;  // from one token to the next, in pairs of columns, as all that follows
  float eps;
};

constexpr int HEAD_PAIRS = 64, HALF_PAIRS = HEAD_PAIRS / 2;  // what is rotated with a pair is HALF_PAIRS behind it
constexpr u32 ONES = 0x3f803f80;                             // a norm's weight where there is none

// What a pair and its other half are multiplied by.
struct Factors {
  u32 cos[2], sin[2], weight[2];
};
__device__ __forceinline__ Factors load_factors(const Rotation& rotation, const u32* weight, int token, int pair) {
  Factors its;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int place = pair + half * HALF_PAIRS;
    its.cos[half] = rotation.cos[token * HEAD_PAIRS + place];
    its.sin[half] = rotation.sin[token * HEAD_PAIRS + place];
    its.weight[half] = weight ? weight[place] : ONES;
  }
  return its;
}
__device__ __forceinline__ float norm_factor(float squares, const u32* weight, float eps) {
  return weight ? rsqrtf(squares / (2 * HEAD_PAIRS) + eps) : 1.f;
}
__device__ __forceinline__ void rotate(u32& first, u32& second, const Factors& by, float norm) {
  const float ax = first_of(first) * norm * first_of(by.weight[0]), ay = second_of(first) * norm * second_of(by.weight[0]);
  const float bx = first_of(second) * norm * first_of(by.weight[1]), by_ = second_of(second) * norm * second_of(by.weight[1]);
  first = pack(ax * first_of(by.cos[0]) - bx * first_of(by.sin[0]), ay * second_of(by.cos[0]) - by_ * second_of(by.sin[0]));
  second = pack(bx * first_of(by.cos[1]) + ax * first_of(by.sin[1]), by_ * second_of(by.cos[1]) + ay * second_of(by.sin[1]));
}

// Of pair (k, j) that a lane has of a query head, as of an operand of a product: quad of each four.
__device__ __forceinline__ Factors load_query_factors(const Rotation& rotation, int token, int k, int j) {
  return load_factors(rotation, rotation.q_weight, token, k * 8 + j * 4 + threadIdx.x % 4);
}
// A query head a lane's row; by whole warps. `factors_of(k, j)` are those of the pairs.
template <typename FactorsOf>
__device__ __forceinline__ void load_query(u32 (&query)[8][2], const u32* head, bool is_there, const Rotation& rotation,
                                           const FactorsOf& factors_of) {
  float squares = 0.f;
#pragma unroll
  for (int k = 0; k < 8; k++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      query[k][j] = is_there ? head[k * 8 + j * 4 + threadIdx.x % 4] : 0;
      squares += sum_of_squares(query[k][j]);
    }
  if (!rotation.k) return;
  const float norm = norm_factor(sum_of_lanes(squares, 4), rotation.q_weight, rotation.eps);
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int j = 0; j < 2; j++) rotate(query[k][j], query[k + 4][j], factors_of(k, j), norm);
}

// A head's new key and value, of which a lane has pair `lane` and its other half.
struct NewToken {
  u32 key[2], value[2];
};
__device__ __forceinline__ Factors load_key_factors(const Rotation& rotation, int token) {
  return load_factors(rotation, rotation.k_weight, token, threadIdx.x % 32);
}
__device__ __forceinline__ NewToken load_new_token(const Rotation& rotation, int token, int head, const Factors& factors) {
  const u32* k = rotation.k + (u64)token * rotation.k_stride + head * HEAD_PAIRS + threadIdx.x % 32;
  const u32* v = rotation.v + (u64)token * rotation.v_stride + head * HEAD_PAIRS + threadIdx.x % 32;
  NewToken its = {{k[0], k[HALF_PAIRS]}, {v[0], v[HALF_PAIRS]}};
  const float squares = sum_of_lanes(sum_of_squares(its.key[0]) + sum_of_squares(its.key[1]), 32);
  rotate(its.key[0], its.key[1], factors, norm_factor(squares, rotation.k_weight, rotation.eps));
  return its;
}
__device__ __forceinline__ void write_to_cache(const Rotation& rotation, const NewToken& its, u64 slot, int head) {
  const u64 place = (slot * KV_HEADS + head) * HEAD_PAIRS + threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    rotation.keys[place + half * HALF_PAIRS] = its.key[half];
    rotation.values[place + half * HALF_PAIRS] = its.value[half];
  }
}
__device__ __forceinline__ void store_shared(u32 address, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
