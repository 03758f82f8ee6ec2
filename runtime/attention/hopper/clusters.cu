// Attention of a request's new tokens over its keys, their own included; for few requests. A decode has one new token,
// a verify step some (TOKENS): each sees the keys up to its own.
//
// A cluster takes a KV head of a request, its blocks take tiles of 64 keys in turns. All tiles that a block's shared
// memory holds are loaded at once (by TMA), before the previous kernel has ended. A tile with a new token's key waits,
// as that kernel writes it; earlier kernels wrote lengths, the page table and earlier keys. Where blocks rotate
// (rotation.cuh) that tile comes too, and a warp puts the new token there itself (new_tokens.cuh). A block's warps
// share its queries' rotation. With up to 16 queries (FP8: 8) a warp has 16 keys of a tile; with more it has more
// keys, and a unit of so many queries. Its sums are its own. A block adds them up, and sends each block of the
// cluster those of the columns that this one adds up. They are where tiles were: so two blocks fit on a
// multiprocessor, of up to 32 queries.
// A cluster's blocks must be in one group of 16 or 18 multiprocessors, and some groups have fewer. With one block each,
// 32 clusters of four may not run side by side.
//
// A long request's head has up to `parts` clusters, if that many run side by side (clusters.py). With one cluster of
// eight blocks for each of eight heads half of the multiprocessors would be idle, and 128 blocks load too little at
// once for the memory. Those but the first leave what they have to it (cluster_parts.cuh). They wait for nobody, so the
// first may wait for them even if they have not started.
//
// Defined by clusters.py: KV_HEADS, GROUP (query heads of a KV head, up to 8), TOKENS (rows of a request, up to 16;
// those behind its last token see no key), TOGETHER (rotation.cuh), ROWS (TOKENS times GROUP, up to 64; FP8: 32), PAGE
// (tokens), SPLIT (blocks of a cluster), STAGES (tiles in shared memory), SHARED_BYTES, SINKS (sinks.cuh), FP8 (the
// cache is e4m3, fp8_keys.cuh), OF_SOURCE (no key is new).

constexpr int D = 128;
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
// To the same place of another block's memory.
__device__ __forceinline__ void send_to_peer(float4* place, u32 rank, float4 v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address_of_peer(shared_address(place), rank)),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
__device__ __forceinline__ void send_to_peer(float2* place, u32 rank, float2 v) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address_of_peer(shared_address(place), rank)),
               "f"(v.x), "f"(v.y) : "memory");
}

// Tiles that are taken at once: of small keys most of the time is waits of one instruction for another.
constexpr int AT_ONCE = FP8 ? 2 : 1;
// Fewer tiles for each of a cluster's blocks are not worth a further cluster: adding up takes as long as reading two.
constexpr int PART_TILES = 6;

// A warp multiplies one unit of queries with a part of a tile's keys; several units with the same keys.
constexpr int UNIT = FP8 ? 8 : 16;
constexpr int UNITS = ROWS <= UNIT ? 1 : ROWS <= 2 * UNIT ? 2 : 4, UNIT_ROWS = ROWS < UNIT ? ROWS : UNIT;
constexpr int WARP_KEYS = TILE / WARPS * UNITS;
static_assert(ROWS <= UNIT * UNITS, "as clusters.py has it");

constexpr int MY_COLUMNS = D / SPLIT;  // of values, which a block adds up
struct __align__(16) WarpSums {        // over some keys: weighted values, rows of other banks; then as Weight has it
  float values[UNIT_ROWS][D + 8], top[UNIT_ROWS], total[UNIT_ROWS];
};
typedef float2 Weight;  // what weights are against, and their sum
struct AllSums {
  WarpSums of_warp[WARPS];
  float values[SPLIT][ROWS][MY_COLUMNS];  // of each block
  Weight weights[SPLIT][ROWS];
};
static_assert(sizeof(AllSums) <= STAGES * TILE_BYTES, "they stand where tiles were");
struct Shared {
  Row queries[ROWS];
  u64 full[STAGES], empty[STAGES];
  int lengths[TOKENS];
};
static_assert(1024 + STAGES * TILE_BYTES + sizeof(Shared) <= SHARED_BYTES, "and what alignment costs");

typedef u32 Operand[D / 16][FP8 ? 2 : 4];
// The keys before `num_keys` are a request's; a lane's queries see those before `of_query`.
struct Seen {
  int num_keys, of_query[QUERIES];
};

