// Rows of experts times their weights on Hopper, many rows an expert: out = x . weight^T, or of a gated weight silu(x .
// gate^T) * (x . up^T). Bound by the tensor cores.
//
// The work comes in blocks of up to four units of 64 rows of one expert (runtime/ops/experts/order.py); how many, only
// the device knows. A tile is a block's rows times ROWS of the weight; each group of warps multiplies half of the
// block's units. The blocks of a cluster work on neighbouring rows of the weight for the same x (units.cuh, which is in
// front of this file): on a set of tiles. A cluster claims a set when it has loaded all of the previous one, as tiles
// take unequal times. If clusters took sets in turns, they would wait 4 to 5 % of the time for the last. The ring goes
// on from one to the next. Rows of x behind a block's last are whatever is there; their sums are not stored.
//
// TMA takes neighbours alone, so a gated linear's rows are first copied from their tokens' places (Gather). All warps
// copy the first blocks' rows. Idle warps copy the others, while earlier blocks are multiplied.
//
// The rows of a tile are ordered so that a lane's sums are of eight neighbouring outputs (tensor_maps.expert_halves,
// expert_rows).
//
// Defined by kernel.py: N rows of a weight (of a gated one gates, then ups), GATED, and what units.cuh asks for.

constexpr int BLOCK = TILE_UNITS * UNIT_ROWS;
constexpr int OUTPUTS = GATED ? N / 2 : N, TILE_OUTPUTS = GATED ? ROWS / 2 : ROWS;
constexpr int ROW_TILES = (OUTPUTS + TILE_OUTPUTS - 1) / TILE_OUTPUTS, SETS = (ROW_TILES + SHARE - 1) / SHARE;
static_assert(OUTPUTS % 32 == 0, "whole lanes");

__device__ __forceinline__ void load_weight(u32 to, const TensorMap* map, int expert, int tile, int step, u32 barrier) {
#pragma unroll
  for (int copy = 0; copy < COPIES; copy++) {
    const u32 there = to + copy * COPY_ROWS * ROW_BYTES;
    // The gates' eight, or the thirty-two, that the copy begins with.
    const int first =
        GATED ? (expert * N + tile * TILE_OUTPUTS + copy * 32) / 8 : (expert * N + tile * ROWS + copy * 64) / 32;
    const int eights = GATED ? first : 0, groups = GATED ? 0 : first;
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %3, %5}], [%6];"
        ::"r"(there), "l"(map), "r"(step * COLUMNS), "r"(0), "r"(eights), "r"(groups), "r"(barrier) : "memory");
  }
}

struct __align__(16) Tile {
  int block, expert, rows, row_tile;
  __device__ __forceinline__ int units() const { return (rows + UNIT_ROWS - 1) / UNIT_ROWS; }
};
// All sets of tiles: the rows of a weight for one block, then for the next, usually of the same expert. So x and weight
// come from the L2, except once.
struct Work {
  const int2* blocks;  // each one's expert, or -1, and rows; those with rows come first
  int count;
  u32* claims;  // of sets, so far
  __device__ __forceinline__ int claim() const { return atomicAdd(claims, 1u); }
  // This block's tile of a set; without rows behind the last one.
  __device__ __forceinline__ Tile tile(int set) const {
    const int block = set / SETS;
    const int2 entry = block < count ? blocks[block] : int2{-1, 0};
    return {block, entry.x, entry.y, set % SETS * SHARE + (int)(blockIdx.x % SHARE)};
  }
};
// In shared memory: what the warp that asks tells the others of a tile, beside its first stage, and what the cluster's
// first block tells the others of sets. It is fewer letters ahead of them than there are: the ring has no more stages.
struct Told {
  static constexpr int LETTERS = 8;
  Tile tiles[STAGES];
  u64 arrived[LETTERS];
  int letters[LETTERS];
  __device__ __forceinline__ void make_barriers() {
    for (int i = 0; i < LETTERS; i++) make_barrier(shared_address(&arrived[i]), 1), expect(i);
  }
  __device__ __forceinline__ void expect(int i) { expect_bytes(shared_address(&arrived[i]), sizeof(int)); }
  __device__ __forceinline__ void send_to(int rank, int turn, int set) {
    const int i = turn % LETTERS;
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                     address_of_peer(shared_address(&letters[i]), rank)),
                 "r"(set), "r"(address_of_peer(shared_address(&arrived[i]), rank)) : "memory");
  }
  __device__ __forceinline__ int receive(int turn) {
    const int i = turn % LETTERS;
    wait_for(shared_address(&arrived[i]), turn / LETTERS & 1);
    const int set = *(volatile int*)&letters[i];
    expect(i);
    return set;
  }
};
static_assert(STAGES <= Told::LETTERS - 2, "letters ahead");
static_assert(1023 + STAGES * STAGE_BYTES + sizeof(Shared) + sizeof(Told) <= SHARED_BYTES, "and what alignment costs");

