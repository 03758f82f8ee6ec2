// Linears of weights in 32 or 16 bits, in panels: [N / 16, K, 16] float32, or [N / 16, K / 2, 16, 2] bfloat16.
//
// Shape legend: M tokens, N outputs, K inputs.
#pragma once

#include <algorithm>

#include "vectors.h"

namespace mllm {

enum class Number { f32, bf16, f16, e8m0 };

inline int64_t size_of(Number type) { return type == Number::f32 ? 4 : type == Number::e8m0 ? 1 : 2; }

// Tokens [M, K]; `stride` is from one to the next, in numbers.
struct Rows {
  const void* data;
  Number type;
  int64_t stride;
  const float* f32(int64_t row) const { return (const float*)data + row * stride; }
  const uint16_t* half(int64_t row) const { return (const uint16_t*)data + row * stride; }
  Rows from(int64_t row) const { return {(const char*)data + row * stride * size_of(type), type, stride}; }
};

inline float number(const void* data, Number type, int64_t place) {
  return type == Number::f32 ? ((const float*)data)[place] : widened(((const uint16_t*)data)[place]);
}

// Where products go: [M, N] of `type`, and a bias [N] of that type, or null.
struct Outputs {
  void* data;
  const void* bias;
  Number type;
  int64_t n;
  const int64_t* places = nullptr;  // of each token; null: in their order

  // The same without the outputs ahead of `first`.
  Outputs from(int64_t first) const {
    const int64_t bytes = first * size_of(type);
    return {(char*)data + bytes, bias ? (const char*)bias + bytes : nullptr, type, n, places};
  }

