// What adapters add to a linear of few tokens on Hopper, for rows.cu and tiles.cu: B . (A . x), A and B of each token's
// slot.
//
// Some warps of a block are for it, its helpers, so that no warp that reads the weight waits. All blocks' helpers
// together multiply A of each slot that tokens have: a task is up to 8 tokens of one slot, 16 rows of A and a part of
// the inputs, which the helpers of a block divide. They leave float32 sums in `sums`, each with the launch's tag beside
// it: 8 bytes are written and read at once, so that nobody waits for a count of what is written. Each block adds up
// what its outputs need into shared memory, as it comes. That is all blocks' reading of all sums, so parts are few.
// Sums have one order, so numbers are the same every time. Blocks that run take the tasks, so nobody waits for one that
// does not run yet. Where slots are an input of the step, factors are asked for ahead of x: a kernel's wait covers what
// kernels of the step write.
//
// Defined by adapted.py: RANK, A_ROWS (RANK rows of each part), B_ROWS (of all parts' outputs), SHRINK_SPLITS (parts of
// the inputs), ADAPTED_TOKENS (at most), HELPERS (warps), and of an output `part_of` (-1: no part) and its row of B,
// `row_of_b`.

constexpr int A_GROUPS = (A_ROWS + 15) / 16, A_STEP = 32, A_STEPS = K / A_STEP, TASK_TOKENS = 8;
constexpr int A_BATCH = ADAPTED_TOKENS > 8 ? 9 : 4;  // steps asked for at once: as registers of the kernel allow
constexpr int SLOT_WORDS = (ADAPTED_TOKENS + 31) / 32;

struct Counts {
  u32 taken, left, launches;  // tasks, and blocks that have all sums: 0 between launches; and launches that have ended
};
struct Adapters {
  const char *a, *b;  // [slots, A_ROWS, K], [slots, B_ROWS, RANK]
  const int* slots;   // of each token; -1: none
  uint2* sums;        // [SHRINK_SPLITS, ADAPTED_TOKENS, A_ROWS], of the linear alone: a sum, and its launch's tag
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

// The helpers of a block: which of them this thread is in, and what they share. All of them meet.
struct Helpers {
  int warp, lane;
  float4* sums;  // [HELPERS - 1][32]
  u32* number;   // of the block's task
  u32* tag;      // of the launch; none that has been

  __device__ __forceinline__ int thread() const { return warp * 32 + lane; }
  __device__ __forceinline__ bool is_first() const { return thread() == 0; }
};
__device__ __forceinline__ void meet_helpers() {
  asm volatile("bar.sync 3, %0;" ::"n"(32 * HELPERS) : "memory");
}

// A task as a lane has it: its slot and part of the inputs, the first of the lane's two rows of A, and the token that
// it loads; -1: none.
struct Task {
  int slot, part, row, token;

  // The helper's first step of inputs; the next helper's is where it ends.
  __device__ __forceinline__ int begin(int helper) const {
    return (part * HELPERS + helper) * A_STEPS / (SHRINK_SPLITS * HELPERS);
  }
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
// A helper's products of a task: of two tokens, in two rows. Inputs are in the order of rows.cu: 16 bytes of a row
// serve two products.
__device__ __forceinline__ float4 shrink(const Adapters& adapters, const char* x, const Task& task, int helper) {
  const int quad = threadIdx.x % 4, row = task.row, token = task.token;
  const char* of_x = x + ((u64)max(token, 0) * K + quad * 8) * 2;
  const char* of_a = adapters.a + (((u64)task.slot * A_ROWS + row) * K + quad * 8) * 2;
  const int end = task.begin(helper + 1);
  float even[4] = {}, odd[4] = {};
  for (int step = task.begin(helper); step < end; step += A_BATCH) {
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
  return {even[0] + odd[0], even[1] + odd[1], even[2] + odd[2], even[3] + odd[3]};
}
// A sum and its tag, written at once; two of them.
__device__ __forceinline__ void store_tagged(uint2* to, float sum, u32 tag) {
  asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(__float_as_uint(sum)), "r"(tag) : "memory");
}
__device__ __forceinline__ void load_tagged(uint4& v, bool is_asked, const uint2* from) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(from), "r"((u32)is_asked) : "memory");
}
// Leaves the sums of a task, added up over the helpers.
__device__ __forceinline__ void store_sums(const Adapters& adapters, const Task& task, float4 sums,
                                           const Helpers& helpers) {
#pragma unroll
  for (int i = 0; i < HELPERS - 1; i++) {
    const float4 v = helpers.sums[i * 32 + helpers.lane];
    sums.x += v.x, sums.y += v.y, sums.z += v.z, sums.w += v.w;
  }
  const float of_rows[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int token = __shfl_sync(~0u, task.token, (threadIdx.x % 4 * 2 + i % 2) * 4), row = task.row + i / 2 * 8;
    if (token >= 0 && row < A_ROWS)
      store_tagged(adapters.sums + (task.part * ADAPTED_TOKENS + token) * A_ROWS + row, of_rows[i], *helpers.tag);
  }
}

