// A linear of experts with few rows each on Hopper, whose weights are in MXFP4: all blocks read as much, and each
// chosen expert's weight is read once for up to 16 rows.
//
// A block takes groups of 16 outputs, from one block of `order` to the next. One warp asks for a group's values,
// scales and biases (by cp.async.bulk, a ring of STAGES). WARPS warps divide its inputs. Each holds its inputs of x
// in registers for as long as rows stay the same, and makes weights bfloat16 there, once for all rows. A lane
// multiplies 32 inputs, which share a scale. One more warp adds up their sums: those that multiply wait for no other,
// and are up to BUFFERS groups ahead of it.
//
// Of one token a multiprocessor has two blocks (RESIDENT).
//
// Of the second linear the order of rows is known before its inputs are (EARLY): weights are asked for ahead of the
// wait.
//
// Defined by kernel.py: N outputs (of swiglu: pairs of a gate and an up), K, EXPERTS, CHOSEN (experts a token), BLOCK
// (places of a block in `order`; 1: `order` is ids of one token), OF_TOKENS (rows of x are tokens), SWIGLU, BIAS,
// EARLY, WARPS, RESIDENT (blocks of a multiprocessor, of registers), STAGES, BUFFERS, MOST_BLOCKS, SHARED_BYTES.
// e2m1.cuh is ahead.

constexpr int ROWS = 16, EIGHT = 8;  // of m16n8k16: of the weight, of x
constexpr int ADDER = WARPS, ASKER = WARPS + 1;  // warps
constexpr int EIGHTS = BLOCK > EIGHT ? 2 : 1;   // of a block of `order`
constexpr int SCALED = 32, OF_ROW = K / SCALED;  // inputs of a scale; scales of a row
constexpr int GROUPS = N / ROWS, PITCH = K / 2;
constexpr int STEPS = (OF_ROW + 4 * WARPS - 1) / (4 * WARPS);  // of a warp: a scale's inputs by each lane of a quad
constexpr int VALUES = ROWS * PITCH, SCALES = ROWS * OF_ROW, BIASES = BIAS ? ROWS * 2 : 0;  // bytes of a stage
constexpr int STAGE_BYTES = (VALUES + SCALES + BIASES + 127) / 128 * 128, COPIES = 4;
constexpr int SUMS = EIGHT * ROWS;  // of a product
constexpr int LD = ROWS + 4;        // floats a row of x of what is added up
constexpr int OUTPUTS = SWIGLU ? N / 2 : N;
static_assert(N % ROWS == 0 && K % SCALED == 0 && BLOCK <= EIGHTS * EIGHT, "whole groups");
static_assert(VALUES % (16 * COPIES) == 0, "copies are of 16 bytes");
static_assert(EIGHT * LD <= WARPS * SUMS, "what is added up lies where the sums were");

struct Shared {
  float sums[BUFFERS][EIGHTS][WARPS][SUMS];  // of groups, as products leave them
  u64 full[STAGES], empty[STAGES], multiplied[BUFFERS], added[BUFFERS];
  int counts[ASKER + 1], num_active;
  short places[MOST_BLOCKS], experts[MOST_BLOCKS], rows[MOST_BLOCKS];  // of blocks of `order` that an expert has
};
static_assert(STAGES * STAGE_BYTES + sizeof(Shared) <= SHARED_BYTES, "as it is launched");

