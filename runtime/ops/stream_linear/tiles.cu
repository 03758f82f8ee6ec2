// A linear of up to 128 tokens on Hopper: out = x . weight^T, with the norm before it and what follows it.
//
// Such a linear is a read of its weight. So a block loads as much of it as its shared memory holds (by TMA, a ring of
// STAGES) before the kernel that makes x has ended. Every multiprocessor gets nearly the same share: a tile of ROWS
// outputs. ROWS is any number, as wgmma takes 64 tokens as its rows and any multiple of 8 outputs as its columns. The
// SPLIT blocks of a cluster divide the inputs of a tile, send each other sums, and each finishes every SPLIT-th group
// of 16 outputs. Undivided tiles a block takes in turns, one after another, and the ring goes on from one to the next.
//
// One warp asks for weight and x, the other three of its group compute the norm's factors; each of the other groups of
// four warps multiplies 64 tokens.
//
// Defined by tiles.py: N outputs (of a gated one: gate and up rows), K, ROWS (a multiple of 16), SPLIT, BLOCKS,
// NUM_THREADS and SHARED_BYTES of a block, TOKENS (8, 16, 32, 64 or 128), STAGES, PANELS (of 64 inputs, of a stage),
// NORM_BLOCKS (sums of squares a token to read; 0: no norm), GATED, RESIDUAL, NEXT_BLOCKS (sums of squares a token to
// leave), PLUS_ONE (the next norm's weight has 1 added), BIAS (in the place of the norm's weight), SQUARED_RELU, GELU,
// and `multiply_add_all`, which adds products to ROWS / 2 sums of a thread. RANK of adapters that add to it
// (adapters.cuh); without them there is none. With them the ring has pages behind a tile's stages: B of the slots that
// tokens have.

// AHEAD_BYTES of the next linear's weight that the blocks ask into the L2, if any.

constexpr int M_TOKENS = 64;                                               // of a wgmma
constexpr int ALL_TOKENS = (TOKENS + M_TOKENS - 1) / M_TOKENS * M_TOKENS;  // that are multiplied
constexpr int GROUPS = ALL_TOKENS / M_TOKENS, CONSUMERS = 4 * GROUPS, THREADS = 32 * (4 + CONSUMERS);
constexpr int NORM_ROWS = 16, ROW_GROUPS = ROWS / NORM_ROWS, PLACES = (ROW_GROUPS + SPLIT - 1) / SPLIT;
constexpr int OUT_ROWS = GATED ? ROWS / 2 : ROWS, OUT_GROUP = GATED ? NORM_ROWS / 2 : NORM_ROWS,
              OUTPUTS = GATED ? N / 2 : N;
constexpr int TILES = (N + ROWS - 1) / ROWS, CLUSTERS = BLOCKS / SPLIT;
constexpr int W_BYTES = PANELS * ROWS * ROW_BYTES, X_PANEL_BYTES = TOKENS * ROW_BYTES,
              STAGE_BYTES = W_BYTES + PANELS * X_PANEL_BYTES;
constexpr int STEPS = K / SPLIT / COLUMNS / PANELS;  // stages of a tile, a block's
constexpr int SUMS = ROWS / 2;                       // of a thread: of 8 outputs of a group 2, of two tokens
static_assert(SPLIT == 1 || TILES == CLUSTERS, "what others send is of one tile");
static_assert(N % NORM_ROWS == 0 || !GATED && !NEXT_BLOCKS, "an odd head is a plain one");
static_assert(STAGES > 1 || STEPS == 1, "a stage is free when the products of the next one have begun");
static_assert(K % (SPLIT * PANELS * COLUMNS) == 0 && NORM_BLOCKS % 4 == 0, "whole stages, and four sums at a time");
static_assert(THREADS == NUM_THREADS, "as it is launched");

constexpr int RING_BYTES = STAGES * STAGE_BYTES;
struct Shared {
#if SPLIT > 1
  // Sums that each other block sends for the groups of rows that this one finishes.
  float4 inbox[SPLIT - 1][GROUPS][PLACES][2][128];
#endif
  float factors[ALL_TOKENS];
  u64 full[STAGES], empty[STAGES], arrived, factors_there;
#if RANK
  alignas(16) u32 shrunk[ALL_TOKENS * A_ROWS / 2];
  u64 shrunk_there;
#endif
};

static_assert(1023 + RING_BYTES + sizeof(Shared) <= SHARED_BYTES, "and what alignment costs");
static_assert(1023 + RING_BYTES - X_PANEL_BYTES + ALL_TOKENS * ROW_BYTES <= SHARED_BYTES, "wgmma reads 64 tokens");

