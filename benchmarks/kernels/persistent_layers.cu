// A decode of one token through all layers of Qwen3-0.6B's shape and its head as one launch, by blocks that walk the
// layers together; see persistent_layers_speed.py. One block a multiprocessor, at once.
//
// Weights: the last warp asks for them in their order, into a ring of slots in shared memory: eight rows of 1024
// columns each (or two pages of keys and values). The 16 other warps load their 64 columns of a stage into registers
// before they look for inputs.
// Inputs: what a stage makes lies in global memory, in a place that is all ones (a NaN which no sum gives) until then.
// A warp looks at the 64 inputs that it multiplies, so there are no flags and no barriers of the grid. Each launch has
// the places of every second one, and fills the others with ones.
// Products: mma of 16 rows, where each of the 8 columns holds the same token, or, in o, a part of attention's keys.
// One KV head's two queries over a part of the pages, a page a warp. Rows of products: query, query, new key, new value.
__device__ __forceinline__ void Reader::attend(const Arguments& of, Places& to, int layer, int block) {
  const int head = block / PARTS, part = block % PARTS, pages = (of.keys + PAGE - 1) / PAGE;
  const int mine = (pages - part + PARTS - 1) / PARTS, page = part + warp * PARTS, kind = g & 3;
  const u32 keys = of_page(warp), values = keys + PAGE_BYTES;
  Ring each = ring;
  for (int i = 0; i < mine; i += 2, each.step()) each.wait_full();
  mark(0);
  if (warp < mine) {
    const int row = kind < 2 ? 2 * head + kind : kind == 2 ? HEADS + head : HEADS + KV_HEADS + head;
    const bf16* norm = of.head_norms + (layer * 2 + (kind == 2)) * DIM + 8 * t;
    uint4 x[4], gains[4];
#pragma unroll
    for (int j = 0; j < 4; j++) gains[j] = *(const uint4*)(norm + 32 * j);
    const int place_of_page = of.table[page];
    look<DIM>(x, to.qkv + row * DIM + 8 * t);
    mark(1);
    const float squares = sum_of_lanes(squares_of(x[0]) + squares_of(x[1]) + squares_of(x[2]) + squares_of(x[3]), 4);
    const float scale = rsqrtf(squares / DIM + EPS) * (kind < 2 ? 0.08838834764831845f * 1.4426950408889634f : 1.f);
    uint4 q[4];
#pragma unroll
    for (int j = 0; j < 2; j++) {
#pragma unroll
      for (int pair = 0; pair < 4; pair++) {
        const u32 low = (&x[j].x)[pair], high = (&x[j + 2].x)[pair];
        const u32 low_gain = (&gains[j].x)[pair], high_gain = (&gains[j + 2].x)[pair];
        float out[2][2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int turn = 32 * j + 8 * t + 2 * pair + i;
          const float cos = shared.turns[0][turn], sin = shared.turns[1][turn];
          const float a = half_of(low, i) * half_of(low_gain, i) * scale;
          const float b = half_of(high, i) * half_of(high_gain, i) * scale;
          out[0][i] = a * cos - b * sin;
          out[1][i] = b * cos + a * sin;
        }
        (&q[j].x)[pair] = pack(out[0][0], out[0][1]);
        (&q[j + 2].x)[pair] = pack(out[1][0], out[1][1]);
      }
    }
    if (page == pages - 1 && (g == 2 || g == 3)) {  // the new token
      const int place = (of.keys - 1) % PAGE;
      bf16* kept = of.cache + ((((u64)layer * of.pages + place_of_page) * 2 + (g == 3)) * KV_HEADS + head) * PAGE * DIM;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const uint4 v = g == 2 ? q[j] : x[j];
        const int at = place * DIM + 32 * j + 8 * t;
        *(uint4*)(kept + at) = v;
        store_shared((g == 2 ? keys : values) + 2 * at, v);
      }
    }
    __syncwarp();
    float s[2][4] = {};
#pragma unroll
    for (int eight = 0; eight < 2; eight++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const uint4 k = load_shared(keys + ((8 * eight + g) * DIM + 32 * j + 8 * t) * 2);
        multiply_add(s[eight], q[j].x, 0, q[j].y, 0, k.x, k.y);
        multiply_add(s[eight], q[j].z, 0, q[j].w, 0, k.z, k.w);
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        if (page * PAGE + 8 * eight + 2 * t + i >= of.keys) s[eight][i] = NO_SCORE;
      }
    }
    const float top = max_of_quad(fmaxf(fmaxf(s[0][0], s[0][1]), fmaxf(s[1][0], s[1][1])));
    float total = 0;
