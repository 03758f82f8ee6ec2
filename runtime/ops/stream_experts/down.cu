// The weighted sum of the experts' outputs of up to 8 tokens on Hopper, with the residual and the next norm's inputs.
// Every active expert's weight is read once, and each output is finished where its products are.
//
// A block takes 16 outputs, of one active expert after another: rows that are side by side. One warp asks for them (by
// cp.async.bulk, a ring of STAGES), before the kernel that makes the inputs has ended: the choice is of the kernel
// before that one. WORKERS warps take an expert each in turns, and leave its outputs for each token in shared memory.
// There a token's experts are added up in the order of its choice. So its numbers are the same in any company. A stage
// has one warp that reads it, each time: one that had not seen it full the time before could take that for the next
// time.
//
// Defined by kernel.py: as choice.cuh, N, K, STAGES, WORKERS, NEXT_BLOCKS (sums of squares a token to leave), PLUS_ONE
// (the next norm's weight has 1 added), SHARED_BYTES.

constexpr int ROWS = 16;  // of m16n8k16
constexpr int GROUPS = N / ROWS, STEP = 32, STEPS = K / STEP;
constexpr int PITCH = K * 2, STAGE_BYTES = ROWS * PITCH, COPIES = 4;  // of a stage
static_assert(WORKERS <= WARPS && STAGES % WORKERS == 0, "a stage has one warp");
static_assert(N % ROWS == 0 && K % STEP == 0 && (NEXT_BLOCKS == 0 || NEXT_BLOCKS == GROUPS), "whole groups and steps");

struct Shared {
  float parts[2][TOKENS * CHOSEN][ROWS];  // of a turn and of the next one
  u64 full[STAGES], empty[STAGES];
  Choice choice;
};
static_assert(STAGES * STAGE_BYTES + sizeof(Shared) <= SHARED_BYTES, "as it is launched");

__device__ __forceinline__ float rounded(float v) { return first_of(pack(v, 0.f)); }

extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1), 1)
    expert_down(const char* weight, const char* x, const Router router, const u32* residual, const u32* norm_weight,
                u32* out, u32* scaled, float* out_squares, int num_tokens) {
  extern __shared__ __align__(128) char memory[];
  Shared& shared = *(Shared*)(memory + STAGES * STAGE_BYTES);
  const u32 ring = shared_address(memory), full = shared_address(shared.full), empty = shared_address(shared.empty);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = lane / 4, quad = lane % 4;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) make_barrier(full + 8 * i, 1), make_barrier(empty + 8 * i, 1);
    publish_barriers();
  }
  clear(shared.choice);
  __syncthreads();
  find_choice<true>(shared.choice, router, num_tokens);
  __syncthreads();
  const int active = shared.choice.num_active;

  if (warp == WARPS) {
    const u64 once = read_once();
    int slot = 0, phase = 1;
    for (int group = blockIdx.x; group < GROUPS; group += gridDim.x)
      for (int n = 0; n < active; n++) {
        wait_for(empty + 8 * slot, phase);
        if (lane == 0) expect_bytes(full + 8 * slot, STAGE_BYTES);
        __syncwarp();
        const char* rows = weight + ((u64)shared.choice.active[n] * N + group * ROWS) * PITCH;
        constexpr int BYTES = STAGE_BYTES / COPIES;
        if (lane < COPIES)
          load_bytes(ring + slot * STAGE_BYTES + lane * BYTES, rows + lane * BYTES, BYTES, full + 8 * slot, once);
        if (++slot == STAGES) slot = 0, phase ^= 1;
      }
    wait_for_prerequisites();
    start_dependents();
    return;
  }
  wait_for_prerequisites();
  start_dependents();

  int next = warp, turn = 0;  // of all stages of the block
  for (int group = blockIdx.x; group < GROUPS; group += gridDim.x, turn++) {
    float(*parts)[ROWS] = shared.parts[turn % 2];
    for (; warp < WORKERS && next < (turn + 1) * active; next += WORKERS) {
      const int n = next - turn * active, slot = next % STAGES;
      const int place = shared.choice.places[n][token];
      const char* from = x + ((u64)(token * CHOSEN + place) * K + quad * 8) * 2;
      uint4 xs[STEPS];
#pragma unroll
      for (int s = 0; s < STEPS; s++) xs[s] = place >= 0 ? *(const uint4*)(from + s * STEP * 2) : uint4{0, 0, 0, 0};
      wait_for(full + 8 * slot, next / STAGES & 1);
      float even[4] = {}, odd[4] = {};
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        const u32 at = ring + slot * STAGE_BYTES + lane / 4 * PITCH + s * STEP * 2 + quad * 16;
        const uint4 upper = load_shared(at), lower = load_shared(at + ROWS / 2 * PITCH), v = xs[s];
        multiply_add(even, upper.x, lower.x, upper.y, lower.y, v.x, v.y);
        multiply_add(odd, upper.z, lower.z, upper.w, lower.w, v.z, v.w);
      }
      __syncwarp();
      if (lane == 0) arrive(empty + 8 * slot);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int its = quad * 2 + i % 2, its_place = shared.choice.places[n][its];
        if (its_place >= 0) parts[its * CHOSEN + its_place][lane / 4 + i / 2 * (ROWS / 2)] = even[i] + odd[i];
      }
    }
    wait_for_others();  // what was there was read before the turn ahead
    if (warp != turn % WARPS) continue;
    // Four outputs of a token by a lane.
    const int row = group * ROWS + quad * 4, at = (token * N + row) / 2;
    const bool is_there = token < num_tokens;
    uint2 residuals = {0, 0}, weights = {0, 0};
    if (is_there) residuals = *(const uint2*)(residual + at);
    if (NEXT_BLOCKS) weights = *(const uint2*)(norm_weight + row / 2);
    float sums[4] = {};
    if (is_there)
      for (int j = 0; j < CHOSEN; j++) {
        if (shared.choice.ids[token][j] == NONE) break;
        const float by = shared.choice.weights[token][j];
        const float4 part = *(const float4*)(parts[token * CHOSEN + j] + quad * 4);
        const float of[4] = {part.x, part.y, part.z, part.w};
        // Rounded where the traced model rounds: the linear, and the product with a weight of bfloat16.
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float product = rounded(of[i]) * by;
          sums[i] += WIDE ? product : rounded(product);
        }
      }
    u32 low = pack(sums[0], sums[1]), high = pack(sums[2], sums[3]);
    low = add(residuals.x, low), high = add(residuals.y, high);
    if (is_there) *(uint2*)(out + at) = uint2{low, high};
    if (NEXT_BLOCKS) {
      if (is_there)
        *(uint2*)(scaled + at) =
            uint2{times_norm_weight(low, weights.x, PLUS_ONE), times_norm_weight(high, weights.y, PLUS_ONE)};
      const float sum = sum_of_lanes(sum_of_squares(low) + sum_of_squares(high), 4);
      store_if(is_there && quad == 0, out_squares + token * GROUPS + group, sum);
    }
  }
}
