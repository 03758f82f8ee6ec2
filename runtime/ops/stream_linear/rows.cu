// A linear of up to 8 tokens on Hopper whose weight is larger than the multiprocessors' memory: out = x . weight^T,
// with the norm before it and the ops behind it. tiles.cu takes as long with 8 tokens, and 2 to 4 % longer with one.
//
// The memory gives its full rate to long reads only. So rows of the weight are loaded in pieces of about 2 KB, 16 rows
// at a time (by cp.async.bulk, into a ring of STAGES, before the kernel that makes x has ended: EARLY_STAGES at a time,
// linear.py). x stays in registers: the SPLIT blocks of a cluster divide the inputs, and the warps of a block its
// share. Every warp multiplies its inputs with every row that the cluster takes. Sums of a block are added up in its
// shared memory and sent to the block of the cluster that finishes the rows; blocks take turns at that.
//
// Defined by rows.py: N outputs (of a gated one: gate and up rows), K, SPLIT (of at least 2), WARPS, CLUSTERS, RESIDENT
// (blocks of a multiprocessor), PIECE (inputs of a row in a stage), STAGES, EARLY_STAGES, NORM_BLOCKS (sums of squares
// a token to read; 0: no norm), GATED, RESIDUAL, NEXT_BLOCKS (sums of squares a token to leave), PLUS_ONE (the next
// norm's weight has 1 added), BIAS (in the place of the norm's weight), SQUARED_RELU, GELU. RANK of adapters that add
// to it (adapters.cuh); without them there is none.

constexpr int ROWS = 16, TOKENS = 8;  // of m16n8k16
constexpr int OUT_ROWS = GATED ? ROWS / 2 : ROWS, OUTPUTS = GATED ? N / 2 : N, GROUPS = N / ROWS;
constexpr int MY_K = K / SPLIT, CHUNKS = (MY_K + PIECE - 1) / PIECE;
constexpr int STEP = 32, STEPS = (PIECE / STEP + WARPS - 1) / WARPS;  // inputs of a step; a warp's steps in a chunk
constexpr int PITCH = PIECE * 2, STAGE_BYTES = ROWS * PITCH;          // multiples of 128 bytes: others are read slower
constexpr int MOST_GROUPS = (GROUPS + CLUSTERS - 1) / CLUSTERS;       // of rows, a cluster's
constexpr int MOST_FINISHED = (MOST_GROUPS + SPLIT - 1) / SPLIT;      // a block's
constexpr int LD = ROWS + 4;                                          // floats a token of a warp's sums
constexpr int SUMS = TOKENS * ROWS;
static_assert(NEXT_BLOCKS == 0 || NEXT_BLOCKS == GROUPS, "a sum of squares of each group");

__device__ __forceinline__ constexpr int columns_of(int chunk) {
  return chunk + 1 < CHUNKS ? PIECE : MY_K - chunk * PIECE;
}
// A warp's steps of a chunk are every WARPS-th; the last one may be another warp's alone.
__device__ __forceinline__ bool is_step(int chunk, int step) { return step < columns_of(chunk) / STEP; }