#pragma unroll
    for (int eight = 0; eight < 2; eight++) {
      const float2 p = make_float2(exp2f(s[eight][0] - top), exp2f(s[eight][1] - top));
      total += p.x + p.y;
      if (g < 2) *(float2*)&shared.shares[warp][g][8 * eight + 2 * t] = p;
    }
    total = sum_of_lanes(total, 4);
    if (g < 2 && t == 0) shared.tops[warp][g][0] = top, shared.tops[warp][g][1] = total;
    __syncwarp();
    float sums[2][4] = {};
#pragma unroll
    for (int key = 0; key < PAGE; key++) {
      u32 low, high;
      load_shared(low, high, values + (key * DIM + 4 * lane) * 2);
#pragma unroll
      for (int query = 0; query < 2; query++) {
        const float p = shared.shares[warp][query][key];
        sums[query][0] += p * first_of(low), sums[query][1] += p * second_of(low);
        sums[query][2] += p * first_of(high), sums[query][3] += p * second_of(high);
      }
    }
#pragma unroll
    for (int query = 0; query < 2; query++) {  // where the warp's keys were
      store_shared(keys + (query * DIM + 4 * lane) * 4, *(const uint4*)sums[query]);
    }
  }
  meet();
  if (warp < 8) {  // 256 threads, a dimension of a query each
    const int query = warp / 4, dim = 32 * (warp % 4) + lane;
    const bool is_page = lane < mine;
    const float top = is_page ? shared.tops[lane][query][0] : NO_SCORE;
    float parts[WARPS], most = top, v = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) parts[i] = i < mine ? load_shared_float(of_page(i) + (query * DIM + dim) * 4) : 0;
    for (int other = WARPS / 2; other; other >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, other));
    most = __shfl_sync(~0u, most, 0);
    const float share = is_page ? exp2f(top - most) : 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) v += parts[i] * __shfl_sync(~0u, share, i);
    const float total = __shfl_sync(~0u, sum_of_lanes(is_page ? share * shared.tops[lane][query][1] : 0, WARPS), 0);
    publish<32>(&to.parts[part][(2 * head + query) * DIM + dim - lane], v * reciprocal(total));
    if (dim == 0) write(&to.weights[part][2 * head + query], __float_as_uint(most + log2f(total)));
  }
  fence_copies();
  for (int i = 0; i < mine; i += 2) give_back();
  end_stage(2);
}

// 16 rows; columns of a product are attention's parts, weighted when the sums are there.
__device__ __forceinline__ void Reader::o(const bf16* residual, Places& to, int block) {
  const int number = block - FIRST_OF_O, part = g & 3;
  uint4 a[4][2], x[4];
  load(a);
  const u32 before = warp == 0 ? look_word(residual + number * 16 + (lane & 14)) : 0;
  look<ROW_BYTES>(x, &to.parts[part][at(0)]);
  float top[2], sums[2] = {};
#pragma unroll
  for (int half = 0; half < 2; half++) top[half] = __uint_as_float(look_word(&to.weights[part][8 * half + warp / 2]));
  mark(1);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float d[4] = {};
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const uint4 &upper = a[2 * half][k], &lower = a[2 * half + 1][k], &of = x[2 * half + k];
      multiply_add(d, upper.x, lower.x, upper.y, lower.y, of.x, of.y);
      multiply_add(d, upper.z, lower.z, upper.w, lower.w, of.z, of.w);
    }
    float most = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 4));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 8));
    const float own = exp2f(top[half] - most);
    float all = own + __shfl_xor_sync(~0u, own, 4);
    all += __shfl_xor_sync(~0u, all, 8);
    const float weight = own / all;
    const float first = __shfl_sync(~0u, weight, 8 * t), second = __shfl_sync(~0u, weight, 8 * t + 4);
    sums[0] += d[0] * first + d[1] * second;
    sums[1] += d[2] * first + d[3] * second;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    sums[i] += __shfl_xor_sync(~0u, sums[i], 1);
    if (t == 0) shared.sums[buffer][8 * i + g][warp] = sums[i];
  }
  meet();
  if (warp == 0) publish<16>(to.middle + number * 16, row(lane & 15) + half_of(before, lane & 1));
  end_stage(3);
}

