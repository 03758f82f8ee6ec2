// Attention of one new token a request over its keys, the token's own included; for few requests.
//
// A cluster takes a KV head of a request, its blocks take tiles of 64 keys in turns. All tiles that a block's shared
// memory holds are loaded at once (by TMA), before the previous kernel has ended. The tile with the new token's key
// waits, as that kernel writes it; earlier kernels wrote lengths, the page table and earlier keys. Where blocks rotate
// (rotation.cuh) that tile comes too, and the warp whose keys it ends puts the new token there itself. A block's warps
// share its queries' rotation. A warp has 16 keys of a tile and sums of its own; sums are added up in a block, then
// over distributed shared memory. They are where tiles were: so two blocks fit on a multiprocessor. A cluster's blocks
// must be in one group of 16 or 18 multiprocessors, and some groups have fewer. With one block each, 32 clusters of
// four may not run side by side.
//
// A long request's head has up to `parts` clusters, if that many run side by side (clusters.py). With one cluster of
// eight blocks for each of eight heads half of the multiprocessors would be idle, and 128 blocks load too little at
// once for the memory. Those but the first leave what they have to it (cluster_parts.cuh). They wait for nobody, so the
// first may wait for them even if they have not started.
//
// Defined by clusters.py: KV_HEADS, GROUP (query heads of a KV head, up to 8), PAGE (tokens), SPLIT (blocks of a
// cluster), STAGES (tiles in shared memory), SHARED_BYTES, SINKS (sinks.cuh), FP8 (the cache is e4m3, fp8_keys.cuh).

constexpr int D = 128, TILE = 64, WARPS = 4;
static_assert(D == 2 * HEAD_PAIRS, "as rotation.cuh has it");
constexpr int BOX_ROWS = PAGE < TILE ? PAGE : TILE, BOX_COLUMNS = FP8 ? 128 : 64;  // rows of 128 bytes, swizzled
// Keys in two halves (FP8: in one), then values.
constexpr int HALVES = D / BOX_COLUMNS, HALF_BYTES = TILE * 128, VALUES = HALVES * HALF_BYTES, TILE_BYTES = 2 * VALUES;

__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
}
// Chunk `chunk` (16 bytes) of row `row`.
__device__ __forceinline__ u32 chunk_address(u32 halves, int row, int chunk) {
  return halves + chunk / 8 * HALF_BYTES + swizzled(row, chunk);
}
__device__ __forceinline__ float load_peer(const float* place, u32 rank) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address_of_peer(shared_address(place), rank)));
  return v;
}

// Tiles that are taken at once: of small keys most of the time is waits of one instruction for another.
constexpr int AT_ONCE = FP8 ? 2 : 1;
// Fewer tiles for each of a cluster's blocks are not worth a further cluster: adding up takes as long as reading two.
constexpr int PART_TILES = 6;

struct HeadSums {  // over some keys: weighted values; what weights are against, and their sum
  float values[GROUP][D], top[GROUP], total[GROUP];
};
struct AllSums {
  HeadSums of_warp[WARPS], of_block;
};
static_assert(sizeof(AllSums) <= STAGES * TILE_BYTES, "they stand where tiles were");
struct Shared {
  Row queries[GROUP];
  u64 full[STAGES], empty[STAGES];
};
static_assert(1024 + STAGES * TILE_BYTES + sizeof(Shared) <= SHARED_BYTES, "and what alignment costs");

// The query heads of a KV head; by way of `rows` where the block rotates them, a share of them a warp.
__device__ __forceinline__ void load_queries(u32 (&query)[D / 16][2], const u32* heads, const Rotation& rotation,
                                             const Weights& weights, const Angle& angle, Row* rows) {
  if (!rotation.k) return load_operand(query, heads, HEAD_PAIRS);
  constexpr int SHARE = (GROUP + WARPS - 1) / WARPS;
  const int first = threadIdx.x / 32 * SHARE;
  Head of[SHARE];
#pragma unroll
  for (int i = 0; i < SHARE; i++) of[i] = load_head(heads + min(first + i, GROUP - 1) * HEAD_PAIRS);
  rotate(of, weights.q, angle, rotation);
#pragma unroll
  for (int i = 0; i < SHARE; i++)
    if (first + i < GROUP) put_head(rows[first + i], of[i]);
  __syncthreads();
  load_operand(query, rows[0], ROW_PAIRS);
}

