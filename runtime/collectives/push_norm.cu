// push.cu's sum, with the residual and the norm that are behind it: a block has whole rows. It shares buffers and
// state with that kernel. With one rank it is residual and norm alone, behind a sum that was made otherwise.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
push_norm(const uint4* input, const uint4* residual, const uint4* weight, uint4* summed, uint4* normed, float eps,
          const __grid_constant__ Peers peers, u32* state, const u32* are_gone, int rank, int num_ranks, int rows,
          int most_chunks) {
  Norm norm = {residual, summed, normed, eps};
  norm.load_weight(weight);
  start_dependents();  // all blocks of this kernel run by then
  wait_for_prerequisites();
  uint4 first[MINE];  // of the block's first row: asked for beside the state
#pragma unroll
  for (int i = 0; i < MINE; i++)
    first[i] = chunk_of(i) < 0 ? make_uint4(0, 0, 0, 0) : own_chunk(input + blockIdx.x * CHUNKS + chunk_of(i));
  const u32* seen = num_ranks > 1 ? read_state(state) : nullptr;
  const u32 call = num_ranks > 1 ? seen[CALLS] : 0;
  const u32 now = call % 3, before = (call + 2) % 3;
  const size_t of_buffer = (size_t)num_ranks * most_chunks;
  uint4* here = (uint4*)peers.at[rank];
  if (num_ranks > 1) {
    for (int row = blockIdx.x; row < rows; row += gridDim.x)
#pragma unroll
      for (int i = 0; i < MINE; i++) {
        if (chunk_of(i) < 0) continue;
        const int chunk = row * CHUNKS + chunk_of(i);
        const uint4 own = row == blockIdx.x ? first[i] : own_chunk(input + chunk);
        for (int ahead = 1; ahead < num_ranks; ahead++) {
          const int peer = (rank + ahead) % num_ranks;
          store_there((uint4*)peers.at[peer] + now * of_buffer + (size_t)rank * most_chunks + chunk, own);
        }
      }
    count_call(state, call, rows * CHUNKS);
    const int stale = seen[CHUNKS_OF + before];
    for (int chunk = blockIdx.x * THREADS + threadIdx.x; chunk < stale; chunk += gridDim.x * THREADS)
      for (int source = 0; source < num_ranks; source++)
        if (source != rank)
          here[before * of_buffer + (size_t)source * most_chunks + chunk] =
              make_uint4(NOTHING, NOTHING, NOTHING, NOTHING);
  }
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    float sums[1][MINE][8] = {};
    uint4 rest[1][MINE];
    norm.ask<1>(rest, row, rows);
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      if (chunk_of(i) < 0) continue;
      const size_t chunk = (size_t)row * CHUNKS + chunk_of(i);
      for (int source = 0; source < num_ranks; source++) {
        const uint4* from = here + now * of_buffer + (size_t)source * most_chunks + chunk;
        add_chunk(sums[0][i], source == rank ? own_chunk(input + chunk) : wait_for_chunk(from, are_gone));
      }
    }
    norm.finish<1>(sums, rest, row, rows);
  }
}
