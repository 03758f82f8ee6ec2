// Attention of one new token a request over its keys, the token's own included; for many requests.
//
// All keys are divided among the blocks in equal shares (plan.cuh): a block for each multiprocessor if it works at
// eight heads of 128, several smaller ones if KV heads do not divide into eights. Keys, or values, of a tile are 4 KB
// of each such head, contiguous if there are no other heads, and one copy takes them. TMA puts them so that eight keys'
// chunks are in different banks; rows padded for that would be read 5 % slower. One warp loads them before the previous
// kernel has ended, except a tile with a new token's key, which that kernel writes. Earlier kernels wrote lengths and
// the page table. Some make requests ready (ready.cuh): where they rotate (rotation.cuh) no tile waits, and new tokens
// are put into the tiles that have come. The others compute, a head each. Of a head of 256 two take the products with
// all of a key, and each sums half of the values' columns.
//
// Where a share ends within a request, the block with the request's first tile adds up what the others leave of it.
// They come to that part first and it comes to its own last, so that it hardly waits (cluster_parts.cuh). Parts of many
// blocks are added up in teams before (plan.cuh): each takes most of a microsecond. Where another kernel holds
// multiprocessors, a block may wait for one that has not started. Blocks start in their order. Of blocks with shared
// requests only the first of a team waits, for the blocks right behind it. So three blocks at most wait, and the others
// end and make room.
//
// Defined by shares.py: KV_HEADS, HEADS (of them, which a block works at together: a divisor), HEAD_DIM (128 or 256),
// BLOCKS (of a multiprocessor), GROUP (query heads of a KV head, up to 8), PAGE (tokens, a multiple of 16),
// MOST_REQUESTS, SLOTS (of tiles' keys or values, in shared memory), SHARED_BYTES, PREPARERS (warps that make requests
// ready), READY (requests that are so at a time), MISSING (all bits set), SINKS (sinks.cuh), FP8 (the cache is e4m3,
// fp8_keys.cuh: then tiles are half as large).

constexpr int D = 2 * HEAD_PAIRS;
constexpr int PANELS = D * (FP8 ? 1 : 2) / 128, PANEL_BYTES = TILE * 128;  // of a head: rows of 128 bytes, swizzled
constexpr int HEAD_BYTES = PANELS * PANEL_BYTES, SLOT_BYTES = HEADS * HEAD_BYTES;
constexpr int OWN = D / WARPS_A_HEAD, PART_BYTES = HEAD_BYTES / WARPS_A_HEAD;  // columns of values that a warp sums

__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, int row, int panel, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(0), "r"(row), "r"(panel), "r"(barrier), "l"(policy) : "memory");
}
// Chunk `chunk` (16 bytes) of a head's row `row`.
__device__ __forceinline__ u32 chunk_address(u32 head, int row, int chunk) {
  return head + chunk / 8 * PANEL_BYTES + swizzled(row, chunk);
}

struct Shared {
  u64 full[SLOTS], empty[SLOTS];
  ReadyRequests requests;
  Counts counts;
};

// Tiles that are taken at once: of small keys most of the time is waits of one instruction for another.
constexpr int AT_ONCE = FP8 ? 2 : 1;

// The n-th of a lane's OWN / 8 pairs of sums: of two columns, or of two queries.
__device__ __forceinline__ float* pair_of(Sums& sums, int n) {
  return FP8 ? sums.values[n / 2] + n % 2 * 2 : sums.values[n];
}
struct Part {  // sums over part of a request's keys, as one block leaves them to another
  float2 values[OWN / 8][32], weights[QUERIES][32];  // what weights are against, and their sum
};

// Where a tile is read from.
struct Place {
  int row, panel;  // of a map of panels
  bool has_new_key;
};

