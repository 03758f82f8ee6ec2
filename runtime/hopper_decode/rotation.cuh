// Norm, rotation and KV write of a decode's new tokens, where the piece before has left them to attention.
//
// A warp takes a head: a lane has pair `lane` of its columns and the pair that is rotated with it, HALF_PAIRS behind. Sums
// and products are in float32 and rounded once, as in runtime/rope_cache_ops.py.

struct Rotation {
  const u32 *k, *v;                  // new keys and values; null: queries are rotated, keys and values are in the cache
  const u32 *q_weight, *k_weight;    // of the norms before the rotation; null: there are none
  const u32 *cos, *sin;              // of each request's new token
  u32 *keys, *values;                // the cache
  int q_stride, k_stride, v_stride;  // from one token to the next, in pairs
  float eps;
};

constexpr int HEAD_PAIRS = 64, HALF_PAIRS = HEAD_PAIRS / 2;
// Of queries on their way from the lanes that rotate them to those that multiply: rows of other banks.
constexpr int QUERY_ROW = HEAD_PAIRS + 4;
typedef u32 QueryRow[QUERY_ROW];

struct Head {
  u32 pairs[2];
};
__device__ __forceinline__ Head load_head(const u32* head) {
  const int lane = threadIdx.x % 32;
  return {{head[lane], head[HALF_PAIRS + lane]}};
}

struct Weights {  // of the norms: nobody has to be waited for to read them
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
__device__ __forceinline__ void rotate(Head& head, const Head& weight, const Angle& by, const Rotation& rotation) {
  u32(&x)[2] = head.pairs;
  float a = first_of(x[0]), b = second_of(x[0]), c = first_of(x[1]), d = second_of(x[1]);
  if (rotation.q_weight) {
    const float squares = sum_of_lanes(sum_of_squares(x[0]) + sum_of_squares(x[1]), 32);
    const float norm = rsqrtf(squares / (2 * HEAD_PAIRS) + rotation.eps);
    a *= norm * first_of(weight.pairs[0]), b *= norm * second_of(weight.pairs[0]);
    c *= norm * first_of(weight.pairs[1]), d *= norm * second_of(weight.pairs[1]);
  }
  const u32(&cos)[2] = by.cos.pairs, (&sin)[2] = by.sin.pairs;
  x[0] = pack(a * first_of(cos[0]) - c * first_of(sin[0]), b * second_of(cos[0]) - d * second_of(sin[0]));
  x[1] = pack(c * first_of(cos[1]) + a * first_of(sin[1]), d * second_of(cos[1]) + b * second_of(sin[1]));
}

// The GROUP query heads of a KV head, which follow one another at `heads`, as rows of a product's operand; by one warp.
__device__ __forceinline__ void load_queries(u32 (&query)[8][2], const u32* heads, const Rotation& rotation,
                                             const Weights& weights, const Angle& angle, QueryRow* on_the_way) {
  const int lane = threadIdx.x % 32, member = lane / 4, quad = lane % 4;
  const bool is_there = member < GROUP;
  if (rotation.k) {
    Head of[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; g++) of[g] = load_head(heads + g * HEAD_PAIRS);
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      rotate(of[g], weights.q, angle, rotation);
      on_the_way[g][lane] = of[g].pairs[0], on_the_way[g][HALF_PAIRS + lane] = of[g].pairs[1];
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 8; k++)
#pragma unroll
      for (int j = 0; j < 2; j++) query[k][j] = is_there ? on_the_way[member][k * 8 + j * 4 + quad] : 0;
    __syncwarp();  // or a lane might put the next ones there
  } else {
#pragma unroll
    for (int k = 0; k < 8; k++)
#pragma unroll
      for (int j = 0; j < 2; j++) query[k][j] = is_there ? heads[member * HEAD_PAIRS + k * 8 + j * 4 + quad] : 0;
  }
}

// A KV head's new key and value.
struct NewToken {
  Head key, value;
};
__device__ __forceinline__ NewToken load_new_token(const Rotation& rotation, int token, int head) {
  return {load_head(rotation.k + (u64)token * rotation.k_stride + head * HEAD_PAIRS),
          load_head(rotation.v + (u64)token * rotation.v_stride + head * HEAD_PAIRS)};
}
// The lane, asked for anew: so that what follows from it is not kept in registers all the loop that has it once at its end.
__device__ __forceinline__ int lane_now() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
// Where the queries were, which are in registers by then, in two rows: for later, when all other registers are needed.
__device__ __forceinline__ void keep(const NewToken& its, u32 page, QueryRow* rows) {
  const int lane = threadIdx.x % 32;
  rows[0][HEAD_PAIRS] = page;  // every lane puts it there, and finds it
#pragma unroll
  for (int half = 0; half < 2; half++)
    rows[0][half * HALF_PAIRS + lane] = its.key.pairs[half], rows[1][half * HALF_PAIRS + lane] = its.value.pairs[half];
}
__device__ __forceinline__ NewToken kept(const QueryRow* rows) {
  const int lane = lane_now();
  return {{rows[0][lane], rows[0][HALF_PAIRS + lane]}, {rows[1][lane], rows[1][HALF_PAIRS + lane]}};
}
__device__ __forceinline__ u32 kept_page(const QueryRow* rows) { return rows[0][HEAD_PAIRS]; }
// Of the cache, where the token at `position` of a request is.
__device__ __forceinline__ u64 slot_in(u32 page, int position) { return (u64)page * PAGE + position % PAGE; }
__device__ __forceinline__ void write_to_cache(const Rotation& rotation, const NewToken& its, u64 slot, int head) {
  const u64 place = (slot * KV_HEADS + head) * HEAD_PAIRS + lane_now();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    rotation.keys[place + half * HALF_PAIRS] = its.key.pairs[half];
    rotation.values[place + half * HALF_PAIRS] = its.value.pairs[half];
  }
}
// Into the rows of a tile: `chunk_of(c)` is where chunk c (16 bytes) of the row begins.
template <typename ChunkOf>
__device__ __forceinline__ void put_into_tile(const Head& head, const ChunkOf& chunk_of) {
  const int lane = lane_now();
#pragma unroll
  for (int half = 0; half < 2; half++)
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(chunk_of(half * 8 + lane / 4) + lane % 4 * 4), "r"(head.pairs[half])
                 : "memory");
}
