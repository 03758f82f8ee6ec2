// A linear of up to 8 or 16 tokens on Hopper whose weight is float8_e4m3fn, four-bit integers or four-bit floats:
// out = x . weight^T, with the norm before it and the ops behind it.
//
// With 8-bit or 4-bit weights the read takes half or a quarter of the time, so everything else
// costs relatively 2 to 4 times as much. So a block takes less than half of a multiprocessor, and lets the next
// kernel in before it waits for x: the next kernel's blocks ask for their own weight meanwhile. Let in at a block's
// last request, a layer's linears took 79 µs in place of 68.
//
// TMA loads boxes of 16 rows by PIECE inputs into a ring of STAGES, EARLY_STAGES at a time until x is there
// (linear.py). A layer's linears in fp8 took 54 µs at 8 tokens with the whole ring loaded at once, and take 50 so. x
// stays in registers, in the order of a lane's 16 bytes of the weight. The warps divide a piece's inputs, and each
// multiplies its own with every row that the block takes. Where x has more inputs than registers hold, PASSES go over
// all rows, or the SPLIT blocks of a cluster divide them. Of up to 8 tokens a pass loads the inputs of the next one,
// which would wait for them while the ring is full. Sums of the warps are added up by one of them, in turns, and
// finished at the end; meanwhile the others go on, two groups of rows ahead at most. Asking for a stage takes half as
// many instructions as multiplying one, so that goes in turns too.
//
// Defined by few.py: TOKENS (8 or 16), N outputs (of a gated one: gate and up rows), K, BITS (of a value: 8 or 4),
// SPLIT, PASSES, CLUSTERS, WARPS, RESIDENT (blocks of a multiprocessor, of registers), PIECE (inputs of a row in a
// stage), STAGES, EARLY_STAGES, SHARED_BYTES, GROUP (inputs that share a scale: 128, of floats of four bits 32 or 16;
// 0: all of a row, of fp8), SCALE_BYTES, SCALES_ARE_HALF (float16; else of two bytes bfloat16), ZEROS (there are zero
// points, of a byte), FLOATS (of four bits), FACTORS (`zeros` are factors of rows, in float32), NORM_BLOCKS (sums of
// squares a token to read; 0: no norm), GATED, RESIDUAL, NEXT_BLOCKS (sums of squares a token to leave), PLUS_ONE (the
// next norm's weight has 1 added), BIAS (in the place of the norm's weight), SQUARED_RELU, GELU.

constexpr int ROWS = 16, EIGHT = 8, EIGHTS = TOKENS / EIGHT;  // of m16n8k16, and of tokens
constexpr int OUT_ROWS = GATED ? ROWS / 2 : ROWS, OUTPUTS = GATED ? N / 2 : N, GROUPS = N / ROWS;
constexpr int IN_BYTE = 8 / BITS;  // values
// A swizzled row of shared memory.
constexpr int PANEL = 128, PANEL_INPUTS = PANEL * IN_BYTE, PANEL_BYTES = ROWS * PANEL;
constexpr int PANELS = PIECE / PANEL_INPUTS;
constexpr int MY_K = K / SPLIT, MY_PANELS = MY_K / PANEL_INPUTS;                                       // a block's
constexpr int CHUNKS = (MY_K + PIECE * PASSES - 1) / (PIECE * PASSES), PASS_PANELS = CHUNKS * PANELS;  // of a pass
// Inputs of a step; a warp's steps in a piece.
constexpr int STEP = 64 * IN_BYTE, STEPS = (PIECE / STEP + WARPS - 1) / WARPS;
constexpr int INPUTS = STEP / 4;                                               // of a lane and step: 16 bytes of a row
constexpr int WITH_A_SCALE = GROUP ? GROUP : K;  // inputs
constexpr int ROW_GROUPS = GROUP ? PIECE / WITH_A_SCALE : 0;  // of a row in a stage
constexpr int VALUE_BYTES = ROWS * PIECE / IN_BYTE, OF_SCALES = ROWS * ROW_GROUPS * SCALE_BYTES,
              OF_ZEROS = ZEROS ? ROWS * ROW_GROUPS : 0;
