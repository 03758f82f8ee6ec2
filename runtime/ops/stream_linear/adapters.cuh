// What adapters add to a linear of few tokens on Hopper, for rows.cu and tiles.cu: B . (A . x), A and B of each token's
// slot.
//
// Some warps of a block are for it, so that no warp that reads the weight waits. All blocks' such warps together
// multiply A of each slot that tokens have: a task is up to 8 tokens of one slot, 16 rows of A and a part of the
// inputs. They leave float32 sums in `shrunk` and count tasks. When all are done, each block adds up what its outputs
// need into shared memory. Sums have one order, so numbers are the same every time. Warps that run take the tasks, so
// nobody waits for a block that does not run yet. Where slots are an input of the step, factors are asked for ahead of
// x: a kernel's wait covers what kernels of the step write.
//
// Defined by adapted.py: RANK, A_ROWS (RANK rows of each part), B_ROWS (of all parts' outputs), SHRINK_SPLITS (parts of
// the inputs), ADAPTED_TOKENS (at most), HELPERS of rows.cu (warps), and of an output `part_of` (-1: no part) and its
// row of B, `row_of_b`.

constexpr int A_GROUPS = (A_ROWS + 15) / 16, A_STEP = 32, A_STEPS = K / A_STEP, TASK_TOKENS = 8;
constexpr int A_BATCH = ADAPTED_TOKENS > 8 ? 8 : 4;  // steps asked for at once: as registers of the kernel allow
constexpr int SLOT_WORDS = (ADAPTED_TOKENS + 31) / 32;

struct Counts {  // 0 between launches
  u32 taken, done, left;  // tasks; and warps that have seen them all done
};
struct Adapters {
  const char *a, *b;  // [slots, A_ROWS, K], [slots, B_ROWS, RANK]
  const int* slots;   // of each token; -1: none
  float* shrunk;      // [SHRINK_SPLITS, ADAPTED_TOKENS, A_ROWS]
  Counts* counts;
  int early_slots;  // no kernel right ahead writes slots
};

// Tokens of a slot, one bit each.
struct SlotTokens {
  int slot;
  u64 tokens;
  __device__ __forceinline__ int num_tiles() const { return (__popcll(tokens) + TASK_TOKENS - 1) / TASK_TOKENS; }
};
// Slots of the step's tokens: a lane has those of the tokens of its number, and 32 behind.
struct StepSlots {
  int mine[SLOT_WORDS];
  u64 adapted;  // tokens that have one
  int num_tiles = 0, num_slots = 0;

  __device__ __forceinline__ StepSlots(const int* slots, int num_tokens) {
#pragma unroll
    for (int i = 0; i < SLOT_WORDS; i++) {
      const int token = threadIdx.x % 32 + 32 * i;
      mine[i] = token < num_tokens ? slots[token] : -1;
    }
    adapted = tokens_where([](int slot) { return slot >= 0; });
    for (u64 left = adapted; left;) {
      const SlotTokens next = first_of_those(left);
      num_tiles += next.num_tiles(), num_slots++, left &= ~next.tokens;
    }
  }
  __device__ __forceinline__ int num_tasks() const { return num_tiles * A_GROUPS * SHRINK_SPLITS; }
  // The slot of the first one of some tokens, and its tokens.
  __device__ __forceinline__ SlotTokens first_of_those(u64 tokens) const {
    const int token = __ffsll(tokens) - 1;
    const int slot = __shfl_sync(~0u, SLOT_WORDS > 1 && token > 31 ? mine[SLOT_WORDS - 1] : mine[0], token % 32);
    return {slot, tokens_where([=](int other) { return other == slot; })};
  }
  // The slot of a tile, and its tokens from the tile's first one on.
  __device__ __forceinline__ SlotTokens of_tile(int tile) const {
    SlotTokens its = first_of_those(adapted);
    for (u64 left = adapted; tile >= its.num_tiles();) {
      tile -= its.num_tiles(), left &= ~its.tokens;
      its = first_of_those(left);
    }
    for (int i = 0; i < tile * TASK_TOKENS; i++) its.tokens &= its.tokens - 1;
    return its;
  }

 private:
  template <typename Test>
  __device__ __forceinline__ u64 tokens_where(Test test) const {
    u64 tokens = __ballot_sync(~0u, test(mine[0]));
    if (SLOT_WORDS > 1) tokens |= (u64)__ballot_sync(~0u, test(mine[SLOT_WORDS - 1])) << 32;
    return tokens;
  }
};