#if RANK
// B of eight outputs is one of a page's pieces; a slot has those of a tile, gates ahead of ups.
constexpr int EIGHTS = ROWS / 8, EIGHT_BYTES = 8 * RANK * 2, PAGE_SLOTS = STAGE_BYTES / (EIGHTS * EIGHT_BYTES);
static_assert(EIGHTS <= 32, "a lane has one of them");
static_assert(PAGE_SLOTS > 0 && STAGES <= STEPS, "a page is in the place of a stage, and behind a tile's");

__device__ __forceinline__ int num_pages(const StepSlots& slots) {
  return (slots.num_slots + PAGE_SLOTS - 1) / PAGE_SLOTS;
}
// The first of eight outputs of a tile, and their part; -1: none.
__device__ __forceinline__ int first_of_eight(int tile, int eight) {
  const bool is_up = GATED && eight >= EIGHTS / 2;
  return tile * OUT_ROWS + (is_up ? OUTPUTS + (eight - EIGHTS / 2) * 8 : eight * 8);
}
__device__ __forceinline__ int part_of_eight(int tile, int eight) {
  const int first = first_of_eight(tile, eight);
  const bool is_there = GATED ? first % OUTPUTS / OUT_ROWS == tile && first < N : first < N;
  return eight < EIGHTS && is_there ? part_of(first) : -1;
}
// Asks for a tile's page, by all lanes: B of each of its slots. A copy takes as long as hundreds of bytes, so that
// neighbours are in one.
__device__ __forceinline__ void ask_page(const Adapters& adapters, const StepSlots& slots, int tile, int page, u32 to,
                                         u32 barrier) {
  const int lane = threadIdx.x % 32, part = part_of_eight(tile, lane);
  const int row = part >= 0 ? row_of_b(first_of_eight(tile, lane), part) : -1;
  const int before = __shfl_sync(~0u, row, max(lane - 1, 0));
  const u32 there = __ballot_sync(~0u, row >= 0);
  const bool is_first = row >= 0 && (lane == 0 || before < 0 || before + 8 != row);
  const u32 ends = (__ballot_sync(~0u, is_first) | ~there) & ~1u << lane;  // of the neighbours behind
  const int count = (ends ? __ffs(ends) - 1 : 32) - lane;
  const int first = page * PAGE_SLOTS, end = min(first + PAGE_SLOTS, slots.num_slots);
  if (lane == 0) expect_bytes(barrier, (end - first) * __popc(there) * EIGHT_BYTES);
  __syncwarp();
  u64 left = slots.adapted;
  for (int at = 0; at < end; at++) {
    const SlotTokens its = slots.first_of_those(left);
    left &= ~its.tokens;
    if (at >= first && is_first)
      load_bytes(to + ((at - first) * EIGHTS + lane) * EIGHT_BYTES,
                 adapters.b + ((u64)its.slot * B_ROWS + row) * RANK * 2, count * EIGHT_BYTES, barrier);
  }
}
#endif

// The warp that asks, by its first lane; for pages by all.
__device__ void ask(const TensorMap* weight, const TensorMap* x, u32 ring, u32 full, u32 empty, int rank,
                    int first_tile, int num_tokens
#if RANK
                    ,
                    const Adapters& adapters
#endif
#if AHEAD_BYTES
                    ,
                    const char* next_weight
#endif
) {
  const u64 once = read_once();
#if RANK
  const bool asks = threadIdx.x == 0;
#else
  constexpr bool asks = true;
#endif
  const int turns = first_tile < TILES ? (TILES - first_tile + CLUSTERS - 1) / CLUSTERS : 0;
  auto ask_weight = [&](int i, int turn, int step) {
    const u32 slot = i % STAGES, barrier = full + 8 * slot;
    expect_bytes(barrier, W_BYTES + PANELS * num_tokens * ROW_BYTES);
    load_weight(ring + slot * STAGE_BYTES, weight, (first_tile + turn * CLUSTERS) * ROWS,
                (rank * STEPS + step) * PANELS, barrier, once);
  };
  auto ask_x = [&](int i, int step) {
    const u32 slot = i % STAGES;
#pragma unroll
    for (int p = 0; p < PANELS; p++)
      load_x(ring + slot * STAGE_BYTES + W_BYTES + p * X_PANEL_BYTES, x, 0, (rank * STEPS + step) * PANELS + p,
             full + 8 * slot);
  };
  const int ahead = STAGES < turns * STEPS ? STAGES : turns * STEPS;
  for (int i = 0; i < ahead && asks; i++) ask_weight(i, i / STEPS, i % STEPS);
#if AHEAD_BYTES
  constexpr u32 SHARE = AHEAD_BYTES / BLOCKS / 128 * 128;
  if (SHARE)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(next_weight + (u64)blockIdx.x * SHARE), "r"(SHARE)
                 : "memory");
