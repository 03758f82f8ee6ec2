// Products with keys and values of e4m3 (FP8). They become float16, which has each of their numbers, two in an
// instruction; queries and weights are float16 too, which rounds them less than bfloat16 does. Keys, and columns of
// values, are the rows of products, and queries the columns: so no row is idle. A tile's row is a head's 128 columns in
// 128 bytes, as TMA swizzles them.
//
// Weights are against a reference, which grows only where they would leave float16's range: so of most tiles nobody
// needs the largest logit, and sums stay as they are.

constexpr float NOTHING = -1e30f;  // a logit that no key has

__device__ __forceinline__ u32 half_pair(float first, float second) {
  u32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
}
// Two bfloat16 as float16; numbers beyond its range become the largest.
__device__ __forceinline__ u32 half_query(u32 pair) {
  constexpr float MOST = 65504.f;
  return half_pair(fminf(fmaxf(first_of(pair), -MOST), MOST), fminf(fmaxf(second_of(pair), -MOST), MOST));
}
// Four numbers of e4m3 as float16: the lower two and the upper two.
struct Halves {
  u32 lower, upper;
};
__device__ __forceinline__ Halves halves_of(u32 four) {
  Halves its;
  asm("{ .reg .b16 lower, upper;\n"
      "mov.b32 {lower, upper}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, lower;\n"
      "cvt.rn.f16x2.e4m3x2 %1, upper; }" : "=r"(its.lower), "=r"(its.upper) : "r"(four));
  return its;
}
// Of m16n8k16, float16 with float32 sums.
__device__ __forceinline__ void add_halves(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 transposed(u32 matrix) {
  u32 its;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(its) : "r"(matrix));
  return its;
}
// Bytes of `pairs`, or zeros.
__device__ __forceinline__ u32 in_order(u32 pairs, u32 order) {
  u32 its;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(its) : "r"(pairs), "r"(order));
  return its;
}
__device__ __forceinline__ float power_of_two(float v) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
  return power;
}

// Adds the products of sixteen keys from row `row` on with queries, in two parts: a lane has the products of key lane /
// 4 and of the one eight behind, each with queries 2 quad and 2 quad + 1.
__device__ __forceinline__ void add_fp8_keys(float (&logits)[2][4], const u32 (&query)[8][2], u32 tile, int row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < 8; k += 2) {
    u32 keys[4];
    load_matrices(keys, tile + swizzled(row + lane % 16, k + lane / 16));
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const Halves early = halves_of(keys[2 * j]), late = halves_of(keys[2 * j + 1]);
      add_halves(logits[j], early.lower, late.lower, early.upper, late.upper, query[k + j][0], query[k + j][1]);
    }
  }
}

// A warp's sums over keys. values[k] are of columns 16 k + lane / 4 * 2 and the next one, each of queries 2 quad and
// 2 quad + 1, and so are the others: what weights are against, and their sum, of this lane's keys.
struct Fp8Sums {
  float values[8][4], top[2], total[2];
};

// The weights of 16 keys of each tile, as operands, and the order in which to take values, which leaves out what memory
// behind the last key holds. The first tile's keys begin at `key`, the next one's `step` behind. A lane's queries see
// those before `of_query`, and all that are seen are before `num_keys`. What a query that has seen none adds up is
// against NOTHING, so it counts for nothing.
template <int TILES>
struct Fp8Weights {
  u32 of_keys[TILES][2], order[TILES][2];
};
template <int TILES>
__device__ __forceinline__ Fp8Weights<TILES> weigh(Fp8Sums& sums, const float (&logits)[TILES][2][4], int key,
                                                     int step, int num_keys, const int (&of_query)[2], float scale) {
  constexpr float MOST_WEIGHT = 15.f, WEIGHT_OF_LARGEST = 7.f;  // to base 2; the latter where the reference grows
  Fp8Weights<TILES> its;
  const int lane = threadIdx.x % 32;
  float above[TILES][4], most = -MOST_WEIGHT;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    its.order[t][0] = its.order[t][1] = 0x3120u;  // the first columns of both keys, then the second ones
#pragma unroll
    for (int i = 0; i < 4; i++) {
      above[t][i] = (logits[t][0][i] + logits[t][1][i]) * scale - sums.top[i % 2];
      most = fmaxf(most, above[t][i]);
    }
  }
  const int last = key + (TILES - 1) * step + 16;
  if (__any_sync(~0u, most > MOST_WEIGHT || last > of_query[0] || last > of_query[1])) {
    float largest[2] = {NOTHING, NOTHING};
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const bool is_seen = key + t * step + i / 2 * 8 + lane / 4 < of_query[i % 2];
        above[t][i] = is_seen ? (logits[t][0][i] + logits[t][1][i]) * scale : NOTHING;
        largest[i % 2] = fmaxf(largest[i % 2], above[t][i]);
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int place = key + t * step + i * 8 + lane % 4 * 2;
        its.order[t][i] = (place < num_keys ? 0x0100u : 0x0404u) | (place + 1 < num_keys ? 0x3020u : 0x4040u);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int by = 4; by < 32; by *= 2) largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], by));
      const float top = largest[i] > sums.top[i] + MOST_WEIGHT ? largest[i] - WEIGHT_OF_LARGEST : sums.top[i];
      const float shrink = power_of_two(sums.top[i] - top);
      sums.top[i] = top, sums.total[i] *= shrink;
#pragma unroll
      for (int k = 0; k < 8; k++) sums.values[k][i] *= shrink, sums.values[k][i + 2] *= shrink;
#pragma unroll
      for (int t = 0; t < TILES; t++) above[t][i] -= top, above[t][i + 2] -= top;
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float first = power_of_two(above[t][i * 2]), second = power_of_two(above[t][i * 2 + 1]);
      sums.total[0] += first, sums.total[1] += second;
      its.of_keys[t][i] = transposed(half_pair(first, second));
    }
  return its;
}

// Adds the weighted values of sixteen keys from row `row` on.
__device__ __forceinline__ void add_fp8_values(float (&sums)[8][4], const u32 (&weights)[2], const u32 (&order)[2],
                                                 u32 tile, int row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < 8; k += 2) {
    u32 values[4];
    load_transposed(values, tile + swizzled(row + lane % 16, k + lane / 16));
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const Halves early = halves_of(in_order(values[2 * j], order[0]));
      const Halves late = halves_of(in_order(values[2 * j + 1], order[1]));
      add_halves(sums[k + j], early.lower, early.upper, late.lower, late.upper, weights[0], weights[1]);
    }
  }
}
