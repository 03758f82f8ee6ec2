// Which experts a step's tokens go to. Every block finds it for itself, from the router's scores or from a choice that
// was made, in less time than the launch of a kernel for it would take.
//
// Defined by kernel.py: EXPERTS, CHOSEN (experts a token), SCORE_BYTES (of a score; 0: ids and weights are given),
// SOFTMAX, RENORMALISE (shapes.py of runtime/ops/experts), WIDE (weights stay float32; else they are bfloat16).

constexpr int TOKENS = 8, WARPS = 8;  // of a product; of a block, those that compute: one for each token's choice
constexpr int MOST_ACTIVE = TOKENS * CHOSEN < EXPERTS ? TOKENS * CHOSEN : EXPERTS;
constexpr int WORDS = (EXPERTS + 31) / 32;      // of a mask; scores of a lane
constexpr int NONE = -1;                        // in the place of an expert: the token is padding
constexpr float LEAST = -3.402823466e38f;       // in the place of a score
static_assert(WORDS <= 32 && CHOSEN <= 32 && CHOSEN <= EXPERTS, "a lane has a word, and a choice");

struct Choice {
  float weights[TOKENS][CHOSEN];
  u32 mask[WORDS];  // of experts that a token goes to
  int num_active;
  short ids[TOKENS][CHOSEN], active[MOST_ACTIVE];  // active: in ascending order
  signed char places[MOST_ACTIVE][TOKENS];         // which of the token's choices an active expert is, or -1
};
struct Router {
  const void* scores;          // [T, EXPERTS]
  const long long* ids;        // [T, CHOSEN], and weights, where they are given
  const void* weights;
  const long long* slots;      // [T]: 0 is padding
};