#endif
  wait_for_prerequisites();
  for (int i = 0; i < ahead && asks; i++) ask_x(i, i % STEPS);
  auto ask_stage = [&](int i, int turn, int step) {
    wait_for(empty + 8 * (i % STAGES), (i / STAGES & 1) ^ 1);
    ask_weight(i, turn, step), ask_x(i, step);
  };
#if RANK
  const StepSlots slots(adapters.slots, num_tokens);
  const int pages = num_pages(slots);
  for (int turn = 0, i = 0; turn < turns; turn++) {
    // The lane has these to itself: while others went through them too, it asked late.
    if (asks)
      for (int step = turn ? 0 : ahead; step < STEPS; step++) ask_stage(i + step, turn, step);
    i += STEPS;
    for (int page = 0; page < pages; page++, i++) {
      if (asks) wait_for(empty + 8 * (i % STAGES), (i / STAGES & 1) ^ 1);  // others might see a phase that is over
      __syncwarp();
      ask_page(adapters, slots, first_tile + turn * CLUSTERS, page, ring + i % STAGES * STAGE_BYTES,
               full + 8 * (i % STAGES));
    }
  }
#else
  for (int i = ahead; i < turns * STEPS; i++) ask_stage(i, i / STEPS, i % STEPS);
#endif
}

__device__ __forceinline__ int before(int slot) { return slot ? slot - 1 : STAGES - 1; }
// Adds to `sums` the products of a tile and the group's tokens, as its stages arrive.
__device__ __forceinline__ void multiply(float (&sums)[SUMS], u32 ring, u32 full, u32 empty, int& slot, int& phase,
                                         int group, int lane) {
  for (int step = 0; step < STEPS; step++) {
    wait_for(full + 8 * slot, phase);
    const u32 weight = ring + slot * STAGE_BYTES, x = weight + W_BYTES + group * M_TOKENS * ROW_BYTES;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int p = 0; p < PANELS; p++)
#pragma unroll
      for (int k = 0; k < COLUMNS / 16; k++)
        multiply_add_all(sums, matrix(x + p * X_PANEL_BYTES + k * 32), matrix(weight + p * ROWS * ROW_BYTES + k * 32));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    // The stage before has been read when all but this one's products are there.
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (step && lane == 0) arrive(empty + 8 * before(slot));
    if (++slot == STAGES) slot = 0, phase ^= 1;
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  if (lane == 0) arrive(empty + 8 * before(slot));
}

// A thread finishes PLACES groups of rows: of each two neighbouring outputs, and two that are eight behind (of a gated
// one gates and ups), of two tokens.
struct Outputs {
  int token, first_row, rank, num_tokens;  // row and token of the first one

  __device__ __forceinline__ int row(int place) const { return first_row + (place * SPLIT + rank) * OUT_GROUP; }
  __device__ __forceinline__ bool is_row(int place) const {
    return row(place) < OUTPUTS && place * SPLIT + rank < ROW_GROUPS;
  }
  // Of eight rows behind those of `place`: the last rows of an odd head need not be sixteen.
  __device__ __forceinline__ bool is_second(int place) const {
    return N % NORM_ROWS == 0 || row(place) + 8 < OUTPUTS;
  }
  __device__ __forceinline__ int at(int place, int h) const { return ((token + 8 * h) * OUTPUTS + row(place)) / 2; }
  __device__ __forceinline__ bool is_there(int place, int h) const {
    return is_row(place) && token + 8 * h < num_tokens;
  }
};

// Residual and norm weight, or bias: asked for before the products and used after them, when they are there.
struct Operands {
  u32 residuals[PLACES][2][2], weights[PLACES][2];

  __device__ __forceinline__ void ask(const Outputs& outputs, const u32* residual, const u32* norm_weight) {
#pragma unroll
    for (int place = 0; place < PLACES; place++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const bool is_there = RESIDUAL && outputs.is_there(place, h);
        const u32* from = residual + outputs.at(place, h);
        residuals[place][h][0] = is_there ? from[0] : 0;
        residuals[place][h][1] = is_there && outputs.is_second(place) ? from[4] : 0;
        weights[place][h] =
            (NEXT_BLOCKS || BIAS) && outputs.is_row(place) && (h == 0 || outputs.is_second(place))
                ? norm_weight[outputs.row(place) / 2 + 4 * h] : 0;
      }
  }
};

