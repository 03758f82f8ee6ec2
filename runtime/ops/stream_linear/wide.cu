// A linear of 129 to 256 tokens on Hopper, in fp8 of 8 to 256: out = x . weight^T, with the norm before it and the ops
// behind it.
//
// With so many tokens the time is no longer the weight's read alone. The tensor cores take about as long, and with
// small tiles a block's loads to shared memory and reads there take longer than either. So 64 rows of the weight are
// the rows of wgmma and tokens its columns, any multiple of 8. At most 15 missing tokens are multiplied; with tokens as
// rows it would be up to 63. The SPLIT blocks of a cluster divide the inputs of a tile and send each other sums. Each
// finishes every SPLIT-th unit of tokens. So a tile is twice as large as in one wave of undivided tiles.
//
// As in tiles.cu, a block fills its shared memory with the weight before the kernel that makes x has ended, in fp8 no
// more than EARLY_STAGES (linear.py). Weight and x have a ring each, as x, which the L2 holds, arrives sooner. One warp
// loads, three compute the norm's factors, and each of the other GROUPS of four warps multiplies 64 rows. Undivided
// tiles a block takes in turns.
//
// Defined by wide.py: N outputs (of a gated one: gate and up rows), K, GROUPS, TOKEN_TILES, TOKENS of a tile (a
// multiple of 8) in PARTS that are multiplied one after another, SPLIT, BLOCKS, NUM_THREADS and SHARED_BYTES of a
// block, REGISTER_THREADS that could have all registers, W_STAGES and X_STAGES of the rings, EARLY_STAGES of the
// weight's, NORM_BLOCKS (sums of squares a token to read; 0: no norm), GATED, RESIDUAL, NEXT_BLOCKS (sums of squares a
// token to leave), PLUS_ONE (the next norm's weight has 1 added), BIAS (in the place of the norm's weight),
// SQUARED_RELU, GELU, SCALED, and `multiply_add_all`, which adds products to TOKENS / PARTS / 2 sums of a thread.
//
// SCALED: weight and x are float8_e4m3fn with a float32 scale a row of the weight (in the place of the norm's weight)
// and a token (in the place of sums of squares); no other ops are around the linear.

constexpr int GROUP_ROWS = 64, WARP_ROWS = 16, ROWS = GROUPS * GROUP_ROWS;
constexpr int CONSUMERS = 4 * GROUPS, THREADS = 32 * (4 + CONSUMERS);
constexpr bool TAKES_ALL = REGISTER_THREADS == THREADS;  // of the registers, which are then divided anew
constexpr int OUTPUTS = GATED ? N / 2 : N, WARP_OUTPUTS = GATED ? WARP_ROWS / 2 : WARP_ROWS;
constexpr int ROW_TILES = (N + ROWS - 1) / ROWS, TILES = ROW_TILES * TOKEN_TILES, CLUSTERS = BLOCKS / SPLIT;
constexpr int W_BYTES = ROWS * ROW_BYTES, X_BYTES = TOKENS * ROW_BYTES,
              RING_BYTES = W_STAGES * W_BYTES + X_STAGES * X_BYTES;
constexpr int STEPS = K / SPLIT / COLUMNS;  // stages of a tile, a block's
constexpr int SUMS = TOKENS / 2;            // of a thread: of each 8 tokens four, of two tokens and two rows
// A warp's outputs transposed at a time: 8 of a token for each lane.
constexpr int LANE_OUTPUTS = 8, UNIT_TOKENS = 32 * LANE_OUTPUTS / WARP_OUTPUTS,
              UNITS = (TOKENS + UNIT_TOKENS - 1) / UNIT_TOKENS;
constexpr int OWN_UNITS = (UNITS + SPLIT - 1) / SPLIT, UNIT_BLOCKS = UNIT_TOKENS / 8;
static_assert(SPLIT == 1 || SPLIT == 2 && TILES == CLUSTERS, "what the other block sends is of one tile");
static_assert(K % (SPLIT * COLUMNS) == 0 && NORM_BLOCKS % 4 == 0, "whole stages, and four sums at a time");
static_assert((X_STAGES > 1 || STEPS == 1) && X_STAGES <= W_STAGES,
              "a stage is free when the products of the next have begun");
static_assert(TOKENS % (8 * PARTS) == 0 && THREADS == NUM_THREADS, "as it is launched");
static_assert(!SCALED || !NORM_BLOCKS && !NEXT_BLOCKS && !BIAS, "scales are in their places");
constexpr bool HAS_FACTORS = NORM_BLOCKS || SCALED;  // of tokens