constexpr int BESIDE_BYTES = (OF_SCALES + OF_ZEROS + 15) / 16 * 16;  // of a stage, behind the values of all
constexpr int RING_BYTES = STAGES * (VALUE_BYTES + BESIDE_BYTES);
// Groups of a cluster, of a block.
constexpr int TURNS = (GROUPS + CLUSTERS - 1) / CLUSTERS, PLACES = (TURNS + SPLIT - 1) / SPLIT;
// Outputs are stored by twos.
constexpr int SUMS = ROWS * TOKENS, HALVES = OUT_ROWS / 2;
// Factors of x, twice, and of sums: of 2^120, an fp8 value's.
constexpr u32 X_FACTOR = 0x5f805f80u;
constexpr float OUT_FACTOR = BITS == 8 ? (float)(1ull << 56) : FLOATS ? E2M1_FACTOR : fours_factor();
constexpr bool INTEGERS = BITS == 4 && !FLOATS, OF_ROWS = GROUP == 0 || FACTORS;  // rows have a scale or factor each
static_assert(K % (SPLIT * PANEL_INPUTS) == 0 && PIECE % PANEL_INPUTS == 0 && CLUSTERS <= GROUPS,
              "whole panels, and work for all");
static_assert(GROUP == 0 && BITS == 8 || GROUP == 128 && STEP <= GROUP && !FLOATS ||
                  FLOATS && GROUP == (FACTORS ? 16 : 32),
              "a step or a part of a lane has one scale");
static_assert(BITS == 4 || SCALE_BYTES == 4 && !ZEROS, "fp8 has scales in float32");
static_assert(!FLOATS || BITS == 4 && SCALE_BYTES == 1 && !ZEROS, "floats of four bits have scales of a byte");
static_assert(NEXT_BLOCKS == 0 || NEXT_BLOCKS == GROUPS, "a sum of squares of each group");
static_assert(WARPS % 2 == 0, "a warp's steps are all of one half");
static_assert(NORM_BLOCKS == 0 || NORM_BLOCKS % 4 == 0 && WARPS >= EIGHT, "a warp has a token's sums, four at a time");
static_assert(TOKENS % EIGHT == 0, "whole products");
static_assert(STAGES >= 2, "a stage is asked for when the next one has been read");

// A pass loads the inputs of the next one where there are registers for both.
constexpr bool IS_AHEAD = PASSES > 1 && EIGHTS == 1 && CHUNKS * STEPS * INPUTS / 2 <= 32;
// Unused arrays have the least room.
constexpr bool IS_UNSENT = SPLIT > 1 && PASSES > 1, HAS_WEIGHTS = NEXT_BLOCKS || BIAS;
// Left to itself the compiler computes such a value again for each stage.
__device__ __forceinline__ u32 kept(u32 v) {
  u32 copy;
  asm volatile("mov.b32 %0, %1;" : "=r"(copy) : "r"(v));
  return copy;
}

struct Shared {
  float sums[2][WARPS][SUMS];         // of the rows that the block works at, and of those before
  float inbox[PLACES][SPLIT][SUMS];   // of the rows that it finishes, from every block of the cluster
  float unsent[IS_UNSENT ? TURNS : 1][IS_UNSENT ? SUMS : 4];  // of all rows, until the last pass
  u32 residuals[RESIDUAL ? PLACES : 1][RESIDUAL ? TOKENS : 1][RESIDUAL ? 8 : 2];  // two outputs each
  float scales[OF_ROWS ? PLACES : 1][OF_ROWS ? ROWS : 2];           // of rows that have one
  float totals[INTEGERS ? WARPS * CHUNKS * STEPS : 1][TOKENS];  // of a warp's inputs, by steps
  u32 weights[HAS_WEIGHTS ? PLACES : 1][8];  // of the norm, or biases
  float factors[TOKENS];
  u64 full[STAGES], empty[STAGES], arrived[SPLIT > 1 ? PLACES : 1];
  u64 taken[2];  // sums of all warps have been added up
};
static_assert(1023 + RING_BYTES + sizeof(Shared) <= SHARED_BYTES, "as it is launched, and what alignment costs");

