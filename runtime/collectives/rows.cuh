// Rows of COLUMNS numbers: the residual added to a row's sum over ranks, and the RMS norm of that, by one block.
constexpr int CHUNKS = COLUMNS / 8, MINE = (CHUNKS + THREADS - 1) / THREADS, WARPS = THREADS / 32;
static_assert(COLUMNS % 8 == 0 && THREADS % 32 == 0, "whole chunks and warps");

// The thread's chunk `index` of a row, or -1 where the row has no such.
__device__ __forceinline__ int chunk_of(int index) {
  const int chunk = index * THREADS + threadIdx.x;
  return chunk < CHUNKS ? chunk : -1;
}
__device__ __forceinline__ float square_of(uint4 v) {
  return sum_of_squares(v.x) + sum_of_squares(v.y) + sum_of_squares(v.z) + sum_of_squares(v.w);
}
__device__ __forceinline__ u32 scaled_pair(u32 both, float factor, u32 weight) {
  return times(pack(first_of(both) * factor, second_of(both) * factor), weight);
}

// Arguments that all rows of a call share.
struct Norm {
  const uint4* residual;
  uint4 *summed, *normed;
  float eps;
  uint4 weight[MINE];

  __device__ __forceinline__ void load_weight(const uint4* from) {
#pragma unroll
    for (int i = 0; i < MINE; i++) weight[i] = chunk_of(i) < 0 ? make_uint4(0, 0, 0, 0) : from[chunk_of(i)];
  }

  // Asks for the residual of R rows from `row` on, ahead of all that is waited for.
  template <int R>
  __device__ __forceinline__ void ask(uint4 (&rest)[R][MINE], int row, int rows) const {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int i = 0; i < MINE; i++)
        if (chunk_of(i) >= 0 && row + r < rows) rest[r][i] = residual[(size_t)(row + r) * CHUNKS + chunk_of(i)];
  }

  // Adds the residual to the sums, rounds once, stores them and their norms.
  template <int R>
  __device__ __forceinline__ void finish(float (&sums)[R][MINE][8], const uint4 (&rest)[R][MINE], int row,
                                         int rows) const {
    __shared__ float parts[WARPS][R];
    uint4 y[R][MINE];
#pragma unroll
    for (int r = 0; r < R; r++) {
      float squares = 0;
#pragma unroll
      for (int i = 0; i < MINE; i++) {
        y[r][i] = make_uint4(0, 0, 0, 0);
        if (chunk_of(i) >= 0 && row + r < rows) {
          const size_t place = (size_t)(row + r) * CHUNKS + chunk_of(i);
          add_chunk(sums[r][i], rest[r][i]);
          y[r][i] = pack_chunk(sums[r][i]);
          summed[place] = y[r][i];
          squares += square_of(y[r][i]);
        }
      }
      squares = sum_of_lanes(squares, 32);
      if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32][r] = squares;
    }
    sync_workers();
#pragma unroll
    for (int r = 0; r < R; r++) {
      float squares = threadIdx.x % 32 < WARPS ? parts[threadIdx.x % 32][r] : 0.f;
      const float factor = rsqrtf(sum_of_lanes(squares, 32) / COLUMNS + eps);
#pragma unroll
      for (int i = 0; i < MINE; i++)
        if (chunk_of(i) >= 0 && row + r < rows) {
          const uint4 v = y[r][i], w = weight[i];
          normed[(size_t)(row + r) * CHUNKS + chunk_of(i)] =
              make_uint4(scaled_pair(v.x, factor, w.x), scaled_pair(v.y, factor, w.y), scaled_pair(v.z, factor, w.z),
                         scaled_pair(v.w, factor, w.w));
        }
    }
    sync_workers();  // the parts are written again for the next rows
  }
};
