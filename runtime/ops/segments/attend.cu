// Attention in both directions within segments of packed rows on Hopper: softmax(q . k^T * scale) . v, as towers of
// images attend. It is bound by the tensor cores, and nearly as much by the exponentials: a multiprocessor makes 16 in
// a cycle. So products of the next keys run while the weights of these are computed.
//
// A block has ROWS rows of one head of a segment, 64 for each group of four warps. It goes through the segment's keys
// in tiles of KEYS; one warp of a further group loads them by TMA into a ring of STAGES. The last tile comes first: it
// alone may be short.
//
// Columns of a head are in two panels: SWIZZLED columns in one with rows of 128 bytes (two of them for 128), and the
// rest in one with rows of 32 or 64 bytes. So heads of 72 and 80 take the products of 80 columns. TMA fills with zeros
// what is past a head's columns or the last row.
//
// Defined by kernel.py: D columns of a head, ROWS, KEYS, STAGES, NUM_THREADS, SHARED_BYTES and REGISTERS (of a thread
// that multiplies) of a block, and the instructions `multiply_keys` (64 x KEYS products of 16 columns), `weigh_panel`
// (64 x 64 of 16 keys) and `weigh_rest`.

constexpr int PANELS = D / 64;                             // of 128 bytes
// Columns of the last panel, and its room in columns.
constexpr int REST = D % 64, REST_COLUMNS = REST > 16 ? 32 : 16;
constexpr int REST_OUTPUTS = REST;                         // a multiple of eight
constexpr int GROUPS = ROWS / 64, CONSUMERS = 128 * GROUPS, THREADS = 128 + CONSUMERS;
constexpr int PANEL_ROW = 128, REST_ROW = 2 * REST_COLUMNS;
constexpr int Q_PANEL = ROWS * PANEL_ROW, KEY_PANEL = KEYS * PANEL_ROW;
constexpr int Q_REST = REST ? ROWS * REST_ROW : 0, KEY_REST = REST ? KEYS * REST_ROW : 0;
constexpr int Q_BYTES = PANELS * Q_PANEL + Q_REST, KEY_BYTES = PANELS * KEY_PANEL + KEY_REST;
// All panels of 128 bytes first: they begin at multiples of 1024.
constexpr int K_AT = PANELS * Q_PANEL, V_AT = K_AT + STAGES * PANELS * KEY_PANEL,
              RESTS_AT = V_AT + STAGES * PANELS * KEY_PANEL;
constexpr int K_REST_AT = RESTS_AT + Q_REST, V_REST_AT = K_REST_AT + STAGES * KEY_REST,
              BARRIERS_AT = V_REST_AT + STAGES * KEY_REST;
constexpr int SUMS = KEYS / 2, PANEL_OUTPUTS = 32, OUTPUTS = PANELS * PANEL_OUTPUTS + REST_OUTPUTS / 2;  // of a thread
constexpr int STEPS = KEYS / 16;
constexpr float NEVER = -1e30f;  // below any product, and its differences are no NaN
static_assert(THREADS == NUM_THREADS, "as it is launched");
static_assert(KEYS % 16 == 0 && KEYS <= 256 && ROWS % 64 == 0 && ROWS <= 256, "of wgmma and of a box");
static_assert(D % 8 == 0 && REST <= 32 && PANELS >= 1 && PANELS <= 2, "what panels hold");
static_assert(1023 + BARRIERS_AT + 8 * (1 + 4 * STAGES) <= SHARED_BYTES, "and what alignment costs");

struct Sizes {
  int heads, kv_heads, tiles;  // tiles of the longest segment
  int row;                     // numbers of a row of the output: heads * D
  float scale;                 // of products, in base 2
};