// The warp's keys of tiles, of the first from `key` on and of the next one `step` behind; those before num_keys.
template <int TILES>
__device__ __forceinline__ void add_tiles(Fp8Sums& sums, const u32 (&query)[8][2], const u32 (&tiles)[TILES], int key,
                                          int step, int num_keys, float scale) {
  if (key >= num_keys) return;
  const int row = threadIdx.x / 32 * 16;
  float logits[TILES][2][4] = {};
#pragma unroll
  for (int t = 0; t < TILES; t++) add_fp8_keys(logits[t], query, tiles[t], row);
  const Fp8Weights<TILES> weights = weigh(sums, logits, key, step, num_keys, scale);
#pragma unroll
  for (int t = 0; t < TILES; t++)
    add_fp8_values(sums.values, weights.of_keys[t], weights.order[t], tiles[t] + VALUES, row);
}
__device__ __forceinline__ void add_tiles(LargeSums& sums, const u32 (&query)[8][2], const u32 (&tiles)[1], int key,
                                          int, int num_keys, float scale) {
  const u32 tile = tiles[0];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4;
  float logits[2][4] = {};
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    u32 keys[4];
    load_matrices(keys, chunk_address(tile, warp * 16 + lane % 8 + lane / 16 * 8, k * 2 + lane / 8 % 2));
    multiply_add(logits[0], query[k][0], 0, query[k][1], 0, keys[0], keys[1]);
    multiply_add(logits[1], query[k][0], 0, query[k][1], 0, keys[2], keys[3]);
  }
  // A lane has the logits of keys place, place + 1, place + 8 and place + 9.
  const int place = key + quad * 2;
  float most = sums.top[0], weight_sum = 0.f;
  u32 weights[2], is_key[2];
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const bool is_first = place + n * 8 < num_keys, is_second = place + n * 8 + 1 < num_keys;
    is_key[n] = (is_first ? 0xffffu : 0) | (is_second ? 0xffff0000u : 0);
    logits[n][0] = is_first ? logits[n][0] * scale : NOTHING;
    logits[n][1] = is_second ? logits[n][1] * scale : NOTHING;
    most = fmaxf(most, fmaxf(logits[n][0], logits[n][1]));
  }
  most = max_of_quad(most);
  const float shrink = exp2f(sums.top[0] - most);
  sums.top[0] = most;
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const float a = is_key[n] & 0xffffu ? exp2f(logits[n][0] - most) : 0.f;
    const float b = is_key[n] >> 16 ? exp2f(logits[n][1] - most) : 0.f;
    weight_sum += a + b;
    weights[n] = pack(a, b);
  }
  sums.total[0] = sums.total[0] * shrink + weight_sum;
#pragma unroll
  for (int n = 0; n < D / 8; n++) sums.values[n][0] *= shrink, sums.values[n][1] *= shrink;
#pragma unroll
  for (int n = 0; n < D / 16; n++) {
    u32 values[4];
    load_transposed(values, chunk_address(tile + VALUES, warp * 16 + lane % 16, n * 2 + lane / 16));
    // Memory behind the last key may hold anything, infinity too.
    values[0] &= is_key[0], values[1] &= is_key[1], values[2] &= is_key[0], values[3] &= is_key[1];
    multiply_add(sums.values[2 * n], weights[0], 0, weights[1], 0, values[0], values[1]);
    multiply_add(sums.values[2 * n + 1], weights[0], 0, weights[1], 0, values[2], values[3]);
  }
}

