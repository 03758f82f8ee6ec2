// A sum over ranks of many numbers (send.cuh).
constexpr int EACH = GROUP_CHUNKS / THREADS;  // chunks of a thread
static_assert(EACH * THREADS == GROUP_CHUNKS, "whole groups");

extern "C" __global__ void __launch_bounds__(THREADS + SENDERS)
send_sum(const uint4* input, uint4* output, const __grid_constant__ Peers peers, u32* state, const u32* are_gone,
         int rank, int num_ranks, int chunks, int most_chunks) {
  wait_for_prerequisites();
  const u32 call = read_state(state)[CALLS];
  count_call(state, call, 0);
  const Exchange exchange = {peers, rank, num_ranks, (size_t)most_chunks, call};
  if (threadIdx.x >= THREADS) {
    send_groups(exchange, input, chunks);
    return;
  }
  for (int group = blockIdx.x; group * GROUP_CHUNKS < chunks; group += gridDim.x) {
    const int first = group * GROUP_CHUNKS + threadIdx.x;
    uint4 own[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (first + i * THREADS < chunks) own[i] = input[first + i * THREADS];
    exchange.wait(group, are_gone);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int chunk = first + i * THREADS;
      if (chunk >= chunks) break;
      float sum[8] = {};
      for (int source = 0; source < num_ranks; source++)
        add_chunk(sum, source == rank ? own[i] : load_now(exchange.buffer_of(rank, source) + chunk));
      output[chunk] = pack_chunk(sum);
    }
  }
}