// Data of a kernel before the previous one: a level-one cache may hold older data.
__device__ __forceinline__ float load_number(const void* from, int index, int bytes) {
  if (bytes == 4) {
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"((const float*)from + index));
    return v;
  }
  unsigned short v;
  asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"((const unsigned short*)from + index));
  return __uint_as_float((u32)v << 16);
}
__device__ __forceinline__ long long load_integer(const long long* from) {
  long long v;
  asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];" : "=l"(v) : "l"(from));
  return v;
}
// Larger for larger numbers, and never 0.
__device__ __forceinline__ u32 key_of(float v) {
  const u32 bits = __float_as_uint(v + 0.f);  // -0 is 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float number_of(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// The largest of a warp's keys, a lane's i-th of expert i * 32 + lane, of equal ones the first expert's; it is taken
// away.
struct Largest {
  u32 key;
  int expert;
};
__device__ __forceinline__ Largest take_largest(u32 (&keys)[WORDS]) {
  u32 best = 0;
  if constexpr (SCORE_BYTES == 2) {  // a key's lower half is free for the expert
#pragma unroll
    for (int i = 0; i < WORDS; i++) best = max(best, keys[i]);
    const u32 most = __reduce_max_sync(~0u, best);
#pragma unroll
    for (int i = 0; i < WORDS; i++)
      if (keys[i] == most) keys[i] = 0;
    return {most & 0x80000000u ? most & 0xffff0000u : most | 0xffffu, (int)(0xffff - (most & 0xffff))};
  } else {
    u32 first = 0;
#pragma unroll
    for (int i = 0; i < WORDS; i++)
      if (keys[i] > best) best = keys[i], first = i * 32 + threadIdx.x % 32;
    const u32 most = __reduce_max_sync(~0u, best), expert = __reduce_min_sync(~0u, best == most ? first : ~0u);
#pragma unroll
    for (int i = 0; i < WORDS; i++)
      if (expert == i * 32 + threadIdx.x % 32) keys[i] = 0;
    return {most, (int)expert};
  }
}

// A warp finds a token's largest scores, lane j the j-th; the lowest of equal scores' experts comes first. A token with
// scores that are no numbers chooses the first experts with the weight NaN. The choice is of scores: a softmax of all
// of them leaves their order, and only its sum is needed besides.
template <bool WITH_WEIGHTS>
__device__ __forceinline__ void choose(int& id, float& weight, const void* scores, int token) {
  const int lane = threadIdx.x % 32;
  float values[WORDS];
  u32 keys[WORDS];
  bool is_number = true;
#pragma unroll
  for (int i = 0; i < WORDS; i++) {
    const int expert = i * 32 + lane;
    values[i] = expert < EXPERTS ? load_number(scores, token * EXPERTS + expert, SCORE_BYTES) : LEAST;
  }
#pragma unroll
  for (int i = 0; i < WORDS; i++) {
    is_number &= values[i] == values[i];
    const u32 key = key_of(values[i]), expert = i * 32 + lane;
    keys[i] = expert >= EXPERTS ? 0 : SCORE_BYTES == 2 ? (key & 0xffff0000u) | (0xffff - expert) : key;
  }
  is_number = __all_sync(~0u, is_number);
  id = 0, weight = 0.f;
  float most = 0.f;
#pragma unroll 1
  for (int j = 0; j < CHOSEN; j++) {
    const Largest largest = take_largest(keys);
    if (j == 0) most = number_of(largest.key);
    if (lane == j) id = largest.expert, weight = number_of(largest.key);
  }
  if (!is_number) id = lane;
  if (!WITH_WEIGHTS) return;
  const bool is_choice = lane < CHOSEN;
  if (SOFTMAX) {
    weight = is_choice ? __expf(weight - most) : 0.f;
    float sum = weight;
    if (SOFTMAX == 1 && !RENORMALISE) {  // of all; else what is left out is in both, the weights' sum and theirs
      sum = 0.f;
#pragma unroll
      for (int i = 0; i < WORDS; i++) sum += __expf(values[i] - most);
    }
    weight /= sum_of_lanes(sum, 32);
  } else if (RENORMALISE) weight /= sum_of_lanes(weight, 32);
  if (!is_number) weight = __uint_as_float(0x7fc00000u);
}

// Before find_choice, with a barrier of the block between.
__device__ __forceinline__ void clear(Choice& choice) {
  if (threadIdx.x < WORDS) choice.mask[threadIdx.x] = 0;
  for (int i = threadIdx.x; i < MOST_ACTIVE * TOKENS; i += blockDim.x) choice.places[i / TOKENS][i % TOKENS] = -1;
}
// Active experts of the words before `word`.
__device__ __forceinline__ int active_before(const Choice& choice, int word) {
  int count = 0;
#pragma unroll
  for (int i = 0; i < WORDS; i++) count += i < word ? __popc(choice.mask[i]) : 0;
  return count;
}
// All threads call it; a barrier of the block must follow before the choice is read. The first weights are loaded once
// it is known, so it computes no more than needed: WITH_WEIGHTS also the sum's weights.
template <bool WITH_WEIGHTS>
__device__ __forceinline__ void find_choice(Choice& choice, const Router& router, int num_tokens) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool is_token = warp < num_tokens;
  int id = NONE;
  float weight = 0.f;
  if (is_token) {
    const bool is_real = load_integer(router.slots + warp) > 0;
    if (SCORE_BYTES) choose<WITH_WEIGHTS>(id, weight, router.scores, warp);
    else if (lane < CHOSEN) {
      id = load_integer(router.ids + warp * CHOSEN + lane);
      if (WITH_WEIGHTS) weight = load_number(router.weights, warp * CHOSEN + lane, WIDE ? 4 : 2);
    }
    if (!WIDE) weight = first_of(pack(weight, 0.f));
    if (!is_real || lane >= CHOSEN) id = NONE;
    if (lane < CHOSEN) {
      choice.ids[warp][lane] = id;
      if (WITH_WEIGHTS) choice.weights[warp][lane] = weight;
    }
    if (id >= 0) atomicOr(&choice.mask[id / 32], 1u << id % 32);
  }
  __syncthreads();
  // Each choice says where its expert is among the active ones.
  if (id >= 0) {
    const int place = active_before(choice, id / 32) + __popc(choice.mask[id / 32] & ((1u << id % 32) - 1));
    choice.places[place][warp] = lane, choice.active[place] = id;
  }
  if (threadIdx.x == 0) choice.num_active = active_before(choice, WORDS);
}

__device__ __forceinline__ uint4 load_shared(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ void load_bytes(u32 to, const char* from, int bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
// Of the warps that compute, without the one that asks for weights.
__device__ __forceinline__ void wait_for_others() { asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory"); }
