// Four-bit floats (E2M1) as bfloat16 times their scales, which have a byte each. A float's bits in bfloat16's places
// are it times 2^-126; scales come times 2^64. So products of the two are 2^-62 of what they should be, and exact: of
// both scales and of values few bits are used. Powers of two (E8M0) above 2^63 count as that, and powers below 2^-63
// lose digits.

constexpr float E2M1_FACTOR = (float)(1ull << 62);  // of sums

// The floats in the bits 0 to 3 and 16 to 19.
__device__ __forceinline__ u32 pair_of_e2m1(u32 codes) { return codes << 6 & 0x01c001c0u | codes << 12 & 0x80008000u; }
// The same of the numbers i (0 to 3) and i + 4 of a word: a multiplication brings sign and rest to their places, as
// shifts and masks share one slow unit.
__device__ __forceinline__ u32 pair_of_word(u32 word, int i) {
  const u32 near = i < 2 ? word : word >> 8;
  return (i % 2 ? (near & 0x00f000f0u) * 0x0104u : (near & 0x000f000fu) * 0x1040u) & 0x81c081c0u;
}
// The two floats of a byte. Multiplications bring them to their places, as shifts and masks share one slow unit.
__device__ __forceinline__ u32 pair_of_byte(u32 byte) {
  return byte * 0x00040040u & 0x01c001c0u | byte * 0x01001000u & 0x80008000u;
}
// Of eight inputs, two a word, i and i + 4.
__device__ __forceinline__ u32 inputs_apart(const u32 (&words)[4], int i) {
  return __byte_perm(words[i / 2], words[i / 2 + 2], i % 2 ? 0x7632 : 0x5410);
}
// Byte `i` of four scales, twice.
__device__ __forceinline__ u32 scale_of_byte(u32 scales, int i) {
#if FACTORS  // float8_e4m3fn, never negative
  constexpr u32 POWER_120 = 0x7b807b80u, POWER_64 = 0x5f805f80u;
  const u32 bits = __byte_perm(scales, 0, 0x4040 | i * 0x101) << 4 & 0x07f007f0u;
  return times(times(bits, POWER_120), POWER_64);
#else
  const u32 exponent = scales >> 8 * i & 255;
  return (exponent < 190 ? exponent + 64 : 254) * 0x00800080u;
#endif
}
