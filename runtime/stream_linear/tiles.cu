// A linear of up to 64 tokens on Hopper whose weight all multiprocessors together hold, or that has very many rows:
// out = x . weight^T, with the norm before it and what follows it.
//
// Such a linear is a read of its weight. So a block asks for all of it that its shared memory holds (by TMA, a ring of
// STAGES tiles) before the kernel that makes x has ended, and every multiprocessor gets the same share: SPLIT blocks of
// a cluster divide the inputs of ROWS outputs among them, and add up over distributed shared memory, each for its own
// tokens (t % SPLIT).
//
// One warp asks for tiles; the others multiply. With up to 16 tokens they do so by mma.sync, and divide the inputs of a
// tile among them (WARPS_K): all is latency. With more, by wgmma, and warp groups take turns at the tiles.
//
// Defined by tiles.py: N outputs (of a gated one: gate and up rows), K, ROWS, SPLIT, TOKENS (a multiple of 8, up to
// 64), STAGES, NORM_BLOCKS (sums of squares a token to read; 0: no norm), GATED, RESIDUAL, NORM_NEXT, WARP_GROUPS (0:
// mma.sync) and WARPS_N x WARPS_K, and, for wgmma, `multiply_add_all`.

constexpr int COLUMNS = 64, ROW_BYTES = COLUMNS * 2;  // of a tile: one swizzled row of 128 bytes
constexpr int WARPS = WARP_GROUPS ? 4 * WARP_GROUPS : WARPS_N * WARPS_K;
constexpr int PARTS = WARP_GROUPS ? WARP_GROUPS : WARPS_K;  // groups of warps whose sums are added up in a block
constexpr int M_TILES = WARP_GROUPS ? ROWS / 64 : ROWS / 16 / WARPS_N, TOKEN_TILES = TOKENS / 8;
constexpr int OUT_ROWS = GATED ? ROWS / 2 : ROWS, OUTPUTS = GATED ? N / 2 : N;
constexpr int MY_TOKENS = (TOKENS + SPLIT * WARPS - 1) / (SPLIT * WARPS);  // of a warp, when it finishes outputs
constexpr int MY_PAIRS = (OUT_ROWS + 63) / 64;                              // of neighbouring outputs, of a lane
constexpr int TILES = K / SPLIT / COLUMNS, NORM_ROWS = 32;
constexpr int W_BYTES = ROWS * ROW_BYTES, X_BYTES = TOKENS * ROW_BYTES;
constexpr int LD = ROWS + 4;  // floats a token of the sums: no bank conflicts

__device__ __forceinline__ void load_tile(u32 to, const TensorMap* map, int column, int row, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy) : "memory");
}
__device__ __forceinline__ float2 load_peer(u32 address, u32 rank) {
  float2 v;
  const u32 there = SPLIT > 1 ? address_of_peer(address, rank) : address;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(there));
  return v;
}
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory"); }

// What a warp multiplies, and which rows its sums are of -------------------------------------------------------------