__device__ __forceinline__ uint4 load_if(bool is_there, const char* from) {
  return is_there ? *(const uint4*)from : uint4{0, 0, 0, 0};
}

// A task as a lane has it: its slot and part of the inputs, the first of the lane's two rows of A, and the token that
// it loads; -1: none.
struct Task {
  int slot, part, row, token;
};
// From their total on there is none. Finding tokens takes half a microsecond: those of the first task are found ahead
// of the wait.
__device__ __forceinline__ Task task_of(const StepSlots& slots, u32 number) {
  if (number >= slots.num_tasks()) return {};
  const int lane = threadIdx.x % 32, tile = number / SHRINK_SPLITS / A_GROUPS;
  const SlotTokens its = slots.of_tile(tile);
  u64 tokens = its.tokens;
  for (int i = 0; i < lane / 4; i++) tokens &= tokens - 1;
  const int group = number / SHRINK_SPLITS % A_GROUPS, part = number % SHRINK_SPLITS;
  return {its.slot, part, group * 16 + lane / 4, __ffsll(tokens) - 1};
}
// Inputs are in the order of rows.cu: 16 bytes of a row serve two products.
__device__ __forceinline__ void shrink(const Adapters& adapters, const char* x, const Task& task) {
  const int quad = threadIdx.x % 4, part = task.part, row = task.row, token = task.token;
  const char* of_x = x + ((u64)max(token, 0) * K + quad * 8) * 2;
  const char* of_a = adapters.a + (((u64)task.slot * A_ROWS + row) * K + quad * 8) * 2;
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
      v[i] = load_if(is_step && token >= 0, of_x + at);
    }
