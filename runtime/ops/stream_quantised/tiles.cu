// A linear of 9 to 64 tokens on Hopper whose weight is float8_e4m3fn: out = x . (values * scales)^T, with the norm before it
// and what follows it.
//
// As in stream_linear/tiles.cu a block asks for what its ring holds of the weight before the kernel that makes x has ended,
// and every multiprocessor gets nearly the same share: a tile of ROWS outputs, or, where those were few, of more whose inputs
// the SPLIT blocks of a cluster divide. A tile of few rows would read x as often as it has weights: x's bytes are two an
// input and token. Values are taken apart in registers, so rows of the weight are those of mma, and tokens its columns: a
// warp has M_TILES times 16 rows, and K_WARPS of them divide the panels of a stage. All sums of a tile go to the block of
// the cluster that finishes their rows, 16 at a time, into its shared memory.
//
// One warp asks for weight and x, the other three of its group compute the norm's factors.
//
// Defined by tiles.py: N outputs (of a gated one: gate and up rows), K, ROWS (a multiple of 16 * M_TILES), M_TILES, K_WARPS,
// SPLIT, BLOCKS, RESIDENT (blocks of a multiprocessor, of registers), NUM_THREADS and SHARED_BYTES of a block, TOKENS (a
// multiple of 8), PANELS (of 128 inputs, of a stage), STAGES, GROUP (inputs that share a scale: 128; 0: all of a row),
// NORM_BLOCKS (sums of squares a token to read; 0: no norm), GATED, RESIDUAL, NEXT_BLOCKS (sums of squares a token to leave),
// BIAS (in the place of the norm's weight).

constexpr int PANEL = 128;  // inputs, and bytes of a swizzled row of the weight; of x a panel of boxes.cuh has half of them
constexpr int EIGHTS = TOKENS / 8, M_ROWS = 16, WARP_ROWS = M_ROWS * M_TILES, ROW_WARPS = ROWS / WARP_ROWS;
constexpr int CONSUMERS = ROW_WARPS * K_WARPS, THREADS = 32 * (4 + CONSUMERS);
constexpr int ROW_GROUPS = ROWS / M_ROWS, PLACES = (ROW_GROUPS + SPLIT - 1) / SPLIT;  // groups of a tile, and a block's
constexpr int OUT_ROWS = GATED ? ROWS / 2 : ROWS, OUT_GROUP = GATED ? M_ROWS / 2 : M_ROWS, OUTPUTS = GATED ? N / 2 : N;
constexpr int TILES = (N + ROWS - 1) / ROWS, CLUSTERS = BLOCKS / SPLIT;
constexpr int W_PANEL_BYTES = ROWS * PANEL, X_PANEL_BYTES = TOKENS * ROW_BYTES;
constexpr int W_BYTES = PANELS * W_PANEL_BYTES, X_BYTES = 2 * PANELS * X_PANEL_BYTES, STAGE_BYTES = W_BYTES + X_BYTES;
constexpr int STEPS = K / SPLIT / PANEL / PANELS;  // stages of a tile, a block's
constexpr int SOURCES = SPLIT * K_WARPS;           // of what adds up to an output
constexpr int ITEMS = (PLACES * EIGHTS + CONSUMERS - 1) / CONSUMERS;  // a warp's: 16 outputs of eight tokens each
static_assert(SPLIT == 1 || TILES == CLUSTERS, "what others send is of one tile");
static_assert(K % (SPLIT * PANELS * PANEL) == 0 && NORM_BLOCKS % 4 == 0, "whole stages, and four sums at a time");
static_assert(PANELS % K_WARPS == 0, "a warp has panels of every stage");
static_assert(ROWS % WARP_ROWS == 0 && TOKENS % 8 == 0 && THREADS == NUM_THREADS, "as it is launched");
static_assert(GROUP == 0 || GROUP == PANEL, "a scale for a panel");

constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int ROW_SCALES = GROUP ? STEPS * PANELS : 1, SCALE_PITCH = ROW_SCALES | 1;  // of a row and a block; odd: other banks
struct Shared {
  float inbox[PLACES][EIGHTS][SOURCES][M_ROWS * 8];  // of a row eight tokens
  float scales[ROWS * SCALE_PITCH], factors[TOKENS];
  u64 full[STAGES], empty[STAGES], arrived, factors_there;
};
static_assert(1023 + RING_BYTES + sizeof(Shared) <= SHARED_BYTES, "and what alignment costs");