// An operand whose rows are 64 or 32 bytes, swizzled, in groups of eight; or, read along rows, of eight keys.
__device__ __forceinline__ u64 rest_matrix(u32 address) {
  constexpr u64 EIGHT_ROWS = 8 * REST_ROW / 16;
  return (u64)((address & 0x3ffff) >> 4) | (1ull << 16) | (EIGHT_ROWS << 32) |
         ((REST_COLUMNS == 16 ? 3ull : 2ull) << 62);
}
__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, int column, int head, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4}], [%5];"
               ::"r"(to), "l"(map), "r"(column), "r"(head), "r"(row), "r"(barrier) : "memory");
}
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Keeps reads and writes of wgmma's registers at their place in the code.
template <int N>
__device__ __forceinline__ void hold(float (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(values[i])::"memory");
}
__device__ __forceinline__ void hold(u32 (&weights)[STEPS][4]) {
#pragma unroll
  for (int i = 0; i < 4 * STEPS; i++) asm volatile("" : "+r"(weights[i / 4][i % 4])::"memory");
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// A stage of the ring: its barriers and its place.
struct Ring {
  u32 memory, barriers;
  __device__ __forceinline__ u32 full_q() const { return barriers; }
  __device__ __forceinline__ u32 full(int slot, int of_values) const {
    return barriers + 8 * (1 + 2 * slot + of_values);
  }
  __device__ __forceinline__ u32 empty(int slot, int of_values) const { return full(STAGES + slot, of_values); }
  __device__ __forceinline__ u32 keys(int slot) const { return memory + K_AT + slot * PANELS * KEY_PANEL; }
  __device__ __forceinline__ u32 values(int slot) const { return memory + V_AT + slot * PANELS * KEY_PANEL; }
  __device__ __forceinline__ u32 rest_of_keys(int slot) const { return memory + K_REST_AT + slot * KEY_REST; }
  __device__ __forceinline__ u32 rest_of_values(int slot) const { return memory + V_REST_AT + slot * KEY_REST; }
};
struct Place {
  int slot = 0, phase = 0;
  __device__ __forceinline__ void go_on() {
    if (++slot == STAGES) slot = 0, phase ^= 1;
  }
};

// The maps of q, k or v: of panels of 128 bytes, and of the rest.
struct Maps {
  const TensorMap *panel, *rest;
};

__device__ __forceinline__ void ask_part(const Maps& maps, u32 panels, u32 panel_bytes, u32 rest, int head, int row,
                                         u32 barrier) {
#pragma unroll
  for (int p = 0; p < PANELS; p++) load_box(panels + p * panel_bytes, maps.panel, 64 * p, head, row, barrier);
  if (REST) load_box(rest, maps.rest, 64 * PANELS, head, row, barrier);
}

// The warp that asks, by one lane.
__device__ __forceinline__ void ask(const Ring& ring, const Maps& q, const Maps& k, const Maps& v, int first_row,
                                    int head, int kv_head, int begin, int tiles) {
  expect_bytes(ring.full_q(), Q_BYTES);
  ask_part(q, ring.memory, Q_PANEL, ring.memory + RESTS_AT, head, first_row, ring.full_q());
  Place place;
  for (int tile = tiles - 1; tile >= 0; tile--, place.go_on()) {
    const int row = begin + tile * KEYS, slot = place.slot;
    wait_for(ring.empty(slot, 0), place.phase ^ 1);
    expect_bytes(ring.full(slot, 0), KEY_BYTES);
    ask_part(k, ring.keys(slot), KEY_PANEL, ring.rest_of_keys(slot), kv_head, row, ring.full(slot, 0));
    wait_for(ring.empty(slot, 1), place.phase ^ 1);
    expect_bytes(ring.full(slot, 1), KEY_BYTES);
    ask_part(v, ring.values(slot), KEY_PANEL, ring.rest_of_values(slot), kv_head, row, ring.full(slot, 1));
  }
}

// Begins the products of a group's rows with a tile's keys.
__device__ __forceinline__ void begin_keys(float (&sums)[SUMS], u32 q, u32 q_rest, u32 keys, u32 rest) {
#pragma unroll
  for (int p = 0; p < PANELS; p++)
#pragma unroll
    for (int k = 0; k < 4; k++)
      multiply_keys(sums, matrix(q + p * Q_PANEL + k * 32), matrix(keys + p * KEY_PANEL + k * 32), p || k);
  if (REST)
#pragma unroll
    for (int k = 0; k < REST_COLUMNS / 16; k++)
      multiply_keys(sums, rest_matrix(q_rest + k * 32), rest_matrix(rest + k * 32), true);
}
// Begins the sums of a tile's values by their weights.
__device__ __forceinline__ void begin_values(float (&outputs)[OUTPUTS], const u32 (&weights)[STEPS][4], u32 values,
                                             u32 rest) {
#pragma unroll
  for (int k = 0; k < STEPS; k++) {
#pragma unroll
    for (int p = 0; p < PANELS; p++)
      weigh_panel(outputs + p * PANEL_OUTPUTS, weights[k], matrix(values + p * KEY_PANEL + k * 16 * PANEL_ROW), true);
#if D % 64
    weigh_rest(outputs + PANELS * PANEL_OUTPUTS, weights[k], rest_matrix(rest + k * 16 * REST_ROW), true);
#endif
  }
}

// The two rows of a thread: their largest product so far, and the sum of its own weights.
struct Rows {
  float top[2] = {NEVER, NEVER}, total[2] = {0.f, 0.f};

  // Products become weights; returns by how much what was summed before shrinks.
  __device__ __forceinline__ void weigh(float (&sums)[SUMS], float scale, float (&shrink)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float tops[2] = {top[h], top[h]};
#pragma unroll
      for (int j = 2 * h; j < SUMS; j += 8)
#pragma unroll
        for (int i = 0; i < 2; i++) tops[i] = fmaxf(tops[i], fmaxf(sums[j + 4 * i], sums[j + 4 * i + 1]));
      const float most = max_of_quad(fmaxf(tops[0], tops[1]));
      shrink[h] = power_of_two((top[h] - most) * scale);
      top[h] = most;
      const float base = most * scale;
      float own[2] = {0.f, 0.f};
#pragma unroll
      for (int j = 2 * h; j < SUMS; j += 4)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          sums[j + i] = power_of_two(fmaf(sums[j + i], scale, -base));
          own[i] += sums[j + i];
        }
      total[h] = fmaf(total[h], shrink[h], own[0] + own[1]);
    }
  }
};

