// Products with keys and values of e4m3 (FP8). They become bfloat16 as numbers 2^120 times smaller (e4m3.cuh): queries, and
// the weights of values, are 2^60 times as large, and the rest is in the factor of what comes out, so that all sums are
// among float32's normal numbers. A tile's row is a head's 128 columns in 128 bytes, as TMA swizzles them.

constexpr float ENLARGED = FP8 ? 1.152921504606847e18f : 1.f;  // 2^60

// Where the lane's 32 columns of a key are: 16 bytes at quad, and at quad + 4. Neighbouring rows read theirs in turns: so
// eight lanes read from different banks.
struct SmallKey {
  uint4 chunks[2];
};
__device__ __forceinline__ uint4 load_chunk(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ SmallKey load_small_key(u32 tile, int row) {
  const int quad = threadIdx.x % 4, later = row % 2 * 4;
  const uint4 a = load_chunk(tile + swizzled(row, quad + later)), b = load_chunk(tile + swizzled(row, quad + 4 - later));
  return later ? SmallKey{{b, a}} : SmallKey{{a, b}};
}
// Adds the products of queries with eight keys, of which a lane has that of row lane / 4.
__device__ __forceinline__ void add_small_keys(float* logits, const u32 (&query)[8][2], const SmallKey& key) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u32 words[4] = {key.chunks[half].x, key.chunks[half].y, key.chunks[half].z, key.chunks[half].w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const u32(&q)[2] = query[half * 4 + k];
      add_product(logits, q[0], 0, q[1], 0, first_pair(words[k]), second_pair(words[k]));
    }
  }
}

// Of two keys' pairs of columns, as ldmatrix transposes them: the first columns of both, and the second ones.
__device__ __forceinline__ u32 first_columns(u32 pairs) { return (pairs << 4 & 0x07f007f0u) | (pairs << 8 & 0x80008000u); }
__device__ __forceinline__ u32 second_columns(u32 pairs) { return (pairs >> 4 & 0x07f007f0u) | (pairs & 0x80008000u); }

// Adds the weighted values of sixteen keys from row `row` on. sums[2 k] has columns 16 k + 4 quad and the one two further,
// sums[2 k + 1] those behind each.
__device__ __forceinline__ void add_small_values(float (*sums)[4], const u32 (&weights)[2], u32 tile, int row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < 8; k += 2) {
    u32 value[4];
    load_transposed(value, tile + swizzled(row + lane % 16, k + lane / 16));
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const u32 early = value[2 * j], late = value[2 * j + 1];
      multiply_add(sums[2 * (k + j)], weights[0], 0, weights[1], 0, first_columns(early), first_columns(late));
      multiply_add(sums[2 * (k + j) + 1], weights[0], 0, weights[1], 0, second_columns(early), second_columns(late));
    }
  }
}