// The warp that asks, by one lane.
__device__ void ask(const TensorMap* values, const TensorMap* x, u32 ring, u32 full, u32 empty, int rank, int first_tile,
                    int num_tokens) {
  const u64 once = read_once();
  const int turns = first_tile < TILES ? (TILES - first_tile + CLUSTERS - 1) / CLUSTERS : 0, total = turns * STEPS;
  auto ask_weight = [&](int i) {
    const u32 slot = i % STAGES, barrier = full + 8 * slot;
    expect_bytes(barrier, W_BYTES + 2 * PANELS * num_tokens * ROW_BYTES);
    load_weight(ring + slot * STAGE_BYTES, values, (first_tile + i / STEPS * CLUSTERS) * ROWS, (rank * STEPS + i % STEPS) * PANELS,
                barrier, once);
  };
  auto ask_x = [&](int i) {
    const u32 slot = i % STAGES;
#pragma unroll
    for (int p = 0; p < 2 * PANELS; p++)
      load_x(ring + slot * STAGE_BYTES + W_BYTES + p * X_PANEL_BYTES, x, 0, (rank * STEPS + i % STEPS) * 2 * PANELS + p, full + 8 * slot);
  };
  const int ahead = STAGES < total ? STAGES : total;
  for (int i = 0; i < ahead; i++) ask_weight(i);
  start_dependents();
  wait_for_prerequisites();
  for (int i = 0; i < ahead; i++) ask_x(i);
  for (int i = ahead; i < total; i++) {
    wait_for(empty + 8 * (i % STAGES), (i / STAGES & 1) ^ 1);
    ask_weight(i), ask_x(i);
  }
}

constexpr u32 VALUE_FACTOR = 0x7b807b80u;  // 2^120, twice
// What a lane multiplies of 16 rows and 64 inputs, as bfloat16: of rows lane / 4 and that plus 8, 16 inputs each.
struct Values {
  u32 upper[8], lower[8];
};
__device__ __forceinline__ void take_apart(u32 (&to)[8], uint4 from) {
  const u32 words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int j = 0; j < 4; j++) to[2 * j] = times(first_pair(words[j]), VALUE_FACTOR), to[2 * j + 1] = times(second_pair(words[j]), VALUE_FACTOR);
}

// Adds to `sums` the products of a panel: of its halves one after another.
__device__ __forceinline__ void multiply_panel(float (&sums)[M_TILES][EIGHTS][4], const char* weight, const char* x, int lane) {
  const int row = lane / 4, quad = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    Values values[M_TILES];
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
      const char* from = weight + (m * M_ROWS + row) * PANEL + ((half * 4 + quad ^ row) & 7) * 16;
      take_apart(values[m].upper, *(const uint4*)from), take_apart(values[m].lower, *(const uint4*)(from + 8 * PANEL));
    }
#pragma unroll
    for (int e = 0; e < EIGHTS; e++) {
      const char* from = x + half * X_PANEL_BYTES + (e * 8 + row) * ROW_BYTES;  // of the token
      const uint4 a = *(const uint4*)(from + ((quad * 2 ^ row) & 7) * 16), b = *(const uint4*)(from + ((quad * 2 + 1 ^ row) & 7) * 16);
      const u32 inputs[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int k = 0; k < 8; k += 2)
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
          const Values& v = values[m];
          add_product(sums[m][e], v.upper[k], v.lower[k], v.upper[k + 1], v.lower[k + 1], inputs[k], inputs[k + 1]);
        }
    }
  }
}

// Of a tile's rows, by all warps that multiply. Returns when all have loaded theirs.
__device__ void load_scales(float* to, const float* scales, int tile, int rank) {
  for (int i = threadIdx.x - 128; i < ROWS * ROW_SCALES; i += 32 * CONSUMERS) {
    const int in_tile = i / ROW_SCALES, at = tile * ROWS + in_tile, group = at / M_ROWS * M_ROWS;
    const int row = GATED ? group / 2 + in_tile % 8 + in_tile / 8 % 2 * OUTPUTS : at;
    if (at < N) to[in_tile * SCALE_PITCH + i % ROW_SCALES] = scales[row * ROW_SCALES * (GROUP ? SPLIT : 1) + (GROUP ? rank * ROW_SCALES : 0) + i % ROW_SCALES];
  }
  asm volatile("bar.sync 1, %0;" ::"n"(32 * CONSUMERS) : "memory");
}

