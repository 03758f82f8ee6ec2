// float8_e4m3fn as bfloat16, without a conversion instruction: exponent and mantissa of a byte are moved into their
// places. This gives the value times 2^-120, also for subnormal ones and zeros (as bfloat16's own subnormals, which
// products on tensor cores take). The caller multiplies by 2^120, before products would leave float32's normal numbers.
// NaN (0x7f, 0xff) becomes 480 or -480: a checkpoint with NaN is refused where it is read.

// Bytes 0 and 1, and bytes 2 and 3: each is brought into half of a register with its sign in all bits before it.
template <int SELECTOR>
__device__ __forceinline__ u32 pair_of(u32 values) {
  u32 spread;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(spread) : "r"(values), "n"(SELECTOR));
  return spread << 4 & 0x87f087f0u;
}
__device__ __forceinline__ u32 first_pair(u32 values) { return pair_of<0x9180>(values); }
__device__ __forceinline__ u32 second_pair(u32 values) { return pair_of<0xb3a2>(values); }

// As multiply_add, but that the compiler may move it.
__device__ __forceinline__ void add_product(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