// The sums of the groups that the block finishes, of all its cluster.
__device__ __forceinline__ void exchange(float (&mine)[PLACES][8], const float (&sums)[SUMS], Shared& shared, int rank,
                                         int group) {
#pragma unroll
  for (int g = 0; g < ROW_GROUPS; g++)
    if (g % SPLIT == rank)
#pragma unroll
      for (int i = 0; i < 8; i++) mine[g / SPLIT][i] = sums[8 * g + i];
#if SPLIT > 1
  const int thread = threadIdx.x % 128;
  const u32 arrived = shared_address(&shared.arrived);
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");  // the others' barriers are made
#pragma unroll
  for (int g = 0; g < ROW_GROUPS; g++) {
    const int owner = g % SPLIT, sender = (rank - owner - 1 + SPLIT) % SPLIT;
    if (owner == rank) continue;
    const float* sum = sums + 8 * g;
    const u32 to = shared_address(&shared.inbox[sender][group][g / SPLIT][0][thread]),
              half = sizeof(shared.inbox[0][0][0][0]);
    send(address_of_peer(to, owner), {sum[0], sum[1], sum[2], sum[3]}, address_of_peer(arrived, owner));
    send(address_of_peer(to + half, owner), {sum[4], sum[5], sum[6], sum[7]}, address_of_peer(arrived, owner));
  }
  wait_for(arrived, 0);
#pragma unroll
  for (int place = 0; place < PLACES; place++)
    if (place * SPLIT + rank < ROW_GROUPS)
#pragma unroll
      for (int peer = 0; peer < SPLIT - 1; peer++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float4 part = shared.inbox[peer][group][place][half][thread];
          float* sum = mine[place] + 4 * half;
          sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
        }
#endif
}

