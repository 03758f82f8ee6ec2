// Runs a CUDA kernel's threads as fibers on one CPU: warps, blocks and clusters meet where the kernel has them meet, and
// TMA's copies come late, in any order. Fibers take turns in an order drawn anew each round.
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __cluster_dims__(...)
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

typedef unsigned int u32;
typedef unsigned long long u64;
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct uint4 {
  u32 x, y, z, w;
};
// Set at each turn; not static, or they might be kept in registers meanwhile.
struct Index {
  u32 x;
} threadIdx, blockIdx, gridDim, blockDim;

static int min(int a, int b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }
static float rsqrtf(float v) { return 1.f / sqrtf(v); }
static float __uint_as_float(u32 v) {
  float f;
  memcpy(&f, &v, 4);
  return f;
}
static u32 __float_as_uint(float f) {
  u32 v;
  memcpy(&v, &f, 4);
  return v;
}

namespace emulated {

struct Meeting {
  int count = 0;
  u64 generation = 0;
  bool arrive(int all) {
    if (++count < all) return false;
    count = 0, generation++;
    return true;
  }
};
struct Warp {
  Meeting meeting;
  u32 given[2][32][6];
};
struct Barrier {
  int expected, pending, bytes;
  u32 phase;
  void look() {
    if (pending == 0 && bytes == 0) phase ^= 1, pending = expected;
  }
  void arrive(int more_bytes) { bytes += more_bytes, pending--, look(); }
};
struct Block {
  char* memory;
  std::vector<Warp> warps;
  Meeting meeting;
  std::map<u32, Barrier> barriers;
};
struct Fiber {
  ucontext_t context;
  int block, thread;
  bool done = false;
  u64 exchanges = 0, arrivals = 0;
  std::vector<char> stack;
};
struct Copy {
  int block;
  u32 to, barrier;
  const char* from;
  u64 stride;
  int rows;
};

constexpr u32 BASE = 16;  // where a block's memory begins: no multiple of what the kernel aligns it to
static std::vector<Block> blocks;
static std::vector<Meeting> clusters;
static std::vector<Fiber*> fibers;
static std::vector<Copy> copies;
Fiber* now;
static ucontext_t scheduler;
static std::mt19937_64 draws;
static int cluster_blocks, block_threads;

static void yield() { swapcontext(&now->context, &scheduler); }
static Block& block() { return blocks[now->block]; }
static char* place_of(u32 address) {
  const int peer = address >> 24;
  Block& its = peer ? blocks[now->block / cluster_blocks * cluster_blocks + peer - 1] : block();
  return its.memory + ((address & 0xffffff) - BASE);
}
// The words that the lanes of a warp give to one operation.
template <typename... Words>
static u32 (&exchange(Words... words))[32][6] {
  Warp& warp = block().warps[now->thread / 32];
  u32(&given)[32][6] = warp.given[now->exchanges++ % 2];
  const u32 own[] = {(u32)words...};
  memcpy(given[now->thread % 32], own, sizeof(own));
  const u64 generation = warp.meeting.generation;
  if (!warp.meeting.arrive(32))
    while (warp.meeting.generation == generation) yield();
  return given;
}
static void meet_block() {
  Meeting& meeting = block().meeting;
  const u64 generation = meeting.generation;
  if (!meeting.arrive(block_threads))
    while (meeting.generation == generation) yield();
}
static void arrive_at_cluster() {
  now->arrivals++;
  clusters[now->block / cluster_blocks].arrive(cluster_blocks * block_threads);
}
static void wait_for_cluster() {
  while (clusters[now->block / cluster_blocks].generation < now->arrivals) yield();
}
// One of the copies that have been asked for comes.
static void copy_one() {
  if (copies.empty() || draws() % 4) return;
  const size_t i = draws() % copies.size();
  const Copy its = copies[i];
  copies[i] = copies.back(), copies.pop_back();
  for (int row = 0; row < its.rows; row++)
    for (int chunk = 0; chunk < 8; chunk++) {
      const u32 at = its.to + row * 128 + chunk * 16;
      memcpy(blocks[its.block].memory + ((at ^ (at >> 7 & 7) << 4) - BASE), its.from + row * its.stride + chunk * 16, 16);
    }
  Barrier& barrier = blocks[its.block].barriers.at(its.barrier);
  barrier.bytes -= its.rows * 128, barrier.look();
}
static float of_half(u32 both, int i) { return __uint_as_float(i ? both & 0xffff0000u : both << 16); }
static float of_float16(u32 both, int i) {
  _Float16 its;
  memcpy(&its, (const char*)&both + 2 * i, 2);
  return its;
}
static u32 float16_pair(float first, float second) {
  const _Float16 both[] = {(_Float16)first, (_Float16)second};
  u32 its;
  memcpy(&its, both, 4);
  return its;
}
static float of_e4m3(u32 v) {
  const int exponent = v >> 3 & 15, mantissa = v & 7;
  const float size = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  return (v & 0x7f) == 0x7f ? NAN : v & 0x80 ? -size : size;
}
static u32 to_e4m3(float v) {
  if (v != v) return 0x7f;
  u32 best = 0;
  for (u32 i = 1; i < 0x7f; i++) {
    const float off = fabsf(of_e4m3(i) - fabsf(v)) - fabsf(of_e4m3(best) - fabsf(v));
    if (off < 0 || (off == 0 && i % 2 == 0)) best = i;
  }
  return best | (v < 0 ? 0x80 : 0);
}
static void (*kernel)();
static void enter() {
  kernel();
  now->done = true;
  yield();
}

static int run(void (*body)(), int num_blocks, int split, int num_threads, int shared_bytes, u64 seed) {
  kernel = body, cluster_blocks = split, block_threads = num_threads, draws.seed(seed), gridDim.x = num_blocks;
  blockDim.x = num_threads;
  blocks.clear(), clusters.assign(num_blocks / split, {}), copies.clear(), blocks.resize(num_blocks);
  for (Block& its : blocks) {
    its.memory = (char*)aligned_alloc(1024, (shared_bytes + 2047) / 1024 * 1024) + BASE;
    memset(its.memory, 0xff, shared_bytes), its.warps.resize(num_threads / 32);
  }
  for (int i = 0; i < num_blocks * num_threads; i++) {
    Fiber* its = new Fiber;
    its->block = i / num_threads, its->thread = i % num_threads, its->stack.resize(48 << 10);
    getcontext(&its->context);
    its->context.uc_stack.ss_sp = its->stack.data(), its->context.uc_stack.ss_size = its->stack.size();
    makecontext(&its->context, enter, 0);
    fibers.push_back(its);
  }
  int rounds = 0;
  std::vector<Fiber*> alive = fibers;
  for (; !alive.empty() && rounds < 200000; rounds++) {
    for (size_t i = alive.size(); i > 1; i--) std::swap(alive[i - 1], alive[draws() % i]);
    for (Fiber* its : alive) {
      now = its, threadIdx.x = its->thread, blockIdx.x = its->block;
      swapcontext(&scheduler, &its->context);
      copy_one();
    }
    std::vector<Fiber*> left;
    for (Fiber* its : alive)
      if (!its->done) left.push_back(its);
    alive.swap(left);
  }
  const int stuck = alive.size();
  for (Fiber* its : fibers) delete its;
  fibers.clear();
  for (Block& its : blocks) free(its.memory - BASE);
  return stuck;
}

}  // namespace emulated

static u32 __cvta_generic_to_shared(const void* p) {
  return (u32)((const char*)p - emulated::block().memory) + emulated::BASE;
}
static float __shfl_xor_sync(u32, float v, int other) {
  return __uint_as_float(emulated::exchange(__float_as_uint(v))[(threadIdx.x % 32) ^ other][0]);
}
static bool __all_sync(u32, bool v) {
  u32(&given)[32][6] = emulated::exchange(v);
  bool all = true;
  for (auto& its : given) all &= its[0] != 0;
  return all;
}
static bool __any_sync(u32, bool v) { return !__all_sync(~0u, !v); }
static int __reduce_max_sync(u32, int v) {
  u32(&given)[32][6] = emulated::exchange(v);
  int most = v;
  for (auto& its : given) most = max(most, (int)its[0]);
  return most;
}
static void __syncwarp() { emulated::exchange(0); }
static void __syncthreads() { emulated::meet_block(); }