#if WARP_GROUPS
// Rows of 128 bytes, swizzled, in groups of eight (PTX ISA, "Matrix Descriptor Format").
__device__ __forceinline__ u64 matrix(u32 address) {
  return (u64)((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
__device__ __forceinline__ int first_row(int warp, int m) { return m * 64 + (warp & 3) * 16; }
__device__ __forceinline__ int part_of(int warp) { return warp >> 2; }
__device__ __forceinline__ bool takes(int warp, int tile) { return tile % WARP_GROUPS == part_of(warp); }

__device__ __forceinline__ void multiply(float (*sums)[TOKEN_TILES * 4], u32 weights, u32 xs, int, int) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int k = 0; k < COLUMNS / 16; k++)
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
      multiply_add_all(sums[m], matrix(weights + m * 64 * ROW_BYTES + k * 32), matrix(xs + k * 32));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
#else
__device__ __forceinline__ int first_row(int warp, int m) { return (warp % WARPS_N * M_TILES + m) * 16; }
__device__ __forceinline__ int part_of(int warp) { return warp / WARPS_N; }
__device__ __forceinline__ bool takes(int, int) { return true; }

// Chunk `chunk` (16 bytes) of row `row` of a swizzled tile.
__device__ __forceinline__ u32 chunk_address(u32 tile, int row, int chunk) {
  return tile + swizzled(row, chunk);
}
__device__ __forceinline__ void multiply(float (*sums)[TOKEN_TILES * 4], u32 weights, u32 xs, int warp, int lane) {
#pragma unroll
  for (int step = 0; step < COLUMNS / 16 / WARPS_K; step++) {
    const int chunk = (step * WARPS_K + part_of(warp)) * 2;
    u32 x[(TOKEN_TILES + 1) / 2][4];  // two tiles of tokens, each as two halves of the inputs
#pragma unroll
    for (int j = 0; j < (TOKEN_TILES + 1) / 2; j++) {
      const int row = TOKEN_TILES == 1 ? lane & 7 : j * 16 + (lane & 7) + (lane >> 4) * 8;
      load_matrices(x[j], chunk_address(xs, row, chunk + ((lane >> 3) & 1)));
    }
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
      u32 w[4];
      load_matrices(w, chunk_address(weights, first_row(warp, m) + (lane & 15), chunk + (lane >> 4)));
#pragma unroll
      for (int j = 0; j < TOKEN_TILES; j++)
        multiply_add(sums[m] + j * 4, w[0], w[1], w[2], w[3], x[j / 2][j % 2 * 2], x[j / 2][j % 2 * 2 + 1]);
    }
  }
}
#endif

// The warp that asks for tiles ---------------------------------------------------------------------------------------

__device__ void send_tiles(const TensorMap* weight, const TensorMap* x, u32 ring, u32 full, u32 empty, int rank, int rows) {
  const u64 once = read_once();
  u64 again;  // x is read by every block
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(again));
  const int first_column = rank * (K / SPLIT);
  const u32 xs = ring + STAGES * W_BYTES;
  auto send_weights = [&](int i) {
    const u32 barrier = full + 8 * (i % STAGES), to = ring + i % STAGES * W_BYTES;
    const int column = first_column + i * COLUMNS;
    expect_bytes(barrier, W_BYTES + X_BYTES);
    load_tile(to, weight, column, rows, barrier, once);
    if (GATED) load_tile(to + OUT_ROWS * ROW_BYTES, weight, column, OUTPUTS + rows, barrier, once);
  };
  auto send_x = [&](int i) {
    load_tile(xs + i % STAGES * X_BYTES, x, first_column + i * COLUMNS, 0, full + 8 * (i % STAGES), again);
  };
  constexpr int ahead = STAGES < TILES ? STAGES : TILES;
  for (int i = 0; i < ahead; i++) send_weights(i);
  wait_for_prerequisites();
  start_dependents();
  for (int i = 0; i < ahead; i++) send_x(i);
  for (int i = ahead; i < TILES; i++) {
    wait_for(empty + 8 * (i % STAGES), (i / STAGES & 1) ^ 1);
    send_weights(i);
    send_x(i);
  }
}

// A warp's outputs ---------------------------------------------------------------------------------------------------