// The block's best logit, as a number that is larger for a larger logit, then for a smaller token.
__device__ __forceinline__ u64 Reader::head(const Arguments& of, const bf16* from, int block) {
  uint4 a[4][2], x[2];
  look_for_normed(x, from, of.final_norm);
  u64 best = 0;
  for (int chunk = block; chunk < VOCABULARY / HEAD_ROWS; chunk += BLOCKS) {
    load(a);
    multiply(a, x);
    meet();
    if (warp == 0) {
      const u32 bits = __float_as_uint(row(lane)), order = bits & 1u << 31 ? ~bits : bits | 1u << 31;
      const u64 found = (u64)order << 32 | (u32)~(chunk * HEAD_ROWS + lane);
      best = found > best ? found : best;
    }
    end_stage(5);
  }
  for (int other = 16; other; other >>= 1) {
    const u64 found = __shfl_xor_sync(~0u, best, other);
    best = found > best ? found : best;
  }
  return best;
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) persistent_layers(const __grid_constant__ Arguments of) {
  extern __shared__ __align__(128) char memory[];
  Shared& shared = *(Shared*)(memory + SLOTS * SLOT_BYTES);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x;
  const Ring ring = {shared_address(memory), shared_address(shared.full), shared_address(shared.empty), 0, 0};
  if (threadIdx.x < SLOTS) {
    make_barrier(ring.full + 8 * threadIdx.x, 1);
    make_barrier(ring.empty + 8 * threadIdx.x, WARPS);
  }
  if (threadIdx.x < 24) shared.marks[threadIdx.x / 4][threadIdx.x % 4] = 0;
  if (threadIdx.x < DIM) shared.turns[threadIdx.x / 64][threadIdx.x % 64] = of.turns[threadIdx.x];
  publish_barriers();
  __syncthreads();
  if (warp == WARPS) {
    ask_for_all(of, {ring, lane, read_once()}, block);
    return;
  }
  const u32 step = *of.step;
  Places* places = of.places + (step & 1) * LAYERS;
  uint4* others = (uint4*)(of.places + (~step & 1) * LAYERS);
  for (int i = block * THREADS + threadIdx.x; i < (int)(LAYERS * sizeof(Places) / 16); i += BLOCKS * THREADS) {
    others[i] = make_uint4(NOT_THERE, NOT_THERE, NOT_THERE, NOT_THERE);
  }
  const bf16* x = of.embedding + (u64)*of.token * HIDDEN;
  Reader reader = {ring, shared, warp, lane, lane >> 2, lane & 3, 0, 0, (int)clock()};
  for (int layer = 0; layer < LAYERS; layer++) {
    Places& to = places[layer];
    reader.qkv(of, x, to, layer, block);
    if (block < FIRST_OF_O) reader.attend(of, to, layer, block);
    else if (block < FIRST_OF_O + O_BLOCKS) reader.o(x, to, block);
    reader.stage = 3;
    reader.gate_up(of, to, layer, block);
    reader.down(to, block);
    x = to.out;
  }
  reader.stage = 5;
  const u64 best = reader.head(of, x, block);
  if (MARKS && threadIdx.x == 0) {
    for (int i = 0; i < 24; i++) of.marks[block * 24 + i] = shared.marks[i / 4][i % 4];
  }
  if (threadIdx.x == 0) {
    atomicMax(of.best, best);
    __threadfence();
    if (atomicAdd(of.done, 1) == BLOCKS - 1) {  // the last block: all others have read token and step
      __threadfence();
      *of.token = (int)~(u32)atomicExch(of.best, 0);
      *of.done = 0;
      *of.step = step + 1;
    }
  }
}
