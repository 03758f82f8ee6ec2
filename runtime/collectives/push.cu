// A sum over ranks: each stores its numbers straight into memory of all others, and looks for theirs in its own.
//
// Memory that nothing has come to holds NOTHING: so there are no flags, and what a rank waits for is the numbers
// themselves. Three buffers take turns. A call empties the previous call's buffer. The others write there again two
// calls later, and need this rank's numbers of the next call for that. The count of calls is in the GPU's memory, so a
// captured call is another one at each replay.
extern "C" __global__ void __launch_bounds__(THREADS)
push_sum(const uint4* input, uint4* output, const __grid_constant__ Peers peers, u32* state, const u32* are_gone,
         int rank, int num_ranks, int chunks, int most_chunks) {
  start_dependents();  // all blocks of this kernel run by then
  wait_for_prerequisites();
  const int first = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
  // Loaded while the state is.
  const uint4 its_own = first < chunks ? own_chunk(input + first) : make_uint4(0, 0, 0, 0);
  const u32* seen = read_state(state);
  const u32 call = seen[CALLS];
  const u32 now = call % 3, before = (call + 2) % 3;
  const size_t of_buffer = (size_t)num_ranks * most_chunks;
  for (int chunk = first; chunk < chunks; chunk += step) {
    const uint4 own = chunk == first ? its_own : own_chunk(input + chunk);
    for (int ahead = 1; ahead < num_ranks; ahead++) {
      const int peer = (rank + ahead) % num_ranks;
      store_there((uint4*)peers.at[peer] + now * of_buffer + (size_t)rank * most_chunks + chunk, own);
    }
  }
  count_call(state, call, chunks);
  uint4* here = (uint4*)peers.at[rank];
  const int stale = seen[CHUNKS_OF + before];
  for (int chunk = first; chunk < stale; chunk += step)
    for (int source = 0; source < num_ranks; source++)
      if (source != rank)
        here[before * of_buffer + (size_t)source * most_chunks + chunk] =
            make_uint4(NOTHING, NOTHING, NOTHING, NOTHING);
  for (int chunk = first; chunk < chunks; chunk += step) {
    float sum[8] = {};
    for (int source = 0; source < num_ranks; source++) {
      const uint4* from = here + now * of_buffer + (size_t)source * most_chunks + chunk;
      add_chunk(sum, source == rank ? own_chunk(input + chunk) : wait_for_chunk(from, are_gone));
    }
    output[chunk] = pack_chunk(sum);
  }
}
