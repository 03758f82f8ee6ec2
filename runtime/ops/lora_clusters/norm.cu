// What is between two linears with adapters, of many tokens on Hopper: B of the first ones' adapters, the residual, the
// norm, and A of the next ones'. By kernels of their own each of these reads and writes all tokens again. Here a row's
// numbers stay in registers until the cluster has its sum of squares.
//
// Defined by kernel.py: RANK, PLUS_ONE (1 is added to the norm's weight), and what rows.cuh asks for, which is in front
// of this file; its A is that of the next linear.

constexpr int STEPS = RANK / 16;
static_assert(RANK % 16 == 0, "whole steps");

struct Operands {
  const uint4 *y, *residual;
  const char *shrunk, *b;
  const uint4 *weight, *next_a;
  const int* slots;
  uint4 *out, *normed;
  u32* products;
  int num_tokens;
  float eps;
};
struct Shared {
  OfA of_a;
  uint4 b[GROUPS][2][STEPS][THREADS], weight[GROUPS][THREADS];  // a thread reads what it has written
  float squares[WARPS][TOKENS], squares_of_blocks[SPLIT][TOKENS];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "as it is launched");

__device__ __forceinline__ void send_one(float* place, u32 rank, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address_of_peer(shared_address(place), rank)), "f"(v)
               : "memory");
}
__device__ __forceinline__ u32& word(uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// What a lane needs of a tile's tokens.
struct Loaded {
  Values y, residual;
  uint2 shrunk[2][STEPS];

  __device__ __forceinline__ void get(const Operands& operands, const Lane& lane, int token) {
    y.get(operands.y, lane, token, operands.num_tokens);
    residual.get(operands.residual, lane, token, operands.num_tokens);
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int r = 0; r < STEPS; r++) {
        const u64 t = min(token + lane.row + 8 * h, operands.num_tokens - 1);
        shrunk[h][r] = *(const uint2*)(operands.shrunk + (t * RANK + r * 16 + lane.quad * 4) * 2);
      }
  }
};

// B of a slot for the warp's columns. Of a group of columns the four products have every fourth pair, so that a lane's
// sums are of eight neighbours.
__device__ __forceinline__ void get_b(Shared& shared, int& held, const char* b, const Lane& lane, int slot) {
  if (held == slot) return;
  held = slot;
  const int first = lane.first + lane.row / 2 * 8 + lane.row % 2;
#pragma unroll
  for (int g = 0; g < GROUPS; g++)
#pragma unroll
    for (int j = 0; j < 4; j += 2)
#pragma unroll
      for (int r = 0; r < STEPS; r++) {
        const u64 row = (u64)slot * N + first + g * GROUP + j * 2;
        const char* from = b + (row * RANK + r * 16 + lane.quad * 4) * 2;
        const u32 to = shared_address(&shared.b[g][j / 2][r][threadIdx.x]);
        copy<8>(to, from), copy<8>(to + 8, from + 2 * RANK * 2);
      }
}

// The residual plus y plus B times A . x, in the place of y; gives the sums of squares of the lane's two tokens.
__device__ __forceinline__ float2 add_all(Loaded& tile, Shared& shared, int& held, const char* b, const Lane& lane,
                                          TileSlots slots) {
  float added[GROUPS][4][4] = {};
  for (int slot = slots.next(); slot >= 0; slot = slots.next()) {
    get_b(shared, held, b, lane, slot);
    wait_for_copies();
#pragma unroll
    for (int r = 0; r < STEPS; r++) {
      const uint2 first = slots.own[0] == slot ? tile.shrunk[0][r] : uint2{0, 0};
      const uint2 second = slots.own[1] == slot ? tile.shrunk[1][r] : uint2{0, 0};
#pragma unroll
      for (int g = 0; g < GROUPS; g++)
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const uint4 its = shared.b[g][j / 2][r][threadIdx.x];
          multiply_add(added[g][j], first.x, second.x, first.y, second.y, its.x, its.y);
          multiply_add(added[g][j + 1], first.x, second.x, first.y, second.y, its.z, its.w);
        }
    }
  }
  float squares[2] = {0.f, 0.f};
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        u32& y = word(tile.y.of[h][g], j);
        const u32 out = pack(first_of(y) + added[g][j][2 * h], second_of(y) + added[g][j][2 * h + 1]);
        y = add(word(tile.residual.of[h][g], j), out), squares[h] += sum_of_squares(y);
      }
  return {squares[0], squares[1]};
}

