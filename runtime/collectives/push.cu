// A sum over ranks, each of which stores its numbers straight into memory of all others and looks for theirs in its own.
//
// Memory that nothing has come to holds NOTHING, two negative zeros, which no rank sends: so there are no flags, and what
// a rank waits for is the numbers themselves. Three buffers take turns. A call empties the buffer of the call before it:
// the others write there again two calls later, for which they need what this rank sends in the next one. The count of
// calls is in the GPU's memory, so a captured call is another one at each replay.
//
// All ranks add in the order of ranks, in float32: they get the same bits. Chunks are of 16 bytes, eight bfloat16.
constexpr u32 NOTHING = 0x80008000u;
constexpr u32 LOOKS = 1 << 12;  // between two looks at whether the others are gone

struct Peers {
  u64 at[MOST_RANKS];  // the buffers of each rank, as this GPU sees them
};

// Words of the state: calls so far, blocks that have ended this one, chunks of the three buffers' last calls.
enum { CALLS = 0, ENDED = 1, CHUNKS = 2 };

__device__ __forceinline__ void store_there(uint4* to, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ uint4 load_here(const uint4* from) {
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
// Numbers that never come are left as they are: whoever reads the sum is told otherwise that there is none.
__device__ __forceinline__ uint4 wait_for_chunk(const uint4* from, const volatile u32* are_gone) {
  uint4 v = load_here(from);
  for (u32 looks = 1; !is_there(v); looks++) {
    if (looks % LOOKS == 0 && *are_gone) break;
    v = load_here(from);
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(THREADS)
push_sum(const uint4* input, uint4* output, const __grid_constant__ Peers peers, u32* state, const u32* are_gone,
         int rank, int num_ranks, int chunks, int most_chunks) {
  wait_for_prerequisites();
  const u32 call = *(volatile u32*)&state[CALLS];
  const u32 now = call % 3, before = (call + 2) % 3;
  const size_t of_buffer = (size_t)num_ranks * most_chunks;
  const int first = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
  for (int chunk = first; chunk < chunks; chunk += step) {
    const uint4 own = own_chunk(input + chunk);
    for (int ahead = 1; ahead < num_ranks; ahead++) {
      const int peer = (rank + ahead) % num_ranks;
      store_there((uint4*)peers.at[peer] + now * of_buffer + (size_t)rank * most_chunks + chunk, own);
    }
  }
  uint4* here = (uint4*)peers.at[rank];
  const int stale = *(volatile u32*)&state[CHUNKS + before];
  for (int chunk = first; chunk < stale; chunk += step)
    for (int source = 0; source < num_ranks; source++)
      if (source != rank)
        here[before * of_buffer + (size_t)source * most_chunks + chunk] = make_uint4(NOTHING, NOTHING, NOTHING, NOTHING);
  for (int chunk = first; chunk < chunks; chunk += step) {
    float sum[8] = {};
    for (int source = 0; source < num_ranks; source++) {
      const uint4* from = here + now * of_buffer + (size_t)source * most_chunks + chunk;
      const uint4 v = source == rank ? own_chunk(input + chunk) : wait_for_chunk(from, are_gone);
      add_pair(sum, v.x);
      add_pair(sum + 2, v.y);
      add_pair(sum + 4, v.z);
      add_pair(sum + 6, v.w);
    }
    output[chunk] = make_uint4(pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7]));
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(&state[ENDED], 1u) == gridDim.x - 1) {
      state[CHUNKS + now] = chunks;
      state[ENDED] = 0;
      state[CALLS] = call + 1;
      __threadfence();
    }
  }
}
