// The kernels' common part; kernel.py puts it in front of each.
typedef unsigned int u32;
typedef unsigned long long u64;

struct __align__(64) TensorMap {
  char bytes[128];
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ u32 address_of_peer(u32 address, u32 rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ void make_barrier(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// Makes the barriers visible before TMA and other blocks use them.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// At a barrier of another block of the cluster, or of this one. The waiter may overwrite what was read, and nothing was
// written: no wider release, which would hold the warp for a microsecond until all its writes are seen.
__device__ __forceinline__ void arrive_in_cluster(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
  asm volatile(
      "{ .reg .pred p;\n"
      "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE; bra AGAIN;\n"
      "DONE: }" ::"r"(barrier), "r"(parity) : "memory");
}
// To another block of the cluster; its barrier counts the bytes.
__device__ __forceinline__ void send(u32 to, float4 v, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier) : "memory");
}
__device__ __forceinline__ void fetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ u64 read_once() {  // a weight: not read again in this step
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ u64 read_again() {  // by another block, at about the same time
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Four matrices of 8 x 8, a row of 16 bytes at each lane's address.
__device__ __forceinline__ void load_matrices(u32* to, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}
__device__ __forceinline__ void load_transposed(u32* to, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}
// An operand of wgmma: rows of 128 bytes, swizzled, in groups of eight (PTX ISA, "Matrix Descriptor Format").
__device__ __forceinline__ u64 matrix(u32 address) {
  return (u64)((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
// Where TMA puts chunk `chunk` (16 bytes) of a row of 128 bytes, in eights of rows that begin at multiples of 1024.
__device__ __forceinline__ u32 swizzled(int row, int chunk) { return row * 128 + ((chunk ^ row) & 7) * 16; }
// Of m16n8k16, bfloat16 with float32 sums.
__device__ __forceinline__ void multiply_add(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Two bfloat16 in a register, and back.
__device__ __forceinline__ u32 pack(float first, float second) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
}
__device__ __forceinline__ float first_of(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float second_of(u32 both) { return __uint_as_float(both & 0xffff0000u); }
__device__ __forceinline__ u32 add(u32 a, u32 b) {
  return pack(first_of(a) + first_of(b), second_of(a) + second_of(b));
}
__device__ __forceinline__ u32 times(u32 a, u32 b) {  // rounded once
  u32 product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
// By a norm's weight, or by 1 + weight; rounded once, as v * weight + v is.
__device__ __forceinline__ u32 times_norm_weight(u32 v, u32 weight, bool plus_one) {
  if (!plus_one) return times(v, weight);
  u32 product;
  asm("fma.rn.bf16x2 %0, %1, %2, %1;" : "=r"(product) : "r"(v), "r"(weight));
  return product;
}
// relu(v) ** 2 of two values, rounded once.
__device__ __forceinline__ u32 squared_relu(u32 v) {
  u32 relu;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(relu) : "r"(v), "r"(0));
  return times(relu, relu);
}
// v * Phi(v) of two values, rounded once; as torch's of bfloat16.
__device__ __forceinline__ u32 gelu(u32 v) {
  constexpr float ROOT = 0.70710678118654752f;  // of one half
  const float first = first_of(v), second = second_of(v);
  return pack(first * 0.5f * (1.f + erff(first * ROOT)), second * 0.5f * (1.f + erff(second * ROOT)));
}
// exp(-v). Below -40 (silu is -2e-16 there) it does not grow on, so that no product of two is infinite.
__device__ __forceinline__ float power_of(float v) {
  constexpr float LEAST = -40.f, LOG2_E = 1.4426950408889634f;
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(fmaxf(v, LEAST) * -LOG2_E));
  return power;
}
__device__ __forceinline__ float reciprocal(float v) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(v));
  return inverse;
}
// silu(v) = v / (1 + exp(-v)) of two values of one token. They share a reciprocal, and so each other's rounding. In
// many tokens' linears a tile's exponentials and reciprocals take 6 % of its products' time, as a multiprocessor makes
// only 16 of them in a cycle.
__device__ __forceinline__ u32 silu_of_two(float first, float second) {
  const float a = 1.f + power_of(first), b = 1.f + power_of(second), inverse = reciprocal(a * b);
  return pack(first * (b * inverse), second * (a * inverse));
}
__device__ __forceinline__ u32 silu_times(u32 gates, u32 ups) {
  return times(silu_of_two(first_of(gates), second_of(gates)), ups);
}
// The same of two tokens: no bit of one may depend on the other.
__device__ __forceinline__ u32 silu_times_of_tokens(u32 gates, u32 ups) {
  const float first = first_of(gates), second = second_of(gates);
  const float a = reciprocal(1.f + power_of(first)), b = reciprocal(1.f + power_of(second));
  return times(pack(first * a, second * b), ups);
}
__device__ __forceinline__ float sum_of_squares(u32 both) {
  return first_of(both) * first_of(both) + second_of(both) * second_of(both);
}
__device__ __forceinline__ float sum_of_lanes(float v, int lanes) {  // of neighbours, a power of two
  for (int other = lanes / 2; other; other >>= 1) v += __shfl_xor_sync(~0u, v, other);
  return v;
}
// A store by some lanes of a warp before all of them shuffle again. No branch: ptxas 12.8 to 13.0 does not always
// reconverge lanes before the next shuffle (a sum over four lanes was the first one's alone).
__device__ __forceinline__ void store_if(bool is_there, float* to, float v) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.f32 [%1], %2; }"
               ::"r"((u32)is_there), "l"(to), "f"(v) : "memory");
}
__device__ __forceinline__ void store_if(bool is_there, uint4* to, const uint4& v) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.v4.b32 [%1], {%2, %3, %4, %5}; }"
               ::"r"((u32)is_there), "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ float max_of_quad(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
// See runtime/ops/dependent_launch.py.
__device__ __forceinline__ void wait_for_prerequisites() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void start_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
