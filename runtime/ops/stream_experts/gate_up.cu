// silu(gate) * up of the experts that up to 8 tokens chose, on Hopper: every active expert's weight is read once.
//
// A block takes groups of 8 outputs in turns, from one active expert to the next, so that all blocks read as much. One
// warp loads rows of the weight, 8 gates and 8 ups, in pieces (by cp.async.bulk, a ring of STAGES). Eight warps
// multiply them with all tokens, whose inputs they divide and hold in registers, and add up their sums in shared
// memory.
//
// Defined by kernel.py: as choice.cuh, OUTPUTS (of an expert), K, PIECE (inputs of a row in a stage), STAGES, RESIDENT
// (blocks of a multiprocessor), NORM_BLOCKS (sums of squares a token to read; 0: no norm), SHARED_BYTES.

constexpr int ROWS = 16, OUT_ROWS = 8;  // of m16n8k16
constexpr int GROUPS = OUTPUTS / OUT_ROWS, CHUNKS = K / PIECE;
constexpr int STEP = 32, STEPS = PIECE / STEP / WARPS;  // inputs of a step; a warp's steps in a chunk
constexpr int PITCH = PIECE * 2, STAGE_BYTES = ROWS * PITCH;
constexpr int LD = ROWS + 4;  // floats a token of a warp's sums
static_assert(K % PIECE == 0 && PIECE % (STEP * WARPS) == 0 && OUTPUTS % OUT_ROWS == 0,
              "whole chunks, steps and groups");

struct Shared {
  float sums[2][WARPS][TOKENS * LD];  // of a turn and of the next one
  float factors[TOKENS];
  u64 full[STAGES], empty[STAGES];
  Choice choice;
};
static_assert(STAGES * STAGE_BYTES + sizeof(Shared) <= SHARED_BYTES, "as it is launched");

extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1), RESIDENT)
    expert_gate_up(const char* weight, const char* x, const float* squares, const Router router, u32* out, float eps,
                   int num_tokens) {
  extern __shared__ __align__(128) char memory[];
  Shared& shared = *(Shared*)(memory + STAGES * STAGE_BYTES);
  const u32 ring = shared_address(memory), full = shared_address(shared.full), empty = shared_address(shared.empty);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = lane / 4, quad = lane % 4;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) make_barrier(full + 8 * i, 1), make_barrier(empty + 8 * i, WARPS);
    publish_barriers();
  }
  clear(shared.choice);
  __syncthreads();
  wait_for_prerequisites();
  start_dependents();  // not before: they count on all that is ahead of this kernel
  find_choice<false>(shared.choice, router, num_tokens);
  __syncthreads();

  const int items = shared.choice.num_active * GROUPS;
  if (warp == WARPS) {
    const u64 once = read_once();
    int slot = 0, phase = 1;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      const int expert = shared.choice.active[item / GROUPS];
      const u64 row =
          (u64)expert * 2 * OUTPUTS + item % GROUPS * OUT_ROWS + lane % OUT_ROWS + lane / OUT_ROWS * OUTPUTS;
#pragma unroll 1
      for (int c = 0; c < CHUNKS; c++) {
        wait_for(empty + 8 * slot, phase);
        if (lane == 0) expect_bytes(full + 8 * slot, STAGE_BYTES);
        __syncwarp();
        if (lane < ROWS) load_bytes(ring + slot * STAGE_BYTES + lane * PITCH, weight + (row * K + c * PIECE) * 2, PITCH,
                                    full + 8 * slot, once);
        if (++slot == STAGES) slot = 0, phase ^= 1;
      }
    }
    return;
  }

  // Behind the choice, which the first weights wait for. The order of inputs is the same for x and weight, and such
  // that 16 bytes of either are what a lane multiplies.
  uint4 xs[CHUNKS][STEPS];
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      const char* from = x + ((u64)token * K + c * PIECE + (s * WARPS + warp) * STEP + quad * 8) * 2;
      xs[c][s] = token < num_tokens ? *(const uint4*)from : uint4{0, 0, 0, 0};
    }
  if (NORM_BLOCKS && warp < num_tokens) {
    float sum = 0.f;
#pragma unroll
    for (int j = lane; j < NORM_BLOCKS; j += 32) sum += squares[warp * NORM_BLOCKS + j];
    sum = sum_of_lanes(sum, 32);
    if (lane == 0) shared.factors[warp] = rsqrtf(sum / K + eps);
  }
  int slot = 0, phase = 0, turn = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x, turn++) {
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      wait_for(full + 8 * slot, phase);
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        const u32 from = ring + slot * STAGE_BYTES + lane / 4 * PITCH + (s * WARPS + warp) * STEP * 2 + quad * 16;
        const uint4 upper = load_shared(from), lower = load_shared(from + OUT_ROWS * PITCH), v = xs[c][s];
        multiply_add(even, upper.x, lower.x, upper.y, lower.y, v.x, v.y);
        multiply_add(odd, upper.z, lower.z, upper.w, lower.w, v.z, v.w);
      }
      __syncwarp();
      if (lane == 0) arrive(empty + 8 * slot);
      if (++slot == STAGES) slot = 0, phase ^= 1;
    }
    float(*sums)[TOKENS * LD] = shared.sums[turn % 2];
#pragma unroll
    for (int i = 0; i < 4; i++) sums[warp][(quad * 2 + i % 2) * LD + lane / 4 + i / 2 * OUT_ROWS] = even[i] + odd[i];
    wait_for_others();  // what was there was read before the turn ahead
    if (warp != turn % WARPS) continue;
    float2 gates = {0.f, 0.f}, ups = {0.f, 0.f};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float* part = sums[w] + token * LD + quad * 2;
      const float2 a = *(const float2*)part, b = *(const float2*)(part + OUT_ROWS);
      gates.x += a.x, gates.y += a.y, ups.x += b.x, ups.y += b.y;
    }
    const float factor = NORM_BLOCKS && token < num_tokens ? shared.factors[token] : 1.f;
    const int place = shared.choice.places[item / GROUPS][token];
    const u32 both = silu_times(pack(gates.x * factor, gates.y * factor), pack(ups.x * factor, ups.y * factor));
    if (place >= 0) out[((token * CHOSEN + place) * OUTPUTS + item % GROUPS * OUT_ROWS) / 2 + quad] = both;
  }
}
