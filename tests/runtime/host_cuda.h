// What kernels take of CUDA and of runtime/cuda/common.cuh, on a host: a block's threads are threads, one block after
// another. Copies of shared memory are there at once, prerequisites always. Behind it comes a kernel's source, without
// its own functions of assembly, whose stand-ins are here.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

using std::max, std::min;
using u32 = unsigned int;
using u64 = unsigned long long;
struct int2 {
  int x, y;
};
struct uint2 {
  u32 x, y;
};
struct uint4 {
  u32 x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct Index {
  int x;
};
thread_local Index threadIdx, blockIdx;
Index blockDim, gridDim;
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

constexpr int LANES = 32, MOST_WARPS = 32;
char* shared_memory;
std::unique_ptr<std::barrier<>> of_block, of_others, of_warp[MOST_WARPS];
u32 exchanged[MOST_WARPS][LANES][6];

inline int warp_index() { return threadIdx.x / LANES; }
inline int lane_index() { return threadIdx.x % LANES; }
inline u32* mine() { return exchanged[warp_index()][lane_index()]; }
inline u32 theirs(int lane, int i = 0) { return exchanged[warp_index()][lane][i]; }
inline void __syncthreads() { of_block->arrive_and_wait(); }
inline void wait_for_others() { of_others->arrive_and_wait(); }  // all warps but the last
inline void __syncwarp() { of_warp[warp_index()]->arrive_and_wait(); }
inline int __popc(u32 v) { return __builtin_popcount(v); }
// What `read` makes of the values that all lanes gave.
template <typename Read>
auto among_lanes(u32 value, Read read) {
  mine()[0] = value;
  __syncwarp();
  const auto found = read();
  __syncwarp();
  return found;
}
inline u32 __reduce_max_sync(u32, u32 v) {
  return among_lanes(v, [] {
    u32 most = 0;
    for (int lane = 0; lane < LANES; lane++) most = max(most, theirs(lane));
    return most;
  });
}
inline u32 __reduce_min_sync(u32 lanes, u32 v) { return ~__reduce_max_sync(lanes, ~v); }
inline bool __all_sync(u32 lanes, bool is_so) { return __reduce_min_sync(lanes, is_so) != 0; }
inline u32 __ballot_sync(u32, bool is_so) {
  return among_lanes(is_so, [] {
    u32 all = 0;
    for (int lane = 0; lane < LANES; lane++) all |= theirs(lane) << lane;
    return all;
  });
}
inline void atomicOr(u32* to, u32 v) { __atomic_or_fetch(to, v, __ATOMIC_SEQ_CST); }

// Ends the program at once: its own end would wait for threads that wait.
inline void fail(const char* why) { std::puts(why), std::fflush(stdout), std::_Exit(1); }

// Barriers of shared memory, by their addresses.
struct Barrier {
  int needed, pending, bytes = 0, phase = 0;
};
std::map<u32, Barrier> barriers;
std::mutex mutex;
std::condition_variable changed;

inline u32 shared_address(const void* p) { return (u32)((const char*)p - shared_memory); }
inline void make_barrier(u32 at, u32 arrivals) {
  std::lock_guard lock(mutex);
  barriers[at] = {(int)arrivals, (int)arrivals};
}
inline void change(u32 at, int arrivals, int bytes) {
  std::lock_guard lock(mutex);
  Barrier& barrier = barriers.at(at);
  barrier.pending -= arrivals, barrier.bytes += bytes;
  if (barrier.pending < 0) fail("a barrier has too many arrivals");
  if (barrier.pending == 0 && barrier.bytes == 0) barrier.phase ^= 1, barrier.pending = barrier.needed, changed.notify_all();
}
inline void arrive(u32 at) { change(at, 1, 0); }
inline void expect_bytes(u32 at, u32 bytes) { change(at, 1, bytes); }
inline void wait_for(u32 at, u32 parity) {
  std::unique_lock lock(mutex);
  changed.wait(lock, [=] { return (u32)barriers.at(at).phase != parity; });
}
inline void publish_barriers() {}
inline void wait_for_prerequisites() {}
inline void start_dependents() {}
inline u64 read_once() { return 0; }
inline u64 read_again() { return 0; }
inline void load_bytes(u32 to, const char* from, int bytes, u32 barrier, u64) {
  if (to % 16 || (u64)from % 16 || bytes % 16) fail("a copy is not aligned");
  std::memcpy(shared_memory + to, from, bytes);
  change(barrier, 0, -bytes);
}
inline void copy(u32 to, const char* from, bool is_there, u64) {
  if (to % 16 || (u64)from % 16) fail("a copy is not aligned");
  if (is_there)
    std::memcpy(shared_memory + to, from, 16);
  else
    std::memset(shared_memory + to, 0, 16);
}
inline void wait_for_copies() {}
inline uint4 load_shared(u32 at) {
  uint4 v;
  std::memcpy(&v, shared_memory + at, sizeof v);
  return v;
}
template <typename Integer>
Integer load_integer(const Integer* from) {
  return *from;
}

inline float __uint_as_float(u32 bits) {
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}
inline u32 __float_as_uint(float v) {
  u32 bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}
inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
  const u64 both = (u64)high << 32 | low;
  u32 found = 0;
  for (int i = 0; i < 4; i++) found |= (u32)(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return found;
}
inline float power_of(float v) { return std::exp(-v); }
inline float reciprocal(float v) { return 1.f / v; }
inline float __expf(float v) { return std::exp(v); }
inline float rsqrtf(float v) { return 1.f / std::sqrt(v); }
inline float first_of(u32 both) { return __uint_as_float(both << 16); }
inline float second_of(u32 both) { return __uint_as_float(both & 0xffff0000u); }
inline u32 rounded_to_bf16(float v) {
  const u32 bits = __float_as_uint(v);
  return std::isnan(v) ? 0x7fff : bits + 0x7fff + (bits >> 16 & 1) >> 16;
}
inline u32 pack(float first, float second) { return rounded_to_bf16(first) | rounded_to_bf16(second) << 16; }
// Operations on two numbers of bfloat16, each rounded.
template <typename Operation>
u32 of_each(u32 a, u32 b, Operation operation) {
  return pack(operation(first_of(a), first_of(b)), operation(second_of(a), second_of(b)));
}
inline u32 add(u32 a, u32 b) {
  return of_each(a, b, [](float v, float w) { return v + w; });
}
inline u32 times(u32 a, u32 b) {
  return of_each(a, b, [](float v, float w) { return v * w; });
}
inline u32 times_norm_weight(u32 v, u32 weight, bool plus_one) {
  return of_each(v, weight, [=](float one, float by) { return plus_one ? std::fma(one, by, one) : one * by; });
}
inline u32 squared_relu(u32 v) {
  return of_each(v, v, [](float one, float) { return std::max(one, 0.f) * std::max(one, 0.f); });
}
inline u32 gelu(u32 v) {
  return of_each(v, v, [](float one, float) { return one * 0.5f * (1.f + std::erf(one * 0.70710678f)); });
}
inline u32 silu_times(u32 gates, u32 ups) {
  const auto silu = [](float v) { return v / (1.f + std::exp(-v)); };
  return times(pack(silu(first_of(gates)), silu(second_of(gates))), ups);
}
inline float sum_of_squares(u32 both) {
  return first_of(both) * first_of(both) + second_of(both) * second_of(both);
}
inline float sum_of_lanes(float v, int lanes) {
  return among_lanes(__float_as_uint(v), [=] {
    float sum = 0.f;
    for (int i = 0; i < lanes; i++) sum += __uint_as_float(theirs(lane_index() / lanes * lanes + i));
    return sum;
  });
}
inline void store_if(bool is_there, float* to, float v) {
  if (is_there) *to = v;
}
inline float load_number(const void* from, int index, int bytes) {
  return bytes == 4 ? ((const float*)from)[index] : first_of(((const unsigned short*)from)[index]);
}
// m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16").
inline void multiply_add(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u32 given[6] = {a0, a1, a2, a3, b0, b1};
  std::memcpy(mine(), given, sizeof given);
  __syncwarp();
  const auto at = [](int row, int k, int first) {
    const u32 both = theirs(row % 8 * 4 + k % 8 / 2, first + row / 8 + k / 8 * (first ? 1 : 2));
    return k % 2 ? second_of(both) : first_of(both);
  };
  for (int i = 0; i < 4; i++) {
    const int row = lane_index() / 4 + i / 2 * 8, column = lane_index() % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) d[i] += at(row, k, 0) * at(column, k, 4);
  }
  __syncwarp();
}