// The number of the block's first task, which is none from their total on.
__device__ __forceinline__ u32 take_first(const Adapters& adapters, const Helpers& helpers) {
  if (helpers.is_first()) {
    *helpers.number = atomicAdd(&adapters.counts->taken, 1);
    *helpers.tag = *(volatile const u32*)&adapters.counts->launches + 1;
  }
  meet_helpers();
  return *helpers.number;
}
// A multiple of 16 bytes into shared memory; the barrier counts them.
__device__ __forceinline__ void load_bytes(u32 to, const char* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void fetch(const char* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}
// Gets a helper's A of a task near.
__device__ __forceinline__ void fetch_a(const Adapters& adapters, const Task& task, int helper) {
  const int first_row = task.row - threadIdx.x % 32 / 4;
  const int begin = task.begin(helper) * A_STEP, end = task.begin(helper + 1) * A_STEP;
  const char* from = adapters.a + (u64)task.slot * A_ROWS * K * 2;
  for (int row = first_row + threadIdx.x % 32; row < min(first_row + 16, A_ROWS); row += 32)
    for (int column = begin; column < end; column += 64) fetch(from + ((u64)row * K + column) * 2);
}
// The tasks that the block takes, `task` of this number first.
__device__ __forceinline__ void shrink_some(const Adapters& adapters, const StepSlots& slots, const char* x, u32 number,
                                            Task task, const Helpers& helpers) {
  const u32 total = slots.num_tasks();
  while (number < total) {
    meet_helpers();  // all have read the number, and the first warp others' sums
    const u32 taken = helpers.is_first() ? atomicAdd(&adapters.counts->taken, 1) : 0;
    const float4 sums = shrink(adapters, x, task, helpers.warp);
    if (helpers.warp) helpers.sums[helpers.thread() - 32] = sums;
    if (helpers.is_first()) *helpers.number = taken;
    meet_helpers();
    if (helpers.warp == 0) store_sums(adapters, task, sums, helpers);
    number = *helpers.number;
    task = task_of(slots, number);
  }
}
// Of all blocks that have their sums, the last one makes the counts 0 again, and the next launch's tag another one. The
// answer to its count takes a microsecond: it is behind what others wait for.
__device__ __forceinline__ void leave(const Adapters& adapters, int num_blocks, const Helpers& helpers) {
  Counts& counts = *adapters.counts;
  if (helpers.is_first() && atomicAdd(&counts.left, 1) == num_blocks - 1)
    atomicExch(&counts.taken, 0), atomicExch(&counts.left, 0), atomicAdd(&counts.launches, 1);
}

// Adds up A . x of the parts in the mask, two neighbours of [ADAPTED_TOKENS][A_ROWS] by a thread of the helpers'. Its
// loads do not wait for each other. Until one of them is there nothing else is asked for: reads of the weight go on.
template <typename Store>
__device__ __forceinline__ void add_up_shrunk(const Adapters& adapters, const StepSlots& slots, u32 parts,
                                              const Helpers& helpers, Store store) {
  constexpr int MOST_LOADS = ADAPTED_TOKENS > 8 ? 30 : 16, PITCH_OF_SPLIT = ADAPTED_TOKENS * A_ROWS;
  constexpr int TWOS = RANK / 2, COUNT = ADAPTED_TOKENS * TWOS, HELPING = 32 * HELPERS;
  constexpr int TURNS = (COUNT + HELPING - 1) / HELPING;
  constexpr int SPLITS = SHRINK_SPLITS < MOST_LOADS ? SHRINK_SPLITS : MOST_LOADS;
  constexpr int AT_ONCE = MOST_LOADS / SPLITS < TURNS ? MOST_LOADS / SPLITS : TURNS;
  const u32 tag = *helpers.tag;
  meet_helpers();  // the first warp has others' sums, in whose place these may be
  for (u32 left = parts; left; left &= left - 1) {
    const int first_row = (__ffs(left) - 1) * RANK;
#pragma unroll 1
    for (int first = 0; first < TURNS; first += AT_ONCE) {
      float2 sums[AT_ONCE] = {};
      int places[AT_ONCE];  // -1: none
#pragma unroll
      for (int turn = 0; turn < AT_ONCE; turn++) {
        const int at = (first + turn) * HELPING + helpers.thread(), token = min(at, COUNT - 1) / TWOS;
        const bool is_there = at < COUNT && slots.adapted >> token & 1;
        places[turn] = is_there ? token * A_ROWS + first_row + at % TWOS * 2 : -1;
      }
#pragma unroll
      for (int split = 0; split < SHRINK_SPLITS; split += SPLITS) {
        uint4 values[AT_ONCE][SPLITS];
        const uint2* from = adapters.sums + split * PITCH_OF_SPLIT;
        for (uint4 v = {0, places[0] >= 0 ? tag - 1 : tag, 0, 0}; v.y != tag;) load_tagged(v, true, from + places[0]);
        bool is_missing;
        auto ask = [&](bool again) {
          is_missing = false;
#pragma unroll
          for (int turn = 0; turn < AT_ONCE; turn++)
#pragma unroll
            for (int s = 0; s < SPLITS; s++) {
              uint4& v = values[turn][s];
              const bool is_there = places[turn] >= 0 && split + s < SHRINK_SPLITS;
              const bool is_asked = again ? v.y != tag || v.w != tag : is_there;
              if (!again) v = uint4{0, tag, 0, tag};
              load_tagged(v, is_asked, from + s * PITCH_OF_SPLIT + places[turn]);
            }
#pragma unroll
          for (int turn = 0; turn < AT_ONCE; turn++)
#pragma unroll
            for (int s = 0; s < SPLITS; s++) is_missing |= values[turn][s].y != tag || values[turn][s].w != tag;
        };
        ask(false);
        while (is_missing) ask(true);
#pragma unroll
        for (int turn = 0; turn < AT_ONCE; turn++)
#pragma unroll
          for (int s = 0; s < SPLITS; s++)
            sums[turn].x += __uint_as_float(values[turn][s].x), sums[turn].y += __uint_as_float(values[turn][s].z);
      }
#pragma unroll
      for (int turn = 0; turn < AT_ONCE; turn++)
        if (places[turn] >= 0) store(places[turn], sums[turn]);
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