// Adds what `count` other clusters leave of a column, in their order.
__device__ __forceinline__ void add_parts(float& sum, float& all, float& most, float2* others, int count) {
  constexpr int AT_ONCE = 4;
  for (int first = 0; first < count; first += AT_ONCE) {
    float2 part[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      part[i] = first + i < count ? look_at(others + (first + i) * (GROUP * D)) : float2{0.f, NOTHING};
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      if (first + i >= count) break;
      while (!is_there(part[i])) part[i] = look_at(others + (first + i) * (GROUP * D));
      put(others + (first + i) * (GROUP * D), MISSING, MISSING);  // for the next launch
      const float top = fmaxf(most, part[i].y), own = exp2f(most - top), other = exp2f(part[i].y - top);
      sum = sum * own + part[i].x * other, all = all * own + other, most = top;
    }
  }
}

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(32 * WARPS)
    cluster_decode(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values, const u32* q,
                   const int* page_table, const int* seq_lens, unsigned short* out, float2* left, int parts,
                   int width, float scale, const __grid_constant__ Rotation rotation,
                   const unsigned short* sinks) {
  extern __shared__ __align__(1024) char memory[];
  const u32 ring = (shared_address(memory) + 1023) & ~1023u;
  char* const aligned = memory + (ring - shared_address(memory));
  AllSums& all_sums = *(AllSums*)aligned;
  Shared& shared = *(Shared*)(aligned + STAGES * TILE_BYTES);
  const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % SPLIT, part = blockIdx.x / SPLIT % parts, sequence = blockIdx.x / SPLIT / parts;
  const int head = sequence % KV_HEADS, request = sequence / KV_HEADS;
  const int num_keys = seq_lens[request], tiles = (num_keys + TILE - 1) / TILE;
  const int own_parts = min(parts, max(1, tiles / (SPLIT * PART_TILES)));
  if (part >= own_parts) return wait_for_prerequisites();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) make_barrier(full + 8 * i, 1), make_barrier(empty + 8 * i, WARPS);
    publish_barriers();
  }
  __syncthreads();

  const int blocks = own_parts * SPLIT, block = part * SPLIT + rank;  // that take tiles in turns
  const int mine = tiles > block ? (tiles - block + blocks - 1) / blocks : 0;
  const bool has_new_key = mine && block + (mine - 1) * blocks == tiles - 1;
  auto ask = [&](int i) {  // for this block's i-th tile
    const u32 to = ring + i % STAGES * TILE_BYTES, barrier = full + 8 * (i % STAGES);
    expect_bytes(barrier, TILE_BYTES);
#pragma unroll
    for (int row = 0; row < TILE; row += BOX_ROWS) {
      const int key = (block + i * blocks) * TILE + row;
      const int page = key / PAGE < width ? page_table[request * width + key / PAGE] : 0;  // any, behind the last key
      const int slot = page * PAGE + key % PAGE;
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        const int column = head * D + half * BOX_COLUMNS;
        load_box(to + half * HALF_BYTES + row * 128, &keys, column, slot, barrier);
        load_box(to + VALUES + half * HALF_BYTES + row * 128, &values, column, slot, barrier);
      }
    }
  };
  const int first = min(mine, STAGES);
  const bool waits_for_key = has_new_key && mine <= STAGES && !rotation.k;
  if (threadIdx.x == 0)
    for (int i = 0; i < first - waits_for_key; i++) ask(i);
  const int new_row = (num_keys - 1) % TILE;
  const bool puts_new_key = rotation.k && has_new_key && new_row / 16 == warp;
  Weights norm_weights;
  if (rotation.k) norm_weights = load_weights(rotation);
  u64 new_slot = 0;
  if (puts_new_key) new_slot = slot_in(page_table[request * width + (num_keys - 1) / PAGE], num_keys - 1);
  start_dependents();  // its weight comes while this one waits and attends
  wait_for_prerequisites();
  if (threadIdx.x == 0) {
    asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA reads what others stored
    if (waits_for_key) ask(mine - 1);
  }

  Angle angle;
  if (rotation.k) angle = load_angle(rotation, request);
  Head new_key[1], new_value;
  if (puts_new_key)
    new_key[0] = load_new_key(rotation, request, head), new_value = load_new_value(rotation, request, head);
  u32 query[D / 16][2];  // of rows 0 to 7 of a product; the others are zero
  const u32* heads = q + (u64)request * rotation.q_stride + head * GROUP * HEAD_PAIRS;
  load_queries(query, heads, rotation, norm_weights, angle, shared.queries);
  if (puts_new_key) rotate(new_key, norm_weights.k, angle, rotation);
  Sums sums = no_sums();
  auto come = [&](int i) {  // a tile that has
    const u32 tile = ring + i % STAGES * TILE_BYTES;
    wait_for(full + 8 * (i % STAGES), i / STAGES & 1);
    if (puts_new_key && i == mine - 1) {
      write_to_cache(rotation, new_key[0], new_value, new_slot, head);
      put_into_tile(new_key[0], rotation.k_factor, [&](int chunk) { return chunk_address(tile, new_row, chunk); });
      put_into_tile(new_value, rotation.v_factor,
                    [&](int chunk) { return chunk_address(tile + VALUES, new_row, chunk); });
      __syncwarp();
    }
    return tile;
  };
  auto read = [&](int i) {
    if (i + STAGES >= mine) return;
    if (lane == 0) arrive(empty + 8 * (i % STAGES));
    if (threadIdx.x == 0) {
      wait_for(empty + 8 * (i % STAGES), i / STAGES & 1);
      ask(i + STAGES);
    }
    __syncwarp();
  };
  auto key_of = [&](int i) { return (block + i * blocks) * TILE + warp * 16; };
  int i = 0;
  for (; i + AT_ONCE <= mine; i += AT_ONCE) {
    u32 tiles[AT_ONCE];
#pragma unroll
    for (int t = 0; t < AT_ONCE; t++) tiles[t] = come(i + t);
    add_tiles(sums, query, tiles, key_of(i), blocks * TILE, num_keys, scale);
    __syncwarp();
#pragma unroll
    for (int t = 0; t < AT_ONCE; t++) read(i + t);
  }
  if (AT_ONCE > 1 && i < mine) {
    const u32 tiles[] = {come(i)};
    add_tiles(sums, query, tiles, key_of(i), 0, num_keys, scale);
    __syncwarp();
    read(i);
  }
  add_up_totals(sums);
  __syncthreads();  // all tiles have been read