__device__ __forceinline__ bool is_step(int step) { return PIECE / STEP % WARPS == 0 || step < PIECE / STEP; }

__device__ __forceinline__ void load_values(u32 to, const TensorMap* map, int group, int panel, u32 barrier,
                                            u64 policy) {
#if GATED  // eight rows of gate, then eight of up
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %2, %2, %3, %4}], [%5], %6;" ::"r"(to), "l"(map), "r"(0), "r"(group), "r"(panel), "r"(barrier),
      "l"(policy) : "memory");
#else
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(map), "r"(0), "r"(group * ROWS), "r"(panel), "r"(barrier),
      "l"(policy) : "memory");
#endif
}

// Copies what a stage's rows have of [N, K / GROUP], SIZE bytes each: by all lanes of a warp. Past the block's last
// input are zeros.
template <int SIZE, typename RowOf>
__device__ __forceinline__ void copy_groups(u32 to, const char* from, int rank, int panel, const RowOf& row_of) {
  constexpr int STAGE_ROW = ROW_GROUPS * SIZE, MINE = MY_K / WITH_A_SCALE * SIZE, BOTH = STAGE_ROW | MINE;
  constexpr int COPY = BOTH % 16 == 0 ? 16 : BOTH % 8 == 0 ? 8 : 4;
  static_assert(BOTH % COPY == 0, "copies are of four bytes at least");
  const int begin = panel * (STAGE_ROW / PANELS);
#pragma unroll
  for (int i = threadIdx.x % 32 * COPY; i < ROWS * STAGE_ROW; i += 32 * COPY) {
    const int at = begin + i % STAGE_ROW, bytes = at < MINE ? COPY : 0;
    const char* source = from + (u64)row_of(i / STAGE_ROW) * (MINE * SPLIT) + rank * MINE + (bytes ? at : 0);
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 ::"r"(to + i), "l"(source), "n"(COPY), "r"(bytes) : "memory");
  }
}

