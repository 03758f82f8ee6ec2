// silu(x . gate^T) * (x . up^T) of many tokens on Hopper. The products are bound by the tensor cores; what the kernel
// saves is writing gates and ups and reading them again.
//
// A tile is up to four units of 64 tokens times ROWS of the weight, half of them gates. Tokens are the rows of wgmma,
// so that a tile may have any number of outputs. Blocks take tiles in turns; the ring goes on from one to the next. The
// blocks of a cluster work on neighbouring rows for the same tokens (units.cuh, which is in front of this file).
//
// Tiles have as even numbers of units as there can be. The last of several tiles ends at the last token, and so has
// some tokens of the previous one: TMA would fill missing rows with zeros, which come late.
//
// The rows of a tile are ordered so that a lane's sums are of eight neighbouring outputs (tensor_maps.spread_halves).
//
// With adapters a tile has further stages, one for each slot that its tokens have: B of the slot, times A . x, which a
// kernel ahead has made.
//
// Defined by kernel.py: N rows of the weight (gates, then ups), RANK of adapters if there are any, and what units.cuh
// asks for.

constexpr int OUTPUTS = N / 2, COPY_OUTPUTS = COPY_ROWS / 2;
constexpr int ROW_TILES = (N + ROWS - 1) / ROWS, SETS = (ROW_TILES + SHARE - 1) / SHARE;
constexpr int BAND = 8;  // tiles of tokens whose x stays in the L2 while the weight goes by
static_assert(OUTPUTS % COPY_OUTPUTS == 0, "whole copies");

__device__ __forceinline__ void load_weight(u32 to, const TensorMap* map, int tile, int step, u32 barrier) {
#pragma unroll
  for (int copy = 0; copy < COPIES; copy++)
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %3, %3}], [%5];"
        ::"r"(to + copy * COPY_ROWS * ROW_BYTES), "l"(map), "r"(step * COLUMNS), "r"(0),
        "r"((tile * COPIES + copy) * COPY_OUTPUTS / 8), "r"(barrier) : "memory");
}

struct Tile {
  int token, units, row_tile;  // the first token
};
// How tokens are divided into tiles, by kernel.py: the first `larger` of `tiles` have a unit more than `units`.
struct Tokens {
  int count, tiles, units, larger, box;  // box: tokens of a copy of x
};
// A block's work: tiles in turns, every second time from the last cluster to the first, so that neighbouring tiles
// of more and fewer units are shared out evenly.
struct Work : Tokens {
  int rank, cluster, clusters;
  __device__ __forceinline__ Work(const Tokens& tokens)
      : Tokens(tokens), rank(blockIdx.x % SHARE), cluster(blockIdx.x / SHARE), clusters(gridDim.x / SHARE) {}
  // True if there is a tile in this turn.
  __device__ __forceinline__ bool has(int turn) const { return index(turn) < tiles * SETS; }
  // Bands of tokens, in them the weight's rows, in those the tokens.
  __device__ __forceinline__ Tile tile(int turn) const {
    const int i = index(turn), first = i / (SETS * BAND) * BAND, rest = i % (SETS * BAND),
              width = min(BAND, tiles - first);
    const int t = first + rest % width, own = units + (t < larger), begin = t * units + min(t, larger);
    return {t > 0 && t == tiles - 1 ? count - own * UNIT_ROWS : begin * UNIT_ROWS, own, rest / width * SHARE + rank};
  }
  __device__ __forceinline__ int end_of(const Tile& tile) const {
    return min(count, tile.token + tile.units * UNIT_ROWS);
  }

 private:
  __device__ __forceinline__ int index(int turn) const {
    return turn * clusters + (turn % 2 ? clusters - 1 - cluster : cluster);
  }
};