// Those of token t, from the blocks' sums: the norm's factor, the activation, the residual, what the next norm wants.
__device__ __forceinline__ void finish_token(int t, int tile, int lane, u32 buffer, float factor, const u32* residual,
                                             const u32* norm_weight, u32* out, u32* scaled, float* out_squares) {
#pragma unroll
  for (int j = 0; j < MY_PAIRS; j++) {
    const int r = 2 * lane + 64 * j, row = tile * OUT_ROWS + r, at = (t * OUTPUTS + row) / 2;
    float squares = 0.f;
    if (r < OUT_ROWS) {
      float2 sum = {0.f, 0.f}, up = {0.f, 0.f};
#pragma unroll
      for (int peer = 0; peer < SPLIT; peer++) {
        const float2 part = load_peer(buffer + 4 * (t * LD + r), peer);
        sum.x += part.x, sum.y += part.y;
        if (GATED) {
          const float2 up_part = load_peer(buffer + 4 * (t * LD + OUT_ROWS + r), peer);
          up.x += up_part.x, up.y += up_part.y;
        }
      }
      u32 both = pack(sum.x * factor, sum.y * factor);
      if (GATED) both = silu_times(both, pack(up.x * factor, up.y * factor));
      if (RESIDUAL) both = add(residual[j], both);
      out[at] = both;
      if (NORM_NEXT) {
        scaled[at] = times(both, norm_weight[row / 2]);
        squares = sum_of_squares(both);
      }
    }
    if (NORM_NEXT) {  // of NORM_ROWS outputs, which 16 lanes hold
      squares = sum_of_lanes(squares, 16);
      if (lane % 16 == 0 && r < OUT_ROWS) out_squares[t * (OUTPUTS / NORM_ROWS) + row / NORM_ROWS] = squares;
    }
  }
}

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
__launch_bounds__(32 * WARPS + 32, 1) stream_linear(
    const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, const float* squares, const u32* residual,
    const u32* norm_weight, u32* out, u32* scaled, float* out_squares, float eps, int num_tokens) {
  extern __shared__ __align__(1024) char memory[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const u32 ring = (shared_address(memory) + 1023) & ~1023u;
  const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % SPLIT, tile = blockIdx.x / SPLIT;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * STAGES; i++) make_barrier(full + 8 * i, i < STAGES ? 1 : WARP_GROUPS ? 4 : WARPS);
    publish_barriers();
  }
  __syncthreads();
  float factor[MY_TOKENS];
  u32 residuals[MY_TOKENS][MY_PAIRS];
  if (warp == WARPS) {
    if (lane == 0) send_tiles(&weight, &x, ring, full, empty, rank, tile * OUT_ROWS);
    __syncwarp();
  } else {
    wait_for_prerequisites();
    start_dependents();
    // Asked for here and used at the end: by then they are there.
#pragma unroll
    for (int i = 0; i < MY_TOKENS; i++) {
      const int t = rank + SPLIT * (warp + WARPS * i);
      factor[i] = 0.f;
#pragma unroll
      for (int j = lane; j < NORM_BLOCKS; j += 32)
        if (t < num_tokens) factor[i] += squares[t * NORM_BLOCKS + j];
#pragma unroll
      for (int j = 0; j < MY_PAIRS; j++) {
        const int r = 2 * lane + 64 * j;
        const bool is_there = RESIDUAL && t < num_tokens && r < OUT_ROWS;
        residuals[i][j] = is_there ? residual[(t * OUTPUTS + tile * OUT_ROWS + r) / 2] : 0;
      }
    }
    float sums[M_TILES][TOKEN_TILES * 4];
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
      for (int j = 0; j < TOKEN_TILES * 4; j++) sums[m][j] = 0.f;
    for (int i = 0; i < TILES; i++) {
      if (!takes(warp, i)) continue;
      const int slot = i % STAGES;
      wait_for(full + 8 * slot, i / STAGES & 1);
      multiply(sums, ring + slot * W_BYTES, ring + STAGES * W_BYTES + slot * X_BYTES, warp, lane);
      __syncwarp();
      if (lane == 0) arrive(empty + 8 * slot);
    }
    // The groups' sums, one after another, where the ring was.
    float* buffer = (float*)(memory + (ring - shared_address(memory)));
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      meet();
      if (part_of(warp) == part)
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
          for (int j = 0; j < TOKEN_TILES * 4; j++) {
            const int t = j / 4 * 8 + lane % 4 * 2 + j % 2, row = first_row(warp, m) + lane / 4 + j / 2 % 2 * 8;
            buffer[t * LD + row] = part ? buffer[t * LD + row] + sums[m][j] : sums[m][j];
          }
    }
#pragma unroll
    for (int i = 0; i < MY_TOKENS; i++) {
      factor[i] = NORM_BLOCKS ? rsqrtf(sum_of_lanes(factor[i], 32) / K + eps) : 1.f;
    }
    if (SPLIT == 1) meet();
  }
#if SPLIT > 1
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  if (warp < WARPS)
#pragma unroll
    for (int i = 0; i < MY_TOKENS; i++) {
      const int t = rank + SPLIT * (warp + WARPS * i);
      if (t < num_tokens)
        finish_token(t, tile, lane, ring, factor[i], residuals[i], norm_weight, out, scaled, out_squares);
    }
#if SPLIT > 1  // a block's memory stays until the others have read it
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