// INPUTS inputs of a token, in the order in which a lane takes values apart.
struct Inputs {
  u32 pairs[INPUTS / 2];
};
// Leaves also the sum of a step's inputs of a lane's two tokens at `totals`, if it is needed: in registers it would be
// two more a step.
__device__ __forceinline__ Inputs prepared(const uint4 (&raw)[INPUTS / 8], float* totals) {
  Inputs v;
#pragma unroll
  for (int i = 0; i < INPUTS / 8; i++) {
    const u32 words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (INTEGERS)
        v.pairs[j * 4 + i] = inputs_of_fours(words[j], i);
      else
        v.pairs[i * 4 + j] = FLOATS ? inputs_apart(words, j) : times(words[j], X_FACTOR);
  }
  if (INTEGERS) {
    constexpr u32 EVEN = one_of_fours(0), ODD = one_of_fours(1);
    float total[4] = {};
#pragma unroll
    for (int j = 0; j < INPUTS / 4; j++) add_product(total, EVEN, EVEN, ODD, ODD, v.pairs[2 * j], v.pairs[2 * j + 1]);
    constexpr float FACTOR = ZEROS ? -1.f : -8.f;  // what is taken off where all have the same zero point
    if (threadIdx.x % 32 < 4) *(float2*)totals = {FACTOR * total[0], FACTOR * total[1]};
  }
  return v;
}
// Sums of 16 rows and all tokens, as products leave them.
using Sums = float[EIGHTS][4];
__device__ __forceinline__ void add_products(Sums& sums, u32 a0, u32 a1, u32 a2, u32 a3, const Inputs (&v)[EIGHTS],
                                             int pair) {
#pragma unroll
  for (int e = 0; e < EIGHTS; e++) add_product(sums[e], a0, a1, a2, a3, v[e].pairs[pair], v[e].pairs[pair + 1]);
}
// Of four bytes of two rows.
__device__ __forceinline__ void multiply(Sums& sums, u32 upper, u32 lower, const Inputs (&v)[EIGHTS], int j) {
  if (BITS == 8) {
    add_products(sums, first_pair(upper), first_pair(lower), second_pair(upper), second_pair(lower), v, 2 * j);
  } else {
#pragma unroll
    for (int i = 0; i < 4; i += 2)
      add_products(sums, pair_of_fours(upper, i), pair_of_fours(lower, i), pair_of_fours(upper, i + 1),
                   pair_of_fours(lower, i + 1), v, 4 * j + i);
  }
}
// The same of floats of four bits and of the scales of their rows.
__device__ __forceinline__ void multiply_floats(Sums& sums, u32 upper, u32 lower, u32 of_upper, u32 of_lower,
                                                const Inputs (&v)[EIGHTS], int j) {
  const auto pair = [](u32 values, int i, u32 scale) { return times(pair_of_e2m1(values >> 4 * i), scale); };
#pragma unroll
  for (int i = 0; i < 4; i += 2)
    add_products(sums, pair(upper, i, of_upper), pair(lower, i, of_lower), pair(upper, i + 1, of_upper),
                 pair(lower, i + 1, of_lower), v, 4 * j + i);
}
__device__ __forceinline__ float scale_at(const char* scales, int i) {
  if (SCALE_BYTES == 4 || FLOATS) return ((const float*)scales)[i];
  const unsigned short bits = ((const unsigned short*)scales)[i];
  return SCALES_ARE_HALF ? float_of_half(bits) : __uint_as_float((u32)bits << 16);
}

