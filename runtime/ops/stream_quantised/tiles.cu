// A linear of 9 to 128 tokens on Hopper whose weight is float8_e4m3fn, four-bit integers or four-bit floats: out = x .
// weight^T, with the norm before it and the ops behind it.
//
// As in stream_linear/tiles.cu a block loads its weight before the kernel that makes x has ended, but no more than
// EARLY_STAGES (linear.py). Every multiprocessor gets nearly the same share: a tile of ROWS outputs; where these would
// be few, larger tiles whose inputs the SPLIT blocks of a cluster divide. A tile of few rows would read x as often as
// it has weights: x's bytes are two an input and token.
//
// Rows of the weight are wgmma's rows, from registers, where values are unpacked; tokens are its columns, which it
// reads from shared memory once for 64 rows. (With mma every 16 rows read them, which took longer than the weight's way
// from memory.) TMA brings x in the order of its inputs, so the weight must have the same order. Of fp8 a lane loads
// the two bytes that it multiplies, of floats of four bits 16 bytes, every fourth of which it uses. Integers are
// ordered so that a lane's are one word (int4.cuh). While a half of a group's products run, the other half is taken
// apart. K_GROUPS warp groups divide a stage's inputs. All sums of a tile go to the block of the cluster that finishes
// their rows, 16 at a time, into its shared memory.
//
// One warp asks for weight and x, the other three of its group compute the norm's factors.
//
// Defined by tiles.py: N outputs (of a gated one: gate and up rows), K, BITS (of a value: 8 or 4), ROWS (a multiple of
// 16), K_GROUPS, SPLIT, BLOCKS, RESIDENT (blocks of a multiprocessor, of registers), NUM_THREADS and SHARED_BYTES of a
// block, TOKENS (a multiple of 8), PANELS (of 128 bytes of a row, of a stage), STAGES, EARLY_STAGES, GROUP (inputs that
// share a scale: 128, of floats of four bits 32 or 16; 0: all of a row, of fp8), SCALE_BYTES, SCALES_ARE_HALF (float16;
// else of two bytes bfloat16), ZEROS (there are zero points, of a byte), FLOATS (of four bits), FACTORS (`zeros` are
// factors of rows, in float32), NORM_BLOCKS (sums of squares a token to read; 0: no norm), GATED, RESIDUAL, NEXT_BLOCKS
// (sums of squares a token to leave), PLUS_ONE (the next norm's weight has 1 added), BIAS (in the place of the norm's
// weight), SQUARED_RELU, GELU.

constexpr int PANEL_BYTES = 128, PANEL = PANEL_BYTES * 8 / BITS;  // of a swizzled row of the weight; its inputs
constexpr int HALF = COLUMNS, PANEL_GROUPS = PANEL / (2 * HALF);  // inputs: of a panel of x; twice that share a scale
constexpr int EIGHTS = TOKENS / 8, M_ROWS = 16, ROW_WARP_GROUPS = (ROWS + 63) / 64;
constexpr int WARP_GROUPS = ROW_WARP_GROUPS * K_GROUPS, CONSUMERS = 4 * WARP_GROUPS, THREADS = 32 * (4 + CONSUMERS);
constexpr int ROW_GROUPS = ROWS / M_ROWS, PLACES = (ROW_GROUPS + SPLIT - 1) / SPLIT;  // groups of a tile, and a block's
constexpr int OUT_ROWS = GATED ? ROWS / 2 : ROWS, OUT_GROUP = GATED ? M_ROWS / 2 : M_ROWS, OUTPUTS = GATED ? N / 2 : N;
constexpr int TILES = (N + ROWS - 1) / ROWS, CLUSTERS = BLOCKS / SPLIT;
constexpr int W_PANEL_BYTES = ROWS * PANEL_BYTES, X_PANEL_BYTES = TOKENS * ROW_BYTES;
constexpr int X_PANELS = PANELS * PANEL / HALF;  // of a stage
constexpr int W_BYTES = PANELS * W_PANEL_BYTES, STAGE_BYTES = W_BYTES + X_PANELS * X_PANEL_BYTES;
constexpr int STEPS = K / SPLIT / PANEL / PANELS;  // stages of a tile, a block's
constexpr int SOURCES = SPLIT * K_GROUPS;          // of what adds up to an output
constexpr int ITEMS = (PLACES * EIGHTS + CONSUMERS - 1) / CONSUMERS;  // a warp's: 16 outputs of eight tokens each
static_assert(SPLIT == 1 || TILES == CLUSTERS, "what others send is of one tile");
static_assert(K % (SPLIT * PANELS * PANEL) == 0 && NORM_BLOCKS % 4 == 0, "whole stages, and four sums at a time");
static_assert(PANELS * PANEL_GROUPS % K_GROUPS == 0, "a warp has groups of every stage");
static_assert(TOKENS <= 64 || WARP_GROUPS <= 2 && RESIDENT == 1, "sums take twice the registers");
static_assert(ROWS % M_ROWS == 0 && TOKENS % 8 == 0 && THREADS == NUM_THREADS, "as it is launched");
static_assert(GROUP == 0 && BITS == 8 || GROUP == 2 * HALF || FLOATS && GROUP == (FACTORS ? 16 : 32),
              "a scale for two panels of x, or for a product or two");
