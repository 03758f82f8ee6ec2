// What blocks of persistent_layers.cu share: places of results, the ring of weights, and a warp's part of a stage.
constexpr int HIDDEN = 1024, HEADS = 16, KV_HEADS = 8, DIM = 128, FFN = 3072, QKV = (HEADS + 2 * KV_HEADS) * DIM;
constexpr int BLOCKS = 128, WARPS = 16, THREADS = 32 * WARPS;
constexpr int SLOT_ROWS = 8, ROW_BYTES = 2048, PITCH = ROW_BYTES + 64, SLOT_BYTES = SLOT_ROWS * PITCH, SLOTS = 13;
constexpr int PAGE = 16, PAGE_BYTES = PAGE * DIM * 2, PARTS = 4, FIRST_OF_O = KV_HEADS * PARTS, O_BLOCKS = HIDDEN / 16;
constexpr int QKV_ROWS = QKV / BLOCKS, FFN_ROWS = FFN / BLOCKS, DOWN_ROWS = HIDDEN / BLOCKS, HEAD_ROWS = 32;
constexpr u32 NOT_THERE = ~0u, MOST_LOOKS = 1u << 22;
constexpr float EPS = 1e-6f, NO_SCORE = -1e30f;
static_assert(QKV_ROWS == 4 * SLOT_ROWS && FFN_ROWS == 3 * SLOT_ROWS && DOWN_ROWS == SLOT_ROWS, "whole slots");
static_assert(VOCABULARY % HEAD_ROWS == 0 && FIRST_OF_O + O_BLOCKS <= BLOCKS, "whole chunks, a role a block");

typedef unsigned short bf16;
struct Places {  // of one layer's results
  bf16 qkv[QKV], parts[PARTS][HEADS * DIM], middle[HIDDEN], active[FFN], out[HIDDEN];
  float weights[PARTS][HEADS];  // log2 of the sum of a part's exponentials
};
struct Arguments {
  const bf16 *qkv, *o, *gate_up, *down, *norms, *head_norms, *embedding, *final_norm;
  const float* turns;  // cos and sin of the position, 64 of each
  bf16* cache;         // [layer, page, keys or values, KV head, PAGE, DIM]
  const int* table;    // the request's pages
  int* token;          // in and out
  Places* places;      // [2, LAYERS]
  u64* best;           // the head's choice
  u32 *done, *step;
  int* marks;          // [BLOCKS, 6 stages, 4]: cycles for weights, inputs, products, results, of one warp
  int keys, pages;     // with the new token; pages that the cache has
};
struct Shared {
  float sums[2][48][20];  // of warps, padded
  float squares[2][WARPS];
  float turns[2][DIM / 2];
  float shares[WARPS][2][PAGE], tops[WARPS][2][2];
  u64 full[SLOTS], empty[SLOTS];
  int marks[6][4];
};