// The warp that reads: keys and values of tile after tile, as slots are free. A lane looks up one tile of each 32, a
// round ahead: it would wait for the page table.
__device__ __forceinline__ void read_tiles(const Plan& plan, int begin, int end, u32 ring, u32 full, u32 empty,
                                           const TensorMap* keys, const TensorMap* values, const int* page_table,
                                           int width, bool rotates) {
  const int lane = threadIdx.x % 32;
  const u64 once = read_once();
  auto look_up = [&](int tile) -> Place {
    if (tile >= end) return {};
    const Request its = plan.request_at(tile);
    const int key = (tile - its.first) * TILE;
    const int row = page_table[its.row * width + key / PAGE] * PAGE + key % PAGE;
    return {row, PANELS * its.head, !rotates && key + TILE >= its.num_keys};
  };
  bool has_waited = false;
  int slot = 0, phase = 1;
  Place next = look_up(begin + lane);
  for (int base = begin; base < end; base += 32) {
    const Place its = next;
    next = look_up(base + 32 + lane);
    const int count = min(32, end - base);
    for (int i = 0; i < count; i++) {
      if (__shfl_sync(~0u, (int)its.has_new_key, i) && !has_waited) {
        wait_for_prerequisites();
        asm volatile("fence.proxy.async.global;" ::: "memory");  // copies what others stored
        start_dependents();
        has_waited = true;
      }
      const int row = __shfl_sync(~0u, its.row, i), panel = __shfl_sync(~0u, its.panel, i);
#pragma unroll
      for (int is_value = 0; is_value < 2; is_value++) {
        wait_for(empty + 8 * slot, phase);
        __syncwarp();  // or a lane might look after the slot has been filled and emptied again
        if (lane == 0) {
          expect_bytes(full + 8 * slot, SLOT_BYTES);
          load_box(ring + slot * SLOT_BYTES, is_value ? values : keys, row, panel, full + 8 * slot, once);
        }
        if (++slot == SLOTS) slot = 0, phase ^= 1;
      }
    }
  }
  if (!has_waited) wait_for_prerequisites(), start_dependents();
}

// A head's keys or values of a tile, and the barriers of their slot.
struct Slot {
  u32 at, full, empty, phase;
};

// Puts a new key and value into row `row`; TMA has brought the cache's older content of it.
__device__ __forceinline__ void put_new_token(Slot keys, Slot values, int row, const Row& key, const Row& value,
                                              const Rotation& rotation) {
  wait_for(keys.full, keys.phase);
  wait_for(values.full, values.phase);
  put_into_tile(load_head(key), rotation.k_factor, [&](int chunk) { return chunk_address(keys.at, row, chunk); });
  put_into_tile(load_head(value), rotation.v_factor, [&](int chunk) { return chunk_address(values.at, row, chunk); });
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // TMA writes there next
  __syncwarp();
}