__device__ __forceinline__ u32 rounded(float first, float second, u32 bias) {
  const u32 both = BIAS ? pack(first + first_of(bias), second + second_of(bias)) : pack(first, second);
  return SQUARED_RELU ? squared_relu(both) : GELU ? gelu(both) : both;
}

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
__launch_bounds__(32 * WARPS, RESIDENT) quantised_linear(
    const __grid_constant__ TensorMap values, const char* x, const char* scales, const char* zeros,
    const float* squares, const u32* residual, const u32* norm_weight, u32* out, u32* scaled, float* out_squares,
    float eps, int num_tokens) {
  extern __shared__ __align__(1024) char memory[];
  const u32 ring = (shared_address(memory) + 1023) & ~1023u;
  const char* first_stage = memory + (ring - shared_address(memory));
  const char* first_beside = first_stage + STAGES * VALUE_BYTES;
  Shared& shared = *(Shared*)(first_stage + RING_BYTES);
  const u32 full = shared_address(shared.full), empty = shared_address(shared.empty),
            arrived = shared_address(shared.arrived);
  const u32 taken = shared_address(shared.taken);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4;
  const int rank = blockIdx.x % SPLIT, first_group = blockIdx.x / SPLIT;
  if (threadIdx.x == 0) {
    fetch_map(&values);
    for (int i = 0; i < STAGES; i++) make_barrier(full + 8 * i, GROUP ? 33 : 1), make_barrier(empty + 8 * i, WARPS);
    for (int i = 0; i < PLACES && SPLIT > 1; i++) make_barrier(arrived + 8 * i, 1);
    for (int i = 0; i < 2; i++) make_barrier(taken + 8 * i, 1);
    publish_barriers();
    for (int i = 0; i < PLACES && SPLIT > 1; i++) expect_bytes(arrived + 8 * i, SPLIT * SUMS * 4);
  }
  __syncthreads();
#if SPLIT > 1
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif

  // Stages are asked for by all lanes of a warp: of a pass all groups, of a group all pieces. Past the last input come
  // zeros.
  const auto row_of = [&](int group, int i) {
    return GATED ? group * OUT_ROWS + i % OUT_ROWS + i / OUT_ROWS * OUTPUTS : group * ROWS + i;
  };
  const int turns = (GROUPS - first_group + CLUSTERS - 1) / CLUSTERS;
  const int stages = PASSES * CHUNKS * turns;
  struct Place {
    int group, panel;  // of the block's inputs
  };
  const auto place_of = [&](int stage) {
    int turn = stage / CHUNKS, panel = stage % CHUNKS * PANELS;
#pragma unroll
    for (int pass = 1; pass < PASSES; pass++)
      if (turn >= turns) turn -= turns, panel += PASS_PANELS;
    return Place{first_group + turn * CLUSTERS, panel};
  };
  const auto ask = [&](int stage, int slot) {
    if (stage >= stages) return;
    const Place at = place_of(stage);
    const u32 barrier = full + 8 * slot;
    if (lane == 0) {
      expect_bytes(barrier, VALUE_BYTES);
      load_values(ring + slot * VALUE_BYTES, &values, at.group, rank * MY_PANELS + at.panel, barrier, read_once());
    }
#if GROUP
    {
      const u32 to = ring + STAGES * VALUE_BYTES + slot * BESIDE_BYTES;
      const auto row_in_stage = [&](int i) { return row_of(at.group, i); };
      copy_groups<SCALE_BYTES>(to, scales, rank, at.panel, row_in_stage);
#if ZEROS
      copy_groups<1>(to + OF_SCALES, zeros, rank, at.panel, row_in_stage);
#endif
      // Arrives when the lane's copies have: one of the arrivals that the barrier was made for.
      asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
    }
#endif
  };
  start_dependents();
  for (int i = warp; i < min(STAGES, stages); i += WARPS) {
    if (EARLY_STAGES < STAGES && i >= EARLY_STAGES) wait_for(full + 8 * (i - EARLY_STAGES), 0);
    ask(i, i);
  }

  // What finishes the rows that are the block's: place p is the cluster's turn p * SPLIT + rank.
  const auto group_of = [&](int place) { return first_group + (place * SPLIT + rank) * CLUSTERS; };
  if (OF_ROWS)
    for (int i = threadIdx.x; i < PLACES * ROWS; i += 32 * WARPS)
      if (group_of(i / ROWS) < GROUPS)
        shared.scales[i / ROWS][i % ROWS] = scale_at(FACTORS ? zeros : scales, row_of(group_of(i / ROWS), i % ROWS));
  if (HAS_WEIGHTS)
    for (int i = threadIdx.x; i < PLACES * HALVES; i += 32 * WARPS)
      if (group_of(i / HALVES) < GROUPS)
        shared.weights[i / HALVES][i % HALVES] = norm_weight[group_of(i / HALVES) * HALVES + i % HALVES];
  wait_for_prerequisites();
  // So that a quarter of a warp reads other banks each, a lane's row is not lane / 4 but has the bits in another order.
  const int row = lane / 8 | (lane / 4 & 1) << 2;
  // In one of a panel's halves; each half is a step.
  const u32 place_of_lane = kept(warp / 2 * PANEL_BYTES + row * PANEL + ((quad + warp % 2 * 4 ^ row) & 7) * 16);
  int slot = 0, phase = 0, nth = 0;  // turn of all passes
  Inputs xs[CHUNKS][STEPS][EIGHTS];
  constexpr int MY_SCALES = GROUP == 16 ? 2 : 1;  // of a lane's inputs of a row
  const u32 place_of_scales =
      GROUP ? kept(row * ROW_GROUPS + (FLOATS ? (warp * 4 + quad) * MY_SCALES : warp * STEP / WITH_A_SCALE)) : 0;
  float* my_totals = shared.totals[0] + (INTEGERS ? kept(warp * CHUNKS * STEPS * TOKENS + quad * 2) : 0);
  uint4 raw[CHUNKS][STEPS][EIGHTS][INPUTS / 8];  // of a pass
  const auto load_inputs = [&](int pass) {         // all are asked for before any is needed
    const int begin = pass * CHUNKS * PIECE;
    const char* my_x = x + ((u64)(lane / 4) * K + rank * MY_K + begin + quad * INPUTS) * 2;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        const int step = s * WARPS + warp, at = c * PIECE + step * STEP;
        const bool is_input = (PASSES * CHUNKS * PIECE == MY_K || begin + at < MY_K) && is_step(step);
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
          const bool is_there = is_input && e * EIGHT + lane / 4 < num_tokens;
          const uint4* from = (const uint4*)(my_x + ((u64)(e * EIGHT) * K + at) * 2);
#pragma unroll
          for (int h = 0; h < INPUTS / 8; h++) raw[c][s][e][h] = is_there ? from[h] : uint4{0, 0, 0, 0};
        }
      }
  };
  if (IS_AHEAD) load_inputs(0);
