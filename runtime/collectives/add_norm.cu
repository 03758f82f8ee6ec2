// A sum over ranks whose parts are in this GPU's memory (copied.py), with the residual and the norm behind it: a block
// has whole rows, and waits for nothing. All ranks add in the order of ranks: they get equal bits.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
add_norm(const uint4* residual, const uint4* weight, uint4* summed, uint4* normed, float eps,
         const __grid_constant__ Peers parts, int num_ranks, int rows) {
  Norm norm = {residual, summed, normed, eps};
  norm.load_weight(weight);
  wait_for_prerequisites();
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    float sums[1][MINE][8] = {};
    uint4 rest[1][MINE];
    norm.ask<1>(rest, row, rows);
    for (int source = 0; source < num_ranks; source++)
#pragma unroll
      for (int i = 0; i < MINE; i++)
        if (chunk_of(i) >= 0)
          add_chunk(sums[0][i], ((const uint4*)parts.at[source])[(size_t)row * CHUNKS + chunk_of(i)]);
    norm.finish<1>(sums, rest, row, rows);
  }
}