// One tile, the keys before num_keys; of the values the warp's columns. `query` has the head's queries, or is room for
// some of `queries`' columns where all would leave no registers.
__device__ __forceinline__ void add_tiles(LargeSums& sums, u32 (&query)[8][2], const u32* queries,
                                          const Slot (&its_keys)[1], const Slot (&its_values)[1], int key, int num_keys,
                                          float scale) {
  const Slot keys = its_keys[0], values = its_values[0];
  const int lane = threadIdx.x % 32, quad = lane % 4;
  float logits[2][2][4] = {};
  wait_for(keys.full, keys.phase);
#pragma unroll
  for (int part = 0; part < WARPS_A_HEAD; part++) {
    const u32 own_keys = keys.at + part * PART_BYTES;
    if constexpr (WARPS_A_HEAD > 1) load_operand(query, queries + part * (OWN / 2), ROW_PAIRS, GROUP);
#pragma unroll
    for (int k = 0; k < OWN / 16; k++) {
      u32 b[4];
      load_matrices(b, chunk_address(own_keys, lane % 8 + lane / 16 * 8, k * 2 + lane / 8 % 2));
      multiply_add(logits[0][k % 2], query[k][0], 0, query[k][1], 0, b[0], b[1]);
      multiply_add(logits[1][k % 2], query[k][0], 0, query[k][1], 0, b[2], b[3]);
    }
  }
  __syncwarp();
  if (lane == 0) arrive(keys.empty);
  u32 weights[2], is_key[2];
  float most = sums.top[0];
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const int place = key + n * 8 + quad * 2;
    const bool is_first = place < num_keys, is_second = place + 1 < num_keys;
    is_key[n] = (is_first ? 0xffffu : 0) | (is_second ? 0xffff0000u : 0);
    logits[n][0][0] = is_first ? (logits[n][0][0] + logits[n][1][0]) * scale : NOTHING;
    logits[n][0][1] = is_second ? (logits[n][0][1] + logits[n][1][1]) * scale : NOTHING;
    most = fmaxf(most, fmaxf(logits[n][0][0], logits[n][0][1]));
  }
  most = max_of_quad(most);  // of a key: a tile has one
  const float shrink = exp2f(sums.top[0] - most);
  sums.top[0] = most, sums.total[0] *= shrink;
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const float a = exp2f(logits[n][0][0] - most), b = exp2f(logits[n][0][1] - most);
    sums.total[0] += a + b;
    weights[n] = pack(a, b);
  }
#pragma unroll
  for (int n = 0; n < OWN / 8; n++) sums.values[n][0] *= shrink, sums.values[n][1] *= shrink;
  const u32 own_values = values.at + threadIdx.x / 32 % WARPS_A_HEAD * PART_BYTES;
  wait_for(values.full, values.phase);
#pragma unroll
  for (int n = 0; n < OWN / 16; n++) {
    u32 b[4];
    load_transposed(b, chunk_address(own_values, lane % 16, n * 2 + lane / 16));
    // Memory behind the last key may hold anything, infinity too.
    b[0] &= is_key[0], b[1] &= is_key[1], b[2] &= is_key[0], b[3] &= is_key[1];
    multiply_add(sums.values[2 * n], weights[0], 0, weights[1], 0, b[0], b[1]);
    multiply_add(sums.values[2 * n + 1], weights[0], 0, weights[1], 0, b[2], b[3]);
  }
  __syncwarp();
  if (lane == 0) arrive(values.empty);
}

// Likewise tiles of e4m3 that follow each other.
template <int TILES>
__device__ __forceinline__ void add_tiles(Fp8Sums& sums, u32 (&query)[8][2], const u32* queries,
                                          const Slot (&keys)[TILES], const Slot (&values)[TILES], int key, int num_keys,
                                          float scale) {
  const int lane = threadIdx.x % 32, own_part = threadIdx.x / 32 % WARPS_A_HEAD * PART_BYTES;
  float logits[TILES][2][4] = {};
#pragma unroll
  for (int t = 0; t < TILES; t++) wait_for(keys[t].full, keys[t].phase);
#pragma unroll
  for (int part = 0; part < WARPS_A_HEAD; part++) {
    if constexpr (WARPS_A_HEAD > 1) load_operand(query, queries + part * (OWN / 2), ROW_PAIRS, GROUP);
#pragma unroll
    for (int t = 0; t < TILES; t++) add_fp8_keys(logits[t], query, keys[t].at + part * PART_BYTES, 0);
  }
  __syncwarp();
  if (lane == 0)
    for (int t = 0; t < TILES; t++) arrive(keys[t].empty);
  const Fp8Weights<TILES> weights = weigh(sums, logits, key, TILE, num_keys, {num_keys, num_keys}, scale);
#pragma unroll
  for (int t = 0; t < TILES; t++) wait_for(values[t].full, values[t].phase);
#pragma unroll
  for (int t = 0; t < TILES; t++)
    add_fp8_values(sums.values, weights.of_keys[t], weights.order[t], values[t].at + own_part, 0);
  __syncwarp();
  if (lane == 0)
    for (int t = 0; t < TILES; t++) arrive(values[t].empty);
}