#pragma unroll
    for (int i = 0; i < A_BATCH; i++) {
      multiply_add(even, upper[i].x, lower[i].x, upper[i].y, lower[i].y, v[i].x, v[i].y);
      multiply_add(odd, upper[i].z, lower[i].z, upper[i].w, lower[i].w, v[i].z, v[i].w);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {  // of two tokens, in two rows
    const int out_token = __shfl_sync(~0u, token, (quad * 2 + i % 2) * 4), out_row = row + i / 2 * 8;
    store_if(out_token >= 0 && out_row < A_ROWS,
             adapters.shrunk + (part * ADAPTED_TOKENS + out_token) * A_ROWS + out_row, even[i] + odd[i]);
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
// A multiple of 16 bytes into shared memory; the barrier counts them.
__device__ __forceinline__ void load_bytes(u32 to, const char* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void fetch(const char* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}
// Gets A of a task near.
__device__ __forceinline__ void fetch_a(const Adapters& adapters, const Task& task) {
  const int part = task.part, first_row = task.row - threadIdx.x % 32 / 4;
  const int begin = part * A_STEPS / SHRINK_SPLITS * A_STEP, end = (part + 1) * A_STEPS / SHRINK_SPLITS * A_STEP;
  const char* from = adapters.a + (u64)task.slot * A_ROWS * K * 2;
  for (int row = first_row + threadIdx.x % 32; row < min(first_row + 16, A_ROWS); row += 32)
    for (int column = begin; column < end; column += 64) fetch(from + ((u64)row * K + column) * 2);
}
// The tasks that the warp takes, `task` of this number first.
__device__ __forceinline__ void shrink_some(const Adapters& adapters, const StepSlots& slots, const char* x, u32 number,
                                            Task task) {
  const u32 total = slots.num_tasks();
  u32 done = 0;
  for (; number < total; done++) {
    const u32 taken = take(adapters);
    shrink(adapters, x, task);
    number = __shfl_sync(~0u, taken, 0);
    task = task_of(slots, number);
  }
  __threadfence();
  __syncwarp();
  if (done && threadIdx.x % 32 == 0) atomicAdd(&adapters.counts->done, done);
}
// Waits for all tasks, of all blocks' warps.
__device__ __forceinline__ void wait_for_all(const Adapters& adapters, const StepSlots& slots) {
  const u32 total = slots.num_tasks();
  while (threadIdx.x % 32 == 0 && seen(&adapters.counts->done) < total) {
  }
  __syncwarp();
}
// Of all warps that have seen all tasks done, the last one makes the counts 0 again. The answer to its count takes a
// microsecond: it is behind what others wait for.
__device__ __forceinline__ void leave(const Adapters& adapters, int num_warps) {
  Counts& counts = *adapters.counts;
  if (threadIdx.x % 32 == 0 && atomicAdd(&counts.left, 1) == num_warps - 1)
    atomicExch(&counts.taken, 0), atomicExch(&counts.done, 0), atomicExch(&counts.left, 0);
}

// Adds up A . x of the parts in the mask, four neighbours of [ADAPTED_TOKENS][A_ROWS] by each of HELPING threads. A
// thread's loads of a part do not wait for each other.
template <int HELPING, typename Store>
__device__ __forceinline__ void add_up_shrunk(const Adapters& adapters, const StepSlots& slots, u32 parts, int thread,
                                              Store store) {
  constexpr int FOURS = RANK / 4, COUNT = ADAPTED_TOKENS * FOURS;
  for (u32 left = parts; left; left &= left - 1) {
    const int first_row = (__ffs(left) - 1) * RANK;
#pragma unroll
    for (int first = 0; first < COUNT; first += HELPING) {
      const int at = first + thread, token = min(at, COUNT - 1) / FOURS;
      const int i = token * A_ROWS + first_row + at % FOURS * 4;
      const bool is_there = at < COUNT && slots.adapted >> token & 1;
      float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int s = 0; s < SHRINK_SPLITS; s++) {
        const float4* from = (const float4*)(adapters.shrunk + s * ADAPTED_TOKENS * A_ROWS + i);
        const float4 v = is_there ? __ldcg(from) : float4{0.f, 0.f, 0.f, 0.f};
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
      if (is_there) store(i, sum);
    }
  }
}

__device__ __forceinline__ const char* place_of_b(const Adapters& adapters, int slot, int output, int part) {
  return adapters.b + ((u64)slot * B_ROWS + row_of_b(output, part)) * RANK * 2;
}
__device__ __forceinline__ void fetch_b(const Adapters& adapters, int slot, int output) {
  const int part = part_of(output);
  if (slot >= 0 && part >= 0) fetch(place_of_b(adapters, slot, output, part));
}
__device__ __forceinline__ u32 mask_of(int part) { return part < 0 ? 0 : 1 << part; }

// Two neighbouring rows of B, of a slot: those of outputs `output` and the next one.
struct RowsOfB {
  int part;
  uint4 values[2][RANK / 8];

  __device__ __forceinline__ RowsOfB(const Adapters& adapters, int slot, int output) : part(part_of(output)) {
    if (slot < 0) part = -1;
    const char* from = place_of_b(adapters, slot, output, part);
#pragma unroll
    for (int i = 0; i < 2 * RANK / 8; i++) values[i / (RANK / 8)][i % (RANK / 8)] = load_if(part >= 0, from + 16 * i);
  }
  // Adds their products with A . x of a token, [A_ROWS].
  __device__ __forceinline__ void add_to(float2& sums, const float* shrunk) const {
    if (part < 0) return;
    float2 added = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < RANK / 8; i++) {
      const float* u = shrunk + part * RANK + 8 * i;
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

__device__ __forceinline__ uint2 shared_pair(u32 address) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

// B of 8 outputs as a lane multiplies it, from shared memory: ranks are ordered so that 8 bytes of a row are operands.
struct EightOfB {
  uint2 factors[RANK / 16];

  __device__ __forceinline__ void get(u32 from) {
#pragma unroll
    for (int r = 0; r < RANK / 16; r++) factors[r] = shared_pair(from + r * 32);
  }
};
// A . x of a lane's two tokens that have a slot, `token` and 8 behind, from [..][A_ROWS] bfloat16: of one part, for as
// many outputs as are in it.
struct ShrunkOfSlot {
  const u32* shrunk;
  int token;
  bool has_slot[2];
  int part = -1;
  uint2 values[2][RANK / 16];

  __device__ __forceinline__ void get(int its_part) {
    if (its_part == part) return;
    part = its_part;
#pragma unroll
    for (int r = 0; r < RANK / 16; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const u32* from = shrunk + ((token + 8 * h) * A_ROWS + part * RANK + r * 16 + threadIdx.x % 4 * 4) / 2;
        values[h][r] = has_slot[h] ? *(const uint2*)from : uint2{0, 0};
      }
  }
  // Adds to the sums of 8 outputs of the part and 16 tokens, as m16n8k16 has them, B times it.
  __device__ __forceinline__ void multiply(float* sums, const EightOfB& b) const {
#pragma unroll
    for (int r = 0; r < RANK / 16; r++)
      multiply_add(sums, values[0][r].x, values[1][r].x, values[0][r].y, values[1][r].y, b.factors[r].x,
                   b.factors[r].y);
  }
};
