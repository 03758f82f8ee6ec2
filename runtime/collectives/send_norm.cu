// A sum over ranks with the residual and the norm that are behind it, for many rows (send.cuh): a group is of whole
// rows.
constexpr int GROUP = GROUP_CHUNKS / CHUNKS;  // rows
static_assert(GROUP * CHUNKS == GROUP_CHUNKS, "whole rows");

extern "C" __global__ void __launch_bounds__(THREADS + SENDERS)
send_norm(const uint4* input, const uint4* residual, const uint4* weight, uint4* summed, uint4* normed, float eps,
          const __grid_constant__ Peers peers, u32* state, const u32* are_gone, int rank, int num_ranks, int rows,
          int most_chunks) {
  Norm norm = {residual, summed, normed, eps};
  const bool sends = threadIdx.x >= THREADS;
  if (!sends) norm.load_weight(weight);
  wait_for_prerequisites();
  const u32 call = read_state(state)[CALLS];
  count_call(state, call, 0);
  const Exchange exchange = {peers, rank, num_ranks, (size_t)most_chunks, call};
  if (sends) {
    send_groups(exchange, input, rows * CHUNKS);
    return;
  }
  for (int group = blockIdx.x; group * GROUP < rows; group += gridDim.x) {
    uint4 own[GROUP][MINE], rest[GROUP][MINE];
    norm.ask<GROUP>(rest, group * GROUP, rows);
#pragma unroll
    for (int r = 0; r < GROUP; r++)
#pragma unroll
      for (int i = 0; i < MINE; i++)
        if (chunk_of(i) >= 0 && group * GROUP + r < rows)
          own[r][i] = input[(size_t)(group * GROUP + r) * CHUNKS + chunk_of(i)];
    exchange.wait(group, are_gone);
    float sums[GROUP][MINE][8] = {};
    for (int source = 0; source < num_ranks; source++) {
      const uint4* from = exchange.buffer_of(rank, source);
#pragma unroll
      for (int r = 0; r < GROUP; r++)
#pragma unroll
        for (int i = 0; i < MINE; i++) {
          const int row = group * GROUP + r;
          if (chunk_of(i) < 0 || row >= rows) continue;
          add_chunk(sums[r][i], source == rank ? own[r][i] : load_now(from + (size_t)row * CHUNKS + chunk_of(i)));
        }
    }
    norm.finish<GROUP>(sums, rest, group * GROUP, rows);
  }
}
