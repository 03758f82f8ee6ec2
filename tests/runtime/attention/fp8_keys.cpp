// A warp that attends to keys of e4m3: its lanes are threads, and its instructions are PTX's. The test pastes
// fp8_keys.cuh where this file says so. Prints the error, or nothing.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

typedef unsigned int u32;
#define __device__
#define __forceinline__ inline
constexpr float NOTHING = -1e30f;
static thread_local struct { u32 x; } threadIdx;

// All lanes meet; each leaves a word or some and sees all of them.
static std::atomic<int> arrived, turn;
static u32 left[32][16];
static void meet() {
  const int its = turn;
  if (++arrived == 32) arrived = 0, turn++;
  else while (turn == its) std::this_thread::yield();
}
template <typename F>
static void together(const u32* words, int count, const F& see) {
  memcpy(left[threadIdx.x % 32], words, 4 * count), meet();
  see(), meet();
}
static u32 bits(float v) { u32 its; memcpy(&its, &v, 4); return its; }
static float number(u32 v) { float its; memcpy(&its, &v, 4); return its; }
static float __shfl_xor_sync(u32, float v, int by) {
  const u32 word = bits(v);
  float its;
  together(&word, 1, [&] { its = number(left[threadIdx.x % 32 ^ by][0]); });
  return its;
}
static bool __any_sync(u32, bool v) {
  const u32 word = v;
  bool its = false;
  together(&word, 1, [&] { for (auto& other : left) its |= other[0]; });
  return its;
}

// Numbers of float16 and e4m3.
static float small_float(u32 v, int exponent_bits, int mantissa_bits, bool has_infinity) {
  const int bias = (1 << (exponent_bits - 1)) - 1, mantissa = v & ((1 << mantissa_bits) - 1);
  const int exponent = v >> mantissa_bits & ((1 << exponent_bits) - 1);
  const bool is_nan = has_infinity ? exponent == (1 << exponent_bits) - 1 : (v & 0x7f) == 0x7f;
  const float size = exponent ? ldexpf((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)
                              : ldexpf(mantissa, 1 - bias - mantissa_bits);
  return is_nan ? NAN : v >> (exponent_bits + mantissa_bits) & 1 ? -size : size;
}
static float of_half(u32 v) { return small_float(v & 0xffff, 5, 10, true); }
static float of_e4m3(u32 v) { return small_float(v & 0xff, 4, 3, false); }
static u32 to_half(float v) {
  if (std::isnan(v)) return 0x7e00;
  const int exponent = v ? std::max(ilogbf(fabsf(v)), -14) : -14;
  const int steps = nearbyintf(ldexpf(fabsf(v), 10 - exponent));  // 1024 and more: a normal number
  return (v < 0 ? 0x8000u : 0) + ((exponent + 14) << 10) + steps;
}
static u32 half_pair(float first, float second) { return to_half(first) | to_half(second) << 16; }
struct Halves { u32 lower, upper; };
static Halves halves_of(u32 v) {
  return {half_pair(of_e4m3(v), of_e4m3(v >> 8)), half_pair(of_e4m3(v >> 16), of_e4m3(v >> 24))};
}
static float power_of_two(float v) { return v < -126 ? 0 : exp2f(v); }
static u32 in_order(u32 pairs, u32 order) {
  u32 its = 0;
  for (int i = 0; i < 4; i++)
    if ((order >> 4 * i & 15) < 4) its |= (pairs >> 8 * (order >> 4 * i & 15) & 0xff) << 8 * i;
  return its;
}

// The warp's memory: a tile of keys and one of values, as TMA swizzles them.
static unsigned char memory[2][64 * 128];
static u32 swizzled(int row, int chunk) { return row * 128 + ((chunk ^ row) & 7) * 16; }
static void matrices(u32* to, u32 address, bool transpose) {
  together(&address, 1, [&] {
    const int lane = threadIdx.x % 32;
    for (int m = 0; m < 4; m++) {
      to[m] = 0;
      for (int i = 0; i < 2; i++) {
        const int row = transpose ? lane % 4 * 2 + i : lane / 4, column = transpose ? lane / 4 : lane % 4 * 2 + i;
        const unsigned char* at = memory[0] + left[m * 8 + row][0] + column * 2;
        to[m] |= (at[0] | at[1] << 8) << 16 * i;
      }
    }
  });
}
static void load_matrices(u32* to, u32 address) { matrices(to, address, false); }
static void load_transposed(u32* to, u32 address) { matrices(to, address, true); }
static u32 transposed(u32 matrix) {
  u32 its = 0;
  together(&matrix, 1, [&] {
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 2; i++)
      its |= (left[(lane % 4 * 2 + i) * 4 + lane / 8][0] >> lane / 4 % 2 * 16 & 0xffff) << 16 * i;
  });
  return its;
}
static void add_halves(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u32 words[6] = {a0, a1, a2, a3, b0, b1};
  together(words, 6, [&] {
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      for (int k = 0; k < 16; k++) {
        const u32 a = left[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], b = left[column * 4 + k % 8 / 2][4 + k / 8];
        d[i] += of_half(a >> k % 2 * 16) * of_half(b >> k % 2 * 16);
      }
    }
  });
}