// The warp's keys of tiles, of the first from `key` on and of the next one `step` behind.
template <int TILES>
__device__ __forceinline__ void add_tiles(Fp8Sums& sums, const Operand& query, const u32 (&tiles)[TILES], int key,
                                          int step, const Seen& seen, float scale) {
  const int row = threadIdx.x / 32 / UNITS * WARP_KEYS;
#pragma unroll
  for (int i = 0; i < WARP_KEYS; i += 16) {
    if (key + i >= seen.num_keys) break;
    float logits[TILES][2][4] = {};
#pragma unroll
    for (int t = 0; t < TILES; t++) add_fp8_keys(logits[t], query, tiles[t], row + i);
    const Fp8Weights<TILES> weights = weigh(sums, logits, key + i, step, seen.num_keys, seen.of_query, scale);
#pragma unroll
    for (int t = 0; t < TILES; t++)
      add_fp8_values(sums.values, weights.of_keys[t], weights.order[t], tiles[t] + VALUES, row + i);
  }
}
// Sixteen keys, in rows from `row` on.
__device__ __forceinline__ void add_keys(LargeSums& sums, const u32 (&query)[D / 16][4], u32 tile, int row, int key,
                                         const Seen& seen, float scale) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  float logits[2][4] = {};
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    u32 keys[4];
    load_matrices(keys, chunk_address(tile, row + lane % 8 + lane / 16 * 8, k * 2 + lane / 8 % 2));
    const u32(&q)[4] = query[k];
    multiply_add(logits[0], q[0], q[1], q[2], q[3], keys[0], keys[1]);
    multiply_add(logits[1], q[0], q[1], q[2], q[3], keys[2], keys[3]);
  }
  // A lane has the logits of keys place, place + 1, place + 8 and place + 9: of one query, then of the other.
  const int place = key + quad * 2;
  u32 is_key[2], weights[2][2] = {};
#pragma unroll
  for (int n = 0; n < 2; n++)
    is_key[n] = (place + n * 8 < seen.num_keys ? 0xffffu : 0) | (place + n * 8 + 1 < seen.num_keys ? 0xffff0000u : 0);
  float shrink[2] = {1.f, 1.f};
#pragma unroll
  for (int i = 0; i < QUERIES; i++) {
    float most = sums.top[i], weight_sum = 0.f;
    bool is_seen[2][2];
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float& logit = logits[n][i * 2 + j];
        is_seen[n][j] = place + n * 8 + j < seen.of_query[i];
        logit = is_seen[n][j] ? logit * scale : NOTHING;
        most = fmaxf(most, logit);
      }
    most = max_of_quad(most);
    shrink[i] = exp2f(sums.top[i] - most);
    sums.top[i] = most;
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const float a = is_seen[n][0] ? exp2f(logits[n][i * 2] - most) : 0.f;
      const float b = is_seen[n][1] ? exp2f(logits[n][i * 2 + 1] - most) : 0.f;
      weight_sum += a + b;
      weights[n][i] = pack(a, b);
    }
    sums.total[i] = sums.total[i] * shrink[i] + weight_sum;
  }
#pragma unroll
  for (int n = 0; n < D / 8; n++)
#pragma unroll
    for (int j = 0; j < 2 * QUERIES; j++) sums.values[n][j] *= shrink[j / 2];
#pragma unroll
  for (int n = 0; n < D / 16; n++) {
    u32 values[4];
    load_transposed(values, chunk_address(tile + VALUES, row + lane % 16, n * 2 + lane / 16));
    // Memory behind the last key may hold anything, infinity too.
    values[0] &= is_key[0], values[1] &= is_key[1], values[2] &= is_key[0], values[3] &= is_key[1];
    const u32(&first)[2] = weights[0], (&second)[2] = weights[1];
    multiply_add(sums.values[2 * n], first[0], first[1], second[0], second[1], values[0], values[1]);
    multiply_add(sums.values[2 * n + 1], first[0], first[1], second[0], second[1], values[2], values[3]);
  }
}
__device__ __forceinline__ void add_tiles(LargeSums& sums, const u32 (&query)[D / 16][4], const u32 (&tiles)[1],
                                          int key, int, const Seen& seen, float scale) {
  const int row = threadIdx.x / 32 / UNITS * WARP_KEYS;
#pragma unroll
  for (int i = 0; i < WARP_KEYS; i += 16) {
    if (UNITS > 1 && key + i >= seen.num_keys) break;
    add_keys(sums, query, tiles[0], row + i, key + i, seen, scale);
  }
}

