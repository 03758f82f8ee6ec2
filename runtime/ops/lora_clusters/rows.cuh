// What norm.cu and shrink.cu share: kernels of adapters on Hopper whose clusters have whole rows, for many tokens.
//
// A cluster has 16 tokens at a time, and a block of it some columns of them. Sums over columns are of a warp's, then of
// a block's warps, then of the cluster's blocks, always in this order. Factors stay in shared memory while tokens have
// the same slot, as the lane multiplies them.
//
// Defined by kernel.py: N columns, SPLIT blocks of a cluster, WARPS of a block, GROUPS (of 32 columns) of a warp,
// A_ROWS, RESIDENT blocks of a multiprocessor, SHARED_BYTES.

constexpr int TOKENS = 16, GROUP = 32;  // of m16n8k16; columns in whose eights a lane has neighbours
constexpr int COLUMNS = WARPS * GROUPS * GROUP, THREADS = 32 * WARPS;
constexpr int A_TILES = A_ROWS / 8, OWN_TOKENS = TOKENS / SPLIT, PAIRS = A_ROWS / 2;
static_assert(COLUMNS * SPLIT == N && A_ROWS % 8 == 0 && TOKENS % SPLIT == 0, "whole parts");

// To another block of the cluster, or to this one.
__device__ __forceinline__ void send_pair(float2* place, u32 rank, float2 v) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address_of_peer(shared_address(place), rank)),
               "f"(v.x), "f"(v.y) : "memory");
}
// All threads of all blocks of the cluster; what they have sent is there.
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
// Bytes into shared memory, which the thread may read behind wait_for_copies().
template <int BYTES>
__device__ __forceinline__ void copy(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Where a lane is: its first two tokens of a tile are `row` and 8 behind; its columns the eight from `column` on, and
// those a GROUP behind.
struct Lane {
  int row, quad, column, first;  // first: the warp's first column
  __device__ __forceinline__ Lane()
      : row(threadIdx.x % 32 / 4),
        quad(threadIdx.x % 4),
        first((blockIdx.x % SPLIT * WARPS + threadIdx.x / 32) * GROUPS * GROUP) {
    column = first + quad * 8;
  }
  // Of a group of its columns of a row; counts eights, which 32 bits hold.
  __device__ __forceinline__ u32 place(u32 its_row, int group) const {
    return its_row * (N / 8) + (column + group * GROUP) / 8;
  }
};
// A lane's numbers of a tile: of two tokens, eight columns of each group.
struct Values {
  uint4 of[2][GROUPS];

  // Of tokens past the last one they are any.
  __device__ __forceinline__ void get(const uint4* from, const Lane& lane, int token, int num_tokens) {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int g = 0; g < GROUPS; g++) of[h][g] = from[lane.place(min(token + lane.row + 8 * h, num_tokens - 1), g)];
  }
  __device__ __forceinline__ void put(uint4* to, const Lane& lane, int token, int num_tokens) const {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        const int t = token + lane.row + 8 * h;
        store_if(t < num_tokens, to + lane.place(t, g), of[h][g]);
      }
  }
};

// The tiles of a cluster, which are neighbours: their tokens mostly have one slot.
struct Tiles {
  int tile, end;
  __device__ __forceinline__ Tiles(int num_tokens) {
    const u64 cluster = blockIdx.x / SPLIT, clusters = gridDim.x / SPLIT, count = (num_tokens + TOKENS - 1) / TOKENS;
    tile = count * cluster / clusters, end = count * (cluster + 1) / clusters;
  }
};
// Slots of a tile's tokens: lanes of the first TOKENS have one each.
struct TileSlots {
  int mine, own[2];  // own: of the lane's two tokens
  u32 left;          // tokens whose slot next() has not given