  void store(Floats sums, int64_t token, int64_t first) const {
    const int64_t place = (places ? places[token] : token) * n + first;
    if (type == Number::f32) {
      if (bias) sums = sums + Floats::load((const float*)bias + first);
      return sums.store((float*)data + place);
    }
    float row[LANES];
    sums.store(row);
    if (bias)
      for (int i = 0; i < LANES; i++) row[i] += number(bias, type, first + i);
    for (int i = 0; i < LANES; i++) ((uint16_t*)data)[place + i] = narrowed(row[i]);
  }
};

struct FloatLinear {
  Rows x;  // of float32; of bfloat16 where that is multiplied as it is
  const void* weights;
  Number type;  // of the weights
  int64_t m, n, k;
  Outputs out;
};

#if defined(__AVX512BF16__)
constexpr bool MULTIPLIES_BF16 = true;
#else
constexpr bool MULTIPLIES_BF16 = false;
#endif

// Adds the products of 16 rows with an input, of bfloat16 with two.
template <Number TYPE>
inline Floats multiplied(const void* weights, const Rows& x, int64_t token, int64_t unit, Floats sums) {
  if constexpr (TYPE == Number::f32) {
    return Floats::fma(Floats::load((const float*)weights), Floats::all(x.f32(token)[unit]), sums);
  } else {
#if defined(__AVX512BF16__)
    int32_t pair;
    std::memcpy(&pair, x.half(token) + 2 * unit, 4);
    return {_mm512_dpbf16_ps(sums.v, (__m512bh)_mm512_loadu_si512(weights), (__m512bh)_mm512_set1_epi32(pair))};
#else
    const float* two = x.f32(token) + 2 * unit;
    const Integers pairs = Integers::load(weights);
    const Floats with_first = Floats::fma(pairs.first_halves(), Floats::all(two[0]), sums);
    return Floats::fma(pairs.second_halves(), Floats::all(two[1]), with_first);
#endif
  }
}

// Has CHAINS sums for each product, as an addition waits for the one before it.
template <Number TYPE, int TOKENS, int PANELS, int CHAINS>
void float_tile(const FloatLinear& a, int64_t token, int64_t panel) {
  const int64_t units = a.k / (TYPE == Number::f32 ? 1 : 2), panel_bytes = units * LANES * 4;
  const char* weights = (const char*)a.weights + panel * panel_bytes;
  Floats sums[CHAINS][TOKENS][PANELS];
  for (auto& chain : sums)
    for (auto& of_token : chain)
      for (auto& one : of_token) one = Floats::zero();
  const auto add = [&](int64_t unit, auto& chain) {
    for (int m = 0; m < TOKENS; m++)
      for (int p = 0; p < PANELS; p++)
        chain[m][p] =
            multiplied<TYPE>(weights + p * panel_bytes + unit * LANES * 4, a.x, token + m, unit, chain[m][p]);
  };
  int64_t unit = 0;
  for (; unit + CHAINS <= units; unit += CHAINS)
    for (int chain = 0; chain < CHAINS; chain++) add(unit + chain, sums[chain]);
  for (; unit < units; unit++) add(unit, sums[0]);
  for (int m = 0; m < TOKENS; m++)
    for (int p = 0; p < PANELS; p++) {
      Floats total = sums[0][m][p];
      for (int chain = 1; chain < CHAINS; chain++) total = total + sums[chain][m][p];
      a.out.store(total, token + m, (panel + p) * LANES);
    }
}

// Multiplies tokens [begin, end) with some panels, which are read once for up to twelve of them. CHAINS decides the
// order of a token's sums, so all tokens of a step have the same: a token's place in it changes no bit.
template <Number TYPE, int PANELS, int CHAINS>
void float_panels(const FloatLinear& a, int64_t begin, int64_t end, int64_t panel) {
  int64_t token = begin;
  if constexpr (CHAINS == 1) {
    for (; token + 12 <= end; token += 12) float_tile<TYPE, 12, PANELS, CHAINS>(a, token, panel);
    if (token + 8 <= end) float_tile<TYPE, 8, PANELS, CHAINS>(a, token, panel), token += 8;
  }
  if constexpr (CHAINS <= 2)
    if (token + 4 <= end) float_tile<TYPE, 4, PANELS, CHAINS>(a, token, panel), token += 4;
  if constexpr (CHAINS <= 4)
    if (token + 2 <= end) float_tile<TYPE, 2, PANELS, CHAINS>(a, token, panel), token += 2;
  if (token == end) return;
  if constexpr (CHAINS < 8)
    float_tile<TYPE, 1, PANELS, CHAINS>(a, token, panel);
  else
    for (int p = 0; p < PANELS; p++) float_tile<TYPE, 1, 1, CHAINS>(a, token, panel + p);  // memory is read in a stream
}

constexpr int64_t CACHED_BYTES = 512 << 10;  // of tokens, which all panels are multiplied with before the next ones
constexpr int64_t MANY_TOKENS = 48;          // of which products take longer than reading weights

// Multiplies tokens [begin, end) with four panels, by six tokens at once: 10 values are read for 24 products, in
// float_panels 14.
template <Number TYPE>
void float_quads(const FloatLinear& a, int64_t begin, int64_t end, int64_t panel) {
  int64_t token = begin;
  for (; token + 6 <= end; token += 6) float_tile<TYPE, 6, 4, 1>(a, token, panel);
  for (int p = 0; p < 4; p += 2) float_panels<TYPE, 2, 1>(a, token, end, panel + p);
}

template <Number TYPE, int CHAINS>
void float_pairs(const FloatLinear& a, int64_t begin, int64_t end) {
  const int64_t panels = a.n / LANES, step = std::max<int64_t>(CACHED_BYTES / (a.k * 4) / 12 * 12, 12);
  const int64_t behind = std::min(end * 2, panels);
  for (int64_t token = 0; token < a.m; token += step) {
    const int64_t last = std::min(token + step, a.m);
    int64_t panel = begin * 2;
    if constexpr (CHAINS == 1)
      for (; a.m >= MANY_TOKENS && panel + 4 <= behind; panel += 4) float_quads<TYPE>(a, token, last, panel);
    for (; panel < behind; panel += 2)
      panel + 2 <= panels ? float_panels<TYPE, 2, CHAINS>(a, token, last, panel)
                          : float_panels<TYPE, 1, CHAINS>(a, token, last, panel);
  }
}

template <Number TYPE>
void float_pairs(const FloatLinear& a, int64_t begin, int64_t end) {
  if (a.m >= 8) return float_pairs<TYPE, 1>(a, begin, end);
  if (a.m >= 4) return float_pairs<TYPE, 2>(a, begin, end);
  a.m >= 2 ? float_pairs<TYPE, 4>(a, begin, end) : float_pairs<TYPE, 8>(a, begin, end);
}

// Computes the outputs of panels [2 * begin, 2 * end).
inline void run(const FloatLinear& a, int64_t begin, int64_t end) {
  a.type == Number::f32 ? float_pairs<Number::f32>(a, begin, end) : float_pairs<Number::bf16>(a, begin, end);
}

}  // namespace mllm