// fp8_keys.cuh

static float query[8][128], out[8][128];

// A lane attends to `num_keys` keys, from the first row on, sixteen or 32 at a time.
template <int TILES>
static void attend(int lane, int num_keys) {
  threadIdx.x = lane;
  u32 operand[8][2];
  for (int k = 0; k < 8; k++)
    for (int j = 0; j < 2; j++) {
      const float* its = query[lane / 4] + k * 16 + lane % 4 * 4 + j * 2;
      operand[k][j] = half_pair(its[0], its[1]);
    }
  Fp8Sums sums = {};
  sums.top[0] = sums.top[1] = NOTHING;
  for (int key = 0; key < num_keys; key += 16 * TILES) {
    float logits[TILES][2][4] = {};
    for (int t = 0; t < TILES; t++) add_fp8_keys(logits[t], operand, 0, key + 16 * t);
    const Fp8Weights<TILES> weights = weigh(sums, logits, key, 16, num_keys, {num_keys, num_keys}, 1.f);
    for (int t = 0; t < TILES; t++)
      add_fp8_values(sums.values, weights.of_keys[t], weights.order[t], sizeof(memory[0]), key + 16 * t);
  }
  for (int i = 0; i < 2; i++) {
    for (int by = 4; by < 32; by *= 2) sums.total[i] += __shfl_xor_sync(~0u, sums.total[i], by);
    for (int k = 0; k < 8; k++)
      for (int c = 0; c < 2; c++)
        out[lane % 4 * 2 + i][k * 16 + lane / 4 * 2 + c] = sums.values[k][c * 2 + i] / sums.total[i];
  }
}

int main(int count, char** arguments) {
  for (int argument = 1; argument < count; argument++)
    for (int tiles = 1; tiles <= 2; tiles++) {
      const int num_keys = atoi(arguments[argument]);  // 64 at the most
      const float size = num_keys % 2 ? 0.05f : 1.f;  // logits of 1, and of 100s
      for (auto& its : query)
        for (float& v : its) v = of_half(to_half(size * (rand() % 2001 - 1000) / 1000.f));
      for (auto& tile : memory) memset(tile, 0x7f, sizeof(tile));  // NaN, where no key is
      for (int row = 0; row < num_keys; row++)
        for (int column = 0; column < 128; column++)
          for (auto& tile : memory)
            tile[swizzled(row, column / 16) + column % 16] = rand() % 0x58 | (rand() % 2 ? 0x80 : 0);
      std::vector<std::thread> lanes;
      for (int lane = 0; lane < 32; lane++) lanes.emplace_back(tiles == 1 ? attend<1> : attend<2>, lane, num_keys);
      for (auto& lane : lanes) lane.join();
      auto number_at = [&](int tile, int row, int column) {
        return of_e4m3(memory[tile][swizzled(row, column / 16) + column % 16]);
      };
      for (int q = 0; q < 8; q++) {
        double weights[64], most = -INFINITY, total = 0;
        for (int key = 0; key < num_keys; key++) {
          weights[key] = 0;
          for (int column = 0; column < 128; column++) weights[key] += query[q][column] * number_at(0, key, column);
          most = std::max(most, weights[key]);
        }
        for (int key = 0; key < num_keys; key++) total += weights[key] = exp2(weights[key] - most);
        double off = 0, norm = 0;
        for (int column = 0; column < 128; column++) {
          double sum = 0;
          for (int key = 0; key < num_keys; key++) sum += weights[key] / total * number_at(1, key, column);
          off += pow(out[q][column] - sum, 2), norm += sum * sum;
        }
        if (!(off < 1e-6 * norm))
          return printf("%d keys, %d at a time: off by %g\n", num_keys, 16 * tiles, sqrt(off / norm)), 1;
      }
    }
}