__device__ __forceinline__ uint4 load_shared(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ void load_row(u32 to, const char* from, int bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

__device__ __forceinline__ u32 rounded(float first, float second, u32 bias) {
  const u32 both = BIAS ? pack(first + first_of(bias), second + second_of(bias)) : pack(first, second);
  return SQUARED_RELU ? squared_relu(both) : GELU ? gelu(both) : both;
}

struct Shared {
  float sums[WARPS][TOKENS * LD];            // of the rows that the block works at
  float inbox[MOST_FINISHED][SPLIT][SUMS];   // of the rows that it finishes, from every block of the cluster
  float factors[TOKENS];
  u64 full[STAGES], empty[STAGES], arrived[MOST_FINISHED];
#if RANK
  alignas(16) float shrunk[TOKENS * A_ROWS];
  u64 shrunk_there;
#endif
};

#if RANK
constexpr int ALL_WARPS = WARPS + HELPERS;
// The warps that adapters have: shrink, and get B near for what the block finishes.
__device__ __forceinline__ void add_adapters(const Adapters& adapters, const char* x, Shared& shared, int num_tokens,
                                             int first_finished) {
  if (!adapters.early_slots) wait_for_prerequisites();
  const int lane = threadIdx.x % 32, helper = threadIdx.x / 32 - WARPS;
  const u32 taken = take(adapters);
  const StepSlots slots(adapters.slots, num_tokens);
  const u32 number = __shfl_sync(~0u, taken, 0);
  const Task task = task_of(slots, number);
  if (number < slots.num_tasks()) fetch_a(adapters, task);
  const int slot = __shfl_sync(~0u, slots.mine[0], lane / 4);
  u32 parts = 0;
  for (int group = first_finished, turn = 0; group < GROUPS; group += SPLIT * CLUSTERS, turn++)
#pragma unroll
    for (int i = 0; i < OUT_ROWS / 4; i += 2) {
      const int row = group * OUT_ROWS + lane % 4 * (OUT_ROWS / 4) + i;
      parts |= mask_of(part_of(row)) | (GATED ? mask_of(part_of(row + OUTPUTS)) : 0);
      if (turn % HELPERS != helper) continue;
      fetch_b(adapters, slot, row);
      if (GATED) fetch_b(adapters, slot, row + OUTPUTS);
    }
  if (adapters.early_slots) wait_for_prerequisites();
  shrink_some(adapters, slots, x, number, task);
  wait_for_all(adapters, slots);
  add_up_shrunk<32 * HELPERS>(adapters, slots, parts, 32 * helper + lane,
                              [&](int i, float4 v) { *(float4*)(shared.shrunk + i) = v; });
  __syncwarp();
  if (lane == 0) arrive(shared_address(&shared.shrunk_there));
  leave(adapters, CLUSTERS * SPLIT * HELPERS);
}
#else
constexpr int ALL_WARPS = WARPS;
#endif

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(32 * ALL_WARPS, RESIDENT)
    stream_linear(const char* weight, const char* x,
#if RANK
                  Adapters adapters,
#endif
                  const float* squares, const u32* residual, const u32* norm_weight, u32* out, u32* scaled,
                  float* out_squares, float eps, int num_tokens) {
  extern __shared__ __align__(128) char memory[];
  Shared& shared = *(Shared*)(memory + STAGES * STAGE_BYTES);
  const u32 ring = shared_address(memory), full = shared_address(shared.full), empty = shared_address(shared.empty);
  const u32 arrived = shared_address(shared.arrived);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = lane / 4, quad = lane % 4;
  const int rank = blockIdx.x % SPLIT, first_group = blockIdx.x / SPLIT;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) make_barrier(full + 8 * i, 1), make_barrier(empty + 8 * i, WARPS);
    for (int i = 0; i < MOST_FINISHED; i++) make_barrier(arrived + 8 * i, 1);
#if RANK
    make_barrier(shared_address(&shared.shrunk_there), HELPERS);
#endif
    publish_barriers();
    for (int i = 0; i < MOST_FINISHED; i++) expect_bytes(arrived + 8 * i, SPLIT * SUMS * 4);
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#if RANK
  if (warp >= WARPS) return add_adapters(adapters, x, shared, num_tokens, first_group + rank * CLUSTERS);
#endif

  // The first warp asks for chunks, a row by a lane.
  const u64 once = read_once();
  int next_group = first_group, next_chunk = 0;
  auto ask = [&](int slot) {
    if (next_group >= GROUPS) return;
    const int bytes = columns_of(next_chunk) * 2;
    if (lane == 0) expect_bytes(full + 8 * slot, ROWS * bytes);
    __syncwarp();
    const int row =
        GATED ? next_group * OUT_ROWS + lane % OUT_ROWS + lane / OUT_ROWS * OUTPUTS : next_group * ROWS + lane;
    const char* from = weight + ((u64)row * K + rank * MY_K + next_chunk * PIECE) * 2;
    if (lane < ROWS) load_row(ring + slot * STAGE_BYTES + lane * PITCH, from, bytes, full + 8 * slot, once);
    if (++next_chunk == CHUNKS) next_chunk = 0, next_group += CLUSTERS;
  };
  if (warp == 0)
    for (int i = 0; i < STAGES && next_group < GROUPS; i++) {
      if (i >= EARLY_STAGES) wait_for(full + 8 * (i - EARLY_STAGES), 0);
      ask(i);
    }

  wait_for_prerequisites();
  // The order of inputs is the same for x and weight, and such that 16 bytes of either are what a lane multiplies.
  uint4 xs[CHUNKS][STEPS];
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      const int step = s * WARPS + warp;
      const char* from = x + ((u64)token * K + rank * MY_K + c * PIECE + step * STEP + quad * 8) * 2;
      xs[c][s] = token < num_tokens && is_step(c, step) ? *(const uint4*)from : uint4{0, 0, 0, 0};
    }
  for (int t = warp; t < num_tokens && NORM_BLOCKS; t += WARPS) {
    float sum = 0.f;
#pragma unroll
    for (int j = lane; j < NORM_BLOCKS; j += 32) sum += squares[t * NORM_BLOCKS + j];
    sum = sum_of_lanes(sum, 32);
    if (lane == 0) shared.factors[t] = rsqrtf(sum / K + eps);
  }
  start_dependents();  // not before: what they read would delay x
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");  // the others' barriers are made

  int slot = 0, phase = 0, turn = 0;
  for (int group = first_group; group < GROUPS; group += CLUSTERS, turn++) {
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      wait_for(full + 8 * slot, phase);
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        const int step = s * WARPS + warp;
        if (!is_step(c, step)) continue;
        const u32 from = ring + slot * STAGE_BYTES + lane / 4 * PITCH + step * STEP * 2 + quad * 16;
        const uint4 upper = load_shared(from), lower = load_shared(from + 8 * PITCH), v = xs[c][s];
        multiply_add(even, upper.x, lower.x, upper.y, lower.y, v.x, v.y);
        multiply_add(odd, upper.z, lower.z, upper.w, lower.w, v.z, v.w);
      }
      __syncwarp();
      if (lane == 0) arrive(empty + 8 * slot);
      if (warp == 0) {
        wait_for(empty + 8 * slot, phase);
        ask(slot);
      }
      if (++slot == STAGES) slot = 0, phase ^= 1;
    }
    // The block that sent the sums before has read them.
    if (turn) asm volatile("bar.sync 2, %0;" ::"n"(32 * WARPS) : "memory");
