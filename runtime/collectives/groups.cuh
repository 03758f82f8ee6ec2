// The common part of the kernels that pull: how a rank says that a group of its numbers is in its memory, and how others
// wait for that. What is said of a group is the number of the call, counted from 1, so nothing is emptied.

// The word by which `source` says to a rank that a group is there; behind the buffers.
__device__ __forceinline__ u32* word_of(const Peers& peers, int rank, int source, int group, size_t most_chunks) {
  return (u32*)((uint4*)peers.at[rank] + 2 * most_chunks) + (size_t)source * MOST_GROUPS + group;
}

// For all threads of a block, when they have put the group.
__device__ __forceinline__ void say_there(const Peers& peers, int rank, int num_ranks, int group, size_t most_chunks, u32 call) {
  __syncthreads();
  if (threadIdx.x < num_ranks && threadIdx.x != rank) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word_of(peers, threadIdx.x, rank, group, most_chunks)),
                 "r"(call + 1)
                 : "memory");
  }
}
// For all threads of a block.
__device__ __forceinline__ void wait_for_group(const Peers& peers, int rank, int num_ranks, int group, size_t most_chunks,
                                               u32 call, const u32* are_gone) {
  if (threadIdx.x < num_ranks && threadIdx.x != rank) {
    const u32* word = word_of(peers, rank, threadIdx.x, group, most_chunks);
    u32 said, looks = 1;
    do {
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(said) : "l"(word) : "memory");
      if (looks++ % LOOKS == 0 && *(const volatile u32*)are_gone) break;
    } while ((int)(said - (call + 1)) < 0);
  }
  __syncthreads();
}