// Data of a kernel before the previous one: a level-one cache may hold older data.
__device__ __forceinline__ int load_integer(const int* from) {
  int v;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
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

// Row `row` of a product is this of a group: rows of two neighbours in a load begin in different halves of the banks.
__device__ __forceinline__ constexpr int row_of(int row) {
  return PITCH % 64 == 32 ? (row & ~3) | (row & 1) << 1 | (row & 2) >> 1 : row;
}
// A place in a ring of SIZE, and the parity of its barrier.
template <int SIZE>
struct Place {
  int slot, phase;
  __device__ __forceinline__ void advance() {
    if (++slot == SIZE) slot = 0, phase ^= 1;
  }
};
// The expert of a block of `order`, and its rows; no rows: the block is of no expert.
__device__ __forceinline__ int2 expert_of(const int* order, const int* blocks, int block) {
  if (BLOCK == 1) {  // ids of 64 bits
    const int low = load_integer(order + 2 * block), high = load_integer(order + 2 * block + 1);
    return {low, high == 0 && low >= 0 && low < EXPERTS};
  }
  const int expert = load_integer(blocks + 2 * block);
  return {expert, expert < 0 ? 0 : load_integer(blocks + 2 * block + 1)};
}
// gate · sigmoid(alpha · gate) · (up + 1) of clamped numbers; what is no number stays so.
__device__ __forceinline__ float swiglu(float gate, float up, float alpha, float limit) {
  gate = gate > limit ? limit : gate, up = up > limit ? limit : up < -limit ? -limit : up;
  return gate * reciprocal(1.f + power_of(alpha * gate)) * (up + 1.f);
}

extern "C" __global__ void __launch_bounds__(32 * (ASKER + 1), RESIDENT)
    expert_rows(const char* values, const char* scales, const char* bias, const char* x, const int* order,
                const int* blocks, u32* out, float alpha, float limit, int num_blocks) {
  extern __shared__ __align__(128) char memory[];
  Shared& shared = *(Shared*)(memory + STAGES * STAGE_BYTES);
  const u32 ring = shared_address(memory), full = shared_address(shared.full), empty = shared_address(shared.empty);
  const u32 multiplied = shared_address(shared.multiplied), added = shared_address(shared.added);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  if (threadIdx.x == 0) {
    // All but the one that asks read a stage.
    for (int i = 0; i < STAGES; i++) make_barrier(full + 8 * i, 1), make_barrier(empty + 8 * i, WARPS + 1);
    for (int i = 0; i < BUFFERS; i++) make_barrier(multiplied + 8 * i, WARPS), make_barrier(added + 8 * i, 1);
    publish_barriers();
    shared.num_active = 0;
  }
  __syncthreads();
  if (!EARLY) {
    wait_for_prerequisites();
    start_dependents();
  }
  // Blocks that an expert has, in their order.
  for (int first = 0; first < num_blocks; first += blockDim.x) {
    const int block = first + threadIdx.x;
    const int2 its = block < num_blocks ? expert_of(order, blocks, block) : int2{0, 0};
    const u32 are_active = __ballot_sync(~0u, its.y > 0);
    if (lane == 0) shared.counts[warp] = __popc(are_active);
    const int before = shared.num_active;
    __syncthreads();
    int at = before + __popc(are_active & ((1u << lane) - 1)), all = before;
    for (int w = 0; w <= ASKER; w++) at += w < warp ? shared.counts[w] : 0, all += shared.counts[w];
    if (its.y > 0) shared.places[at] = block, shared.experts[at] = its.x, shared.rows[at] = its.y;
    __syncthreads();
    if (threadIdx.x == 0) shared.num_active = all;
    __syncthreads();
  }
  const int groups = shared.num_active * GROUPS;
  const int first = (long long)groups * blockIdx.x / gridDim.x, end = (long long)groups * (blockIdx.x + 1) / gridDim.x;

  if (warp == ASKER) {
    const u64 policy = read_again();  // an expert with more rows is in several blocks of `order`
    Place<STAGES> at = {0, 1};
#pragma unroll 1
    for (int item = first; item < end; item++, at.advance()) {
      wait_for(empty + 8 * at.slot, at.phase);
      const u32 to = ring + at.slot * STAGE_BYTES, there = full + 8 * at.slot;
      if (lane == 0) expect_bytes(there, VALUES + SCALES + BIASES);
      __syncwarp();
      const u64 from = (u64)shared.experts[item / GROUPS] * N + item % GROUPS * ROWS;
      constexpr int BYTES = VALUES / COPIES;
      if (lane < COPIES) load_bytes(to + lane * BYTES, values + from * PITCH + lane * BYTES, BYTES, there, policy);
      if (lane == COPIES) load_bytes(to + VALUES, scales + from * OF_ROW, SCALES, there, policy);
      if (BIAS && lane == COPIES + 1) load_bytes(to + VALUES + SCALES, bias + from * 2, BIASES, there, policy);
    }
    if (EARLY) {
      wait_for_prerequisites();
      start_dependents();
    }
    return;
  }
  if (EARLY) {
    wait_for_prerequisites();
    start_dependents();
  }

  if (warp == ADDER) {
    int index = -1, count = 0, entries[EIGHTS] = {};
    Place<STAGES> at = {0, 0};
    Place<BUFFERS> from = {0, 0};
#pragma unroll 1
    for (int item = first; item < end; item++, at.advance(), from.advance()) {
      if (item / GROUPS != index) {
        index = item / GROUPS, count = shared.rows[index];
        const int place = shared.places[index] * BLOCK;
#pragma unroll
        for (int e = 0; e < EIGHTS; e++)
          entries[e] = BLOCK == 1 ? place : e * EIGHT + row < count ? load_integer(order + place + e * EIGHT + row) : 0;
      }
      wait_for(full + 8 * at.slot, at.phase);
      const char* of_group = memory + at.slot * STAGE_BYTES + VALUES + SCALES;
      const uint2 biases = BIAS ? *(const uint2*)(of_group + quad * 8) : uint2{0, 0};
      __syncwarp();
      if (lane == 0) arrive(empty + 8 * at.slot);
      wait_for(multiplied + 8 * from.slot, from.phase);
#pragma unroll
      for (int e = 0; e < EIGHTS; e++) {
        if (e && count <= EIGHT) continue;
        float(*sums)[SUMS] = shared.sums[from.slot][e];
        float4 sum = *(const float4*)(sums[0] + lane * 4);
#pragma unroll
        for (int w = 1; w < WARPS; w++) {
          const float4 part = *(const float4*)(sums[w] + lane * 4);
          sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        __syncwarp();  // from here on a row of x is in a row
        float* in_rows = sums[0] + quad * 2 * LD + row_of(row);
        in_rows[0] = sum.x, in_rows[LD] = sum.y, in_rows[ROWS / 2] = sum.z, in_rows[LD + ROWS / 2] = sum.w;
        __syncwarp();
        const float4 of_row = *(const float4*)(sums[0] + row * LD + quad * 4);
        const u32 low = pack(of_row.x * E2M1_FACTOR + first_of(biases.x), of_row.y * E2M1_FACTOR + second_of(biases.x));
        const u32 high =
            pack(of_row.z * E2M1_FACTOR + first_of(biases.y), of_row.w * E2M1_FACTOR + second_of(biases.y));
        if (e * EIGHT + row < count) {
          u32* to = out + ((u64)entries[e] * OUTPUTS + item % GROUPS * (SWIGLU ? ROWS / 2 : ROWS)) / 2;
          if (SWIGLU)
            to[quad] = pack(swiglu(first_of(low), second_of(low), alpha, limit),
                            swiglu(first_of(high), second_of(high), alpha, limit));
          else
            *(uint2*)(to + quad * 2) = uint2{low, high};
        }
      }
      __syncwarp();
      if (lane == 0) arrive(added + 8 * from.slot);
    }
  } else {
    uint4 xs[EIGHTS][STEPS][4];
    int index = -1, count = 0;
    Place<STAGES> at = {0, 0};
    Place<BUFFERS> to = {0, 1};
#pragma unroll 1
    for (int item = first; item < end; item++, at.advance(), to.advance()) {
      if (item / GROUPS != index) {
        index = item / GROUPS, count = shared.rows[index];
        const int place = shared.places[index] * BLOCK;
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
          const bool is_row = e * EIGHT + row < count;
          const int entry = BLOCK == 1 ? place : is_row ? load_integer(order + place + e * EIGHT + row) : 0;
          const char* from = x + (u64)(OF_TOKENS ? entry / CHOSEN : entry) * K * 2;
#pragma unroll
          for (int s = 0; s < STEPS; s++) {
            const int scale = (s * WARPS + warp) * 4 + quad;
#pragma unroll
            for (int w = 0; w < 4; w++) {
              const bool is_there = is_row && scale < OF_ROW;
              const uint4 v = is_there ? *(const uint4*)(from + scale * SCALED * 2 + w * 16) : uint4{0, 0, 0, 0};
              const u32 words[4] = {v.x, v.y, v.z, v.w};
              xs[e][s][w] = {inputs_apart(words, 0), inputs_apart(words, 1), inputs_apart(words, 2),
                             inputs_apart(words, 3)};
            }
          }
        }
      }
      wait_for(full + 8 * at.slot, at.phase);
      const char* stage = memory + at.slot * STAGE_BYTES;
      float all[EIGHTS][2][4] = {};
      const bool are_many = EIGHTS > 1 && count > EIGHT;
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        if ((s * WARPS + warp) * 4 >= OF_ROW) continue;  // nothing of it is there
        const int scale = (s * WARPS + warp) * 4 + quad;
        const bool is_there = scale < OF_ROW;
        const u32 from = ring + at.slot * STAGE_BYTES + row_of(row) * PITCH + scale * (SCALED / 2);
        const uint4 uppers = is_there ? load_shared(from) : uint4{0, 0, 0, 0};
        const uint4 lowers = is_there ? load_shared(from + ROWS / 2 * PITCH) : uint4{0, 0, 0, 0};
        const unsigned char* its = (const unsigned char*)stage + VALUES + row_of(row) * OF_ROW + scale;
        const u32 upper = scale_of_byte(is_there ? its[0] : 0, 0);
        const u32 lower = scale_of_byte(is_there ? its[ROWS / 2 * OF_ROW] : 0, 0);
        const u32 above[4] = {uppers.x, uppers.y, uppers.z, uppers.w};
        const u32 below[4] = {lowers.x, lowers.y, lowers.z, lowers.w};
#pragma unroll
        for (int w = 0; w < 4; w++) {
          u32 a[4], b[4];
#pragma unroll
          for (int i = 0; i < 4; i++)
            a[i] = times(pair_of_word(above[w], i), upper), b[i] = times(pair_of_word(below[w], i), lower);
#pragma unroll
          for (int e = 0; e < EIGHTS; e++) {
            if (e && !are_many) continue;
            const uint4 v = xs[e][s][w];
            multiply_add(all[e][0], a[0], b[0], a[1], b[1], v.x, v.y);
            multiply_add(all[e][1], a[2], b[2], a[3], b[3], v.z, v.w);
          }
        }
      }
      __syncwarp();
      if (lane == 0) arrive(empty + 8 * at.slot);
      wait_for(added + 8 * to.slot, to.phase);
#pragma unroll
      for (int e = 0; e < EIGHTS; e++) {
        if (e && !are_many) continue;
        const float(&one)[4] = all[e][0], (&other)[4] = all[e][1];
        *(float4*)(shared.sums[to.slot][e][warp] + lane * 4) = {one[0] + other[0], one[1] + other[1],
                                                               one[2] + other[2], one[3] + other[3]};
      }
      __syncwarp();
      if (lane == 0) arrive(multiplied + 8 * to.slot);
    }
  }

  // Rows of padding are zeros, those whose id is no expert's no numbers.
#pragma unroll 1
  for (int block = blockIdx.x; block < num_blocks; block += gridDim.x) {
    if (expert_of(order, blocks, block).y) continue;
    const int rows = BLOCK == 1 ? 1 : load_integer(blocks + 2 * block + 1);
    for (int i = 0; i < rows; i++) {
      const int entry = BLOCK == 1 ? -1 - block : load_integer(order + block * BLOCK + i);
      const u32 both = entry < 0 ? 0x7fc07fc0u : 0u;
      uint4* to = (uint4*)(out + (u64)(entry < 0 ? -1 - entry : entry) * (OUTPUTS / 2));
      for (int j = threadIdx.x; j < OUTPUTS / 8; j += 32 * ASKER) to[j] = uint4{both, both, both, both};
    }
  }
}