#if RANK
constexpr int B_COLUMNS = 16, B_BOX_BYTES = COPY_ROWS * B_COLUMNS * 2, B_PART_BYTES = COPIES * B_BOX_BYTES;
constexpr int B_BYTES = 2 * RANK / B_COLUMNS * B_PART_BYTES;  // of a slot and a tile: gates' and ups'
static_assert(RANK % B_COLUMNS == 0 && B_BYTES <= W_BYTES, "in the place of a stage of the weight");

struct Adapters {
  const u32* shrunk;  // A . x: [tokens, 2, RANK] bfloat16
  const int* slots;   // of each token; -1: none
};
// Reads it again each time, so that no register keeps it: they have the sums.
__device__ __forceinline__ int slot_again(const int* from) {
  int v;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}
// Slots of tokens `token` to `end`, a tile's; `next` gives each once, to all lanes of a warp. They are found 32 at a
// time, as asking for a tile's takes a microsecond.
struct TileSlots {
  const int* slots;
  int token, end, base = 0, most;
  u32 left;  // of those from `base` on

  __device__ __forceinline__ TileSlots(const int* slots, int token, int end) : slots(slots), token(token), end(end) {
    find();
  }
  __device__ __forceinline__ int of(int its) const { return its < end ? slot_again(slots + its) : -1; }
  // The least one that was not given; -1: none is left.
  __device__ __forceinline__ int next() {
    while (!left && most >= base + 32) base += 32, find();
    if (!left) return -1;
    const int slot = base + __ffs(left) - 1;
    left &= left - 1;
    return slot;
  }

 private:
  __device__ __forceinline__ void find() {
    left = 0, most = -1;
#pragma unroll 4  // registers spill with 8
    for (int i = threadIdx.x % 32; i < TILE_UNITS * UNIT_ROWS; i += 32) {
      const int slot = of(token + i), place = slot - base;
      left |= 0 <= place && place < 32 ? 1u << place : 0;
      most = max(most, slot);
    }
    left = __reduce_or_sync(~0u, left), most = __reduce_max_sync(~0u, most);
  }
};
// 16 columns of B of a part, zeros for rows of the other: `first_eight` counts eights of rows of all slots. Gates are
// the first half of what the box takes, ups, whose map begins at them, the second.
__device__ __forceinline__ void load_b(u32 to, const TensorMap* map, int column, int half, int first_eight,
                                       u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %3}], [%6];"
      ::"r"(to), "l"(map), "r"(column), "r"(0), "r"(first_eight), "r"(half), "r"(barrier) : "memory");
}
// An operand of wgmma: rows of 32 bytes, swizzled, in groups of eight.
__device__ __forceinline__ u64 narrow_matrix(u32 address) {
  return (u64)((address & 0x3ffff) >> 4) | (1ull << 16) | (16ull << 32) | (3ull << 62);
}
// Adds to `sums` what adapters add to a tile's outputs, as its further stages arrive; `token` is the lane's first.
__device__ __forceinline__ void multiply_adapters(float (&sums)[GROUP_UNITS][SUMS], const u32* shrunk,
                                                  TileSlots slots, u32 ring, u32 full, u32 empty_of_one, Place& place,
                                                  int token, int lane) {
  u32 own[GROUP_UNITS];  // slots of a unit's two tokens, 16 bits each: as asking for them takes as long as asking for u
#pragma unroll
  for (int m = 0; m < GROUP_UNITS; m++)
    own[m] = (slots.of(token + m * UNIT_ROWS) & 0xffff) | (u32)slots.of(token + m * UNIT_ROWS + 8) << 16;
  for (int slot = slots.next(); slot >= 0; slot = slots.next()) {
    wait_for(full + 8 * place.slot, place.phase);
#pragma unroll 1
    for (int column = 0; column < 2 * RANK; column += B_COLUMNS) {
      const u32* mine = shrunk + token * RANK + lane % 4;
      u32 u[GROUP_UNITS][4];  // two tokens by two columns, and two that are eight behind
#pragma unroll
      for (int m = 0; m < GROUP_UNITS; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int its = m * UNIT_ROWS + i % 2 * 8;
          u[m][i] = (own[m] >> i % 2 * 16 & 0xffff) == slot ? mine[its * RANK + column / 2 + i / 2 * 4] : 0;
        }
      const u64 b = narrow_matrix(ring + place.slot * STAGE_BYTES + column / B_COLUMNS * B_PART_BYTES);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int m = 0; m < GROUP_UNITS; m++) multiply_registers(sums[m], u[m], b, true);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    if (lane < SHARE) arrive_in_cluster(empty_of_one + 8 * place.slot);
    place.go_on();
  }
}
#endif