// Brings sums of 16 rows and eight tokens, as mma leaves them, to an inbox of this block or of another one.
__device__ __forceinline__ void deliver(float* inbox, float upper0, float upper1, float lower0, float lower1, u32 barrier, int owner) {
  // Of two neighbours one takes four tokens of the upper row, the other of the lower.
  const int lane = threadIdx.x % 32;
  const bool is_odd = lane % 2;
  const float other0 = __shfl_xor_sync(~0u, is_odd ? upper0 : lower0, 1), other1 = __shfl_xor_sync(~0u, is_odd ? upper1 : lower1, 1);
  const float4 four = is_odd ? float4{other0, other1, lower0, lower1} : float4{upper0, upper1, other0, other1};
  float* to = inbox + (lane / 4 + is_odd * 8) * 8 + lane % 4 / 2 * 4;
#if SPLIT > 1
  send(address_of_peer(shared_address(to), owner), four, address_of_peer(barrier, owner));
#else
  *(float4*)to = four;
#endif
}

__device__ __forceinline__ u32 rounded(float first, float second, u32 bias) {
  return BIAS ? pack(first + first_of(bias), second + second_of(bias)) : pack(first, second);
}

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
__launch_bounds__(THREADS, RESIDENT) quantised_tiles(
    const __grid_constant__ TensorMap values, const __grid_constant__ TensorMap x, const float* scales, const char*,
    const float* squares, const u32* residual, const u32* norm_weight, u32* out, u32* scaled, float* out_squares, float eps, int num_tokens) {
  extern __shared__ __align__(1024) char memory[];
  const u32 ring = (shared_address(memory) + 1023) & ~1023u;
  const char* first_stage = memory + (ring - shared_address(memory));
  Shared& shared = *(Shared*)(first_stage + RING_BYTES);
  const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
  const u32 arrived = shared_address(&shared.arrived), factors_there = shared_address(&shared.factors_there);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % SPLIT, first_tile = blockIdx.x / SPLIT;
  if (threadIdx.x == 0) {
    fetch_map(&values), fetch_map(&x);
    for (int i = 0; i < STAGES; i++) make_barrier(full + 8 * i, 1), make_barrier(empty + 8 * i, CONSUMERS);
    make_barrier(arrived, 1), make_barrier(factors_there, 3);
    publish_barriers();
    expect_bytes(arrived, (ROW_GROUPS - rank + SPLIT - 1) / SPLIT * sizeof(shared.inbox[0]));
  }
  __syncthreads();
#if SPLIT > 1
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
  if (warp < 4) {
    if (warp == 0) {
      if (lane == 0) ask(&values, &x, ring, full, empty, rank, first_tile, num_tokens);
    } else if (NORM_BLOCKS) {
      wait_for_prerequisites();
      compute_factors<4>(squares, shared.factors, eps, 0, num_tokens);
      __syncwarp();
      if (lane == 0) arrive(factors_there);
    }
    return;
  }
  load_scales(shared.scales, scales, first_tile, rank);
  wait_for_prerequisites();
  const int consumer = warp - 4, row_warp = consumer / K_WARPS, k_warp = consumer % K_WARPS, quad = lane % 4;
  int slot = 0, phase = 0;
  for (int tile = first_tile; tile < TILES; tile += CLUSTERS) {
    // A warp finishes every CONSUMERS-th item, in an order in which neighbouring ones are of one place. What is added to
    // them is asked for before the products and used after them, when it is there.
    const auto place_of = [&](int i) { return (i * CONSUMERS + consumer) / EIGHTS; };
    const auto token_of = [&](int i) { return (i * CONSUMERS + consumer) % EIGHTS * 8 + lane / 4; };
    const auto row_of = [&](int i) { return tile * OUT_ROWS + (place_of(i) * SPLIT + rank) * OUT_GROUP + quad * 2; };  // the first
    const auto is_item = [&](int i) { return place_of(i) * SPLIT + rank < ROW_GROUPS && row_of(i) < OUTPUTS; };
    u32 residuals[ITEMS][2] = {};
    if (RESIDUAL)
#pragma unroll
      for (int i = 0; i < ITEMS; i++)
        if (is_item(i) && token_of(i) < num_tokens) {
          const u32* from = residual + (token_of(i) * OUTPUTS + row_of(i)) / 2;
          residuals[i][0] = from[0], residuals[i][1] = from[4];
        }
    if (tile > first_tile) load_scales(shared.scales, scales, tile, rank);
    const float* my_scales = shared.scales + (row_warp * WARP_ROWS + lane / 4) * SCALE_PITCH;
    float sums[M_TILES][EIGHTS][4] = {};
    for (int step = 0; step < STEPS; step++) {
      wait_for(full + 8 * slot, phase);
      const char* weight = first_stage + slot * STAGE_BYTES + row_warp * WARP_ROWS * PANEL;
      const char* of_x = first_stage + slot * STAGE_BYTES + W_BYTES;
#pragma unroll
      for (int p = 0; p < PANELS / K_WARPS; p++) {
        const int panel = p * K_WARPS + k_warp;
        const char *values_of_panel = weight + panel * W_PANEL_BYTES, *x_of_panel = of_x + panel * 2 * X_PANEL_BYTES;
        if (GROUP) {
          float parts[M_TILES][EIGHTS][4] = {};
          multiply_panel(parts, values_of_panel, x_of_panel, lane);
#pragma unroll
          for (int m = 0; m < M_TILES; m++) {
            const float* of_upper = my_scales + m * M_ROWS * SCALE_PITCH + step * PANELS + panel;
            const float upper = of_upper[0], lower = of_upper[8 * SCALE_PITCH];
#pragma unroll
            for (int e = 0; e < EIGHTS; e++) {
              float* sum = sums[m][e];
              sum[0] += parts[m][e][0] * upper, sum[1] += parts[m][e][1] * upper;
              sum[2] += parts[m][e][2] * lower, sum[3] += parts[m][e][3] * lower;
            }
          }
        } else {
          multiply_panel(sums, values_of_panel, x_of_panel, lane);
        }
      }
      __syncwarp();
      if (lane == 0) arrive(empty + 8 * slot);
      if (++slot == STAGES) slot = 0, phase ^= 1;
    }
#if SPLIT > 1
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");  // the others' barriers are made
#endif
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
      const int group = row_warp * M_TILES + m;
      const float upper = GROUP ? 1.f : my_scales[m * M_ROWS * SCALE_PITCH], lower = GROUP ? 1.f : my_scales[(m * M_ROWS + 8) * SCALE_PITCH];
#pragma unroll
      for (int e = 0; e < EIGHTS; e++) {
        const float* sum = sums[m][e];
        float* inbox = shared.inbox[group / SPLIT][e][rank * K_WARPS + k_warp];
        deliver(inbox, sum[0] * upper, sum[1] * upper, sum[2] * lower, sum[3] * lower, arrived, group % SPLIT);
      }
    }
#if SPLIT > 1
    wait_for(arrived, 0);
#else
    asm volatile("bar.sync 1, %0;" ::"n"(32 * CONSUMERS) : "memory");
#endif
    if (NORM_BLOCKS) wait_for(factors_there, 0);
    // Of a token two neighbouring outputs, and two that are eight behind, or their ups.
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      if (!is_item(i)) break;
      const int place = place_of(i), e = (i * CONSUMERS + consumer) % EIGHTS, first = row_of(i), token = token_of(i);
      const float factor = NORM_BLOCKS && token < num_tokens ? shared.factors[token] : 1.f;
      float sum[4] = {};
#pragma unroll
      for (int source = 0; source < SOURCES; source++)
#pragma unroll
        for (int j = 0; j < 4; j++) sum[j] += shared.inbox[place][e][source][(quad * 2 + j % 2 + j / 2 * 8) * 8 + lane / 4];
      u32 weights[2] = {};
      if (NEXT_BLOCKS || BIAS) weights[0] = norm_weight[first / 2], weights[1] = norm_weight[first / 2 + 4];
      u32 low = rounded(sum[0] * factor, sum[1] * factor, weights[0]), high = rounded(sum[2] * factor, sum[3] * factor, weights[1]);
      const bool is_there = token < num_tokens;
      const int at = (token * OUTPUTS + first) / 2;
      if (GATED) {
        if (is_there) out[at] = silu_times(low, high);
        continue;
      }
      if (RESIDUAL) low = add(residuals[i][0], low), high = add(residuals[i][1], high);
      if (is_there) out[at] = low, out[at + 4] = high;
      if (NEXT_BLOCKS) {
        if (is_there) scaled[at] = times(low, weights[0]), scaled[at + 4] = times(high, weights[1]);
        const float squares_of_group = sum_of_lanes(sum_of_squares(low) + sum_of_squares(high), 4);
        store_squares(is_there && quad == 0, out_squares, token, first, squares_of_group);
      }
    }
    if (tile + CLUSTERS < TILES) asm volatile("bar.sync 1, %0;" ::"n"(32 * CONSUMERS) : "memory");  // all have read the inbox
  }
}