// Copies rows of tokens to the places of `order`, four at a time, and counts for each block how many fours are there.
// Warps claim fours in the order of blocks: so none waits for a multiprocessor that another kernel still holds.
constexpr int FOUR = 4, LANES = 32 / FOUR, PIECES = K / 8;  // rows; lanes of a row; uint4 of a row
struct Gather {
  const uint4* tokens;
  const int* order;
  uint4* rows;
  u32* ready;  // by block, and behind the last the number of claims; zeros at first
  int chosen;  // experts of a token

  __device__ __forceinline__ int claim(const Work& work) const {
    int index = 0;
    if (threadIdx.x % 32 == 0) index = atomicAdd(ready + work.count, 1u);
    return __shfl_sync(~0u, index, 0);
  }
  // False: there are no more. AT_ONCE pieces of a lane are under way together.
  template <int AT_ONCE>
  __device__ __forceinline__ bool copy(int index, const Work& work) const {
    const int block = index / (BLOCK / FOUR), first = index % (BLOCK / FOUR) * FOUR, lane = threadIdx.x % 32;
    if (block >= work.count) return false;
    const int2 entry = work.blocks[block];
    if (entry.y == 0) return false;
    if (entry.x < 0 || first >= entry.y) return true;
    const int row = first + lane / LANES;
    if (row < entry.y) {
      const uint4* from = tokens + (u64)(u32)(order[block * BLOCK + row] / chosen) * PIECES + lane % LANES;
      uint4* to = rows + (u64)(u32)(block * BLOCK + row) * PIECES + lane % LANES;
      for (int step = 0; step < PIECES / LANES; step += AT_ONCE, from += AT_ONCE * LANES, to += AT_ONCE * LANES) {
        uint4 values[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
          if (step + i < PIECES / LANES) values[i] = __ldg(from + i * LANES);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
          if (step + i < PIECES / LANES) to[i * LANES] = values[i];
      }
    }
    asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA reads them
    __syncwarp();
    if (lane == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(ready + block) : "memory");
    return true;
  }
  // Until all rows of a block are there.
  __device__ __forceinline__ void wait_for_block(const Tile& tile) const {
    const u32 fours = (tile.rows + FOUR - 1) / FOUR;
    u32 there;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(ready + tile.block) : "memory");
    while (there < fours);
    asm volatile("fence.proxy.async.global;" ::: "memory");
  }
};

// The warp that asks, by one lane.
__device__ __forceinline__ void ask(const TensorMap* weight, const TensorMap* x, u32 ring, u32 full, u32 empty,
                                    const Work& work, const Gather& gather, Told& told) {
  Place place;
  place.phase = 1;  // the ring is empty
  const bool is_first = blockIdx.x % SHARE == 0;
  int claimed = is_first ? work.claim() : 0;
  for (int turn = 0;; turn++) {
    const int set = is_first ? claimed : told.receive(turn);
    if (is_first) {
      for (int rank = 1; rank < SHARE; rank++) told.send_to(rank, turn, set);
      claimed = work.claim();  // it comes while this set is asked for
    }
    const Tile tile = work.tile(set);
    wait_for(empty + 8 * place.slot, place.phase);
    told.tiles[place.slot] = tile;
    if (tile.expert < 0) {  // nothing to multiply
      arrive(full + 8 * place.slot);
      place.go_on();
      if (tile.rows == 0) return;
      continue;
    }
    const int units = tile.units(), bytes = W_BYTES + units * UNIT_BYTES;
    for (int step = 0; step < STEPS; step++) {
      const u32 to = ring + place.slot * STAGE_BYTES, barrier = full + 8 * place.slot;
      wait_for(empty + 8 * place.slot, place.phase);
      expect_bytes(barrier, bytes);
      load_weight(to, weight, tile.expert, tile.row_tile, step, barrier);
      if (GATED && step == 0) gather.wait_for_block(tile);
      for (int unit = blockIdx.x % SHARE; unit < units; unit += SHARE)
        load_x(to + W_BYTES + unit * UNIT_BYTES, x, step, tile.block * BLOCK + unit * UNIT_ROWS, barrier);
      place.go_on();
    }
  }
}