// Computes weights ahead of the following code; ptxas would wait for products first. A store waits for their sums, and
// is never done, as no sum is below zero.
__device__ __forceinline__ void hold_weights(const Rows& rows, u32 anywhere) {
  asm volatile("{ .reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.f32 [%1], %0; }"
               ::"f"(rows.total[0] + rows.total[1]), "r"(anywhere) : "memory");
}

__device__ __forceinline__ void pack_weights(u32 (&weights)[STEPS][4], const float (&sums)[SUMS]) {
#pragma unroll
  for (int k = 0; k < STEPS; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) weights[k][i] = pack(sums[8 * k + 2 * i], sums[8 * k + 2 * i + 1]);
}

__device__ __forceinline__ void attend(const Ring& ring, float (&outputs)[OUTPUTS], Rows& rows, int group, int lane,
                                       int tiles, int keys, float scale) {
  float sums[SUMS], shrink[2];
  u32 weights[STEPS][4];
  const u32 q = ring.memory + group * 64 * PANEL_ROW, q_rest = ring.memory + RESTS_AT + group * 64 * REST_ROW;
  auto release = [&](int slot, int of_values) {
    if (threadIdx.x % 32 == 0) arrive(ring.empty(slot, of_values));
  };
#pragma unroll
  for (int i = 0; i < OUTPUTS; i++) outputs[i] = 0.f;
  wait_for(ring.full_q(), 0);
  wait_for(ring.full(0, 0), 0);
  begin_products();
  begin_keys(sums, q, q_rest, ring.keys(0), ring.rest_of_keys(0));
  end_products();
  wait_for_products<0>();
  hold(sums);
  release(0, 0);
  const int last = keys - (tiles - 1) * KEYS - lane % 4 * 2;  // of the tile, and as this thread's columns are
  if (last < KEYS)
#pragma unroll
    for (int j = 0; j < SUMS; j++)
      if (j / 4 * 8 + j % 2 >= last) sums[j] = NEVER;
  rows.weigh(sums, scale, shrink);
  pack_weights(weights, sums);
  Place before, place;
  place.go_on();
  for (int tile = 1; tile < tiles; tile++) {
    wait_for(ring.full(place.slot, 0), place.phase);
    hold(sums), hold(outputs), hold(weights);
    begin_products();
    begin_keys(sums, q, q_rest, ring.keys(place.slot), ring.rest_of_keys(place.slot));
    end_products();
    wait_for(ring.full(before.slot, 1), before.phase);
    begin_products();
    begin_values(outputs, weights, ring.values(before.slot), ring.rest_of_values(before.slot));
    end_products();
    wait_for_products<1>();
    hold(sums);
    release(place.slot, 0);
    rows.weigh(sums, scale, shrink);
    hold_weights(rows, q);
    wait_for_products<0>();
    hold(outputs);
    release(before.slot, 1);
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) outputs[i] *= shrink[i / 2 % 2];
    pack_weights(weights, sums);
    before = place, place.go_on();
  }
  wait_for(ring.full(before.slot, 1), before.phase);
  hold(outputs), hold(weights);
  begin_products();
  begin_values(outputs, weights, ring.values(before.slot), ring.rest_of_values(before.slot));
  end_products();
  wait_for_products<0>();
  hold(outputs);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    segment_attention(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                      const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap q_rest,
                      const __grid_constant__ TensorMap k_rest, const __grid_constant__ TensorMap v_rest, u32* out,
                      const int* bounds, const Sizes sizes) {
  extern __shared__ __align__(1024) char memory[];
  const u32 begin_of_memory = (shared_address(memory) + 1023) & ~1023u;
  const Ring ring = {begin_of_memory, begin_of_memory + BARRIERS_AT};
  const int tile = blockIdx.x % sizes.tiles, head = blockIdx.x / sizes.tiles % sizes.heads;
  const int segment = blockIdx.x / sizes.tiles / sizes.heads, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_for_prerequisites();
  start_dependents();
  const int begin = bounds[segment], end = bounds[segment + 1], first_row = begin + tile * ROWS;
  if (first_row >= end) return;
  const int tiles = (end - begin + KEYS - 1) / KEYS;
  if (threadIdx.x == 0) {
    make_barrier(ring.full_q(), 1);
    for (int slot = 0; slot < STAGES; slot++)
      for (int v = 0; v < 2; v++)
        make_barrier(ring.full(slot, v), 1), make_barrier(ring.empty(slot, v), CONSUMERS / 32);
    publish_barriers();
  }
  __syncthreads();
  if (warp < 4) {
#if ROWS > 64
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
#endif
    if (threadIdx.x == 0)
      ask(ring, {&q, &q_rest}, {&k, &k_rest}, {&v, &v_rest}, first_row, head, head / (sizes.heads / sizes.kv_heads),
          begin, tiles);
  } else {
#if ROWS > 64
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
    const int group = warp / 4 - 1;
    float outputs[OUTPUTS];
    Rows rows;
    attend(ring, outputs, rows, group, lane, tiles, end - begin, sizes.scale);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float total = rows.total[h];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      const float inverse = 1.f / total;
      const int row = first_row + group * 64 + warp % 4 * 16 + lane / 4 + 8 * h;
      if (row < end) {
        u32* to = out + ((long long)row * sizes.row + head * D) / 2 + lane % 4;
#pragma unroll
        for (int j = 0; j < D / 8; j++)
          to[4 * j] = pack(outputs[4 * j + 2 * h] * inverse, outputs[4 * j + 2 * h + 1] * inverse);
      }
    }
  }
}
