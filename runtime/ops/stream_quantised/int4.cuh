// Four-bit numbers as bfloat16: 0x4300 with a number as its last bits is 128 plus it, exactly.

// Number i (0 to 3) of the eight in four bytes, and number i + 4: 128 more than they are.
__device__ __forceinline__ u32 pair_of_fours(u32 values, int i) { return values >> 4 * i & 0x000f000fu | 0x43004300u; }
// Of eight inputs, two a word, those that are multiplied by pair_of_fours(…, i).
__device__ __forceinline__ u32 fours_apart(const u32 (&words)[4], int i) {
  return __byte_perm(words[i / 2], words[i / 2 + 2], i % 2 ? 0x7632 : 0x5410);
}
// The two numbers of a byte.
__device__ __forceinline__ u32 pair_of_byte(u32 byte) { return byte * 0x1001u & 0x000f000fu | 0x43004300u; }
__device__ __forceinline__ u32 minus(u32 a, u32 b) {
  u32 difference;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}
__device__ __forceinline__ float float_of_half(unsigned short bits) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
  return v;
}