#pragma unroll 1
  for (int pass = 0; pass < PASSES; pass++) {
    if (!IS_AHEAD) load_inputs(pass);
    if (pass == 0) {
      float of_norm[EIGHTS] = {};  // a warp's tokens are eight apart
#pragma unroll
      for (int e = 0; e < EIGHTS; e++)
        if (NORM_BLOCKS && warp < EIGHT && e * EIGHT + warp < num_tokens)
#pragma unroll
          for (int j = lane * 4; j < NORM_BLOCKS; j += 128) {
            const float4 v = *(const float4*)(squares + (e * EIGHT + warp) * NORM_BLOCKS + j);
            of_norm[e] += v.x + v.y + v.z + v.w;
          }
      if (RESIDUAL)
#pragma unroll 1  // else what it needs is kept in registers from pass to pass
        for (int i = threadIdx.x; i < PLACES * TOKENS * HALVES; i += 32 * WARPS) {
          const int place = i / HALVES / TOKENS, t = i / HALVES % TOKENS;
          if (group_of(place) < GROUPS && t < num_tokens)
            shared.residuals[place][t][i % HALVES] =
                residual[t * (OUTPUTS / 2) + group_of(place) * HALVES + i % HALVES];
        }
#pragma unroll
      for (int e = 0; e < EIGHTS && NORM_BLOCKS; e++) {
        const float sum = sum_of_lanes(of_norm[e], 32);
        if (lane == 0 && warp < EIGHT) shared.factors[e * EIGHT + warp] = rsqrtf(sum / K + eps);
      }
#if SPLIT > 1
      asm volatile("barrier.cluster.wait.acquire;" ::: "memory");  // the others' barriers are made
#endif
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int e = 0; e < EIGHTS; e++)
          xs[c][s][e] = prepared(raw[c][s][e], my_totals + (c * STEPS + s) * TOKENS + e * EIGHT);
    __syncwarp();
    if (IS_AHEAD && pass + 1 < PASSES) load_inputs(pass + 1);
#pragma unroll 1
    for (int turn = 0; turn < turns; turn++, nth++) {
      const int buffer = nth % 2;
      if (nth >= 2) wait_for(taken + 8 * buffer, (nth / 2 & 1) ^ 1);  // the sums before the last ones
      Sums even = {}, odd = {};
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        wait_for(full + 8 * slot, phase);
        const char *stage = first_stage + slot * VALUE_BYTES, *scales_of_stage = first_beside + slot * BESIDE_BYTES;
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
          const int step = s * WARPS + warp;
          if (!is_step(step)) continue;
          const char* from = stage + s * (WARPS / 2 * PANEL_BYTES) + place_of_lane;
          const uint4 upper = *(const uint4*)from, lower = *(const uint4*)(from + 8 * PANEL);
          const auto& v = xs[c][s];
          if (FLOATS) {
            const unsigned char* of_upper =
                (const unsigned char*)scales_of_stage + place_of_scales + s * WARPS * 4 * MY_SCALES;
            const unsigned char* of_lower = of_upper + 8 * ROW_GROUPS;
            const u32 uppers = MY_SCALES == 2 ? *(const unsigned short*)of_upper : *of_upper;
            const u32 lowers = MY_SCALES == 2 ? *(const unsigned short*)of_lower : *of_lower;
            const u32 first[2] = {scale_of_byte(uppers, 0), scale_of_byte(lowers, 0)};
            const u32 second[2] = {scale_of_byte(uppers, MY_SCALES - 1), scale_of_byte(lowers, MY_SCALES - 1)};
            multiply_floats(even, upper.x, lower.x, first[0], first[1], v, 0),
                multiply_floats(odd, upper.y, lower.y, first[0], first[1], v, 1);
            multiply_floats(even, upper.z, lower.z, second[0], second[1], v, 2),
                multiply_floats(odd, upper.w, lower.w, second[0], second[1], v, 3);
          } else if (GROUP) {
            const u32 of_upper = place_of_scales + s * WARPS * STEP / WITH_A_SCALE,
                      of_lower = of_upper + 8 * ROW_GROUPS;
            Sums part = {}, other = {};  // so that fewer products wait for each other
            if (INTEGERS) {              // zero points are taken off
              const unsigned char* zeros_of_stage = (const unsigned char*)(scales_of_stage + OF_SCALES);
              const float of_uppers = ZEROS ? zeros_of_stage[of_upper] : 1.f,
                          of_lowers = ZEROS ? zeros_of_stage[of_lower] : 1.f;
#pragma unroll
              for (int e = 0; e < EIGHTS; e++) {
                const float2 totals = *(const float2*)(my_totals + (c * STEPS + s) * TOKENS + e * EIGHT);
                part[e][0] = of_uppers * totals.x, part[e][1] = of_uppers * totals.y;
                part[e][2] = of_lowers * totals.x, part[e][3] = of_lowers * totals.y;
              }
            }
            multiply(part, upper.x, lower.x, v, 0), multiply(other, upper.y, lower.y, v, 1);
            multiply(part, upper.z, lower.z, v, 2), multiply(other, upper.w, lower.w, v, 3);
            const float scale_of_upper = scale_at(scales_of_stage, of_upper),
                        scale_of_lower = scale_at(scales_of_stage, of_lower);
#pragma unroll
            for (int e = 0; e < EIGHTS; e++)
#pragma unroll
              for (int i = 0; i < 4; i++)
                even[e][i] += (part[e][i] + other[e][i]) * (i < 2 ? scale_of_upper : scale_of_lower);
          } else {
            multiply(even, upper.x, lower.x, v, 0), multiply(odd, upper.y, lower.y, v, 1);
            multiply(even, upper.z, lower.z, v, 2), multiply(odd, upper.w, lower.w, v, 3);
          }
        }
        __syncwarp();
        if (lane == 0) arrive(empty + 8 * slot);
        const int stage_number = nth * CHUNKS + c;
        // The stage before: other warps are done with it, or soon will be.
        if (stage_number && stage_number % WARPS == warp) {
          const int last = slot ? slot - 1 : STAGES - 1;
          wait_for(empty + 8 * last, slot ? phase : phase ^ 1);
          ask(stage_number - 1 + STAGES, last);
        }
        if (++slot == STAGES) slot = 0, phase ^= 1;
      }
      auto& all = shared.sums[buffer];
