// How long blocks take to meet: ROUNDS times, each makes 8 values of 1024 and goes on when it knows of all others'.
// WORDS: values lie in places that are all ones until then, in COPIES, and each warp looks at the 64 that it needs.
// Otherwise a counter tells that all are there (an addition that releases, a read that acquires); then they are read.
typedef unsigned short bf16;
constexpr int BLOCKS = 128, THREADS = 512, HIDDEN = 1024;
constexpr u32 NOT_THERE = ~0u, MOST_LOOKS = 1u << 22;

__device__ __forceinline__ uint4 read(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) persistent_meetings(bf16* places, u32* counter, int* out) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x;
  u32 found = 0;
  for (int round = 0; round < ROUNDS; round++) {
    bf16* values = places + round * COPIES * HIDDEN;
    if (threadIdx.x < 4 * COPIES) {
      bf16* to = values + lane / 4 * HIDDEN + block * 8 + 2 * (lane & 3);
      asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(found & 1) : "memory");
    }
    if (!WORDS) {
      __syncthreads();
      if (threadIdx.x == 0) {
        u32 there;
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter + round) : "memory");
        for (u32 looks = 0;; looks++) {
          asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(counter + round) : "memory");
          if (there == BLOCKS) break;
          if (looks == MOST_LOOKS) __trap();
        }
      }
      __syncthreads();
    }
    for (u32 looks = 0;; looks++) {
      const uint4 v = read(values + block % COPIES * HIDDEN + 64 * warp + 8 * (lane & 7));
      const bool are_there = v.x != NOT_THERE && v.y != NOT_THERE && v.z != NOT_THERE && v.w != NOT_THERE;
      found += v.x + v.y + v.z + v.w;
      if (are_there) break;
      if (looks == MOST_LOOKS) __trap();
    }
    found &= 1;
    __syncthreads();
  }
  if (threadIdx.x == 0) out[block] = found;
}
