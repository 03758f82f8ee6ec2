// Linears of weights in few bits (integers.h has their layout) and inputs as they are: products are summed in float32.
//
// Few tokens are multiplied with the integers, and a group's sum with its scale. For many tokens two panels become
// float32 first. All tokens of a step have the same order of sums: a token's place in it changes no bit.
//
// Shape legend: M tokens, N outputs, K inputs, G groups of inputs that share a scale.
#pragma once

#include "integers.h"

namespace mllm {

constexpr int64_t MANY = 32;  // tokens, for which weights become floats once
enum class SumOrder { four_chains, two_chains, floats };

inline SumOrder order_of(int64_t tokens) {
  return tokens == 1 ? SumOrder::four_chains : tokens < MANY ? SumOrder::two_chains : SumOrder::floats;
}

struct ExactLinear {
  Rows x;  // of float32
  const float* sums;  // [M, G] of inputs, where takes_sums says so
  IntegerWeights weights;
  int64_t m, n, k;
  Outputs out;
  SumOrder order;
};

template <Values VALUES>
constexpr bool IS_SIGNED = VALUES == Values::signed_bytes || VALUES == Values::four_bit_floats;

inline bool takes_sums(const IntegerWeights& weights, SumOrder order) {
  return order != SumOrder::floats && weights.kind != Values::signed_bytes && weights.kind != Values::four_bit_floats;
}

inline std::vector<float> sums_of_groups(const Rows& x, int64_t m, int64_t k, int64_t group) {
  std::vector<float> sums;
  sums.reserve(m * (k / group));
  for (int64_t token = 0; token < m; token++)
    for (const float *at = x.f32(token), *end = at + k; at < end; at += group) {
      float parts[4] = {};  // an addition waits for the one before it
      for (int64_t i = 0; i < group; i++) parts[i % 4] += at[i];
      sums.push_back((parts[0] + parts[1]) + (parts[2] + parts[3]));
    }
  return sums;
}

// The integer of input `i` of a word, less what stands for zero in all weights of the kind.
template <Values VALUES>
inline Floats value_of(Integers word, int i) {
  if constexpr (VALUES == Values::signed_bytes) return word.signed_byte(8 * i);
  if constexpr (VALUES == Values::four_bit_floats) return word.e2m1(4 * i);
  if constexpr (VALUES == Values::bytes) return word.byte(8 * i);
  return word.nibble(4 * i);
}

template <Values VALUES>
constexpr int INPUTS = HAS_FOUR_BITS<VALUES> ? 8 : 4;  // of a word

// What a group's integers are times its scale, less this.
template <Values VALUES, Third THIRD>
inline Floats shift_of(const IntegerWeights& a, int64_t place, Floats scale) {
  if constexpr (THIRD == Third::offsets) return load_scales(a.third, a.scale_type, place);
  if constexpr (THIRD == Third::zeros)
    return Integers::load_u8((const uint8_t*)a.third + place).floats() * scale * Floats::all(-1);
  return scale * Floats::all(-8);  // of four bits
}

// Has CHAINS sums for each product, as an addition waits for the one before it.
template <Values VALUES, Third THIRD, int TOKENS, int CHAINS>
void exact_tile(const ExactLinear& a, int64_t token, int64_t panel) {
  const IntegerWeights& w = a.weights;
  const int64_t groups = a.k / w.group, words = w.group / INPUTS<VALUES>;
  const uint8_t* weights = w.values + panel * groups * words * LANES * 4;
  Floats totals[TOKENS];
  for (auto& one : totals) one = Floats::zero();
  for (int64_t g = 0; g < groups; g++) {
    Floats sums[CHAINS][TOKENS];
    for (auto& chain : sums)
      for (auto& one : chain) one = Floats::zero();
    for (int64_t word = g * words; word < (g + 1) * words; word++) {
      const Integers read = Integers::load(weights + word * LANES * 4);
#pragma GCC unroll 8
      for (int i = 0; i < INPUTS<VALUES>; i++) {
        const Floats value = value_of<VALUES>(read, i);
        for (int m = 0; m < TOKENS; m++) {
          Floats& sum = sums[i % CHAINS][m];
          sum = Floats::fma(value, Floats::all(a.x.f32(token + m)[word * INPUTS<VALUES> + i]), sum);
        }
      }
    }
    const int64_t place = (panel * groups + g) * LANES;
    const Floats scale = load_scales(w.scales, w.scale_type, place);
    for (int m = 0; m < TOKENS; m++) {
      Floats sum = sums[0][m];
      for (int chain = 1; chain < CHAINS; chain++) sum = sum + sums[chain][m];
      totals[m] = Floats::fma(sum, scale, totals[m]);
      if constexpr (!IS_SIGNED<VALUES>)
        totals[m] = Floats::fma(shift_of<VALUES, THIRD>(w, place, scale), Floats::all(a.sums[(token + m) * groups + g]),
                                totals[m]);
    }
  }
  for (int m = 0; m < TOKENS; m++) a.out.store(totals[m], token + m, panel * LANES);
}

// Writes a panel's weights as float32, [K, 16].
template <Values VALUES, Third THIRD>
void make_floats(const ExactLinear& a, int64_t panel, float* out) {
  const IntegerWeights& w = a.weights;
  const int64_t groups = a.k / w.group, words = w.group / INPUTS<VALUES>;
  const uint8_t* weights = w.values + panel * groups * words * LANES * 4;
  for (int64_t g = 0; g < groups; g++) {
    const int64_t place = (panel * groups + g) * LANES;
    const Floats scale = load_scales(w.scales, w.scale_type, place);
    Floats shift = Floats::zero();
    if constexpr (!IS_SIGNED<VALUES>) shift = shift_of<VALUES, THIRD>(w, place, scale);
    for (int64_t word = g * words; word < (g + 1) * words; word++) {
      const Integers read = Integers::load(weights + word * LANES * 4);
#pragma GCC unroll 8
      for (int i = 0; i < INPUTS<VALUES>; i++, out += LANES)
        Floats::fma(value_of<VALUES>(read, i), scale, shift).store(out);
    }
  }
}

template <Values VALUES, Third THIRD, int CHAINS>
void exact_panel(const ExactLinear& a, int64_t panel) {
  int64_t token = 0;
  for (; token + 4 <= a.m; token += 4) exact_tile<VALUES, THIRD, 4, CHAINS>(a, token, panel);
  if (token + 2 <= a.m) exact_tile<VALUES, THIRD, 2, CHAINS>(a, token, panel), token += 2;
  if (token < a.m) exact_tile<VALUES, THIRD, 1, CHAINS>(a, token, panel);
}

template <Values VALUES, Third THIRD>
void exact_floats(const ExactLinear& a, int64_t begin, int64_t end) {
  std::vector<float> floats(2 * a.k * LANES);
  for (int64_t panel = begin; panel < end; panel += 2) {
    const int64_t count = std::min<int64_t>(2, end - panel);
    for (int64_t p = 0; p < count; p++) make_floats<VALUES, THIRD>(a, panel + p, floats.data() + p * a.k * LANES);
    const FloatLinear linear{a.x, floats.data(), Number::f32, a.m, count * LANES, a.k, a.out.from(panel * LANES)};
    float_pairs<Number::f32, 1>(linear, 0, 1);
  }
}

template <Values VALUES, Third THIRD>
void exact_panels(const ExactLinear& a, int64_t begin, int64_t end) {
  if (a.order == SumOrder::floats) return exact_floats<VALUES, THIRD>(a, begin, end);
  for (int64_t panel = begin; panel < end; panel++)
    a.order == SumOrder::four_chains ? exact_panel<VALUES, THIRD, 4>(a, panel) : exact_panel<VALUES, THIRD, 2>(a, panel);
}

// Computes the outputs of panels [2 * begin, 2 * end).
inline void run(const ExactLinear& a, int64_t begin, int64_t end) {
  const int64_t last = std::min(2 * end, a.n / LANES);
  with_kind(a.weights, [&](auto values, auto third) { exact_panels<values(), third()>(a, 2 * begin, last); });
}

}  // namespace mllm
