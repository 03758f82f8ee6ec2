// How shares.cu makes requests ready: by warps of their own, ahead of those that compute. If these did it, at the
// beginning of each request, the memory would wait meanwhile.

// A request, or a share's part of it, ready to be computed: its queries, and its new key and value if they are rotated
// here and the share has its last tile.
struct Ready {
  Piece piece;
  Row queries[HEADS][GROUP], keys[HEADS], values[HEADS];
};
struct ReadyRequests {
  u64 full[READY], free[READY];
  Ready places[READY];
  __device__ __forceinline__ void make_barriers() {
    for (int i = 0; i < READY; i++)
      make_barrier(shared_address(&full[i]), PREPARERS), make_barrier(shared_address(&free[i]), WARPS);
  }
};

// A warp's loads to make a request, or a part of it, ready: every PREPARERS-th of its heads.
constexpr int HEADS_LOADED = (HEADS + PREPARERS - 1) / PREPARERS;
struct Loaded {
  Request request;
  bool has_new_key;
  Head queries[HEADS_LOADED * GROUP], new_keys[HEADS_LOADED], new_values[HEADS_LOADED];
  Angle angle;
  u32 page;  // of the new key
};

// A warp that makes requests ready, ahead of those that compute.
struct Preparer {
  const Plan& plan;
  const u32* q;
  const int* page_table;
  int width;
  const Rotation& rotation;
  int end;    // of the share
  int first;  // of the heads that the warp takes

  __device__ __forceinline__ Loaded load(int tile) const {
    Loaded its = {};
    its.request = plan.request_at(tile);
    const int row = its.request.row;
    its.has_new_key = rotation.k && its.request.last <= end;
    if (rotation.cos) its.angle = load_angle(rotation, row);
    if (its.has_new_key) its.page = page_table[row * width + (its.request.num_keys - 1) / PAGE];
#pragma unroll
    for (int i = 0; i < HEADS_LOADED; i++) {
      if (first + i * PREPARERS >= HEADS) break;
      const int head = its.request.head + first + i * PREPARERS;
      const u32* heads = q + (u64)row * rotation.q_stride + head * GROUP * (HEAD_COLUMNS / 2);
#pragma unroll
      for (int g = 0; g < GROUP; g++) its.queries[i * GROUP + g] = load_query(heads, g);
      if (!its.has_new_key) continue;
      its.new_keys[i] = load_new_key(rotation, row, head), its.new_values[i] = load_new_value(rotation, row, head);
    }
    return its;
  }

  __device__ __forceinline__ void rotate_all(Loaded& its, const Weights& weights) const {
    if (!rotation.cos) return;
    rotate(its.queries, weights.q, its.angle, rotation);
    if (its.has_new_key) rotate(its.new_keys, weights.k, its.angle, rotation);
  }

  __device__ __forceinline__ void put(const Loaded& its, Ready& to) const {
    if (first == 0 && threadIdx.x % 32 == 0) to.piece = piece_of(plan, its.request, end);
#pragma unroll
    for (int i = 0; i < HEADS_LOADED; i++) {
      const int head = first + i * PREPARERS;
      if (head >= HEADS) break;
#pragma unroll
      for (int g = 0; g < GROUP; g++) put_head(to.queries[head][g], its.queries[i * GROUP + g]);
      if (its.has_new_key) put_head(to.keys[head], its.new_keys[i]), put_head(to.values[head], its.new_values[i]);
    }
  }

  __device__ __forceinline__ void write(const Loaded& its) const {
    const u64 slot = slot_in(its.page, its.request.num_keys - 1);
#pragma unroll
    for (int i = 0; i < HEADS_LOADED; i++) {
      const int head = first + i * PREPARERS;
      if (head < HEADS) write_to_cache(rotation, its.new_keys[i], its.new_values[i], slot, its.request.head + head);
    }
  }
};

// The requests of a share, from its first tile on.
__device__ __forceinline__ void make_ready(const Preparer& preparer, ReadyRequests& requests, int begin) {
  wait_for_prerequisites();
  start_dependents();
  int place = 0, phase = 1;
  for (int at = begin; at < preparer.end;) {
    Loaded its = preparer.load(at);
    const Weights weights = load_weights(preparer.rotation);  // each time: kept, they would take others' registers
    preparer.rotate_all(its, weights);
    wait_for(shared_address(&requests.free[place]), phase);
    __syncwarp();
    preparer.put(its, requests.places[place]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(shared_address(&requests.full[place]));
    if (its.has_new_key) preparer.write(its);
    __syncwarp();
    if (++place == READY) place = 0, phase ^= 1;
    at = its.request.last;
  }
}