struct Shared {
#if SPLIT > 1
  float4 inbox[OWN_UNITS][UNIT_BLOCKS][32 * CONSUMERS];  // sums of the units that the block finishes, from the other
#endif
  uint4 turned[CONSUMERS][32];
  float factors[256];
  u64 full[W_STAGES], empty[W_STAGES], arrived, factors_there;
};
static_assert(1023 + RING_BYTES + sizeof(Shared) <= SHARED_BYTES, "and what alignment costs");

struct Tile {
  int row, token;  // the first ones
};
// Tokens of a tile: as even as can be; the last tile ends at the last token, and so may have some of the one before.
struct Division {
  int count, box;
  __device__ __forceinline__ Division(int count)
      : count(count), box(TOKEN_TILES == 1 ? count : (count + TOKEN_TILES * 8 - 1) / (TOKEN_TILES * 8) * 8) {}
  __device__ __forceinline__ Tile tile(int i) const {
    return {i / TOKEN_TILES * ROWS, TOKEN_TILES == 1 ? 0 : min(i % TOKEN_TILES * box, count - box)};
  }
};

// The warp that asks, by one lane.
__device__ void ask(const TensorMap* weight, const TensorMap* x, u32 ring, u32 full, u32 empty, int rank,
                    int first_tile, const Division& tokens) {
  const u64 policy = TOKEN_TILES == 1 ? read_once() : read_again();
  const int total = (TILES - first_tile + CLUSTERS - 1) / CLUSTERS * STEPS;
  const auto tile = [&](int i) { return tokens.tile(first_tile + i / STEPS * CLUSTERS); };
  // The barrier of a stage's weight counts its x too.
  auto ask_weight = [&](int i) {
    if (i >= total) return;
    const u32 slot = i % W_STAGES, barrier = full + 8 * slot;
    expect_bytes(barrier, W_BYTES + tokens.box * ROW_BYTES);
    load_weight(ring + slot * W_BYTES, weight, tile(i).row, rank * STEPS + i % STEPS, barrier, policy);
  };
  auto ask_x = [&](int i) {
    if (i >= total) return;
    const u32 to = ring + W_STAGES * W_BYTES + i % X_STAGES * X_BYTES;
    load_x(to, x, tile(i).token, rank * STEPS + i % STEPS, full + 8 * (i % W_STAGES));
  };
  for (int i = 0; i < EARLY_STAGES; i++) ask_weight(i);
  wait_for_prerequisites();
#pragma unroll 1
  for (int i = 0; i < W_STAGES; i++) {
    if (i >= EARLY_STAGES) ask_weight(i);
    if (i < X_STAGES) ask_x(i);
  }
#pragma unroll 1  // with 32 registers four rounds side by side spill
  for (int i = 0; i + X_STAGES < total; i++) {
    wait_for(empty + 8 * (i % W_STAGES), i / W_STAGES & 1);
    ask_weight(i + W_STAGES), ask_x(i + X_STAGES);
  }
}

// A place in the rings.
struct Place {
  int slot = 0, phase = 0, x_slot = 0;
  __device__ __forceinline__ void go_on() {
    if (++slot == W_STAGES) slot = 0, phase ^= 1;
    if (++x_slot == X_STAGES) x_slot = 0;
  }
};

// The products of a tile and the group's rows, as its stages arrive.
__device__ __forceinline__ void multiply(float (&sums)[SUMS], u32 ring, u32 full, u32 empty, Place& place, int group,
                                         int lane) {
#pragma unroll
  for (int i = 0; i < SUMS; i++) sums[i] = 0.f;
  int before = 0;
  for (int step = 0; step < STEPS; step++) {
    wait_for(full + 8 * place.slot, place.phase);
    const u32 weight = ring + place.slot * W_BYTES + group * GROUP_ROWS * ROW_BYTES;
    const u32 x = ring + W_STAGES * W_BYTES + place.x_slot * X_BYTES;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < ROW_BYTES / 32; k++)
#pragma unroll
      for (int part = 0; part < PARTS; part++)
        multiply_add_all(sums + part * (SUMS / PARTS), matrix(weight + k * 32),
                         matrix(x + part * (X_BYTES / PARTS) + k * 32));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    // The stage before has been read when all but this one's products are there.
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (step && lane == 0) arrive(empty + 8 * before);
    before = place.slot;
    place.go_on();
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  if (lane == 0) arrive(empty + 8 * before);
}

// A lane's outputs of a unit: LANE_OUTPUTS neighbours of one token.
struct Outputs {
  int token, row, local, rank, box;  // the lane's first token, in all and in the tile
  __device__ __forceinline__ bool is_row() const { return row < OUTPUTS; }
  __device__ __forceinline__ bool is_there(int unit) const { return is_row() && local + unit * UNIT_TOKENS < box; }
  __device__ __forceinline__ int at(int unit) const {
    return ((token + unit * UNIT_TOKENS) * OUTPUTS + row) / LANE_OUTPUTS;
  }
  __device__ __forceinline__ int own(int i) const { return i * SPLIT + rank; }
};