// Of each 32 outputs a lane has eight neighbours, of two rows of each unit: they leave in one store.
constexpr int STORES_ROW = TILE_OUTPUTS / 32, STORES = GROUP_UNITS * 2 * STORES_ROW;
__device__ __forceinline__ uint4 outputs_of(const float (&sums)[GROUP_UNITS][SUMS], int store) {
  const float* sum =
      sums[store / (2 * STORES_ROW)] + store % STORES_ROW * (GATED ? 32 : 16) + 2 * (store / STORES_ROW % 2);
  u32 pairs[4];
#pragma unroll
  for (int j = 0; j < 4; j++, sum += GATED ? 8 : 4)
    pairs[j] = GATED ? silu_times(pack(sum[0], sum[1]), pack(sum[4], sum[5])) : pack(sum[0], sum[1]);
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// Where a lane's outputs of a tile go.
struct Target {
  static constexpr u32 NOWHERE = ~0u;
  u32 rows[GROUP_UNITS][2];  // in uint4, or NOWHERE
  int first_output;
  // No branch: all lanes of a warp multiply together next.
  __device__ __forceinline__ void store(uint4* out, int store, const uint4& outputs) const {
    const u32 row = rows[store / (2 * STORES_ROW)][store / STORES_ROW % 2];
    const bool is_output = OUTPUTS % (SHARE * TILE_OUTPUTS) == 0 || first_output + store % STORES_ROW * 32 < OUTPUTS;
    store_if(row != NOWHERE && is_output, out + row + store % STORES_ROW * 4, outputs);
  }
};

// Of a block whose rows no expert has: zeros for padding's rows, NaN for rows, inverted, whose id is no expert's.
__device__ __forceinline__ void fill(uint4* out, const int* order, const Tile& tile, int first_row) {
#if !GATED
  for (int i = threadIdx.x - (THREADS - 32 * CONSUMERS); i < tile.rows * (TILE_OUTPUTS / 8); i += 32 * CONSUMERS) {
    const int row = order[first_row + i / (TILE_OUTPUTS / 8)],
              output = tile.row_tile * TILE_OUTPUTS + i % (TILE_OUTPUTS / 8) * 8;
    const u32 pair = row < 0 ? 0x7fc07fc0u : 0u;
    if (output < OUTPUTS)
      out[((long long)(row < 0 ? -1 - row : row) * OUTPUTS + output) / 8] = {pair, pair, pair, pair};
  }
#endif
}

// `gather.order`: the row of `out` for each row of x. A gated linear's outputs are in the order of x: it gathers by
// `order`.
extern "C" __global__ void
#if SHARE > 1
__cluster_dims__(SHARE, 1, 1)
#endif
__launch_bounds__(THREADS, 1) expert_tiles(const __grid_constant__ TensorMap weight,
                                           const __grid_constant__ TensorMap x, uint4* out, const Work work,
                                           const Gather gather) {
  extern __shared__ __align__(1024) char memory[];
  const u32 ring = (shared_address(memory) + 1023) & ~1023u;
  Shared& shared = *(Shared*)(memory + (ring - shared_address(memory)) + STAGES * STAGE_BYTES);
  Told& told = *(Told*)(&shared + 1);
  const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) fetch_map(&weight), fetch_map(&x), told.make_barriers();
  make_ring(full, empty);
  wait_for_prerequisites();
  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0 && lane == 0) {
      asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA reads what others stored
      ask(&weight, &x, ring, full, empty, work, gather, told);
    }
    if (GATED && warp)
      while (gather.copy<4>(gather.claim(work), work));
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    start_dependents();
    if (GATED) gather.copy<8>(gather.claim(work), work);
    const int group = warp / 4 - 1;
    const u32 empty_of_one = address_of_peer(empty, lane % SHARE);
    Place place;
    while (true) {
      wait_for(full + 8 * place.slot, place.phase);
      const Tile tile = told.tiles[place.slot];
      if (tile.rows == 0) break;
      if (tile.expert < 0) {
        __syncwarp();  // all lanes have read it
        if (lane < SHARE) arrive_in_cluster(empty_of_one + 8 * place.slot);
        place.go_on();
        fill(out, gather.order, tile, tile.block * BLOCK);
        continue;
      }
      const int units = tile.units(), half = (units + 1) / 2, first_unit = group * half,
                own = group ? units - half : half;
      Target target;
      target.first_output = tile.row_tile * TILE_OUTPUTS + lane % 4 * 8;
      auto find_places = [&] {
#pragma unroll
        for (int m = 0; m < GROUP_UNITS; m++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int row = (first_unit + m) * UNIT_ROWS + warp % 4 * 16 + lane / 4 + 8 * h,
                      place = tile.block * BLOCK + row;
            target.rows[m][h] =
                m >= own || row >= tile.rows
                    ? Target::NOWHERE
                    : (u32)(GATED ? place : gather.order[place]) * (OUTPUTS / 8) + target.first_output / 8;
          }
      };
      if (!GATED) find_places();  // they come while it multiplies; a gated linear's have no registers meanwhile
      float sums[GROUP_UNITS][SUMS];
#pragma unroll
      for (int m = 0; m < GROUP_UNITS; m++)
#pragma unroll
        for (int j = 0; j < SUMS; j++) sums[m][j] = 0.f;
      if (own == 2)
        multiply<2>(sums, ring, full, empty_of_one, place, first_unit * UNIT_BYTES, lane);
      else if (own == 1)
        multiply<1>(sums, ring, full, empty_of_one, place, first_unit * UNIT_BYTES, lane);
      else
        multiply<0>(sums, ring, full, empty_of_one, place, first_unit * UNIT_BYTES, lane);
      if (GATED) find_places();
#pragma unroll
      for (int i = 0; i < STORES; i++) target.store(out, i, outputs_of(sums, i));
    }
  }
  // Arrivals at the other block's barriers have been seen there: it must not have gone.
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