#if RANK
constexpr int HELPERS = 3;  // warps of a block
// What a helper does for adapters: shrinks, and gets B near for what the block finishes; `meanwhile` what else it has
// to do, before it waits for others.
template <typename Work>
__device__ __forceinline__ void help(const Adapters& adapters, const char* x, Shared& shared, int num_tokens, int rank,
                                     int first_tile, Work meanwhile) {
  if (!adapters.early_slots) wait_for_prerequisites();
  const int thread = threadIdx.x - 32;
  const u32 taken = take(adapters);
  const StepSlots slots(adapters.slots, num_tokens);
  const u32 number = __shfl_sync(~0u, taken, 0);
  const Task task = task_of(slots, number);
  if (number < slots.num_tasks()) fetch_a(adapters, task);
  for (u64 left = slots.adapted; left;) {
    const SlotTokens its = slots.first_of_those(left);
    left &= ~its.tokens;
    for (int tile = first_tile; tile < TILES; tile += CLUSTERS)
      for (int row = thread; row < OUT_ROWS; row += 32 * HELPERS) {
        const int output = tile * OUT_ROWS + row;
        if (row / OUT_GROUP % SPLIT != rank || output >= OUTPUTS) continue;
        fetch_b(adapters, its.slot, output);
        if (GATED) fetch_b(adapters, its.slot, output + OUTPUTS);
      }
  }
  u32 parts = 0;
  for (int tile = first_tile; tile < TILES; tile += CLUSTERS)
    for (int place = 0; place < PLACES; place++) {
      const int output = tile * OUT_ROWS + (place * SPLIT + rank) * OUT_GROUP;
      parts |= mask_of(part_of(output)) | (GATED ? mask_of(part_of(output + OUTPUTS)) : 0);
    }
  if (adapters.early_slots) wait_for_prerequisites();
  start_dependents();
  shrink_some(adapters, slots, x, number, task);
  meanwhile();
  wait_for_all(adapters, slots);
  add_up_shrunk<32 * HELPERS>(adapters, slots, parts, thread, [&](int i, float4 v) {
    *(uint2*)(shared.shrunk + i / 2) = uint2{pack(v.x, v.y), pack(v.z, v.w)};
  });
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(shared_address(&shared.shrunk_there));
  leave(adapters, BLOCKS * HELPERS);
}
constexpr int AT_ONCE = 16 * 8 / RANK;  // eights of outputs whose B is in registers at once
// The eight outputs of a place and a half, in a page.
__device__ __forceinline__ int eight_of(int place, int half, int rank) {
  const int group = place * SPLIT + rank;
  return GATED ? group + half * (EIGHTS / 2) : 2 * group + half;
}
// Adds to the sums that a thread finishes what adapters do, as a tile's pages arrive; slots: of its two tokens.
__device__ __forceinline__ void expand(float (&mine)[PLACES][8], const StepSlots& of_step, const int (&slots)[2],
                                       Shared& shared, int token, int tile, int rank, u32 ring, u32 full, u32 empty,
                                       int& slot, int& phase) {
  const int lane = threadIdx.x % 32;
  // Of gates and ups, or of neighbours: they are in parts of their own, or mostly in one, and then nothing is asked of
  // each eight.
  const int parts[2] = {part_of_eight(tile, eight_of(0, 0, rank)), part_of_eight(tile, eight_of(0, 1, rank))};
  bool are_alike = parts[0] >= 0 && parts[1] >= 0;
  for (int i = 0; i < 2 * PLACES; i++) are_alike &= part_of_eight(tile, eight_of(i / 2, i % 2, rank)) == parts[i % 2];
  int at = 0;  // in the page
  for (u64 left = of_step.adapted; left;) {
    const SlotTokens its = of_step.first_of_those(left);
    left &= ~its.tokens;
    if (at == 0) wait_for(full + 8 * slot, phase);
    const bool has_slot[2] = {slots[0] == its.slot, slots[1] == its.slot};
    if (__any_sync(~0u, has_slot[0] || has_slot[1])) {
      wait_for(shared_address(&shared.shrunk_there), 0);
      const u32 b = ring + slot * STAGE_BYTES + at * EIGHTS * EIGHT_BYTES + lane / 4 * RANK * 2 + lane % 4 * 8;
      ShrunkOfSlot u[2] = {{shared.shrunk, token, {has_slot[0], has_slot[1]}},
                           {shared.shrunk, token, {has_slot[0], has_slot[1]}}};
      if (are_alike) {
        u[0].get(parts[0]), u[1].get(parts[1]);
#pragma unroll
        for (int begin = 0; begin < 2 * PLACES; begin += AT_ONCE) {
          EightOfB factors[AT_ONCE];
#pragma unroll
          for (int i = begin; i < begin + AT_ONCE && i < 2 * PLACES; i++)
            factors[i - begin].get(b + eight_of(i / 2, i % 2, rank) * EIGHT_BYTES);
#pragma unroll
          for (int i = begin; i < begin + AT_ONCE && i < 2 * PLACES; i++)
            u[i % 2].multiply(mine[i / 2] + i % 2 * 4, factors[i - begin]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 2 * PLACES; i++) {
          const int eight = eight_of(i / 2, i % 2, rank), part = part_of_eight(tile, eight);
          if (part < 0) continue;
          EightOfB factors;
          factors.get(b + eight * EIGHT_BYTES);
          u[i % 2].get(part), u[i % 2].multiply(mine[i / 2] + i % 2 * 4, factors);
        }
      }
    }
    if (++at < PAGE_SLOTS && left) continue;
    __syncwarp();
    if (lane == 0) arrive(empty + 8 * slot);
    if (++slot == STAGES) slot = 0, phase ^= 1;
    at = 0;
  }
}
#else
constexpr int HELPERS = 0;
#endif

__device__ __forceinline__ u32 rounded(float first, float second, u32 bias) {
  const u32 both = BIAS ? pack(first + first_of(bias), second + second_of(bias)) : pack(first, second);
  return SQUARED_RELU ? squared_relu(both) : GELU ? gelu(both) : both;
}
// The norm's factor, the bias, the activation, the residual, and what the next norm wants.
__device__ __forceinline__ void finish(const float (&sums)[PLACES][8], const Outputs& outputs, const Operands& operands,
                                       const float (&factors)[2], u32* out, u32* scaled, float* out_squares) {
#pragma unroll
  for (int place = 0; place < PLACES; place++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float* sum = sums[place] + 2 * h;
      const int at = outputs.at(place, h);
      const bool is_there = outputs.is_there(place, h);
      u32 low = rounded(sum[0] * factors[h], sum[1] * factors[h], operands.weights[place][0]);
      u32 high = rounded(sum[4] * factors[h], sum[5] * factors[h], operands.weights[place][1]);
      if (GATED) {
        if (is_there) out[at] = silu_times(low, high);
        continue;
      }
      if (RESIDUAL) low = add(operands.residuals[place][h][0], low), high = add(operands.residuals[place][h][1], high);
      if (is_there) out[at] = low;
      if (is_there && outputs.is_second(place)) out[at + 4] = high;
      if (NEXT_BLOCKS) {
        const u32* weights = operands.weights[place];
        if (is_there)
          scaled[at] = times_norm_weight(low, weights[0], PLUS_ONE),
          scaled[at + 4] = times_norm_weight(high, weights[1], PLUS_ONE);
        const float squares = sum_of_lanes(sum_of_squares(low) + sum_of_squares(high), 4);
        store_squares(is_there && threadIdx.x % 4 == 0, out_squares, outputs.token + 8 * h, outputs.row(place),
                      squares);
      }
    }
}

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
__launch_bounds__(THREADS, 1) stream_linear(
    const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,
#if RANK
    const char* rows_of_x, Adapters adapters,
#endif
#if AHEAD_BYTES
    const char* next_weight,
#endif
    const float* squares,
    const u32* residual, const u32* norm_weight, u32* out, u32* scaled, float* out_squares, float eps, int num_tokens) {
  extern __shared__ __align__(1024) char memory[];
  const u32 ring = (shared_address(memory) + 1023) & ~1023u;
  Shared& shared = *(Shared*)(memory + (ring - shared_address(memory)) + RING_BYTES);
  const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
  const u32 arrived = shared_address(&shared.arrived), factors_there = shared_address(&shared.factors_there);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % SPLIT, first_tile = blockIdx.x / SPLIT;
  if (threadIdx.x == 0) {
    fetch_map(&weight), fetch_map(&x);
    for (int i = 0; i < STAGES; i++) make_barrier(full + 8 * i, 1), make_barrier(empty + 8 * i, CONSUMERS);
    make_barrier(arrived, 1), make_barrier(factors_there, 3);
#if RANK
    make_barrier(shared_address(&shared.shrunk_there), HELPERS);
#endif
    publish_barriers();
#if SPLIT > 1
    expect_bytes(arrived,
                 (SPLIT - 1) * GROUPS * ((ROW_GROUPS - rank + SPLIT - 1) / SPLIT) * sizeof(shared.inbox[0][0][0]));
#endif
  }
  __syncthreads();
#if SPLIT > 1
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
  if (warp < 4) {
    if (warp == 0) {
#if RANK
      ask(&weight, &x, ring, full, empty, rank, first_tile, num_tokens, adapters);
#else
      if (lane == 0)
        ask(&weight, &x, ring, full, empty, rank, first_tile, num_tokens
#if AHEAD_BYTES
            ,
            next_weight
#endif
        );
#endif
    } else if (NORM_BLOCKS || HELPERS) {
      auto norm = [&] {
        if (!NORM_BLOCKS) return;
        compute_factors<16>(squares, shared.factors, eps, 0, num_tokens);
        __syncwarp();
        if (lane == 0) arrive(factors_there);
      };
#if RANK
      help(adapters, rows_of_x, shared, num_tokens, rank, first_tile, norm);
#else
      wait_for_prerequisites();
      start_dependents();
      norm();
#endif
    }
    return;
  }
  const int group = warp / 4 - 1, token = group * M_TOKENS + warp % 4 * 16 + lane / 4;
  wait_for_prerequisites();
  start_dependents();
#if RANK
  const int slots[2] = {token < num_tokens ? adapters.slots[token] : -1,
                        token + 8 < num_tokens ? adapters.slots[token + 8] : -1};
  const StepSlots of_step(adapters.slots, num_tokens);
#endif
  int slot = 0, phase = 0;
  for (int tile = first_tile; tile < TILES; tile += CLUSTERS) {
    const Outputs outputs = {token, tile * OUT_ROWS + lane % 4 * 2, rank, num_tokens};
    Operands operands;
    operands.ask(outputs, residual, norm_weight);
    float sums[SUMS], mine[PLACES][8];
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = 0.f;
    multiply(sums, ring, full, empty, slot, phase, group, lane);
    exchange(mine, sums, shared, rank, group);
#if RANK
    expand(mine, of_step, slots, shared, token, tile, rank, ring, full, empty, slot, phase);
#endif
    if (NORM_BLOCKS) wait_for(factors_there, 0);
    const float* factor = shared.factors + token;
    const float factors[2] = {NORM_BLOCKS ? factor[0] : 1.f, NORM_BLOCKS ? factor[8] : 1.f};
    finish(mine, outputs, operands, factors, out, scaled, out_squares);
  }
}