// Runs all blocks. Shared memory begins as garbage.
template <typename Kernel>
void launch(int blocks, int threads, int shared_bytes, Kernel kernel) {
  gridDim.x = blocks, blockDim.x = threads;
  shared_memory = (char*)std::aligned_alloc(1024, (shared_bytes + 1023) / 1024 * 1024);
  for (int block = 0; block < blocks; block++) {
    of_block = std::make_unique<std::barrier<>>(threads), of_others = std::make_unique<std::barrier<>>(threads - LANES);
    for (int warp = 0; warp < threads / LANES; warp++) of_warp[warp] = std::make_unique<std::barrier<>>(LANES);
    barriers.clear(), std::memset(shared_memory, 0xff, shared_bytes);
    std::vector<std::thread> running;
    for (int thread = 0; thread < threads; thread++)
      running.emplace_back([=] { threadIdx.x = thread, blockIdx.x = block, kernel(); });
    for (auto& thread : running) thread.join();
  }
}

// A file's bytes, aligned.
inline char* bytes_of(const char* path) {
  std::FILE* file = std::fopen(path, "rb");
  std::fseek(file, 0, SEEK_END);
  const long size = std::ftell(file);
  std::rewind(file);
  char* bytes = (char*)std::aligned_alloc(1024, (size + 1024) / 1024 * 1024);
  if (std::fread(bytes, 1, size, file) != (size_t)size) fail("an operand is not there");
  std::fclose(file);
  return bytes;
}
inline void write_bytes(const char* path, const char* bytes, size_t size) {
  std::FILE* file = std::fopen(path, "wb");
  if (std::fwrite(bytes, 1, size, file) != size) fail("a result is not written");
  std::fclose(file);
}
