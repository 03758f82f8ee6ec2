// What adapters add to a linear of up to 8 tokens on Hopper, for rows.cu: B . (A . x), A and B of each token's slot.
//
// A block has one more warp for it, so that no warp that reads the weight waits. All blocks' such warps together
// multiply A of each slot that tokens have: a task is 16 rows of A and a part of the inputs. They leave float32 sums in
// `shrunk` and count tasks. When all are done, each block adds up what its outputs need into shared memory. Sums have
// one order, so numbers are the same every time. Warps that run take the tasks, so nobody waits for a block that does
// not run yet.
//
// Defined by adapted.py: RANK (a multiple of 8), A_ROWS (RANK rows of each part), B_ROWS (of all parts' outputs),
// SHRINK_SPLITS (parts of the inputs), and of an output `part_of` (-1: no part) and its row of B, `row_of_b`.

constexpr int ADAPTED_TOKENS = 8, A_GROUPS = (A_ROWS + 15) / 16, A_STEP = 32, A_STEPS = K / A_STEP, A_BATCH = 4;

struct Counts {  // 0 between launches
  u32 taken, done, left;  // tasks; and warps that have seen them all done
};
struct Adapters {
  const char *a, *b;    // [slots, A_ROWS, K], [slots, B_ROWS, RANK]
  const int* slots;     // of each token; -1: none
  float* shrunk;        // [SHRINK_SPLITS, ADAPTED_TOKENS, A_ROWS]
  Counts* counts;
};

// Slots of the step's tokens: a lane has that of the token of its number.
struct StepSlots {
  int mine;
  u32 first, adapted;  // tokens that are the first one of their slot; that have one

  __device__ __forceinline__ StepSlots(const int* slots, int num_tokens) {
    const int lane = threadIdx.x % 32;
    mine = lane < num_tokens ? slots[lane] : -1;
    const u32 same = __match_any_sync(~0u, mine);
    adapted = __ballot_sync(~0u, mine >= 0);
    first = adapted & __ballot_sync(~0u, lane == __ffs(same) - 1);
  }
  __device__ __forceinline__ int num_tasks() const { return __popc(first) * A_GROUPS * SHRINK_SPLITS; }
  // The slot at this place among different ones.
  __device__ __forceinline__ int slot(int place) const {
    u32 left = first;
    for (int i = 0; i < place; i++) left &= left - 1;
    return __shfl_sync(~0u, mine, __ffs(left) - 1);
  }
};

__device__ __forceinline__ uint4 load_if(bool is_there, const char* from) {
  return is_there ? *(const uint4*)from : uint4{0, 0, 0, 0};
}

// Inputs are in the order of rows.cu: 16 bytes of a row serve two products.
__device__ __forceinline__ void shrink(const Adapters& adapters, const StepSlots& slots, const char* x, int num_tokens,
                                       int task) {
  const int lane = threadIdx.x % 32, quad = lane % 4, part = task % SHRINK_SPLITS;
  const int group = task / SHRINK_SPLITS % A_GROUPS, slot = slots.slot(task / SHRINK_SPLITS / A_GROUPS);
  const int row = group * 16 + lane / 4;
  const char* of_x = x + ((u64)(lane / 4) * K + quad * 8) * 2;
  const char* of_a = adapters.a + (((u64)slot * A_ROWS + row) * K + quad * 8) * 2;
  const int end = (part + 1) * A_STEPS / SHRINK_SPLITS;
  float even[4] = {}, odd[4] = {};
  for (int step = part * A_STEPS / SHRINK_SPLITS; step < end; step += A_BATCH) {
    uint4 upper[A_BATCH], lower[A_BATCH], v[A_BATCH];
#pragma unroll
    for (int i = 0; i < A_BATCH; i++) {
      const bool is_step = step + i < end;
      const u64 at = (step + i) * A_STEP * 2;
      upper[i] = load_if(is_step && row < A_ROWS, of_a + at);
      lower[i] = load_if(is_step && row + 8 < A_ROWS, of_a + (u64)8 * K * 2 + at);
      v[i] = load_if(is_step && lane / 4 < num_tokens, of_x + at);
    }
#pragma unroll
    for (int i = 0; i < A_BATCH; i++) {
      multiply_add(even, upper[i].x, lower[i].x, upper[i].y, lower[i].y, v[i].x, v[i].y);
      multiply_add(odd, upper[i].z, lower[i].z, upper[i].w, lower[i].w, v[i].z, v[i].w);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {  // of two tokens, in two rows
    const int token = quad * 2 + i % 2, out_row = row + i / 2 * 8;
    const bool is_mine = __shfl_sync(~0u, slots.mine, token) == slot;
    if (is_mine && out_row < A_ROWS)
      adapters.shrunk[(part * ADAPTED_TOKENS + token) * A_ROWS + out_row] = even[i] + odd[i];
  }
}

__device__ __forceinline__ u32 seen(const u32* count) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(count) : "memory");
  return v;
}
// A number of a task, which is none from their total on.
__device__ __forceinline__ u32 take(const Adapters& adapters) {
  return threadIdx.x % 32 ? 0 : atomicAdd(&adapters.counts->taken, 1);
}
// The tasks that the warp takes, `taken` first; then waits for all.
__device__ __forceinline__ void shrink_all(const Adapters& adapters, const StepSlots& slots, const char* x,
                                           int num_tokens, u32 taken, int num_warps) {
  const u32 total = slots.num_tasks();
  Counts& counts = *adapters.counts;
  u32 done = 0;
  for (u32 task = __shfl_sync(~0u, taken, 0); task < total; task = __shfl_sync(~0u, taken, 0), done++) {
    taken = take(adapters);
    shrink(adapters, slots, x, num_tokens, task);
  }
  __threadfence();
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    if (done) atomicAdd(&counts.done, done);
    while (seen(&counts.done) < total) {
    }
    // The last warp that has seen them all makes the counts 0 again.
    if (atomicAdd(&counts.left, 1) == num_warps - 1)
      atomicExch(&counts.taken, 0), atomicExch(&counts.done, 0), atomicExch(&counts.left, 0);
  }
  __syncwarp();
}