#pragma unroll
  for (int i = 0; i < QUERIES; i++) {
    const int query = query_of(i);
    if (query >= GROUP) continue;
    HeadSums& own = all_sums.of_warp[warp];
    each_pair(sums, i, [&](int column, float first, float second) {
      *(float2*)&own.values[query][column] = float2{first, second};
    });
    own.top[query] = sums.top[i], own.total[query] = sums.total[i];
  }
  __syncthreads();
#pragma unroll
  for (int g = 0; g < GROUP; g++) {
    float most = NOTHING, all = 0.f, sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) most = fmaxf(most, all_sums.of_warp[w].top[g]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float factor = exp2f(all_sums.of_warp[w].top[g] - most);
      all += factor * all_sums.of_warp[w].total[g];
      sum += factor * all_sums.of_warp[w].values[g][threadIdx.x];
    }
    all_sums.of_block.values[g][threadIdx.x] = sum;
    if (threadIdx.x == 0) all_sums.of_block.top[g] = most, all_sums.of_block.total[g] = all;
  }
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  constexpr int MY_COLUMNS = D / SPLIT;
  for (int j = threadIdx.x; j < GROUP * MY_COLUMNS; j += 32 * WARPS) {
    const int g = j / MY_COLUMNS, d = rank * MY_COLUMNS + j % MY_COLUMNS;
    float tops[SPLIT], totals[SPLIT], sum_of[SPLIT], most = NOTHING, all = 0.f, sum = 0.f;
#pragma unroll
    for (int peer = 0; peer < SPLIT; peer++) {
      tops[peer] = load_peer(&all_sums.of_block.top[g], peer);
      totals[peer] = load_peer(&all_sums.of_block.total[g], peer);
      sum_of[peer] = load_peer(&all_sums.of_block.values[g][d], peer);
      most = fmaxf(most, tops[peer]);
    }
#pragma unroll
    for (int peer = 0; peer < SPLIT; peer++) {
      const float factor = exp2f(tops[peer] - most);
      all += factor * totals[peer], sum += factor * sum_of[peer];
    }
    float2* const others = left + ((u64)sequence * (parts - 1) * GROUP + g) * D + d;
    if (part) {  // the weighted mean of its values, and the logarithm of the weights' sum
      put(others + (part - 1) * (GROUP * D), sayable(sum / all), sayable(most + log2f(all)));
      continue;
    }
    if (own_parts > 1) add_parts(sum, all, most, others, own_parts - 1);
    if constexpr (SINKS) all += sink_weight(sinks, head * GROUP + g, most);
    if (num_keys) out[(sequence * GROUP + g) * D + d] = pack(sum / all, 0.f) & 0xffff;
  }
  // A block's memory stays until the others have read it.
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  asm volatile("barrier.cluster.wait;" ::: "memory");
}
