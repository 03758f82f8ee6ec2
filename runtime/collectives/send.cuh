// The common part of sums of many numbers. The last SENDERS threads of a block store groups of the rank's chunks into
// memory of the others; its first THREADS wait for theirs and add. So links are never idle while a block adds.
//
// A word behind the buffers says that all of a group is there: the number of the call, counted from 1, so nothing is
// emptied. Two buffers take turns. A rank writes into one again two calls later. Before that it has seen words of the
// next call from all others, so they have ended the call that read it. So a word that is waited for becomes this call's
// or the next one's. Others are old, however old: the word of a group that smaller sums do not have stays as it is for
// days.
constexpr int HELD = (GROUP_CHUNKS + SENDERS - 1) / SENDERS;  // chunks of a group that a thread sends
static_assert(SENDERS % 32 == 0, "whole warps");

struct Exchange {
  const Peers& peers;
  int rank, num_ranks;
  size_t most_chunks;  // of a buffer
  u32 call;

  // The place of `source`'s numbers at the owner.
  __device__ __forceinline__ int place_of(int owner, int source) const { return source - (source > owner); }
  __device__ __forceinline__ uint4* buffer_of(int owner, int source) const {
    return (uint4*)peers.at[owner] + (call % 2 * (num_ranks - 1) + place_of(owner, source)) * most_chunks;
  }
  __device__ __forceinline__ u32* word_of(int owner, int source, int group) const {
    u32* words = (u32*)((uint4*)peers.at[owner] + 2 * (num_ranks - 1) * most_chunks);
    return words + place_of(owner, source) * MOST_GROUPS + group;
  }

  // Tells the others that they have the group. For one thread, behind a barrier of those that have sent it.
  __device__ __forceinline__ void say(int group) const {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    for (int ahead = 1; ahead < num_ranks; ahead++)
      asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word_of((rank + ahead) % num_ranks, rank, group)),
                   "r"(call + 1)
                   : "memory");
  }
  // For all threads that add. A wait ends when the others are gone, as in wait_for_chunk.
  __device__ __forceinline__ void wait(int group, const volatile u32* are_gone) const {
    if (threadIdx.x < num_ranks && threadIdx.x != rank) {
      const u32* word = word_of(rank, threadIdx.x, group);
      const u32 following = next_call(call) + 1;
      u32 said, looks = 1;
      do {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(said) : "l"(word) : "memory");
        if (looks++ % LOOKS == 0 && *are_gone) break;
      } while (said != call + 1 && said != following);
    }
    sync_workers();
  }
};

// Sends every gridDim.x-th group of the input to all others. For all threads that send.
__device__ __forceinline__ void send_groups(const Exchange& exchange, const uint4* input, int chunks) {
  const int thread = threadIdx.x - THREADS, step = gridDim.x * GROUP_CHUNKS;
  uint4 held[HELD];
  auto is_there = [&](int first, int i) {
    return i * SENDERS + thread < GROUP_CHUNKS && first + i * SENDERS + thread < chunks;
  };
  auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < HELD; i++)
      if (is_there(first, i)) held[i] = input[first + i * SENDERS + thread];
  };
  load(blockIdx.x * GROUP_CHUNKS);
  for (int first = blockIdx.x * GROUP_CHUNKS; first < chunks; first += step) {
    for (int ahead = 1; ahead < exchange.num_ranks; ahead++) {
      uint4* there = exchange.buffer_of((exchange.rank + ahead) % exchange.num_ranks, exchange.rank);
#pragma unroll
      for (int i = 0; i < HELD; i++)
        if (is_there(first, i)) store_there(there + first + i * SENDERS + thread, held[i]);
    }
    load(first + step);
    asm volatile("bar.sync 2, %0;" ::"n"(SENDERS) : "memory");
    if (thread == 0) exchange.say(first / GROUP_CHUNKS);
  }
}