// The warp that asks, by one lane; with adapters all lanes look for a tile's slots.
__device__ __forceinline__ void ask(const TensorMap* weight, const TensorMap* x,
#if RANK
                                    const TensorMap* b_of_gates, const TensorMap* b_of_ups, const Adapters& adapters,
#endif
                                    u32 ring, u32 full, u32 empty, const Work& work) {
#if RANK
  const bool is_one = threadIdx.x == 0;
#else
  constexpr bool is_one = true;
#endif
  auto ask_weight = [&](const Tile& tile, int bytes, int step, int slot) {
    if (!is_one) return;
    expect_bytes(full + 8 * slot, bytes);
    load_weight(ring + slot * STAGE_BYTES, weight, tile.row_tile, step, full + 8 * slot);
  };
  auto ask_x = [&](const Tile& tile, int tokens, int step, int slot) {
    if (!is_one) return;
    const u32 to = ring + slot * STAGE_BYTES + W_BYTES;
    for (int token = work.rank * work.box; token < tokens; token += SHARE * work.box)
      load_x(to + token * ROW_BYTES, x, step, tile.token + token, full + 8 * slot);
  };
  constexpr int AHEAD = STAGES < STEPS ? STAGES : STEPS;
  Place place = {AHEAD % STAGES, AHEAD / STAGES};
  for (int turn = 0; work.has(turn); turn++) {
    const Tile tile = work.tile(turn);
    const int tokens = work.end_of(tile) - tile.token;
    int bytes = W_BYTES;
    for (int token = 0; token < tokens; token += work.box) bytes += work.box * ROW_BYTES;
    if (turn == 0) {
      for (int i = 0; i < AHEAD; i++) ask_weight(tile, bytes, i, i);
      wait_for_prerequisites();
      for (int i = 0; i < AHEAD; i++) ask_x(tile, tokens, i, i);
    }
    const int first_step = turn == 0 ? AHEAD : 0;
#if RANK
    const int stage = place.slot + STEPS - first_step;  // the next one behind these, for lanes that do not ask
    const Place behind = {stage % STAGES, place.phase ^ (stage / STAGES & 1)};
#endif
    // The lane has these to itself: while others went through them too, it asked late.
    for (int step = first_step; is_one && step < STEPS; step++) {
      wait_for(empty + 8 * place.slot, place.phase ^ 1);
      ask_weight(tile, bytes, step, place.slot), ask_x(tile, tokens, step, place.slot);
      place.go_on();
    }
#if RANK
    __syncwarp();
    place = behind;
    TileSlots slots(adapters.slots, tile.token, tile.token + tokens);
    for (int slot = slots.next(); slot >= 0; slot = slots.next(), place.go_on()) {
      if (!is_one) continue;
      wait_for(empty + 8 * place.slot, place.phase ^ 1);  // others might see a phase that is over
      const u32 to = ring + place.slot * STAGE_BYTES, barrier = full + 8 * place.slot;
      expect_bytes(barrier, B_BYTES);
      for (int i = 0; i < 2 * RANK / B_COLUMNS; i++)
        for (int copy = 0; copy < COPIES; copy++) {
          const int part = i / (RANK / B_COLUMNS), column = i % (RANK / B_COLUMNS) * B_COLUMNS;
          const int eight = slot * (N / 8) + (tile.row_tile * COPIES + copy) * COPY_OUTPUTS / 8;
          load_b(to + i * B_PART_BYTES + copy * B_BOX_BYTES, part ? b_of_ups : b_of_gates, column, -part, eight,
                 barrier);
        }
    }
#endif
  }
}

