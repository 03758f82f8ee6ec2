// Four-bit numbers as bfloat16. The last eight bits of bfloat16, all others being 0, are a number times 2^-133, below
// the least normal number and above. So a number that is there is one already, and one that is four bits further on
// is 16 times larger. Tensor cores take such operands exactly.

// Number i (0 to 3) of the eight in four bytes, and number i + 4: times 2^-133, odd ones 16 times larger. They are of
// neighbouring inputs. Of 32 inputs, 16 bytes, word q has the pairs that lane q of four gives to two products: inputs 2
// q, 2 q + 8, 2 q + 16 and 2 q + 24, each with the next one (runtime/quantised/numbers.py).
__device__ __forceinline__ u32 pair_of_fours(u32 values, int i) {
  return values >> i / 2 * 8 & (i % 2 ? 0x00f000f0u : 0x000f000fu);
}
// Two inputs as pair_of_fours(…, i) is multiplied by them: times 2^64, and 16 times smaller where those are larger.
__device__ __forceinline__ u32 inputs_of_fours(u32 inputs, int i) {
  return times(inputs, i % 2 ? 0x5d805d80u : 0x5f805f80u);
}
// Twice the number 1 as pair_of_fours(…, i) gives it.
__device__ __forceinline__ constexpr u32 one_of_fours(int i) { return i % 2 ? 0x00100010u : 0x00010001u; }
__device__ __forceinline__ constexpr float fours_factor() { return 0x1p69f; }  // of sums of such products

// pair_of_fours(…, i) times a scale, less a zero point, exact except for one instruction's rounding.
__device__ __forceinline__ u32 scaled_fours(u32 values, int i, u32 scale, u32 zero) {
  u32 pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(pair_of_fours(values, i)), "r"(scale), "r"(zero));
  return pair;
}
// Factors of sums of products with these pairs: of numbers alone, and of numbers times their scale.
__device__ __forceinline__ constexpr float int4_factor(bool with_scale) { return with_scale ? 1 << 23 : 1 << 13; }
// Scales of pair i, in both halves: 1 for numbers alone, and one in bfloat16, which is in both halves. Then their
// zeros.
// 2^116, 2^120.
__device__ __forceinline__ constexpr u32 int4_unit(int i) { return i % 2 ? 0x79807980u : 0x7b807b80u; }
// 2^106, 2^110.
__device__ __forceinline__ u32 int4_scale(u32 scale, int i) { return times(scale, i % 2 ? 0x74807480u : 0x76807680u); }
// Times -2^-13.
__device__ __forceinline__ u32 int4_zero(u32 zero) { return times(zero * 0x10001u, 0xfb80fb80u); }
// -8 times 2^-23.
__device__ __forceinline__ u32 int4_scaled_zero(u32 scale) { return times(scale, 0xb580b580u); }
__device__ __forceinline__ float float_of_half(unsigned short bits) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
  return v;
}