static_assert(BITS == 4 || SCALE_BYTES == 4 && !ZEROS, "fp8 has scales in float32");
static_assert(!FLOATS || BITS == 4 && SCALE_BYTES == 1 && !ZEROS, "floats of four bits have scales of a byte");

constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int STEP_GROUPS = PANELS * PANEL_GROUPS / K_GROUPS;  // of a warp: what it multiplies of a stage, by groups
constexpr bool INTEGERS = BITS == 4 && !FLOATS;
// Integers with a scale in bfloat16 and no zero points are multiplied by it as they are taken apart, rounded once, as
// torch rounds them. Of others (and of fp8) the sums of a group are multiplied by its scale.
constexpr bool IN_VALUES = INTEGERS && !SCALES_ARE_HALF && !ZEROS, BY_GROUPS = GROUP && !FLOATS && !IN_VALUES;
// Two groups' sums, so that one's are scaled while the next one's products run; of many tokens there are no registers
// for it.
// Stages.
constexpr int BUFFERS = BY_GROUPS && TOKENS <= 64 ? 2 : 1, UNROLLED = BUFFERS == 2 && STEP_GROUPS % 2 ? 2 : 1;
constexpr float OUT_FACTOR = FLOATS ? E2M1_FACTOR : INTEGERS ? int4_factor(IN_VALUES) : 1.f;  // of sums
constexpr int WORDS = FLOATS ? 2 * HALF / GROUP / 4 : 1;  // of the scales of two panels of x
// Of a row and a block; odd, so that rows are in other banks.
constexpr int ROW_SCALES = GROUP ? STEPS * PANELS * PANEL_GROUPS * WORDS : 1, SCALE_PITCH = ROW_SCALES | 1;
using Inbox = float[PLACES][EIGHTS][SOURCES][M_ROWS * 8];  // of a row eight tokens
// A block of one tile has it where the ring was: with large tiles there is no room for both.
constexpr bool INBOX_IN_RING = SPLIT == 1 && TILES == BLOCKS && sizeof(Inbox) <= RING_BYTES;
constexpr int INBOX_BYTES = INBOX_IN_RING ? 0 : sizeof(Inbox);
struct Shared {
  // One float; or two bytes, with the zero point or they again in front; or four scales of floats of four bits.
  u32 scales[ROWS * SCALE_PITCH];
  float factors[TOKENS];
  u64 full[STAGES], empty[STAGES], arrived, factors_there;
};
static_assert(1023 + RING_BYTES + INBOX_BYTES + sizeof(Shared) <= SHARED_BYTES, "and what alignment costs");

