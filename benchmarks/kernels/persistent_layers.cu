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
// One KV head's two queries over a part of the pages, a page a warp. A product has four rows: both, new key and value.
__device__ __forceinline__ void Reader::attend(const Arguments& of, Places& to, int layer, int block) {
  const int head = block / PARTS, part = block % PARTS, pages = (of.keys + PAGE - 1) / PAGE;
  const int mine = (pages - part + PARTS - 1) / PARTS, page = part + warp * PARTS, kind = g & 3;
  const u32 keys = of_page(warp), values = keys + PAGE_BYTES;
  Ring each = ring;
  for (int i = 0; i < mine; i += 2, each.step()) each.wait_full();
  mark(0);
  if (warp < mine) {
    const int row = kind < 2 ? 2 * head + kind : kind == 2 ? HEADS + head : HEADS + KV_HEADS + head;
    const int first = 32 * (g >> 2) + 8 * t;  // of 8 values; the lane has those that they turn with, too
    const bf16* norm = of.head_norms + (layer * 2 + (kind == 2)) * DIM + first;
    const uint4 gains[2] = {*(const uint4*)norm, *(const uint4*)(norm + DIM / 2)};
    const int place_of_page = of.table[page];
    uint4 x[2], own[2], q[4];
    look<DIM>(x, to.qkv + row * DIM + first);
    mark(1);
    float squares = sum_of_lanes(squares_of(x[0]) + squares_of(x[1]), 4);
    squares += __shfl_xor_sync(~0u, squares, 16);
    const float scale = rsqrtf(squares / DIM + EPS) * (kind < 2 ? 0.08838834764831845f * 1.4426950408889634f : 1.f);
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
      const u32 low = (&x[0].x)[pair], high = (&x[1].x)[pair];
      const float2 cos = *(const float2*)&shared.turns[0][first + 2 * pair];
      const float2 sin = *(const float2*)&shared.turns[1][first + 2 * pair];
      const u32 low_gain = (&gains[0].x)[pair], high_gain = (&gains[1].x)[pair];
      const float a0 = first_of(low) * first_of(low_gain) * scale, b0 = first_of(high) * first_of(high_gain) * scale;
      const float a1 = second_of(low) * second_of(low_gain) * scale;
      const float b1 = second_of(high) * second_of(high_gain) * scale;
      (&own[0].x)[pair] = kind == 3 ? low : pack(a0 * cos.x - b0 * sin.x, a1 * cos.y - b1 * sin.y);
      (&own[1].x)[pair] = kind == 3 ? high : pack(b0 * cos.x + a0 * sin.x, b1 * cos.y + a1 * sin.y);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const u32 mine_of = (&own[i / 4].x)[i % 4], other = __shfl_xor_sync(~0u, mine_of, 16);
      (&q[i / 4 * 2].x)[i % 4] = g < 4 ? mine_of : other;
      (&q[i / 4 * 2 + 1].x)[i % 4] = g < 4 ? other : mine_of;
    }
    if (page == pages - 1 && kind >= 2) {  // the new token
      const int place = (of.keys - 1) % PAGE * DIM + first;
      const u64 page_of_all = (u64)layer * of.pages + place_of_page;
      bf16* kept = of.cache + ((page_of_all * 2 + (kind == 3)) * KV_HEADS + head) * PAGE * DIM;
      const u32 here = (kind == 2 ? keys : values) + 2 * place;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        *(uint4*)(kept + place + half * DIM / 2) = own[half];
        store_shared(here + half * DIM, own[half]);
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
    for (int four = 0; four < PAGE; four += 4) {
      float4 shares[2];
#pragma unroll
      for (int query = 0; query < 2; query++) shares[query] = *(const float4*)&shared.shares[warp][query][four];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 low, high;
        load_shared(low, high, values + ((four + i) * DIM + 4 * lane) * 2);
#pragma unroll
        for (int query = 0; query < 2; query++) {
          const float p = (&shares[query].x)[i];
          sums[query][0] += p * first_of(low), sums[query][1] += p * second_of(low);
          sums[query][2] += p * first_of(high), sums[query][3] += p * second_of(high);
        }
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
  end_stage(2, warp < 8);
}

// 16 rows; columns of a product are attention's parts, of the warp's first and second half of inputs. They are weighted
// when the sums are there.
__device__ __forceinline__ void Reader::o(const bf16* residual, Places& to, int block) {
  const int number = block - FIRST_OF_O, part = g & 3;
  uint4 a[4][2], x[2];
  load(a);
  const u32 before = warp == 0 ? look_word(residual + number * 16 + (lane & 14)) : 0;
  const float* weights = &to.weights[part][warp / 2];
  for (u32 looks = 0; WAITS && __all_sync(~0u, read_word(weights) == NOT_THERE); looks++) {  // little to look at
    if (looks == MOST_LOOKS) __trap();
  }
  look<ROW_BYTES>(x, &to.parts[part][64 * warp + 32 * (g >> 2) + 8 * t]);
  const float top[2] = {__uint_as_float(look_word(weights)), __uint_as_float(look_word(weights + 8))};
  mark(1);
  float sums[2] = {};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float d[2][4] = {};
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const uint4 &upper = a[2 * half][k], &lower = a[2 * half + 1][k], &of = x[half];
      multiply_add(d[k], upper.x, lower.x, upper.y, lower.y, of.x, of.y);
      multiply_add(d[k], upper.z, lower.z, upper.w, lower.w, of.z, of.w);
    }
    float most = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 4));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 8));
    const float own = exp2f(top[half] - most);
    float all = own + __shfl_xor_sync(~0u, own, 4);
    all += __shfl_xor_sync(~0u, all, 8);
    const float weight = own / all;
    const float first = __shfl_sync(~0u, weight, 8 * t), second = __shfl_sync(~0u, weight, 8 * t + 4);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float *of_first = d[0] + 2 * i, *of_second = d[1] + 2 * i;
      sums[i] += (t < 2 ? of_first[0] : of_second[0]) * first + (t < 2 ? of_first[1] : of_second[1]) * second;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float sum = sum_of_lanes(sums[i], 4);
    if (t == 0) shared.sums[buffer][8 * i + g][warp] = sum;
  }
  meet();
  if (warp == 0) {
    const float v = row(lane & 15) + half_of(before, lane & 1);
    publish<16>(to.middle[0] + number * 16, v, COPIES, HIDDEN);
  }
  end_stage(3, warp == 0);
}

// The block's best logit, as a number that is larger for a larger logit, then for a smaller token.
__device__ __forceinline__ u64 Reader::head(const Arguments& of, const bf16* from, int block) {
  uint4 a[4][2];
  const uint4 x = look_for_normed(from, of.final_norm);
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
    end_stage(5, warp == 0);
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
    ask_for_all(of, {ring, ring, lane, 0, read_once()}, block);
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
    reader.stage = 2;
    if (block >= FIRST_OF_O && block < FIRST_OF_O + O_BLOCKS) reader.o(x, to, block);
    reader.stage = 3;
    reader.gate_up(of, to, layer, block);
    reader.down(to, block);
    x = to.out[block % COPIES];
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
