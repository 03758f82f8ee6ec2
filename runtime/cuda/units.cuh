// Products of units of 64 rows of x with rows of a weight, for kernels whose blocks take tiles of up to four units in
// turns (ops/gated_linear/gated.cu, ops/expert_tiles/tiles.cu). Two groups of four warps multiply; one warp of a third
// group loads weight and x by TMA into a ring of STAGES. The SHARE blocks of a cluster take the same x: each asks for
// its part, for all.
//
// Defined by the kernel: K, UNITS (four) and ROWS (of the weight, a multiple of 64) of a tile, SHARE, STAGES,
// NUM_THREADS and SHARED_BYTES of a block, and `multiply_add_all`, which adds products to ROWS / 2 sums of a thread.

constexpr int COLUMNS = 64, ROW_BYTES = COLUMNS * 2;  // of a stage: one swizzled row of 128 bytes
constexpr int UNIT_ROWS = 64, GROUP_UNITS = 2, GROUPS = 2, TILE_UNITS = GROUPS * GROUP_UNITS;
constexpr int CONSUMERS = 4 * GROUPS, THREADS = 32 * (4 + CONSUMERS);
constexpr int SUMS = ROWS / 2;                            // of a thread and a unit
constexpr int COPY_ROWS = 64, COPIES = ROWS / COPY_ROWS;  // of the weight
constexpr int UNIT_BYTES = UNIT_ROWS * ROW_BYTES, W_BYTES = ROWS * ROW_BYTES;
constexpr int STAGE_BYTES = W_BYTES + TILE_UNITS * UNIT_BYTES, STEPS = K / COLUMNS;
static_assert(THREADS == NUM_THREADS && TILE_UNITS == UNITS, "as it is launched");
static_assert(ROWS % COPY_ROWS == 0 && K % COLUMNS == 0, "whole copies");

struct Shared {
  u64 full[STAGES], empty[STAGES];
};
static_assert(1023 + STAGES * STAGE_BYTES + sizeof(Shared) <= SHARED_BYTES, "and what alignment costs");

// For all blocks of the cluster, at the same place.
__device__ __forceinline__ void load_x(u32 to, const TensorMap* map, int step, int row, u32 barrier) {
#if SHARE > 1
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(step * COLUMNS), "r"(row), "r"(barrier),
      "h"((unsigned short)((1 << SHARE) - 1)) : "memory");
#else
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(to), "l"(map), "r"(step * COLUMNS), "r"(row), "r"(barrier) : "memory");
#endif
}

// A place in the ring.
struct Place {
  int slot = 0, phase = 0;
  __device__ __forceinline__ void go_on() {
    if (++slot == STAGES) slot = 0, phase ^= 1;
  }
  __device__ __forceinline__ int before() const { return slot ? slot - 1 : STAGES - 1; }
};

// Makes the barriers of the ring: none of the cluster sends anything before.
__device__ __forceinline__ void make_ring(u32 full, u32 empty) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) make_barrier(full + 8 * i, 1), make_barrier(empty + 8 * i, CONSUMERS * SHARE);
    publish_barriers();
  }
  __syncthreads();
#if SHARE > 1
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}
// No block leaves before the others have sent all that they send.
__device__ __forceinline__ void leave_ring() {
#if SHARE > 1
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Adds to `sums` the products of a tile and M of its units, as its stages arrive. `x_begin`: where these units begin in
// a stage's x, in bytes.
template <int M>
__device__ __forceinline__ void multiply(float (&sums)[GROUP_UNITS][SUMS], u32 ring, u32 full, u32 empty_of_one,
                                         Place& place, int x_begin, int lane) {
  auto release = [&](int slot) {  // to all writers
    if (lane < SHARE) arrive_in_cluster(empty_of_one + 8 * slot);
  };
  for (int step = 0; step < STEPS; step++) {
    wait_for(full + 8 * place.slot, place.phase);
    const u32 weight = ring + place.slot * STAGE_BYTES, x = weight + W_BYTES + x_begin;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; k++)
#pragma unroll
      for (int m = 0; m < M; m++)
        multiply_add_all(sums[m], matrix(x + m * UNIT_BYTES + k * 32), matrix(weight + k * 32));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    // The stage before has been read when all but this one's products are there.
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (step) release(place.before());
    place.go_on();
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  release(place.before());
}