// The warp that asks, by one lane.
__device__ void ask(const TensorMap* values, const TensorMap* x, u32 ring, u32 full, u32 empty, int rank,
                    int first_tile, int num_tokens) {
  const u64 once = read_once();
  const int turns = first_tile < TILES ? (TILES - first_tile + CLUSTERS - 1) / CLUSTERS : 0, total = turns * STEPS;
  auto ask_weight = [&](int i) {
    const u32 slot = i % STAGES, barrier = full + 8 * slot;
    expect_bytes(barrier, W_BYTES + X_PANELS * num_tokens * ROW_BYTES);
    load_weight(ring + slot * STAGE_BYTES, values, (first_tile + i / STEPS * CLUSTERS) * ROWS,
                (rank * STEPS + i % STEPS) * PANELS, barrier, once);
  };
  auto ask_x = [&](int i) {
    const u32 slot = i % STAGES;
#pragma unroll
    for (int p = 0; p < X_PANELS; p++)
      load_x(ring + slot * STAGE_BYTES + W_BYTES + p * X_PANEL_BYTES, x, 0, (rank * STEPS + i % STEPS) * X_PANELS + p,
             full + 8 * slot);
  };
  const int ahead = min(STAGES, total), early = min(EARLY_STAGES, ahead);
  for (int i = 0; i < early; i++) ask_weight(i);
  start_dependents();
  wait_for_prerequisites();
  for (int i = 0; i < early; i++) ask_x(i);
  for (int i = early; i < ahead; i++) ask_weight(i), ask_x(i);  // not before: x would wait behind them
  for (int i = ahead; i < total; i++) {
    wait_for(empty + 8 * (i % STAGES), (i / STAGES & 1) ^ 1);
    ask_weight(i), ask_x(i);
  }
}

// Values of 16 rows and 64 inputs as wgmma takes them: four times 16 inputs.
using Values = u32[4][4];
// Integers of 16 rows and 64 inputs, half `half` of a panel: of the first eight rows and of those behind, then of the
// next 32 inputs. `rows` is where the first row begins.
using Fours = u32[4];
__device__ __forceinline__ void load_fours(Fours& to, u32 rows, int half) {
  const int lane = threadIdx.x % 32;
  load_matrices(to, rows + lane % M_ROWS * PANEL_BYTES + ((half * 2 + lane / M_ROWS ^ lane) & 7) * 16);
}
// Their factors, the second for odd pairs, and summands, of the first eight rows and of the next.
struct OfFours {
  u32 scales[2][2], zeros[2];
};
__device__ __forceinline__ void take_apart(Values& to, const Fours& words, const OfFours& beside) {
#pragma unroll
  for (int word = 0; word < 4; word++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      to[word / 2 * 2 + i / 2][i % 2 * 2 + word % 2] =
          scaled_fours(words[word], i, beside.scales[word % 2][i % 2], beside.zeros[word % 2]);
}
// Floats likewise, from shared memory: `rows` is where the lane's row of the first eight begins, `scales` are four-bit
// floats' scales of the first eight rows and of the next.
__device__ __forceinline__ void take_apart(Values& to, const char* rows, int half, const u32 (&scales)[2]) {
  const int row = threadIdx.x / 4 % 8, quad = threadIdx.x % 4;
#if BITS == 8
  constexpr u32 POWER_120 = 0x7b807b80u;
#pragma unroll
  for (int s = 0; s < 4; s++) {
    const int byte = (half * 4 + s) * 16, chunk = byte / 16;  // of the row
    const char* from = rows + ((chunk ^ row) & 7) * 16 + quad * 2;
#pragma unroll
    for (int i = 0; i < 4; i++)  // of rows and those eight behind, by turns
      to[s][i] = times(first_pair(*(const unsigned short*)(from + i % 2 * 8 * PANEL_BYTES + i / 2 * 8)), POWER_120);
  }
#else
  const u32 my_byte = 0x4440u | quad;  // of a word
#pragma unroll
  for (int chunk = 0; chunk < 2; chunk++)
#pragma unroll
    for (int lower = 0; lower < 2; lower++) {
      const uint4 words = *(const uint4*)(rows + lower * 8 * PANEL_BYTES + ((half * 2 + chunk ^ row) & 7) * 16);
      const u32 of_eights[4] = {words.x, words.y, words.z, words.w};  // each of eight inputs: a lane's are two
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int s = chunk * 2 + i / 2, place = GROUP == 16 ? s : half % 2 * 2 + chunk;  // of the scale
        to[s][i % 2 * 2 + lower] =
            times(pair_of_byte(__byte_perm(of_eights[i], 0, my_byte)), scale_of_byte(scales[lower], place));
      }
    }
#endif
}
// Begins the products with a panel of x; without `add` the sums begin at zero.
__device__ __forceinline__ void multiply(float (&sums)[EIGHTS][4], const Values& values, u32 x, bool add) {
  const u64 first = matrix(x);  // units of 16 bytes
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int s = 0; s < 4; s++) multiply_registers(sums[0], values[s], first + s * 2, add || s);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ float scale_of(u32 word) {
  return SCALE_BYTES == 4 ? __uint_as_float(word) : SCALES_ARE_HALF ? float_of_half(word) : __uint_as_float(word << 16);
}

