// The kernels' common part that sum over ranks: what they store into others' memory, and how they wait for theirs.
//
// Chunks are of 16 bytes, eight bfloat16. All ranks add in the order of ranks, in float32: they get the same bits.
constexpr u32 NOTHING = 0x80008000u;  // two negative zeros, which no rank sends: memory that nothing has come to
constexpr u32 LOOKS = 1 << 12;        // between two looks at whether the others are gone

struct Peers {
  u64 at[MOST_RANKS];  // the memory of each rank, as this GPU sees it
};

// Words of the state: calls so far (next_call), blocks of this one that have read that, chunks of the three buffers'
// last calls.
enum { CALLS = 0, READ = 1, CHUNKS_OF = 2, WORDS = 5 };

// The count wraps at a multiple of two and three, the numbers of buffers that take turns. At the end of 32 bits, which
// a decode reaches in days, one of three would be used twice running.
static_assert(CALLS_AROUND % 6 == 0 && CALLS_AROUND < 0xffffffffll, "what is added to it fits");
__device__ __forceinline__ u32 next_call(u32 call) { return call + 1 == CALLS_AROUND ? 0 : call + 1; }

__device__ __forceinline__ void store_there(uint4* to, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ uint4 load_now(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ bool is_there(uint4 v) {
  return v.x != NOTHING && v.y != NOTHING && v.z != NOTHING && v.w != NOTHING;
}
__device__ __forceinline__ u32 never_nothing(u32 both) { return both == NOTHING ? 0u : both; }
__device__ __forceinline__ uint4 own_chunk(const uint4* from) {
  uint4 v = *from;
  return make_uint4(never_nothing(v.x), never_nothing(v.y), never_nothing(v.z), never_nothing(v.w));
}
__device__ __forceinline__ void add_pair(float* sum, u32 both) {
  sum[0] += first_of(both);
  sum[1] += second_of(both);
}
__device__ __forceinline__ void add_chunk(float* sum, uint4 v) {
  add_pair(sum, v.x);
  add_pair(sum + 2, v.y);
  add_pair(sum + 4, v.z);
  add_pair(sum + 6, v.w);
}
__device__ __forceinline__ uint4 pack_chunk(const float* v) {
  return make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
}
// Numbers that never come are left as they are: the reader of the sum learns otherwise that it failed.
__device__ __forceinline__ uint4 wait_for_chunk(const uint4* from, const volatile u32* are_gone) {
  uint4 v = load_now(from);
  for (u32 looks = 1; !is_there(v); looks++) {
    if (looks % LOOKS == 0 && *are_gone) break;
    v = load_now(from);
  }
  return v;
}
// A barrier of the threads that add, beside which a block may have others (send.cuh).
__device__ __forceinline__ void sync_workers() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }
// The state's facts of this call. For all threads of a block, once.
__device__ __forceinline__ const u32* read_state(const volatile u32* state) {
  __shared__ u32 seen[WORDS];
  if (threadIdx.x < WORDS) seen[threadIdx.x] = state[threadIdx.x];
  __syncthreads();
  return seen;
}
// The block that comes last counts the call, with its chunks. For a block that has read the state and sent what it
// sends: the count is on its way while the block waits for others. At the end the next kernel would wait for two trips
// to memory. The count is for later kernels alone, which wait for the end of this one.
__device__ __forceinline__ void count_call(u32* state, u32 call, int chunks) {
  if (threadIdx.x == 0 && atomicAdd(&state[READ], 1u) == gridDim.x - 1) {
    state[CHUNKS_OF + call % 3] = chunks;
    state[READ] = 0;
    state[CALLS] = next_call(call);
  }
}