// Adds up A . x of the parts in the mask, into [ADAPTED_TOKENS][A_ROWS].
__device__ __forceinline__ void add_up_shrunk(const Adapters& adapters, const StepSlots& slots, u32 parts, float* to) {
  for (int i = threadIdx.x % 32 * 4; i < ADAPTED_TOKENS * A_ROWS; i += 128) {
    if (!(slots.adapted >> i / A_ROWS & 1) || !(parts >> i % A_ROWS / RANK & 1)) continue;
    float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int s = 0; s < SHRINK_SPLITS; s++) {
      const float4 v = __ldcg((const float4*)(adapters.shrunk + s * ADAPTED_TOKENS * A_ROWS + i));
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    *(float4*)(to + i) = sum;
  }
}

// Two neighbouring rows of B, of a slot: those of outputs `output` and the next one.
struct RowsOfB {
  int part;
  uint4 values[2][RANK / 8];

  __device__ __forceinline__ static const char* place(const Adapters& adapters, int slot, int output, int part) {
    return adapters.b + ((u64)slot * B_ROWS + row_of_b(output, part)) * RANK * 2;
  }
  __device__ __forceinline__ static void fetch(const Adapters& adapters, int slot, int output) {
    const int part = part_of(output);
    if (slot >= 0 && part >= 0)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(place(adapters, slot, output, part)) : "memory");
  }
  __device__ __forceinline__ RowsOfB(const Adapters& adapters, int slot, int output) : part(part_of(output)) {
    if (slot < 0) part = -1;
    const char* from = place(adapters, slot, output, part);
#pragma unroll
    for (int i = 0; i < 2 * RANK / 8; i++) values[i / (RANK / 8)][i % (RANK / 8)] = load_if(part >= 0, from + 16 * i);
  }
  // Adds their products with A . x of a token, [A_ROWS].
  __device__ __forceinline__ void add_to(float2& sums, const float* shrunk) const {
    if (part < 0) return;
    float2 added = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < RANK / 8; i++) {
      const float *u = shrunk + part * RANK + 8 * i;
      const float4 low = *(const float4*)u, high = *(const float4*)(u + 4);
      added.x += product(values[0][i], low, high), added.y += product(values[1][i], low, high);
    }
    sums.x += added.x, sums.y += added.y;
  }
  __device__ __forceinline__ static float product(const uint4& b, const float4& low, const float4& high) {
    return first_of(b.x) * low.x + second_of(b.x) * low.y + first_of(b.y) * low.z + second_of(b.y) * low.w +
           first_of(b.z) * high.x + second_of(b.z) * high.y + first_of(b.w) * high.z + second_of(b.w) * high.w;
  }
};
