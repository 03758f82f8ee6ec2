// float8_e4m3fn as bfloat16, without a conversion instruction: exponent and mantissa of a byte are moved into their places,
// which gives the value times 2^-120, subnormal ones and zeros included (as bfloat16's own subnormals, which products on
// tensor cores take). Who uses it multiplies by 2^120, before products would leave float32's normal numbers.
// NaN (0x7f, 0xff) becomes 480 or -480: a checkpoint with NaN is refused where it is read.

// Bytes 0 and 2, and bytes 1 and 3.
__device__ __forceinline__ u32 even_of(u32 values) { return (values << 8 & 0x80008000u) | (values << 4 & 0x07f007f0u); }
__device__ __forceinline__ u32 odd_of(u32 values) { return (values & 0x80008000u) | (values >> 4 & 0x07f007f0u); }

// Bytes 0 and 1, and bytes 2 and 3: each is brought into half of a register with its sign in all bits before it.
template <int SELECTOR>
__device__ __forceinline__ u32 pair_of(u32 values) {
  u32 spread;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(spread) : "r"(values), "n"(SELECTOR));
  return spread << 4 & 0x87f087f0u;
}
__device__ __forceinline__ u32 first_pair(u32 values) { return pair_of<0x9180>(values); }
__device__ __forceinline__ u32 second_pair(u32 values) { return pair_of<0xb3a2>(values); }
