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
  bf16 qkv[QKV], parts[PARTS][HEADS * DIM];
  bf16 middle[COPIES][HIDDEN], active[COPIES][FFN], out[COPIES][HIDDEN];  // each for some of the blocks
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
// COUNT times 16 bytes, STEP bytes from each other, once all are there.
template <int STEP, int COUNT>
__device__ __forceinline__ void look(uint4 (&to)[COUNT], const void* from) {
  for (u32 looks = 0;; looks++) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < COUNT; i++) to[i] = read((const char*)from + i * STEP);
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
// Warps that add up the sums of all do so ahead of the others' loads of weights, which shared memory is busy with.
__device__ __forceinline__ void let_others_load() { asm volatile("bar.arrive 2, %0;" ::"n"(THREADS) : "memory"); }
__device__ __forceinline__ void wait_to_load() { asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory"); }
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
  Ring ring, arriving;
  int lane, in_flight;
  u64 policy;
  // Waits for room, and until only some slots are on their way: with more of them all else in the L2 waits longer.
  __device__ void wait_for_turn() {
    wait_for(ring.empty + 8 * ring.slot, ring.turn ^ 1);
    if (++in_flight <= IN_FLIGHT) return;
    arriving.wait_full();
    arriving.step();
  }
  __device__ void ask(const char* from, int row_step) {  // SLOT_ROWS rows of 1024 columns
    if (!READS) return;
    wait_for_turn();
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
      wait_for_turn();
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
  // Where the lane's 8 inputs of 1024 are: columns of a product that are even have those of the warp's first half.
  __device__ int inputs() const { return 64 * warp + 32 * (g & 1) + 8 * t; }
  // Sums of 8 * COUNT rows over the warp's inputs, for all warps to add.
  template <int COUNT>
  __device__ void multiply(const uint4 (&a)[COUNT][2], const uint4& x) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
      float d[2][4] = {};
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint4 &upper = a[i][half], &lower = a[i + 1][half];
        multiply_add(d[half], upper.x, lower.x, upper.y, lower.y, x.x, x.y);
        multiply_add(d[half], upper.z, lower.z, upper.w, lower.w, x.z, x.w);
      }
      if (t == 0) {
        shared.sums[buffer][8 * i + g][warp] = d[0][0] + d[1][1];
        shared.sums[buffer][8 * i + 8 + g][warp] = d[0][2] + d[1][3];
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
  __device__ void end_stage(int next, bool has_added) {
    if (has_added) let_others_load();
    else wait_to_load();
    mark(3);
    buffer ^= 1;
    stage = next;
  }
  // The values of the first COUNT lanes, in copies so many values from each other.
  template <int COUNT>
  __device__ void publish(bf16* to, float v, int copies = 1, int step = 0) const {
    const float other = __shfl_down_sync(~0u, v, 1);
    for (int copy = 0; copy < copies; copy++) {
      if (lane < COUNT && !(lane & 1)) write(to + copy * step + lane, pack(v, other));
    }
  }
  // The lane's inputs times the norm's weight, and the warp's sum of squares for all warps to add.
  __device__ uint4 look_for_normed(const bf16* from, const bf16* norm) {
    const uint4 gain = *(const uint4*)(norm + inputs());
    uint4 x[1];
    look<ROW_BYTES>(x, from + inputs());
    mark(1);
    const float squares = sum_of_lanes(squares_of(x[0]), 8);
    if (lane == 0) shared.squares[buffer][warp] = squares;
    return times(x[0], gain);
  }

  __device__ void qkv(const Arguments& of, const bf16* from, Places& to, int layer, int block) {
    uint4 a[4][2];
    load(a);
    multiply(a, look_for_normed(from, of.norms + layer * 2 * HIDDEN));
    meet();
    if (warp == 0) publish<QKV_ROWS>(to.qkv + block * QKV_ROWS, row(lane) * inverse_rms());
    end_stage(1, warp == 0);
  }
  __device__ void attend(const Arguments& of, Places& to, int layer, int block);
  __device__ void o(const bf16* residual, Places& to, int block);
  __device__ void gate_up(const Arguments& of, Places& to, int layer, int block) {
    uint4 a[6][2];
    load(a);
    multiply(a, look_for_normed(to.middle[block % COPIES], of.norms + (layer * 2 + 1) * HIDDEN));
    meet();
    if (warp == 0) {
      const float scale = inverse_rms();
      const int number = lane < FFN_ROWS ? lane : 0;
      const float gate = row(number) * scale, up = row(FFN_ROWS + number) * scale;
      const float active = gate * reciprocal(1.f + power_of(gate)) * up;
      publish<FFN_ROWS>(to.active[0] + block * FFN_ROWS, active, COPIES, FFN);
    }
    end_stage(4, warp == 0);
  }
  __device__ void down(Places& to, int block) {
    uint4 a[3][2], x[3];
    load(a);
    look<ROW_BYTES>(x, to.active[block % COPIES] + inputs());
    mark(1);
    float d[3][2][4] = {};
#pragma unroll
    for (int i = 0; i < 6; i++) {
      const uint4 &of = a[i / 2][i % 2], &by = x[i / 2];
      multiply_add(d[i / 2][i % 2], of.x, 0, of.y, 0, by.x, by.y);
      multiply_add(d[i / 2][i % 2], of.z, 0, of.w, 0, by.z, by.w);
    }
    if (t == 0) {
      shared.sums[buffer][g][warp] = d[0][0][0] + d[0][1][1] + (d[1][0][0] + d[1][1][1]) + (d[2][0][0] + d[2][1][1]);
    }
    const u32 before = warp == 0 ? look_word(to.middle[block % COPIES] + block * DOWN_ROWS + (lane & 6)) : 0;
    meet();
    if (warp == 0) {
      const float v = row(lane & 7) + half_of(before, lane & 1);
      publish<DOWN_ROWS>(to.out[0] + block * DOWN_ROWS, v, COPIES, HIDDEN);
    }
    end_stage(0, warp == 0);
  }
  __device__ u64 head(const Arguments& of, const bf16* from, int block);
};