// The factors of the lane's two tokens, of its sums of their squares; all threads of the cluster's blocks call it.
__device__ __forceinline__ float2 factors_of(Shared& shared, float2 squares, const Lane& lane, float eps) {
  const float of_quad[2] = {sum_of_lanes(squares.x, 4), sum_of_lanes(squares.y, 4)};
  if (lane.quad == 0)
    for (int h = 0; h < 2; h++) shared.squares[threadIdx.x / 32][lane.row + 8 * h] = of_quad[h];
  __syncthreads();
  for (int i = threadIdx.x; i < SPLIT * TOKENS; i += THREADS) {
    float sum = 0.f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) sum += shared.squares[warp][i % TOKENS];
    send_one(&shared.squares_of_blocks[blockIdx.x % SPLIT][i % TOKENS], i / TOKENS, sum);
  }
  meet_cluster();
  float all[2] = {0.f, 0.f};
#pragma unroll
  for (int block = 0; block < SPLIT; block++)
#pragma unroll
    for (int h = 0; h < 2; h++) all[h] += shared.squares_of_blocks[block][lane.row + 8 * h];
  return {rsqrtf(all[0] / N + eps), rsqrtf(all[1] / N + eps)};
}

// The norm of the lane's numbers, in their place.
__device__ __forceinline__ void norm(Values& values, const Shared& shared, float2 factors) {
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    uint4 its = shared.weight[g][threadIdx.x];
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float factor = h ? factors.y : factors.x, w[2] = {first_of(word(its, j)), second_of(word(its, j))};
        u32& both = word(values.of[h][g], j);
        const float v[2] = {first_of(both) * factor, second_of(both) * factor};
        both = PLUS_ONE ? pack(v[0] * w[0] + v[0], v[1] * w[1] + v[1]) : pack(v[0] * w[0], v[1] * w[1]);
      }
  }
}

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(THREADS, RESIDENT)
    norm_in_clusters(const __grid_constant__ Operands operands) {
  extern __shared__ __align__(1024) char memory[];
  Shared& shared = *(Shared*)memory;
  const int num_tokens = operands.num_tokens;
  const Lane lane;
  const Tiles tiles(num_tokens);
  int held_b = -1, held_a = -1;
#pragma unroll
  for (int g = 0; g < GROUPS; g++)
    copy<16>(shared_address(&shared.weight[g][threadIdx.x]), operands.weight + lane.place(0, g));
  wait_for_prerequisites();
  start_dependents();
  Loaded next;
  next.get(operands, lane, tiles.tile * TOKENS);
  const int first_slot = TileSlots(operands.slots, lane, tiles.tile * TOKENS, num_tokens).next();
  if (first_slot >= 0) {  // beside the tokens, as the library's product ahead lets none begin early
    get_b(shared, held_b, operands.b, lane, first_slot);
    shared.of_a.get(held_a, operands.next_a, lane, first_slot);
  }
  meet_cluster();  // none sends before all are there
  for (int tile = tiles.tile; tile < tiles.end; tile++) {
    const int token = tile * TOKENS;
    const TileSlots slots(operands.slots, lane, token, num_tokens);
    const float2 squares = add_all(next, shared, held_b, operands.b, lane, slots);
    Values values = next.y;
    values.put(operands.out, lane, token, num_tokens);
    if (tile + 1 < tiles.end) next.get(operands, lane, token + TOKENS);
    const float2 factors = factors_of(shared, squares, lane, operands.eps);
    wait_for_copies();
    norm(values, shared, factors);
    values.put(operands.normed, lane, token, num_tokens);
    shared.of_a.multiply(held_a, values, operands.next_a, lane, slots);
    shared.of_a.add_up(tile, operands.products, num_tokens);
  }
}