// Of each 32 outputs of a tile a lane has eight neighbours, of two tokens of each unit: stores those ahead of `end`.
__device__ __forceinline__ void finish(const float (&sums)[GROUP_UNITS][SUMS], uint4* out, int token, int first_output,
                                       int end) {
#pragma unroll
  for (int m = 0; m < GROUP_UNITS; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int t = token + m * UNIT_ROWS + 8 * h;
      uint4* to = out + ((long long)t * OUTPUTS + first_output) / 8;
#pragma unroll
      for (int copy = 0; copy < COPIES; copy++) {
        const float* sum = sums[m] + copy * COPY_ROWS / 2 + 2 * h;
        u32 pairs[4];
#pragma unroll
        for (int j = 0; j < 4; j++, sum += 8) pairs[j] = silu_times(pack(sum[0], sum[1]), pack(sum[4], sum[5]));
        if (t < end && first_output + copy * COPY_OUTPUTS < OUTPUTS)
          to[copy * COPY_OUTPUTS / 8] = {pairs[0], pairs[1], pairs[2], pairs[3]};
      }
    }
}

extern "C" __global__ void
#if SHARE > 1
__cluster_dims__(SHARE, 1, 1)
#endif
__launch_bounds__(THREADS, 1) gated_linear(const __grid_constant__ TensorMap weight,
                                           const __grid_constant__ TensorMap x,
#if RANK
                                           const __grid_constant__ TensorMap b_of_gates,
                                           const __grid_constant__ TensorMap b_of_ups, const Adapters adapters,
#endif
                                           uint4* out, const Tokens tokens) {
  extern __shared__ __align__(1024) char memory[];
  const u32 ring = (shared_address(memory) + 1023) & ~1023u;
  Shared& shared = *(Shared*)(memory + (ring - shared_address(memory)) + STAGES * STAGE_BYTES);
  const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Work work(tokens);
  if (threadIdx.x == 0) fetch_map(&weight), fetch_map(&x);
  make_ring(full, empty);
  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#if RANK
    if (warp == 0) ask(&weight, &x, &b_of_gates, &b_of_ups, adapters, ring, full, empty, work);
#else
    if (warp == 0 && lane == 0) ask(&weight, &x, ring, full, empty, work);
#endif
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int group = warp / 4 - 1, first_unit = group * GROUP_UNITS;
    const int my_token = first_unit * UNIT_ROWS + warp % 4 * 16 + lane / 4;
    const u32 empty_of_one = address_of_peer(empty, lane % SHARE);
    wait_for_prerequisites();
    start_dependents();
    Place place;
    for (int turn = 0; work.has(turn); turn++) {
      const Tile tile = work.tile(turn);
      float sums[GROUP_UNITS][SUMS];
#pragma unroll
      for (int m = 0; m < GROUP_UNITS; m++)
#pragma unroll
        for (int j = 0; j < SUMS; j++) sums[m][j] = 0.f;
      if (tile.units > first_unit + 1)
        multiply<2>(sums, ring, full, empty_of_one, place, group * GROUP_UNITS * UNIT_BYTES, lane);
      else if (tile.units > first_unit)
        multiply<1>(sums, ring, full, empty_of_one, place, group * GROUP_UNITS * UNIT_BYTES, lane);
      else
        multiply<0>(sums, ring, full, empty_of_one, place, group * GROUP_UNITS * UNIT_BYTES, lane);
#if RANK
      const TileSlots slots(adapters.slots, tile.token, work.end_of(tile));
      multiply_adapters(sums, adapters.shrunk, slots, ring, full, empty_of_one, place, tile.token + my_token, lane);
#endif
      finish(sums, out, tile.token + my_token, tile.row_tile * (ROWS / 2) + lane % 4 * 8, work.end_of(tile));
    }
  }
  leave_ring();
}