// The weight's row of a tile's.
__device__ __forceinline__ int weight_row(int tile, int in_tile) {
  const int at = tile * ROWS + in_tile, group = at / M_ROWS * M_ROWS;
  return GATED ? group / 2 + in_tile % 8 + in_tile / 8 % 2 * OUTPUTS : at;
}
// Of a tile's rows, by all warps that multiply. Returns when all have loaded theirs.
__device__ void load_scales(u32* to, const char* scales, const char* zeros, int tile, int rank) {
  for (int i = threadIdx.x - 128; i < ROWS * ROW_SCALES; i += 32 * CONSUMERS) {
    const int in_tile = i / ROW_SCALES;
    const int from =
        weight_row(tile, in_tile) * ROW_SCALES * (GROUP ? SPLIT : 1) + (GROUP ? rank * ROW_SCALES : 0) + i % ROW_SCALES;
    if (tile * ROWS + in_tile >= N) continue;
    u32 word = SCALE_BYTES == 4 || FLOATS ? ((const u32*)scales)[from] : ((const unsigned short*)scales)[from];
    if (INTEGERS) word |= (IN_VALUES ? word : ZEROS ? ((const unsigned char*)zeros)[from] : 8) << 16;
    to[in_tile * SCALE_PITCH + i % ROW_SCALES] = word;
  }
  asm volatile("bar.sync 1, %0;" ::"n"(32 * CONSUMERS) : "memory");
}

// Brings sums of 16 rows and eight tokens, as mma leaves them, to an inbox of this block or of another one.
__device__ __forceinline__ void deliver(float* inbox, float upper0, float upper1, float lower0, float lower1,
                                        u32 barrier, int owner) {
  // Of two neighbours one takes four tokens of the upper row, the other of the lower.
  const int lane = threadIdx.x % 32;
  const bool is_odd = lane % 2;
  const float other0 = __shfl_xor_sync(~0u, is_odd ? upper0 : lower0, 1),
              other1 = __shfl_xor_sync(~0u, is_odd ? upper1 : lower1, 1);
  const float4 four = is_odd ? float4{other0, other1, lower0, lower1} : float4{upper0, upper1, other0, other1};
  float* to = inbox + (lane / 4 + is_odd * 8) * 8 + lane % 4 / 2 * 4;
#if SPLIT > 1
  send(address_of_peer(shared_address(to), owner), four, address_of_peer(barrier, owner));
#else
  *(float4*)to = four;
#endif
}