  __device__ __forceinline__ TileSlots(const int* slots, const Lane& lane, int token, int num_tokens) {
    const int its = token + threadIdx.x % TOKENS;
    mine = its < num_tokens ? slots[its] : -1;
    own[0] = __shfl_sync(~0u, mine, lane.row), own[1] = __shfl_sync(~0u, mine, lane.row + 8);
    left = __ballot_sync(~0u, mine >= 0) & 0xffff;
  }
  // The next slot; -1: no further one.
  __device__ __forceinline__ int next() {
    if (!left) return -1;
    const int slot = __shfl_sync(~0u, mine, __ffs(left) - 1);
    left &= ~__ballot_sync(~0u, mine == slot);
    return slot;
  }
};

// A of a slot for the warp's columns, and what is added up of its products.
struct OfA {
  uint4 factors[A_TILES][GROUPS][THREADS];  // a thread reads what it has written
  float2 products[WARPS][TOKENS][PAIRS];
  float2 inbox[2][SPLIT][OWN_TOKENS][PAIRS];  // of two tiles in turn: a block may be one ahead

  __device__ __forceinline__ void get(int& held, const uint4* a, const Lane& lane, int slot) {
    if (held == slot) return;
    held = slot;
#pragma unroll
    for (int i = 0; i < A_TILES; i++)
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        const u32 row = slot * A_ROWS + i * 8 + lane.row;
        copy<16>(shared_address(&factors[i][g][threadIdx.x]), a + lane.place(row, g));
      }
  }
  // Leaves the warp's sums of A times its values of a tile.
  __device__ __forceinline__ void multiply(int& held, const Values& values, const uint4* a, const Lane& lane,
                                           TileSlots slots) {
    float sums[A_TILES][4] = {};
    for (int slot = slots.next(); slot >= 0; slot = slots.next()) {
      get(held, a, lane, slot);
      wait_for_copies();
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        const uint4 first = slots.own[0] == slot ? values.of[0][g] : uint4{0, 0, 0, 0};
        const uint4 second = slots.own[1] == slot ? values.of[1][g] : uint4{0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < A_TILES; i++) {
          const uint4 its = factors[i][g][threadIdx.x];
          multiply_add(sums[i], first.x, second.x, first.y, second.y, its.x, its.y);
          multiply_add(sums[i], first.z, second.z, first.w, second.w, its.z, its.w);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < A_TILES; i++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        products[threadIdx.x / 32][lane.row + 8 * h][i * 4 + lane.quad] = {sums[i][2 * h], sums[i][2 * h + 1]};
  }
  // Adds up what the cluster's warps have left of a tile, [A_ROWS] of each token; all threads of the cluster call it.
  __device__ __forceinline__ void add_up(int tile, u32* out, int num_tokens) {
    const int rank = blockIdx.x % SPLIT;
    auto& its = inbox[tile % 2];
    __syncthreads();
    for (int i = threadIdx.x; i < TOKENS * PAIRS; i += THREADS) {
      float2 sum = {0.f, 0.f};
#pragma unroll
      for (int warp = 0; warp < WARPS; warp++) {
        const float2 v = products[warp][i / PAIRS][i % PAIRS];
        sum.x += v.x, sum.y += v.y;
      }
      send_pair(&its[rank][i / PAIRS % OWN_TOKENS][i % PAIRS], i / PAIRS / OWN_TOKENS, sum);
    }
    meet_cluster();
    for (int i = threadIdx.x; i < OWN_TOKENS * PAIRS; i += THREADS) {
      float2 sum = {0.f, 0.f};
#pragma unroll
      for (int block = 0; block < SPLIT; block++) {
        const float2 v = its[block][i / PAIRS][i % PAIRS];
        sum.x += v.x, sum.y += v.y;
      }
      const int token = tile * TOKENS + rank * OWN_TOKENS + i / PAIRS;
      if (token < num_tokens) out[token * PAIRS + i % PAIRS] = pack(sum.x, sum.y);
    }
    __syncwarp();
  }
};
