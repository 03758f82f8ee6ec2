// A sum over ranks with the residual and the norm that stand behind it, for many rows: each rank puts its own into memory
// that the others see, says so, and loads theirs. A block has groups of rows; while it waits for one, it has put the next.
//
// Two buffers take turns. A rank writes into one again when it has seen that all others are in the call between: they have
// ended the one that read it. What is said of a group is the number of the call, counted from 1, so nothing is emptied.
constexpr int GROUP = 2;  // rows

// The word by which `source` says to a rank that a group is there; behind the buffers.
__device__ __forceinline__ u32* word_of(const Peers& peers, int rank, int source, int group, size_t most_chunks) {
  return (u32*)((uint4*)peers.at[rank] + 2 * most_chunks) + (size_t)source * MOST_GROUPS + group;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
pull_norm(const uint4* input, const uint4* residual, const uint4* weight, uint4* summed, uint4* normed, float eps,
          const __grid_constant__ Peers peers, u32* state, const u32* are_gone, int rank, int num_ranks, int rows,
          int most_chunks) {
  Norm norm = {residual, summed, normed, eps};
  norm.load_weight(weight);
  wait_for_prerequisites();
  const u32 call = read_state(state)[CALLS];
  const size_t buffer = (call % 2) * (size_t)most_chunks;
  const int groups = (rows + GROUP - 1) / GROUP;

  auto put = [&](int group) {
#pragma unroll
    for (int r = 0; r < GROUP; r++)
#pragma unroll
      for (int i = 0; i < MINE; i++) {
        const int row = group * GROUP + r;
        if (chunk_of(i) < 0 || row >= rows) continue;
        const size_t chunk = (size_t)row * CHUNKS + chunk_of(i);
        ((uint4*)peers.at[rank])[buffer + chunk] = input[chunk];
      }
    __syncthreads();
    if (threadIdx.x < num_ranks && threadIdx.x != rank) {
      asm volatile("fence.acq_rel.sys;" ::: "memory");
      asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word_of(peers, threadIdx.x, rank, group, most_chunks)),
                   "r"(call + 1)
                   : "memory");
    }
  };
  auto wait = [&](int group) {
    if (threadIdx.x < num_ranks && threadIdx.x != rank) {
      const u32* word = word_of(peers, rank, threadIdx.x, group, most_chunks);
      u32 said, looks = 1;
      do {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(said) : "l"(word) : "memory");
        if (looks++ % LOOKS == 0 && *(const volatile u32*)are_gone) break;
      } while ((int)(said - (call + 1)) < 0);
    }
    __syncthreads();
  };

  if (blockIdx.x < groups) put(blockIdx.x);
  count_call(state, call, 0);
  for (int group = blockIdx.x; group < groups; group += gridDim.x) {
    if (group + gridDim.x < groups) put(group + gridDim.x);
    wait(group);
    float sums[GROUP][MINE][8] = {};
    uint4 rest[GROUP][MINE];
    norm.ask<GROUP>(rest, group * GROUP, rows);
    for (int source = 0; source < num_ranks; source++)
#pragma unroll
      for (int r = 0; r < GROUP; r++)
#pragma unroll
        for (int i = 0; i < MINE; i++) {
          const int row = group * GROUP + r;
          if (chunk_of(i) < 0 || row >= rows) continue;
          const size_t chunk = (size_t)row * CHUNKS + chunk_of(i);
          add_chunk(sums[r][i], source == rank ? input[chunk] : load_now((const uint4*)peers.at[source] + buffer + chunk));
        }
    norm.finish<GROUP>(sums, rest, group * GROUP, rows);
  }
}