#pragma unroll
    for (int i = 0; i < 4; i++) shared.sums[warp][(quad * 2 + i % 2) * LD + lane / 4 + i / 2 * 8] = even[i] + odd[i];
    asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");
    if (warp != turn % WARPS) continue;
    float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float4 part = *(const float4*)(shared.sums[w] + token * LD + quad * 4);
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    const int owner = turn % SPLIT, place = turn / SPLIT;
    const u32 to = shared_address(shared.inbox[place][rank] + token * ROWS + quad * 4);
    send(address_of_peer(to, owner), sum, address_of_peer(arrived + 8 * place, owner));
  }

#if RANK
  const int adapter = token < num_tokens ? adapters.slots[token] : -1;
#endif
  // Finishes the cluster's turns `place * SPLIT + rank`: four outputs of a token by a lane, or two.
  for (int place = warp; place * SPLIT + rank < turn; place += WARPS) {
    const int group = first_group + (place * SPLIT + rank) * CLUSTERS;
    const int row = group * OUT_ROWS + quad * (OUT_ROWS / 4), at = (token * OUTPUTS + row) / 2;
    const bool is_there = token < num_tokens;
    uint2 residuals = {0, 0}, weights = {0, 0};
    if (RESIDUAL && is_there) residuals = *(const uint2*)(residual + at);
    if (NEXT_BLOCKS || BIAS) weights = *(const uint2*)(norm_weight + row / 2);
    const float factor = NORM_BLOCKS ? shared.factors[token] : 1.f;
#if RANK
    const RowsOfB of_first(adapters, adapter, row), of_second(adapters, adapter, GATED ? row + OUTPUTS : row + 2);
#endif
    wait_for(arrived + 8 * place, 0);
    float2 first = {0.f, 0.f}, second = {0.f, 0.f};  // of a gated one: gates and ups
#pragma unroll
    for (int peer = 0; peer < SPLIT; peer++) {
      const float* part = shared.inbox[place][peer] + token * ROWS + quad * (OUT_ROWS / 4);
      const float2 a = *(const float2*)part, b = *(const float2*)(part + (GATED ? OUT_ROWS : 2));
      first.x += a.x, first.y += a.y, second.x += b.x, second.y += b.y;
    }
#if RANK
    wait_for(shared_address(&shared.shrunk_there), 0);
    of_first.add_to(first, shared.shrunk + token * A_ROWS);
    of_second.add_to(second, shared.shrunk + token * A_ROWS);
#endif
    u32 low = rounded(first.x * factor, first.y * factor, weights.x),
        high = rounded(second.x * factor, second.y * factor, weights.y);
    if (GATED) {
      if (is_there) out[at] = silu_times(low, high);
      continue;
    }
    if (RESIDUAL) low = add(residuals.x, low), high = add(residuals.y, high);
    if (is_there) *(uint2*)(out + at) = uint2{low, high};
    if (NEXT_BLOCKS) {
      if (is_there)
        *(uint2*)(scaled + at) =
            uint2{times_norm_weight(low, weights.x, PLUS_ONE), times_norm_weight(high, weights.y, PLUS_ONE)};
      const float sum = sum_of_lanes(sum_of_squares(low) + sum_of_squares(high), 4);
      store_if(is_there && quad == 0, out_squares + token * (OUTPUTS / ROWS) + group, sum);
    }
  }
}