// Adds what `count` other clusters leave of a column, in their order.
__device__ __forceinline__ void add_parts(float& sum, float& all, float& most, float2* others, int count) {
  constexpr int AT_ONCE = 4;
  for (int first = 0; first < count; first += AT_ONCE) {
    float2 part[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      part[i] = first + i < count ? look_at(others + (first + i) * (ROWS * D)) : float2{0.f, NOTHING};
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      if (first + i >= count) break;
      while (!is_there(part[i])) part[i] = look_at(others + (first + i) * (ROWS * D));
      put(others + (first + i) * (ROWS * D), MISSING, MISSING);  // for the next launch
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
  const int unit = warp % UNITS, head = sequence % KV_HEADS, first_token = sequence / KV_HEADS * TOKENS;
  const int num_keys = most_keys(seq_lens + first_token, shared.lengths), tiles = (num_keys + TILE - 1) / TILE;
  auto keys_of = [&](int token) { return TOKENS == 1 ? num_keys : shared.lengths[token]; };
  const int own_parts = min(parts, max(1, tiles / (SPLIT * PART_TILES)));
  if (part >= own_parts) return wait_for_prerequisites();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) make_barrier(full + 8 * i, 1), make_barrier(empty + 8 * i, WARPS);
    publish_barriers();
  }
  __syncthreads();

  const int blocks = own_parts * SPLIT, block = part * SPLIT + rank;  // that take tiles in turns
  const int mine = tiles > block ? (tiles - block + blocks - 1) / blocks : 0;
  // No block has two tiles with new keys.
  const int last_tile = block + (mine - 1) * blocks;
  const bool has_new_key = mine && last_tile >= (keys_of(0) - 1) / TILE;
  auto ask = [&](int i) {  // for this block's i-th tile
    const u32 to = ring + i % STAGES * TILE_BYTES, barrier = full + 8 * (i % STAGES);
    expect_bytes(barrier, TILE_BYTES);
#pragma unroll
    for (int row = 0; row < TILE; row += BOX_ROWS) {
      const int key = (block + i * blocks) * TILE + row;
      // Any page, behind the last key.
      const int page = key / PAGE < width ? page_table[first_token * width + key / PAGE] : 0;
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
  const bool waits_for_key = has_new_key && mine <= STAGES && !rotation.k && !OF_SOURCE;
  if (threadIdx.x == 0)
    for (int i = 0; i < first - waits_for_key; i++) ask(i);
  Weights norm_weights;
  if (rotation.cos) norm_weights = load_weights(rotation);
  NewTokens own;
  own.find(keys_of, page_table, first_token * width, has_new_key ? last_tile : -1);
  Seen seen = {num_keys};
#pragma unroll
  for (int i = 0; i < QUERIES; i++)
    seen.of_query[i] = keys_of(min((unit * UNIT + query_of(i)) / GROUP, TOKENS - 1));
  start_dependents();  // its weight comes while this one waits and attends
  wait_for_prerequisites();
  if (threadIdx.x == 0) {
    asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA reads what others stored
    if (waits_for_key) ask(mine - 1);
  }

  own.load(rotation, first_token, head);
  Operand query;
  const u32* heads = q + (u64)first_token * rotation.q_stride + head * GROUP * (HEAD_COLUMNS / 2);
  if (TOKENS > 1 || rotation.cos) {
    own.put_queries(heads, rotation, norm_weights, shared.queries);
    load_operand(query, shared.queries[unit * UNIT], ROW_PAIRS, ROWS - unit * UNIT);
  } else {
    load_operand<(TOGETHER > 1)>(query, heads, HEAD_COLUMNS / 2, GROUP);
  }
  own.rotate_keys(rotation, norm_weights);
  Sums sums = no_sums();
  auto come = [&](int i) {  // a tile that has
    const u32 tile = ring + i % STAGES * TILE_BYTES;
    wait_for(full + 8 * (i % STAGES), i / STAGES & 1);
    if (i == mine - 1 && has_new_key) {
      own.put(rotation, head, [&](int row, int chunk) { return chunk_address(tile, row, chunk); },
              [&](int row, int chunk) { return chunk_address(tile + VALUES, row, chunk); });
      if constexpr (TOKENS == 1) __syncwarp();
      else __syncthreads();
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
  auto key_of = [&](int i) { return (block + i * blocks) * TILE + warp / UNITS * WARP_KEYS; };
  int i = 0;
  for (; i + AT_ONCE <= mine; i += AT_ONCE) {
    u32 tiles[AT_ONCE];
#pragma unroll
    for (int t = 0; t < AT_ONCE; t++) tiles[t] = come(i + t);
    add_tiles(sums, query, tiles, key_of(i), blocks * TILE, seen, scale);
    __syncwarp();
#pragma unroll
    for (int t = 0; t < AT_ONCE; t++) read(i + t);
  }
  if (AT_ONCE > 1 && i < mine) {
    const u32 tiles[] = {come(i)};
    add_tiles(sums, query, tiles, key_of(i), 0, seen, scale);
    __syncwarp();
    read(i);
  }
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");  // others may write where tiles were
  add_up_totals(sums);
  __syncthreads();  // all tiles have been read
#pragma unroll
  for (int i = 0; i < QUERIES; i++) {
    const int row = query_of(i);
    if (row >= UNIT_ROWS) continue;
    WarpSums& its = all_sums.of_warp[warp];
    each_pair(sums, i, [&](int column, float first, float second) {
      *(float2*)&its.values[row][column] = float2{first, second};
    });
    its.top[row] = sums.top[i], its.total[row] = sums.total[i];
  }
  __syncthreads();
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  // A warp adds up rows, a lane four columns, for the block that adds up these.
#pragma unroll
  for (int row = warp; row < ROWS; row += WARPS) {
    const WarpSums* const of_warp = all_sums.of_warp + row / UNIT;
    const int r = row % UNIT, peer = lane * 4 / MY_COLUMNS, column = lane * 4 % MY_COLUMNS;
    float most = NOTHING, all = 0.f;
    float4 sum = {};
#pragma unroll
    for (int w = 0; w < WARPS; w += UNITS) most = fmaxf(most, of_warp[w].top[r]);
#pragma unroll
    for (int w = 0; w < WARPS; w += UNITS) {
      const float factor = exp2f(of_warp[w].top[r] - most);
      const float4 its = *(const float4*)&of_warp[w].values[r][lane * 4];
      all += factor * of_warp[w].total[r];
      sum.x += factor * its.x, sum.y += factor * its.y, sum.z += factor * its.z, sum.w += factor * its.w;
    }
    send_to_peer((float4*)&all_sums.values[rank][row][column], peer, sum);
    if (lane < SPLIT) send_to_peer(&all_sums.weights[rank][row], lane, Weight{most, all});
  }
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  for (int j = threadIdx.x; j < ROWS * MY_COLUMNS; j += 32 * WARPS) {
    const int row = j / MY_COLUMNS, column = j % MY_COLUMNS, d = rank * MY_COLUMNS + column;
    const int token = row / GROUP, query_head = head * GROUP + row % GROUP;
    Weight weights[SPLIT];
    float most = NOTHING, all = 0.f, sum = 0.f;
#pragma unroll
    for (int peer = 0; peer < SPLIT; peer++)
      weights[peer] = all_sums.weights[peer][row], most = fmaxf(most, weights[peer].x);
#pragma unroll
    for (int peer = 0; peer < SPLIT; peer++) {
      const float factor = exp2f(weights[peer].x - most);
      all += factor * weights[peer].y, sum += factor * all_sums.values[peer][row][column];
    }
    float2* const others = left + ((u64)sequence * (parts - 1) * ROWS + row) * D + d;
    if (part) {  // the weighted mean of its values, and the logarithm of the weights' sum
      put(others + (part - 1) * (ROWS * D), sayable(sum / all), sayable(most + log2f(all)));
      continue;
    }
    if (own_parts > 1) add_parts(sum, all, most, others, own_parts - 1);
    if constexpr (SINKS) all += sink_weight(sinks, query_head, most);
    if (keys_of(token) && is_own(row % GROUP, d))
      out[((first_token + token) * (KV_HEADS * GROUP) + query_head) * HEAD_COLUMNS + d % HEAD_COLUMNS] =
          pack(sum / all, 0.f) & 0xffff;
  }
}