__device__ __forceinline__ u32 rounded(float first, float second, u32 bias) {
  const u32 both = BIAS ? pack(first + first_of(bias), second + second_of(bias)) : pack(first, second);
  return SQUARED_RELU ? squared_relu(both) : GELU ? gelu(both) : both;
}

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
__launch_bounds__(THREADS, RESIDENT) quantised_tiles(
    const __grid_constant__ TensorMap values, const __grid_constant__ TensorMap x, const char* scales,
    const char* zeros, const float* squares, const u32* residual, const u32* norm_weight, u32* out, u32* scaled,
    float* out_squares, float eps, int num_tokens) {
  extern __shared__ __align__(1024) char memory[];
  const u32 ring = (shared_address(memory) + 1023) & ~1023u;
  char* first_stage = memory + (ring - shared_address(memory));
  Inbox& inbox = *(Inbox*)(first_stage + (INBOX_IN_RING ? 0 : RING_BYTES));
  Shared& shared = *(Shared*)(first_stage + RING_BYTES + INBOX_BYTES);
  const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
  const u32 arrived = shared_address(&shared.arrived), factors_there = shared_address(&shared.factors_there);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % SPLIT, first_tile = blockIdx.x / SPLIT;
  if (threadIdx.x == 0) {
    fetch_map(&values), fetch_map(&x);
    for (int i = 0; i < STAGES; i++) make_barrier(full + 8 * i, 1), make_barrier(empty + 8 * i, CONSUMERS);
    make_barrier(arrived, 1), make_barrier(factors_there, 3);
    publish_barriers();
    expect_bytes(arrived, (ROW_GROUPS - rank + SPLIT - 1) / SPLIT * sizeof(inbox[0]));
  }
  __syncthreads();
#if SPLIT > 1
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
  if (warp < 4) {
    if (WARP_GROUPS > 2 || TOKENS > 64) asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
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
  if (WARP_GROUPS == 3) asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
  if (WARP_GROUPS < 3 && TOKENS > 64) asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
  load_scales(shared.scales, scales, zeros, first_tile, rank);
  wait_for_prerequisites();
  const int consumer = warp - 4, row_warp = consumer / 4 / K_GROUPS * 4 + consumer % 4,
            k_group = consumer / 4 % K_GROUPS, quad = lane % 4;
  // The tile may end before 64 rows do. With sums by groups registers are spilled if that is known beforehand.
  const bool has_rows = ROW_GROUPS % 4 == 0 && !BY_GROUPS || row_warp < ROW_GROUPS;
  int slot = 0, phase = 0;
  for (int tile = first_tile; tile < TILES; tile += CLUSTERS) {
    // A warp finishes every CONSUMERS-th item, in an order in which neighbouring ones are of one place. Their summands
    // are loaded before the products and used after them.
    const auto place_of = [&](int i) { return (i * CONSUMERS + consumer) / EIGHTS; };
    const auto token_of = [&](int i) { return (i * CONSUMERS + consumer) % EIGHTS * 8 + lane / 4; };
    // The first row.
    const auto row_of = [&](int i) { return tile * OUT_ROWS + (place_of(i) * SPLIT + rank) * OUT_GROUP + quad * 2; };
    const auto is_item = [&](int i) { return place_of(i) * SPLIT + rank < ROW_GROUPS && row_of(i) < OUTPUTS; };
    u32 residuals[ITEMS][2] = {};
    if (RESIDUAL)
#pragma unroll
      for (int i = 0; i < ITEMS; i++)
        if (is_item(i) && token_of(i) < num_tokens) {
          const u32* from = residual + (token_of(i) * OUTPUTS + row_of(i)) / 2;
          residuals[i][0] = from[0], residuals[i][1] = from[4];
        }
    if (tile > first_tile) load_scales(shared.scales, scales, zeros, tile, rank);
    const u32* my_scales = shared.scales + (has_rows ? row_warp * M_ROWS + lane / 4 : 0) * SCALE_PITCH;
    float sums[EIGHTS][4] = {}, parts[BUFFERS][EIGHTS][4] = {};
    Values values[2] = {};
    float scale_of_upper = 0.f, scale_of_lower = 0.f;  // of the parts
    int read = -1;                                     // the stage that is free when all products are there
    const auto release = [&] {
      if (read >= 0 && lane == 0) arrive(empty + 8 * read);
      read = -1;
    };
    const auto add_parts = [&](const float (&done)[EIGHTS][4]) {
#pragma unroll
      for (int e = 0; e < EIGHTS && BY_GROUPS; e++) {
        sums[e][0] += done[e][0] * scale_of_upper, sums[e][1] += done[e][1] * scale_of_upper;
        sums[e][2] += done[e][2] * scale_of_lower, sums[e][3] += done[e][3] * scale_of_lower;
      }
      release();
    };
#pragma unroll 1
    for (int first_step = 0; first_step < STEPS; first_step += UNROLLED)
#pragma unroll
    for (int u = 0; u < UNROLLED; u++) {
      const int step = first_step + u;
      if (STEPS % UNROLLED && step >= STEPS) break;
      wait_for(full + 8 * slot, phase);
      const char* rows = first_stage + slot * STAGE_BYTES + (row_warp * M_ROWS + lane / 4) * PANEL_BYTES;
      const u32 of_rows = ring + slot * STAGE_BYTES + row_warp * M_ROWS * PANEL_BYTES,
                of_x = ring + slot * STAGE_BYTES + W_BYTES;
#pragma unroll
      for (int i = 0; i < STEP_GROUPS; i++) {
        const int group = i * K_GROUPS + k_group, panel = group / PANEL_GROUPS, g = group % PANEL_GROUPS;
        u32 upper = 0, lower = 0;
        const u32* of_group = my_scales + (step * PANELS * PANEL_GROUPS + group) * WORDS;
        if (GROUP) upper = of_group[0], lower = of_group[8 * SCALE_PITCH];
        const auto of_fours = [&] {
          if (IN_VALUES)
            return OfFours{{{int4_scale(upper, 0), int4_scale(upper, 1)}, {int4_scale(lower, 0), int4_scale(lower, 1)}},
                           {int4_scaled_zero(upper), int4_scaled_zero(lower)}};
          return OfFours{{{int4_unit(0), int4_unit(1)}, {int4_unit(0), int4_unit(1)}},
                         {int4_zero(upper >> 16), int4_zero(lower >> 16)}};
        };
        const int buffer = (u * STEP_GROUPS + i) % BUFFERS;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          Fours words;
          if (INTEGERS && has_rows) load_fours(words, of_rows + panel * W_PANEL_BYTES, 2 * g + half);
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // this half's values before were read
          if (half && !BY_GROUPS) release();
          if (INTEGERS && has_rows) take_apart(values[half], words, of_fours());
          if (!INTEGERS && has_rows) {
            const bool is_next = half && WORDS == 2;
            take_apart(values[half], rows + panel * W_PANEL_BYTES, 2 * g + half,
                       {is_next ? of_group[1] : upper, is_next ? of_group[8 * SCALE_PITCH + 1] : lower});
          }
          if (half == 0 && BY_GROUPS) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
          if (half == 0 && BY_GROUPS && BUFFERS == 1) add_parts(parts[0]);
          multiply(BY_GROUPS ? parts[buffer] : sums, values[half], of_x + (2 * group + half) * X_PANEL_BYTES,
                   !BY_GROUPS || half);
          if (half == 0 && BUFFERS == 2) add_parts(parts[(buffer + 1) % BUFFERS]);  // of the group before
        }
        if (BY_GROUPS) scale_of_upper = scale_of(upper), scale_of_lower = scale_of(lower);
      }
      read = slot;
      if (++slot == STAGES) slot = 0, phase ^= 1;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    add_parts(parts[(STEPS * STEP_GROUPS - 1) % BUFFERS]);
#if SPLIT > 1
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");  // the others' barriers are made
#endif
    // All have read the last stage.
    if (INBOX_IN_RING) asm volatile("bar.sync 1, %0;" ::"n"(32 * CONSUMERS) : "memory");
    if (has_rows) {
      const auto scale_of_row = [&](int in_tile, int at) {
        const bool is_there = tile * ROWS + in_tile < N;
        const float factor = FACTORS && is_there ? ((const float*)zeros)[weight_row(tile, in_tile)] : 1.f;
        return GROUP ? OUT_FACTOR * factor : scale_of(my_scales[at]);
      };
      const float upper = scale_of_row(row_warp * M_ROWS + lane / 4, 0),
                  lower = scale_of_row(row_warp * M_ROWS + lane / 4 + 8, 8 * SCALE_PITCH);
#pragma unroll
      for (int e = 0; e < EIGHTS; e++) {
        const float* sum = sums[e];
        float* to = inbox[row_warp / SPLIT][e][rank * K_GROUPS + k_group];
        deliver(to, sum[0] * upper, sum[1] * upper, sum[2] * lower, sum[3] * lower, arrived, row_warp % SPLIT);
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
        for (int j = 0; j < 4; j++) sum[j] += inbox[place][e][source][(quad * 2 + j % 2 + j / 2 * 8) * 8 + lane / 4];
      u32 weights[2] = {};
      if (NEXT_BLOCKS || BIAS) weights[0] = norm_weight[first / 2], weights[1] = norm_weight[first / 2 + 4];
      u32 low = rounded(sum[0] * factor, sum[1] * factor, weights[0]),
          high = rounded(sum[2] * factor, sum[3] * factor, weights[1]);
      const bool is_there = token < num_tokens;
      const int at = (token * OUTPUTS + first) / 2;
      if (GATED) {
        if (is_there) out[at] = silu_times(low, high);
        continue;
      }
      if (RESIDUAL) low = add(residuals[i][0], low), high = add(residuals[i][1], high);
      if (is_there) out[at] = low, out[at + 4] = high;
      if (NEXT_BLOCKS) {
        if (is_there)
          scaled[at] = times_norm_weight(low, weights[0], PLUS_ONE),
          scaled[at + 4] = times_norm_weight(high, weights[1], PLUS_ONE);
        const float squares_of_group = sum_of_lanes(sum_of_squares(low) + sum_of_squares(high), 4);
        store_squares(is_there && quad == 0, out_squares, token, first, squares_of_group);
      }
    }
    // All have read the inbox.
    if (tile + CLUSTERS < TILES) asm volatile("bar.sync 1, %0;" ::"n"(32 * CONSUMERS) : "memory");
  }
}