__device__ __forceinline__ bool is_there(const uint4& v) {
  return v.x != NOT_THERE && v.y != NOT_THERE && v.z != NOT_THERE && v.w != NOT_THERE;
}
__device__ __forceinline__ uint4 read(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u32 read_word(const void* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void write(void* p, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// COUNT times 16 bytes, once all are there: pairs STEP bytes from each other, 64 between the two of a pair.
template <int STEP, int COUNT>
__device__ __forceinline__ void look(uint4 (&to)[COUNT], const void* from) {
  for (u32 looks = 0;; looks++) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < COUNT; i++) to[i] = read((const char*)from + i / 2 * STEP + i % 2 * 64);
#pragma unroll
    for (int i = 0; i < COUNT; i++) all &= is_there(to[i]);
    if (all || !WAITS) return;
    if (looks == MOST_LOOKS) __trap();
  }
}
__device__ __forceinline__ u32 look_word(const void* from) {
  for (u32 looks = 0;; looks++) {
    const u32 v = read_word(from);
    if (v != NOT_THERE || !WAITS) return v;
    if (looks == MOST_LOOKS) __trap();
  }
}
__device__ __forceinline__ uint4 load_shared(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ void load_shared(u32& first, u32& second, u32 address) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "r"(address));
}
__device__ __forceinline__ float load_shared_float(u32 address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ void store_shared(u32 address, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// What warps wrote into a slot is ahead of what TMA writes there next.
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void copy(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
__device__ __forceinline__ void sync_readers() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }
__device__ __forceinline__ uint4 times(const uint4& a, const uint4& b) {
  return make_uint4(times(a.x, b.x), times(a.y, b.y), times(a.z, b.z), times(a.w, b.w));
}
__device__ __forceinline__ float squares_of(const uint4& v) {
  return sum_of_squares(v.x) + sum_of_squares(v.y) + sum_of_squares(v.z) + sum_of_squares(v.w);
}
__device__ __forceinline__ float half_of(u32 both, int which) { return which ? second_of(both) : first_of(both); }

// Where a warp, or who asks, is in the ring.
struct Ring {
  u32 data, full, empty, slot, turn;
  __device__ u32 address() const { return data + slot * SLOT_BYTES; }
  __device__ void step() {
    if (++slot == SLOTS) slot = 0, turn ^= 1;
  }
  __device__ void wait_full() const {
    if (READS) wait_for(full + 8 * slot, turn);
  }
};

// --- who asks for weights -------------------------------------------------------------------------------------------
struct Asker {
  Ring ring;
  int lane;
  u64 policy;
  __device__ void ask(const char* from, int row_step) {  // SLOT_ROWS rows of 1024 columns
    if (!READS) return;
    wait_for(ring.empty + 8 * ring.slot, ring.turn ^ 1);
    const u32 barrier = ring.full + 8 * ring.slot;
    if (lane == 0) expect_bytes(barrier, SLOT_ROWS * ROW_BYTES);
    __syncwarp();
    if (lane < SLOT_ROWS) {
      copy(ring.address() + lane * PITCH, from + (u64)lane * row_step, ROW_BYTES, barrier, policy);
    }
    ring.step();
  }
  __device__ void ask_rows(const char* from, int count) {
    for (int row = 0; row < count; row += SLOT_ROWS) ask(from + row * ROW_BYTES, ROW_BYTES);
  }
  __device__ void ask_pages(const bf16* cache, const int* table, int part, int pages) {
    if (!READS) return;
    for (int first = part; first < pages; first += 2 * PARTS) {
      wait_for(ring.empty + 8 * ring.slot, ring.turn ^ 1);
      const u32 barrier = ring.full + 8 * ring.slot;
      const int count = first + PARTS < pages ? 4 : 2, page = first + (lane >> 1) * PARTS;
      if (lane == 0) expect_bytes(barrier, count * PAGE_BYTES);
      __syncwarp();
      if (lane < count) {
        const bf16* from = cache + ((u64)table[page] * 2 + (lane & 1)) * KV_HEADS * PAGE * DIM;
        copy(ring.address() + lane * PAGE_BYTES, from, PAGE_BYTES, barrier, policy);
      }
      ring.step();
    }
  }
};
__device__ __forceinline__ void ask_for_all(const Arguments& of, Asker asker, int block) {
  const int pages = (of.keys + PAGE - 1) / PAGE, head = block / PARTS, o = block - FIRST_OF_O;
  for (int layer = 0; layer < LAYERS; layer++) {
    asker.ask_rows((const char*)(of.qkv + ((u64)layer * QKV + block * QKV_ROWS) * HIDDEN), QKV_ROWS);
    if (block < FIRST_OF_O) {
      const bf16* cache = of.cache + ((u64)layer * of.pages * 2 * KV_HEADS + head) * PAGE * DIM;
      asker.ask_pages(cache, of.table, block % PARTS, pages);
    } else if (o < O_BLOCKS) {
      const char* rows = (const char*)(of.o + ((u64)layer * HIDDEN + 16 * o) * HEADS * DIM);
      for (int i = 0; i < 4; i++) {
        asker.ask(rows + (i & 1) * SLOT_ROWS * 2 * ROW_BYTES + (i >> 1) * ROW_BYTES, 2 * ROW_BYTES);
      }
    }
    const bf16* gate = of.gate_up + ((u64)layer * 2 * FFN + block * FFN_ROWS) * HIDDEN;
    asker.ask_rows((const char*)gate, FFN_ROWS);
    asker.ask_rows((const char*)(gate + FFN * HIDDEN), FFN_ROWS);
    const char* down = (const char*)(of.down + ((u64)layer * HIDDEN + block * DOWN_ROWS) * FFN);
    for (int third = 0; third < 3; third++) asker.ask(down + third * ROW_BYTES, 3 * ROW_BYTES);
  }
  for (int chunk = block; chunk < VOCABULARY / HEAD_ROWS; chunk += BLOCKS) {
    asker.ask_rows((const char*)(of.embedding + (u64)chunk * HEAD_ROWS * HIDDEN), HEAD_ROWS);
  }
}

// --- who multiplies -------------------------------------------------------------------------------------------------
struct Reader {
  Ring ring;
  Shared& shared;
  int warp, lane, g, t, stage, buffer;  // g: the lane's row and column of a product, t: its quarter of 32 columns
  int last;

  __device__ void mark(int part) {
    if (!MARKS || warp || lane) return;
    const int now = clock();
    shared.marks[stage][part] += now - last;
    last = now;
  }
  // This warp's 64 columns of COUNT slots, then gives the slots back.
  template <int COUNT>
  __device__ void load(uint4 (&to)[COUNT][2]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      ring.wait_full();
      const u32 from = ring.address() + g * PITCH + warp * 128 + t * 16;
      to[i][0] = load_shared(from);
      to[i][1] = load_shared(from + 64);
      give_back();
    }
    mark(0);
  }
  __device__ void give_back() {
    __syncwarp();
    if (READS && lane == 0) arrive(ring.empty + 8 * ring.slot);
    ring.step();
  }
  __device__ u32 of_page(int number) const {
    const u32 slot = ring.slot + number / 2;
    return ring.data + (slot < SLOTS ? slot : slot - SLOTS) * SLOT_BYTES + (number & 1) * 2 * PAGE_BYTES;
  }
  __device__ int at(int piece) const { return 1024 * (piece >> 1) + 64 * warp + 32 * (piece & 1) + 8 * t; }
  // Sums of 8 * COUNT rows over the warp's columns of x, the same for all columns of a product, for all warps to add.
  template <int COUNT>
  __device__ void multiply(const uint4 (&a)[COUNT][2], const uint4 (&x)[2]) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
      float d[4] = {};
#pragma unroll
      for (int k = 0; k < 2; k++) {
        multiply_add(d, a[i][k].x, a[i + 1][k].x, a[i][k].y, a[i + 1][k].y, x[k].x, x[k].y);
        multiply_add(d, a[i][k].z, a[i + 1][k].z, a[i][k].w, a[i + 1][k].w, x[k].z, x[k].w);
      }
      if (t == 0) {
        shared.sums[buffer][8 * i + g][warp] = d[0];
        shared.sums[buffer][8 * i + 8 + g][warp] = d[2];
      }
    }
  }
  __device__ float sum(const float* of) const {
    float v = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i += 4) {
      const float4 four = *(const float4*)(of + i);
      v += (four.x + four.y) + (four.z + four.w);
    }
    return v;
  }
  __device__ float row(int number) const { return sum(shared.sums[buffer][number]); }
  __device__ float inverse_rms() const { return rsqrtf(sum(shared.squares[buffer]) / HIDDEN + EPS); }
  __device__ void meet() {
    mark(2);
    sync_readers();
  }
  __device__ void end_stage(int next) {
    mark(3);
    buffer ^= 1;
    stage = next;
  }
  // The values of the first COUNT lanes.
  template <int COUNT>
  __device__ void publish(bf16* to, float v) const {
    const float other = __shfl_down_sync(~0u, v, 1);
    if (lane < COUNT && !(lane & 1)) write(to + lane, pack(v, other));
  }
  // This warp's 64 inputs times the norm's weight, and the sum of their squares for all warps to add.
  __device__ void look_for_normed(uint4 (&x)[2], const bf16* from, const bf16* norm) {
    const uint4 gains[2] = {*(const uint4*)(norm + at(0)), *(const uint4*)(norm + at(1))};
    look<ROW_BYTES>(x, from + at(0));
    mark(1);
    const float squares = sum_of_lanes(squares_of(x[0]) + squares_of(x[1]), 4);
    if (lane == 0) shared.squares[buffer][warp] = squares;
    x[0] = times(x[0], gains[0]);
    x[1] = times(x[1], gains[1]);
  }

  __device__ void qkv(const Arguments& of, const bf16* from, Places& to, int layer, int block) {
    uint4 a[4][2], x[2];
    load(a);
    look_for_normed(x, from, of.norms + layer * 2 * HIDDEN);
    multiply(a, x);
    meet();
    if (warp == 0) publish<QKV_ROWS>(to.qkv + block * QKV_ROWS, row(lane) * inverse_rms());
    end_stage(1);
  }
  __device__ void attend(const Arguments& of, Places& to, int layer, int block);
  __device__ void o(const bf16* residual, Places& to, int block);
  __device__ void gate_up(const Arguments& of, Places& to, int layer, int block) {
    uint4 a[6][2], x[2];
    load(a);
    look_for_normed(x, to.middle, of.norms + (layer * 2 + 1) * HIDDEN);
    multiply(a, x);
    meet();
    if (warp == 0) {
      const float scale = inverse_rms();
      const int number = lane < FFN_ROWS ? lane : 0;
      const float gate = row(number) * scale, up = row(FFN_ROWS + number) * scale;
      publish<FFN_ROWS>(to.active + block * FFN_ROWS, gate * reciprocal(1.f + power_of(gate)) * up);
    }
    end_stage(4);
  }
  __device__ void down(Places& to, int block) {
    uint4 a[3][2], x[6];
    load(a);
    look<ROW_BYTES>(x, to.active + at(0));
    mark(1);
    float d[3][4] = {};
#pragma unroll
    for (int i = 0; i < 6; i++) {
      multiply_add(d[i / 2], a[i / 2][i % 2].x, 0, a[i / 2][i % 2].y, 0, x[i].x, x[i].y);
      multiply_add(d[i / 2], a[i / 2][i % 2].z, 0, a[i / 2][i % 2].w, 0, x[i].z, x[i].w);
    }
    if (t == 0) shared.sums[buffer][g][warp] = d[0][0] + d[1][0] + d[2][0];
    const int place = block * DOWN_ROWS + (lane & 6);
    const u32 before = warp == 0 ? look_word(to.middle + place) : 0;
    meet();
    if (warp == 0) publish<DOWN_ROWS>(to.out + block * DOWN_ROWS, row(lane & 7) + half_of(before, lane & 1));
    end_stage(0);
  }
  __device__ u64 head(const Arguments& of, const bf16* from, int block);
};