#if SPLIT > 1
// Sends the other block the sums of its units, and adds what it sends of this one's.
__device__ __forceinline__ void exchange(float (&sums)[SUMS], Shared& shared, int rank) {
  const int thread = threadIdx.x - 128;
  const u32 arrived = shared_address(&shared.arrived), peer = address_of_peer(arrived, rank ^ 1);
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");  // the other's barriers are made
#pragma unroll
  for (int unit = 0; unit < UNITS; unit++)
#pragma unroll
    for (int b = 0; b < UNIT_BLOCKS; b++)
      if (unit % SPLIT != rank && (unit * UNIT_BLOCKS + b) * 4 < SUMS) {
        const float* sum = sums + (unit * UNIT_BLOCKS + b) * 4;
        const u32 to = address_of_peer(shared_address(&shared.inbox[unit / SPLIT][b][thread]), rank ^ 1);
        send(to, {sum[0], sum[1], sum[2], sum[3]}, peer);
      }
  wait_for(arrived, 0);
#pragma unroll
  for (int unit = 0; unit < UNITS; unit++)
#pragma unroll
    for (int b = 0; b < UNIT_BLOCKS; b++)
      if (unit % SPLIT == rank && (unit * UNIT_BLOCKS + b) * 4 < SUMS) {
        const float4 part = shared.inbox[unit / SPLIT][b][thread];
        float* sum = sums + (unit * UNIT_BLOCKS + b) * 4;
        sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
      }
}
#endif

// Four matrices of 8 x 8, transposed: a row of 16 bytes to each lane's address.
__device__ __forceinline__ void store_transposed(u32 address, const u32 (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]) : "memory");
}
// A unit of the warp's rows and tokens: rounded and activated, then turned, so that a lane has neighbouring outputs of
// a token.
__device__ __forceinline__ uint4 turned(const float (&sums)[SUMS], int unit, const float* factors,
                                        const float (&bias)[2], const float (&scales)[2], uint4* place, int lane) {
  u32 parts[4] = {};
#pragma unroll
  for (int b = 0; b < UNIT_BLOCKS; b++) {
    const int at = (unit * UNIT_BLOCKS + b) * 4;
    if (at >= SUMS) break;
    const float* sum = sums + at;
    const float first = HAS_FACTORS ? factors[8 * b] : 1.f, second = HAS_FACTORS ? factors[8 * b + 1] : 1.f;
    u32 low = pack(sum[0] * first * scales[0] + bias[0], sum[1] * second * scales[0] + bias[0]);
    u32 high = pack(sum[2] * first * scales[1] + bias[1], sum[3] * second * scales[1] + bias[1]);
    if (SQUARED_RELU) low = squared_relu(low), high = squared_relu(high);
    if (GELU) low = gelu(low), high = gelu(high);
    if (GATED)
      parts[b % 4] = silu_times_of_tokens(low, high);  // sum[0] and sum[1] are of two
    else
      parts[2 * b % 4] = low, parts[(2 * b + 1) % 4] = high;
  }
  // If not gated, every second part belongs to the rows that are eight behind.
  const int matrix = lane / 8, row = GATED ? lane : matrix % 2 * 16 + matrix / 2 * 8 + lane % 8;
  __syncwarp();  // the unit before has been read
  store_transposed(shared_address(place + row), parts);
  __syncwarp();
  return place[lane];
}

__device__ __forceinline__ u32& part(uint4& v, int i) { return (&v.x)[i]; }

