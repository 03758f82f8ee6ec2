// Ranks' parts of rows, side by side: each rank puts its own into memory that the others see, says so, and loads theirs, as
// pull_norm.cu does, with which it shares buffers, words and state. A block has groups of chunks of a part, in the order in
// which they lie; while it waits for one, it has put the next.
constexpr int GROUP = OF_THREAD * THREADS;  // chunks

extern "C" __global__ void __launch_bounds__(THREADS, 2)
pull_gather(const uint4* input, uint4* output, const __grid_constant__ Peers peers, u32* state, const u32* are_gone, int rank,
            int num_ranks, int chunks, int row_chunks, int most_chunks) {
  wait_for_prerequisites();
  const u32 call = read_state(state)[CALLS];
  const size_t buffer = (call % 2) * (size_t)most_chunks;
  const int groups = (chunks + GROUP - 1) / GROUP;
  // Where chunk `chunk` of a rank's part stands in the output.
  auto place = [&](int source, int chunk) {
    return ((size_t)(chunk / row_chunks) * num_ranks + source) * row_chunks + chunk % row_chunks;
  };
  auto put = [&](int group) {
    uint4 v[OF_THREAD];
#pragma unroll
    for (int i = 0; i < OF_THREAD; i++) {
      const int chunk = group * GROUP + i * THREADS + threadIdx.x;
      if (chunk < chunks) v[i] = input[chunk];
    }
#pragma unroll
    for (int i = 0; i < OF_THREAD; i++) {
      const int chunk = group * GROUP + i * THREADS + threadIdx.x;
      if (chunk < chunks) ((uint4*)peers.at[rank])[buffer + chunk] = v[i], output[place(rank, chunk)] = v[i];
    }
    say_there(peers, rank, num_ranks, group, most_chunks, call);
  };

  if (blockIdx.x < groups) put(blockIdx.x);
  count_call(state, call, 0);
  for (int group = blockIdx.x; group < groups; group += gridDim.x) {
    if (group + gridDim.x < groups) put(group + gridDim.x);
    wait_for_group(peers, rank, num_ranks, group, most_chunks, call, are_gone);
    for (int ahead = 1; ahead < num_ranks; ahead++) {
      const int source = (rank + ahead) % num_ranks;
      uint4 v[OF_THREAD];
#pragma unroll
      for (int i = 0; i < OF_THREAD; i++) {
        const int chunk = group * GROUP + i * THREADS + threadIdx.x;
        if (chunk < chunks) v[i] = load_now((const uint4*)peers.at[source] + buffer + chunk);
      }
#pragma unroll
      for (int i = 0; i < OF_THREAD; i++) {
        const int chunk = group * GROUP + i * THREADS + threadIdx.x;
        if (chunk < chunks) output[place(source, chunk)] = v[i];
      }
    }
  }
}