// Gives the sums to the block that has the request's first tile.
__device__ __forceinline__ void leave(Sums& sums, Part& part) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < OWN / 8; n++) {
    const float* its = pair_of(sums, n);
    if (query_of(0) < GROUP) put(&part.values[n][lane], sayable(its[0]), sayable(its[1]));
  }
#pragma unroll
  for (int i = 0; i < QUERIES; i++) put(&part.weights[i][lane], sayable(sums.top[i]), sayable(sums.total[i]));
}

// Adds the sums that blocks behind this one have left of a request, in order: its team's, then the others' first ones.
__device__ __forceinline__ void add_parts(Sums& sums, int others, Part* parts) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Part* place = parts + (blockIdx.x + 1) * WARPS + warp;
  for (int by = 1, step; by <= others; by += step, place += step * WARPS) {
    step = by < TEAM ? 1 : TEAM;
    Part& part = *place;
    float2 weights[QUERIES], values[OWN / 8];
    float2& last = weights[QUERIES - 1];  // of all that is left
    for (bool are_there = false; !are_there;) {
#pragma unroll
      for (int i = 0; i < QUERIES; i++) weights[i] = look_at(&part.weights[i][lane]);
      are_there = is_there(weights[0]) && is_there(last);
#pragma unroll
      for (int n = 0; n < OWN / 8; n++) {
        values[n] = query_of(0) < GROUP ? look_at(&part.values[n][lane]) : float2{0.f, 0.f};
        are_there &= is_there(values[n]);
      }
      while (!is_there(last)) last = look_at(&part.weights[QUERIES - 1][lane]);  // no need to look at all
    }
    float own[QUERIES], other[QUERIES];
#pragma unroll
    for (int i = 0; i < QUERIES; i++) {
      put(&part.weights[i][lane], MISSING, MISSING);  // for the next launch
      const float most = fmaxf(sums.top[i], weights[i].x);
      own[i] = exp2f(sums.top[i] - most), other[i] = exp2f(weights[i].x - most);
      sums.top[i] = most, sums.total[i] = sums.total[i] * own[i] + weights[i].y * other[i];
    }
#pragma unroll
    for (int n = 0; n < OWN / 8; n++) {
      if (query_of(0) < GROUP) put(&part.values[n][lane], MISSING, MISSING);
      float* its = pair_of(sums, n);
      its[0] = its[0] * own[0] + values[n].x * other[0];
      its[1] = its[1] * own[QUERIES - 1] + values[n].y * other[QUERIES - 1];
    }
  }
}

static_assert(1024 + SLOTS * SLOT_BYTES + sizeof(Shared) <= SHARED_BYTES, "and what alignment costs");
static_assert(TOKENS == 1, "a row is a request");

extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1 + PREPARERS), BLOCKS)
    share_decode(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values, const u32* q,
                 const int* page_table, const int* seq_lens, u32* out, Part* parts, int num_requests,
                 int width, float scale, const __grid_constant__ Rotation rotation,
                 const unsigned short* sinks) {
  extern __shared__ __align__(1024) char memory[];
  const u32 ring = (shared_address(memory) + 1023) & ~1023u;
  Shared& shared = *(Shared*)(memory + (ring - shared_address(memory)) + SLOTS * SLOT_BYTES);
  const u32 full = ring + SLOTS * SLOT_BYTES, empty = full + sizeof(shared.full);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 32 * WARPS) {
    for (int i = 0; i < SLOTS; i++) make_barrier(full + 8 * i, 1), make_barrier(empty + 8 * i, WARPS);
    shared.requests.make_barriers();
    publish_barriers();
  }
  count_tiles(shared.counts, seq_lens, num_requests);
  const Plan plan = {shared.counts, num_requests, (u32)shared.counts.first_tiles[num_requests]};
  const int begin = plan.begin_of(blockIdx.x), end = plan.begin_of(blockIdx.x + 1);
  if (warp == WARPS)
    return read_tiles(plan, begin, end, ring, full, empty, &keys, &values, page_table, width, rotation.k);
  if (warp > WARPS)
    return make_ready({plan, q, page_table, width, rotation, end, warp - WARPS - 1}, shared.requests, begin);
  wait_for_prerequisites();
  start_dependents();
  if (begin == end) return;
  const int own_head = warp / WARPS_A_HEAD;
  int slot = 0, phase = 0, turn = 0;
  auto next_slot = [&] {
    const Slot its = {ring + slot * SLOT_BYTES + own_head * HEAD_BYTES, full + 8 * slot, empty + 8 * slot, (u32)phase};
    if (++slot == SLOTS) slot = 0, phase ^= 1;
    return its;
  };
  for (bool is_last = false; !is_last;) {
    const int place = turn % READY;
    const Ready& its = shared.requests.places[place];
    wait_for(shared_address(&shared.requests.full[place]), turn / READY % 2);
    const int num_keys = its.piece.num_keys, stop = its.piece.stop;
    u32 query[OWN / 16][2];  // of rows 0 to 7 of a product
    load_operand(query, its.queries[own_head][0], ROW_PAIRS, GROUP);
    Sums sums = no_sums();
    // Takes a tile's slots, and puts the new token there if it is this tile's.
    auto next_tile = [&](int key, Slot& keys_slot, Slot& values_slot) {
      keys_slot = next_slot(), values_slot = next_slot();
      if (rotation.k && key + TILE >= num_keys)
        put_new_token(keys_slot, values_slot, num_keys - 1 - key, its.keys[own_head], its.values[own_head], rotation);
    };
    int key = its.piece.key;
    while (key + (AT_ONCE - 1) * TILE < stop) {
      Slot keys_slots[AT_ONCE], values_slots[AT_ONCE];
#pragma unroll
      for (int t = 0; t < AT_ONCE; t++) next_tile(key + t * TILE, keys_slots[t], values_slots[t]);
      add_tiles(sums, query, its.queries[own_head][0], keys_slots, values_slots, key, num_keys, scale);
      key += AT_ONCE * TILE;
    }
    if (AT_ONCE > 1 && key < stop) {
      Slot keys_slots[1], values_slots[1];
      next_tile(key, keys_slots[0], values_slots[0]);
      add_tiles(sums, query, its.queries[own_head][0], keys_slots, values_slots, key, num_keys, scale);
    }
    const int row = its.piece.row, head = its.piece.head + own_head, others = its.piece.others;
    const bool is_left = its.piece.is_left;
    is_last = its.piece.is_last;
    __syncwarp();
    if (lane == 0) arrive(shared_address(&shared.requests.free[place]));
    turn++;
    add_up_totals(sums);
    add_parts(sums, others, parts);
    if (is_left) {
      leave(sums, parts[blockIdx.x * WARPS + warp]);
      __syncwarp();
      continue;
    }
#pragma unroll
    for (int i = 0; i < QUERIES; i++) {
      const int query = query_of(i);
      if constexpr (SINKS) sums.total[i] += sink_weight(sinks, head * GROUP + min(query, GROUP - 1), sums.top[i]);
      const float factor = 1.f / sums.total[i];
      u32* its_out =
          out + (((u64)row * KV_HEADS + head) * GROUP + query) * (HEAD_COLUMNS / 2) + warp % WARPS_A_HEAD * (OWN / 2);
      if (query < GROUP)
        each_pair(sums, i, [&](int column, float first, float second) {
          if (is_own(query, column)) its_out[column % HEAD_COLUMNS / 2] = pack(first * factor, second * factor);
        });
    }
    __syncwarp();  // what some lanes stored: see store_if
  }
}