// The residual, and what the next norm wants.
__device__ __forceinline__ void finish(uint4 v, uint4 residual, uint4 weights, const Outputs& outputs, int unit,
                                       uint4* out, uint4* scaled, float* out_squares) {
  const bool is_there = outputs.is_there(unit);
  const int at = outputs.at(unit);
  if (RESIDUAL)
#pragma unroll
    for (int i = 0; i < 4; i++) part(v, i) = add(part(residual, i), part(v, i));
  if (is_there) out[at] = v;
  if (NEXT_BLOCKS) {
    float squares = 0.f;
    uint4 product;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      part(product, i) = times_norm_weight(part(v, i), part(weights, i), PLUS_ONE);
      squares += sum_of_squares(part(v, i));
    }
    if (is_there) scaled[at] = product;
    squares += __shfl_xor_sync(~0u, squares, 16);
    store_squares(is_there && threadIdx.x % 32 < 16, out_squares, outputs.token + unit * UNIT_TOKENS, outputs.row,
                  squares);
  }
}

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
__launch_bounds__(REGISTER_THREADS, 1) wide_linear(
    const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, const float* squares,
    const uint4* residual, const u32* norm_weight, uint4* out, uint4* scaled, float* out_squares, float eps,
    int num_tokens) {
  extern __shared__ __align__(1024) char memory[];
  const u32 ring = (shared_address(memory) + 1023) & ~1023u;
  Shared& shared = *(Shared*)(memory + (ring - shared_address(memory)) + RING_BYTES);
  const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
  const u32 factors_there = shared_address(&shared.factors_there);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % SPLIT, first_tile = blockIdx.x / SPLIT;
  const Division tokens(num_tokens);
  if (threadIdx.x == 0) {
    fetch_map(&weight), fetch_map(&x);
    for (int i = 0; i < W_STAGES; i++) make_barrier(full + 8 * i, 1), make_barrier(empty + 8 * i, CONSUMERS);
    make_barrier(shared_address(&shared.arrived), 1), make_barrier(factors_there, 3);
    publish_barriers();
#if SPLIT > 1
    int blocks = 0;
    for (int unit = rank; unit < UNITS; unit += SPLIT) blocks += min(UNIT_BLOCKS, SUMS / 4 - unit * UNIT_BLOCKS);
    expect_bytes(shared_address(&shared.arrived), blocks * sizeof(shared.inbox[0][0]));
#endif
  }
  __syncthreads();
#if SPLIT > 1
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
  if (warp < 4) {
    if (GROUPS > 1 && TAKES_ALL) asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (warp == 0) {
      if (lane == 0) ask(&weight, &x, ring, full, empty, rank, first_tile, tokens);
    } else if (HAS_FACTORS) {
      wait_for_prerequisites();
      start_dependents();
      const bool is_one = TILES <= CLUSTERS;
      const int begin = is_one ? tokens.tile(first_tile).token : 0, end = is_one ? begin + tokens.box : num_tokens;
      if (SCALED)
        for (int t = begin + threadIdx.x - 32; t < end; t += 96) shared.factors[t] = squares[t];
      else
        compute_factors<4>(squares, shared.factors, eps, begin, end);
      __syncwarp();
      if (lane == 0) arrive(factors_there);
    }
    return;
  }
  if (GROUPS == 2 && TAKES_ALL) asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
  if (GROUPS == 3 && TAKES_ALL) asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
  const int group = warp / 4 - 1;
  wait_for_prerequisites();
  start_dependents();
  Place place;
  for (int i = first_tile; i < TILES; i += CLUSTERS) {
    const Tile tile = tokens.tile(i);
    const int warp_row = tile.row + group * GROUP_ROWS + warp % 4 * WARP_ROWS, local = lane % UNIT_TOKENS;
    const int row = (GATED ? warp_row / 2 : warp_row) + lane / UNIT_TOKENS * LANE_OUTPUTS;
    const Outputs outputs = {tile.token + local, row, local, rank, tokens.box};
    uint4 residuals[OWN_UNITS], weights = {};
    if (RESIDUAL)
#pragma unroll
      for (int j = 0; j < OWN_UNITS; j++)
        residuals[j] = outputs.is_there(outputs.own(j)) ? residual[outputs.at(outputs.own(j))] : uint4{};
    if (NEXT_BLOCKS && outputs.is_row())
#pragma unroll
      for (int j = 0; j < 4; j++) part(weights, j) = norm_weight[row / 2 + j];
    float bias[2] = {};
    if (BIAS)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int at = warp_row + lane / 4 + 8 * h;
        const u32 both = at < N ? norm_weight[at / 2] : 0;
        bias[h] = at % 2 ? second_of(both) : first_of(both);
      }
    float scales[2] = {1.f, 1.f};
    if (SCALED)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int at = warp_row + lane / 4 + 8 * h;
        scales[h] = at < N ? ((const float*)norm_weight)[at] : 0.f;
      }
    float sums[SUMS];
    multiply(sums, ring, full, empty, place, group, lane);
#if SPLIT > 1
    exchange(sums, shared, rank);
#endif
    if (HAS_FACTORS) wait_for(factors_there, 0);
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++)
      if (SPLIT == 1 || unit % SPLIT == rank) {
        const float* factors = shared.factors + tile.token + unit * UNIT_TOKENS + lane % 4 * 2;
        const uint4 v = turned(sums, unit, factors, bias, scales, shared.turned[warp - 4], lane);
        finish(v, residuals[unit / SPLIT], weights, outputs, unit, out, scaled, out_squares);
      }
  }
}