#pragma unroll
      for (int e = 0; e < EIGHTS; e++) {
        float* mine = all[warp] + row * TOKENS + e * EIGHT + quad * 2;
        *(float2*)mine = {even[e][0] + odd[e][0], even[e][1] + odd[e][1]};
        *(float2*)(mine + 8 * TOKENS) = {even[e][2] + odd[e][2], even[e][3] + odd[e][3]};
      }
      // With the barrier's number in a register a block would have all 16.
      if (warp != ((nth + 1) * CHUNKS + WARPS / 2) % WARPS) {  // none that asks for one of the next stages
        if (buffer)
          asm volatile("bar.arrive 2, %0;" ::"n"(32 * WARPS) : "memory");
        else
          asm volatile("bar.arrive 1, %0;" ::"n"(32 * WARPS) : "memory");
        continue;
      }
      if (buffer)
        asm volatile("bar.sync 2, %0;" ::"n"(32 * WARPS) : "memory");
      else
        asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");
      const int owner = turn % SPLIT;
#pragma unroll
      for (int e = 0; e < EIGHTS; e++) {
        const int at = e * 128 + lane * 4;
        float* to = shared.inbox[turn / SPLIT][rank] + at;
        float* before = IS_UNSENT ? shared.unsent[turn] + at : to;
        float4 sum = {0.f, 0.f, 0.f, 0.f};
        if (pass) sum = *(const float4*)before;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
          const float4 part = *(const float4*)(all[w] + at);
          sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        if (SPLIT == 1 || pass < PASSES - 1)
          *(float4*)before = sum;
        else
          send(address_of_peer(shared_address(to), owner), sum, address_of_peer(arrived + turn / SPLIT * 8, owner));
      }
      __syncwarp();
      if (lane == 0) arrive(taken + 8 * buffer);
    }
  }
  __syncthreads();

  // Four outputs of a token by a lane; of a gated one two gates and their ups.
  for (int place = warp; place < PLACES && group_of(place) < GROUPS; place += WARPS) {
    const int group = group_of(place);
#if SPLIT > 1
    wait_for(arrived + 8 * place, 0);
#endif
    uint2 weights = {0, 0};
    if (HAS_WEIGHTS) weights = *(const uint2*)(shared.weights[place] + quad * 2);
#pragma unroll
    for (int e = 0; e < EIGHTS; e++) {
      const int token = e * EIGHT + lane / 4;
      const bool is_there = token < num_tokens;
      const float factor = OUT_FACTOR * (NORM_BLOCKS ? shared.factors[token] : 1.f);
      float sums[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = GATED ? quad * 2 + i % 2 + i / 2 * OUT_ROWS : quad * 4 + i;
        sums[i] = 0.f;
#pragma unroll
        for (int peer = 0; peer < SPLIT; peer++) sums[i] += shared.inbox[place][peer][r * TOKENS + token];
        sums[i] *= factor * (OF_ROWS ? shared.scales[place][r] : 1.f);
      }
      u32 low = rounded(sums[0], sums[1], weights.x), high = rounded(sums[2], sums[3], weights.y);
      const int at = token * (OUTPUTS / 2) + group * HALVES + quad * (GATED ? 1 : 2);
      if (GATED) {
        if (is_there) out[at] = silu_times(low, high);
        continue;
      }
      if (RESIDUAL) {
        const uint2 residuals = *(const uint2*)(shared.residuals[place][token] + quad * 2);
        low = add(residuals.x, low), high = add(residuals.y, high);
      }
      if (is_there) *(uint2*)(out + at) = uint2{low, high};
      if (NEXT_BLOCKS) {
        if (is_there)
          *(uint2*)(scaled + at) =
              uint2{times_norm_weight(low, weights.x, PLUS_ONE), times_norm_weight(high, weights.y, PLUS_ONE)};
        const float of_group = sum_of_lanes(sum_of_squares(low) + sum_of_squares(high), 4);
        store_if(is_there && quad == 0, out_squares + token * NEXT_BLOCKS + group, of_group);
      }
    }
  }
}
