// How a block of clusters.cu makes new tokens ready: their queries for all of its warps, and in its last tile their
// keys and values. TOKENS and GROUP as there.

constexpr int TILE = 64, WARPS = 4;
// Warps share a token's query heads; or a warp has some tokens.
constexpr int WARPS_A_TOKEN = TOKENS < WARPS ? WARPS / TOKENS : 1, TOKENS_AT_ONCE = WARPS / WARPS_A_TOKEN;
constexpr int A_WARP = (TOKENS + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE;
constexpr int HEADS_A_WARP = (GROUP + WARPS_A_TOKEN - 1) / WARPS_A_TOKEN;
// The i-th of a warp's tokens; TOKENS or more without one.
__device__ __forceinline__ int token_of(int i) { return threadIdx.x / 32 / WARPS_A_TOKEN + i * TOKENS_AT_ONCE; }

// The keys that the last of a request's tokens sees; those of several tokens are kept for the block.
__device__ __forceinline__ int most_keys(const int* seq_lens, int* kept) {
  if constexpr (TOKENS == 1) return *seq_lens;
  const int lane = threadIdx.x % 32, length = lane < TOKENS ? seq_lens[lane] : 0;
  if (threadIdx.x < TOKENS) kept[lane] = length;
  return __reduce_max_sync(~0u, length);
}

// FP8: of pairs of e4m3, which have no infinity.
__device__ __forceinline__ bool is_finite(const Head& head) {
  bool its = true;
#pragma unroll
  for (int i = 0; i < A_LANE; i++)
    if constexpr (FP8) its &= (head.pairs[i] & 0x7fu) != 0x7fu && (head.pairs[i] & 0x7f00u) != 0x7f00u;
    else its &= (head.pairs[i] & 0x7f80u) != 0x7f80u && (head.pairs[i] & 0x7f800000u) != 0x7f800000u;
  return __all_sync(~0u, its);
}
__device__ __forceinline__ Head head_of(u32 pair) {
  Head its;
#pragma unroll
  for (int i = 0; i < A_LANE; i++) its.pairs[i] = pair;
  return its;
}

// The tokens that a warp makes ready.
struct NewTokens {
  int rows[A_WARP];  // of the block's last tile; negative: it is not there, or another warp puts it
  u64 slots[A_WARP];
  Angle angles[A_WARP];
  Head keys[A_WARP], values[A_WARP];

  // A single token is put by the warp that multiplies its key, and no other has to wait.
  template <typename KeysOf>
  __device__ __forceinline__ void find(const KeysOf& keys_of, const int* page_table, int pages, int last_tile) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < A_WARP; i++) {
      const int position = token_of(i) < TOKENS ? keys_of(token_of(i)) - 1 : -1, row = position - last_tile * TILE;
      const bool is_own = TOKENS == 1 ? row / 16 == warp : warp % WARPS_A_TOKEN == 0;
      rows[i] = last_tile >= 0 && position >= 0 && row < TILE && is_own ? row : -1;
      slots[i] = rows[i] >= 0 ? slot_in(page_table[pages + position / PAGE], position) : 0;
    }
  }

  // `first`: the request's first token.
  __device__ __forceinline__ void load(const Rotation& rotation, int first, int head) {
    if (!rotation.k) return;
    if (rotation.cos)
#pragma unroll
      for (int i = 0; i < A_WARP; i++) angles[i] = load_angle(rotation, first + min(token_of(i), TOKENS - 1));
#pragma unroll
    for (int i = 0; i < A_WARP; i++) {
      if (rows[i] < 0) continue;
      keys[i] = load_new_key(rotation, first + token_of(i), head);
      values[i] = load_new_value(rotation, first + token_of(i), head);
    }
  }

  // Puts the block's query heads into `to`, token after token; `heads`: of the first one.
  __device__ __forceinline__ void put_queries(const u32* heads, const Rotation& rotation, const Weights& weights,
                                              Row* to) const {
    const int first = threadIdx.x / 32 % WARPS_A_TOKEN * HEADS_A_WARP;
    Head of[A_WARP][HEADS_A_WARP];
#pragma unroll
    for (int i = 0; i < A_WARP; i++)
#pragma unroll
      for (int j = 0; j < HEADS_A_WARP; j++)
        of[i][j] = load_head(heads + min(token_of(i), TOKENS - 1) * rotation.q_stride +
                             min(first + j, GROUP - 1) * HEAD_PAIRS);
#pragma unroll
    for (int i = 0; i < A_WARP; i++) {
      if (rotation.cos) rotate(of[i], weights.q, angles[i], rotation);
#pragma unroll
      for (int j = 0; j < HEADS_A_WARP; j++)
        if (first + j < GROUP && token_of(i) < TOKENS) put_head(to[token_of(i) * GROUP + first + j], of[i][j]);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void rotate_keys(const Rotation& rotation, const Weights& weights) {
    if (!rotation.cos) return;
#pragma unroll
    for (int i = 0; i < A_WARP; i++) {
      Head key[] = {keys[i]};
      if (rows[i] >= 0) rotate(key, weights.k, angles[i], rotation);
      keys[i] = key[0];
    }
  }

  // Puts keys and values into the tile, whose chunks (16 bytes) of a row begin at `…_chunk(row, chunk)`, and into the
  // cache. Without new keys they are in both.
  template <typename KeyChunk, typename ValueChunk>
  __device__ __forceinline__ void put(const Rotation& rotation, int head, const KeyChunk& key_chunk,
                                      const ValueChunk& value_chunk) {
#pragma unroll
    for (int i = 0; i < A_WARP; i++) {
      const int row = rows[i];
      if (row < 0) continue;
      auto key_at = [&](int chunk) { return key_chunk(row, chunk); };
      auto value_at = [&](int chunk) { return value_chunk(row, chunk); };
      if (rotation.k) {
        write_to_cache(rotation, keys[i], values[i], slots[i], head);
        put_into_tile(keys[i], rotation.k_factor, key_at);
        put_into_tile(values[i], rotation.v_factor, value_at);
      }
      if (TOKENS > 1 && (FP8 || !rotation.k)) values[i] = head_in_tile(value_at);
      // A value that is no number would reach the tokens before it, whose weights of it are zero. In its place the key
      // is none: so only those that see it get none.
      if (TOKENS > 1 && !is_finite(values[i])) {
        put_into_tile(head_of(0x7fff7fffu), 1.f, key_at);
        put_into_tile(head_of(0), 1.f, value_at);
      }
    }
  }
};
