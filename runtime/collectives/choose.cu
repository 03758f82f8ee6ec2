// The most probable token of each row, where the logits' columns are cut over ranks. Each rank finds its largest, and
// ranks exchange a number a row in place of the logits.
//
// That number, a key, has the logit in a sortable form ahead of the complement of the token's id. So the largest key is
// the largest logit, with the lowest id among equals. A logit that is no number counts as inf. No key is 0. So memory
// that nothing has come to holds 0, and, as in push.cu, what a rank waits for is the keys themselves; three buffers
// take turns.
//
// Blocks add their parts of rows to the rank's keys, and the last block exchanges them: no rank waits for another while
// it has blocks to run.
constexpr int CHUNKS = 4;  // of 16 bytes, that a thread reads at once
constexpr int OF_BLOCK = THREADS * CHUNKS * 8, PARTS = (COLUMNS + OF_BLOCK - 1) / OF_BLOCK;
constexpr u32 SIGN = 0x80000000u;
constexpr u32 INFINITE = 0x7f800000u;

// Words of the state: calls so far, blocks of this one that have ended, rows of the three buffers' last calls.
enum { CHOICES = 0, ENDED = 1, ROWS_OF = 2 };

struct Largest {
  float logit;
  u32 column;
  bool is_any;

  // Columns come in ascending order: of equals the first stays.
  __device__ __forceinline__ void see(float one, u32 at) {
    one = one == one ? one : __uint_as_float(INFINITE);
    if (is_any && !(one > logit)) return;
    logit = one;
    column = at;
    is_any = true;
  }
  __device__ __forceinline__ u64 key(u32 first_token) const {
    if (!is_any) return 0;
    const u32 bits = logit == 0.f ? 0u : __float_as_uint(logit);  // both zeros are equal
    return (u64)(bits & SIGN ? ~bits : bits | SIGN) << 32 | ~(first_token + column);
  }
};

__device__ __forceinline__ u64 larger(u64 a, u64 b) { return a > b ? a : b; }
__device__ __forceinline__ long long token_of(u64 key) {
  const u32 ordered = key >> 32, bits = ordered & SIGN ? ordered & ~SIGN : ~ordered;
  return (bits & ~SIGN) == INFINITE ? -1ll : (long long)(u32)~(u32)key;
}
__device__ __forceinline__ u64 wait_for_key(const u64* from, const volatile u32* are_gone) {
  u64 key = 0;
  for (u32 looks = 1;; looks++) {
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(key) : "l"(from) : "memory");
    if (key || (looks % LOOKS == 0 && *are_gone)) return key;
  }
}

// With `last_tokens` the tokens are handed on as ops/tokens/decode_loop.py's last kernel does it.
extern "C" __global__ void __launch_bounds__(THREADS)
choose_token(const unsigned short* logits, long long* tokens, const long long* slots, long long* last_tokens,
             long long* replay_slot, long long* chosen, int num_replay_slots, int num_slot_rows,
             const __grid_constant__ Peers peers, u64* keys, volatile u32* state, const u32* are_gone, int rank,
             int num_ranks, int rows) {
  start_dependents();
  wait_for_prerequisites();
  const int row = blockIdx.x / PARTS, part = blockIdx.x % PARTS;
  const unsigned short* own = logits + (size_t)row * COLUMNS;
  Largest largest = {0.f, 0u, false};
  if (COLUMNS % 8 == 0) {
    uint4 read[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      const int column = part * OF_BLOCK + (i * THREADS + threadIdx.x) * 8;
      if (column < COLUMNS) read[i] = *(const uint4*)(own + column);
    }
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      const int column = part * OF_BLOCK + (i * THREADS + threadIdx.x) * 8;
      if (column >= COLUMNS) break;
      const u32 pairs[4] = {read[i].x, read[i].y, read[i].z, read[i].w};
#pragma unroll
      for (int pair = 0; pair < 4; pair++) {
        largest.see(first_of(pairs[pair]), column + 2 * pair);
        largest.see(second_of(pairs[pair]), column + 2 * pair + 1);
      }
    }
  } else {
    for (int i = threadIdx.x; i < OF_BLOCK && part * OF_BLOCK + i < COLUMNS; i += THREADS)
      largest.see(first_of(own[part * OF_BLOCK + i]), part * OF_BLOCK + i);
  }
  u64 key = largest.key(rank * COLUMNS);
#pragma unroll
  for (int lane = 16; lane; lane /= 2) key = larger(key, __shfl_xor_sync(~0u, key, lane));
  __shared__ u64 of_warps[THREADS / 32];
  __shared__ bool is_last;
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = key;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < THREADS / 32; warp++) key = larger(key, of_warps[warp]);
    atomicMax(&keys[row], key);
    __threadfence();
    is_last = atomicAdd((u32*)&state[ENDED], 1u) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;

  const u32 call = state[CHOICES], now = call % 3, before = (call + 2) % 3;
  const int stale = state[ROWS_OF + before];
  const long long this_slot = last_tokens ? replay_slot[0] : 0;
  const size_t of_buffer = (size_t)num_ranks * MOST_ROWS;
  for (int one = threadIdx.x; one < rows; one += THREADS) {
    const u64 mine = *(volatile u64*)&keys[one];
    for (int ahead = 1; ahead < num_ranks; ahead++) {
      u64* there = (u64*)peers.at[(rank + ahead) % num_ranks] + now * of_buffer + (size_t)rank * MOST_ROWS + one;
      asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(there), "l"(mine) : "memory");
    }
  }
  u64* here = (u64*)peers.at[rank];
  for (int one = threadIdx.x; one < stale; one += THREADS)
    for (int source = 0; source < num_ranks; source++)
      here[before * of_buffer + (size_t)source * MOST_ROWS + one] = 0;
  for (int one = threadIdx.x; one < rows; one += THREADS) {
    u64 best = *(volatile u64*)&keys[one];
    keys[one] = 0;
    for (int source = 0; source < num_ranks; source++)
      if (source != rank)
        best = larger(best, wait_for_key(here + now * of_buffer + (size_t)source * MOST_ROWS + one, are_gone));
    const long long token = token_of(best);
    tokens[one] = token;
    if (last_tokens) {
      // A step may be under way before the host knows that there was no token: its embedding needs an id. Slot 0 is
      // padding's.
      if (slots[one] > 0) last_tokens[slots[one]] = token < 0 ? 0 : token;
      chosen[this_slot * num_slot_rows + one] = token;
    }
  }
  __syncthreads();  // all have read the state
  if (threadIdx.x == 0) {
    state[ROWS_OF + now] = rows;
    state[ENDED] = 0;
    state[CHOICES] = next_call(call);
    if (last_tokens) replay_slot[0] = (this_slot + 1) % num_replay_slots;
  }
}
