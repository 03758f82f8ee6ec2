// How shares.cu divides its work: all keys, request after request in tiles of 16, in equal shares.

constexpr int TILE = 16;  // keys, of HEADS heads
constexpr int WARPS_A_HEAD = HEAD_DIM / 128, WARPS = HEADS * WARPS_A_HEAD;  // that compute
constexpr int A_THREAD = (MOST_REQUESTS + 32 * WARPS - 1) / (32 * WARPS);  // requests that a thread counts

// A request's tiles, of HEADS heads.
struct Request {
  int row, num_keys, head;  // the first of its heads
  int first, last;          // the first tile, and the one behind the last
};
// Sums over all requests; a length of 0 is padding.
struct Counts {
  int of_warps[WARPS], lengths[MOST_REQUESTS];
  int first_tiles[MOST_REQUESTS + 1];  // and the number of all tiles
};
// The division of all tiles among the first blocks: at least one for each of them.
struct Plan {
  const Counts& counts;
  int num_requests;
  u32 tiles;  // of HEADS heads
  __device__ __forceinline__ u32 all() const { return tiles * (KV_HEADS / HEADS); }
  __device__ __forceinline__ u32 blocks() const { return max(1, min(all(), gridDim.x)); }
  __device__ __forceinline__ int begin_of(u32 block) const { return all() * min(block, blocks()) / blocks(); }
  __device__ __forceinline__ int block_of(u32 tile) const { return ((tile + 1) * blocks() - 1) / all(); }
  __device__ __forceinline__ Request request_at(int tile) const {
    const int group = tile / tiles, begin = group * tiles;
    int low = 0, high = num_requests;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (begin + counts.first_tiles[middle] <= tile) low = middle;
      else high = middle;
    }
    return {low, counts.lengths[low], group * HEADS, begin + counts.first_tiles[low],
            begin + counts.first_tiles[low + 1]};
  }
};

// Blocks that have parts of one request, one behind another; the first adds up the others'. Where there are more, the
// request's first block adds up what these first ones have added up.
constexpr int TEAM = 8;
// A block's part of a request.
struct Piece {
  int row, num_keys, head;  // the request's
  int key, stop;            // the first key, and the one behind the last tile
  int others;               // some blocks behind this one leave theirs to it
  bool is_left, is_last;    // for a block before this one to add up; of the share
};
__device__ __forceinline__ Piece piece_of(const Plan& plan, const Request& its, int end) {
  const int at = max(its.first, plan.begin_of(blockIdx.x)), stop = min(its.last, end);
  int others = its.last > end ? plan.block_of(its.last - 1) - blockIdx.x : 0;
  if (at > its.first) others = (blockIdx.x - plan.block_of(its.first)) % TEAM ? 0 : min(others, TEAM - 1);
  return {its.row, its.num_keys, its.head, (at - its.first) * TILE, (stop - its.first) * TILE,
          others, at > its.first, its.last >= end};
}

// Counts keys and tiles of each request, by the warps that compute; all threads call it.
__device__ __forceinline__ void count_tiles(Counts& counts, const int* seq_lens, int num_requests) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int tiles[A_THREAD], sum = 0, up_to = 0;
  if (warp < WARPS) {
#pragma unroll
    for (int j = 0; j < A_THREAD; j++) {
      const int r = threadIdx.x * A_THREAD + j;
      const int length = r < num_requests ? seq_lens[r] : 0;
      if (r < num_requests) counts.lengths[r] = length;
      sum += tiles[j] = (length + TILE - 1) / TILE;
    }
    up_to = sum;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const int left = __shfl_up_sync(~0u, up_to, by);
      if (lane >= by) up_to += left;
    }
    if (lane == 31) counts.of_warps[warp] = up_to;
  }
  __syncthreads();
  if (warp < WARPS) {
    int first = up_to - sum;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
      if (w < warp) first += counts.of_warps[w];
#pragma unroll
    for (int j = 0; j < A_THREAD; j++) {
      const int r = threadIdx.x * A_THREAD + j;
      if (r < num_requests) counts.first_tiles[r] = first;
      first += tiles[j];
      if (r == num_requests - 1) counts.first_tiles[num_requests] = first;
    }
  }
  __syncthreads();
}
