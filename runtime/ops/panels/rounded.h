// Linears of weights in few bits and inputs that are quantised to eight bits, with a scale for each group of each
// token: so a token's outputs do not depend on the others.
//
// Shape legend: M tokens, N outputs, K inputs, G groups of inputs that share a scale.
#pragma once

#include "integers.h"

namespace mllm {

// Four bits: a byte has two weights. Of eight inputs those of the low halves of four bytes lie ahead of the others.
inline void part_by_halves(int8_t* inputs) {
  uint64_t all, halves[2];
  std::memcpy(&all, inputs, 8);
  for (int i = 0; i < 2; i++) {
    uint64_t bytes = all >> 8 * i & 0x00ff00ff00ff00ff;
    bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffff;
    halves[i] = (bytes | bytes >> 16) & 0xffffffff;
  }
  all = halves[0] | halves[1] << 32;
  std::memcpy(inputs, &all, 8);
}

struct QuantisedInputs {
  int64_t k, group, groups;
  std::vector<int8_t> values;  // [M, K]
  std::vector<float> scales;   // [M, G]
  std::vector<int32_t> sums;   // [M, G] of the values

  QuantisedInputs(int64_t m, int64_t k, int64_t group)
      : k(k), group(group), groups(k / group), values(m * k), scales(m * groups), sums(m * groups) {}

  void quantise(const Rows& x, int64_t m, Values of_weights) {
    std::vector<float> row(x.type == Number::f32 ? 0 : k);
    const float* numbers = x.type == Number::f32 ? x.f32(m) : row.data();
    if (x.type != Number::f32)
      for (int64_t i = 0; i < k; i++) row[i] = widened(x.half(m)[i]);
    for (int64_t g = 0; g < groups; g++) quantise_group(numbers + g * group, &values[m * k + g * group], m * groups + g);
    if (of_weights == Values::four_bits || of_weights == Values::four_bit_floats)
      for (int64_t i = 0; i < k; i += 8) part_by_halves(&values[m * k + i]);
  }

 private:
  void quantise_group(const float* numbers, int8_t* out, int64_t place) {
    float largest = 0, unknown = 0;
    float sizes[LANES] = {}, unknowns[LANES] = {};  // lanes of a vector
    int64_t i = 0;
    for (; i + LANES <= group; i += LANES)
      for (int lane = 0; lane < LANES; lane++) {
        const float size = std::fabs(numbers[i + lane]);
        sizes[lane] = size > sizes[lane] ? size : sizes[lane];
        unknowns[lane] += size * 0;
      }
    for (; i < group; i++) {
      const float size = std::fabs(numbers[i]);
      sizes[0] = size > sizes[0] ? size : sizes[0];
      unknowns[0] += size * 0;
    }
    for (int lane = 0; lane < LANES; lane++) {
      largest = std::max(largest, sizes[lane]);
      unknown += unknowns[lane];
    }
    if (unknown != 0) {  // what is infinite or no number makes such outputs, as it does in floats
      std::fill(out, out + group, int8_t(0));
      scales[place] = NAN;
      sums[place] = 0;
      return;
    }
    const float inverse = largest > 1e-30f ? 127 / largest : 0;
    int32_t sum = 0;
    for (int64_t each = 0; each < group; each++) {
      const int32_t rounded = int32_t(std::nearbyintf(numbers[each] * inverse));
      out[each] = int8_t(rounded);
      sum += rounded;
    }
    scales[place] = largest / 127;
    sums[place] = sum;
  }
};

// Of tokens [first, last).
struct RoundedLinear {
  const QuantisedInputs* inputs;
  IntegerWeights weights;
  int64_t first, last, n;
  Outputs out;
};

template <Values VALUES, int PART>
inline Integers bytes_of(Integers weights) {
  if constexpr (VALUES == Values::signed_bytes) return weights.shifted_bytes();
  if constexpr (VALUES == Values::bytes) return weights;
  const Integers numbers = PART ? weights.high_nibbles() : weights.low_nibbles();
  if constexpr (VALUES == Values::four_bit_floats) return numbers.shifted_e2m1();
  return numbers;
}

// What stands for zero, where no third says it.
template <Values VALUES>
constexpr int32_t ZERO = VALUES == Values::signed_bytes ? 128 : VALUES == Values::four_bit_floats ? E2M1_ZERO : 8;

template <Values VALUES, Third THIRD, int TOKENS, int PANELS>
void rounded_tile(const RoundedLinear& a, int64_t token, int64_t panel) {
  constexpr int PARTS = HAS_FOUR_BITS<VALUES> ? 2 : 1;
  const QuantisedInputs& x = *a.inputs;
  const int64_t panel_bytes = x.k * LANES / PARTS;
  const uint8_t* weights = a.weights.values + panel * panel_bytes;
  const int8_t* inputs = x.values.data() + token * x.k;
  Floats sums[TOKENS][PANELS];
  for (auto& of_token : sums)
    for (auto& one : of_token) one = Floats::zero();
  for (int64_t g = 0; g < x.groups; g++) {
    if constexpr (PARTS == 1 && TOKENS > 1)  // the next tokens' inputs; one token and four bits gain nothing
      for (int m = 0; m < TOKENS; m++) __builtin_prefetch(inputs + (TOKENS + m) * x.k + g * x.group);
    Integers dots[TOKENS][PANELS];
    for (auto& of_token : dots)
      for (auto& one : of_token) one = Integers::zero();
    for (int64_t at = g * x.group; at < (g + 1) * x.group; at += 4 * PARTS) {
      const auto add = [&](const Integers* bytes, int64_t place) {
        for (int m = 0; m < TOKENS; m++) {
          int32_t four;
          std::memcpy(&four, inputs + m * x.k + place, 4);
          const Integers input = Integers::all(four);
          for (int p = 0; p < PANELS; p++) dots[m][p] = dot(dots[m][p], bytes[p], input);
        }
      };
      Integers words[PANELS], bytes[PANELS];
      for (int p = 0; p < PANELS; p++) {
        words[p] = Integers::load(weights + p * panel_bytes + at * LANES / PARTS);
        bytes[p] = bytes_of<VALUES, 0>(words[p]);
      }
      add(bytes, at);
      if constexpr (PARTS == 2) {
        for (int p = 0; p < PANELS; p++) bytes[p] = bytes_of<VALUES, 1>(words[p]);
        add(bytes, at + 4);
      }
    }
    for (int p = 0; p < PANELS; p++) {
      const int64_t place = ((panel + p) * x.groups + g) * LANES;
      Floats scale = load_scales(a.weights.scales, a.weights.scale_type, place);
      if constexpr (VALUES == Values::four_bit_floats) scale = scale * Floats::all(0.5f);  // of doubled ones
      Floats offset;
      Integers zero;
      if constexpr (THIRD == Third::offsets) offset = load_scales(a.weights.third, a.weights.scale_type, place);
      if constexpr (THIRD == Third::zeros) zero = Integers::load_u8((const uint8_t*)a.weights.third + place);
      for (int m = 0; m < TOKENS; m++) {
        const float of_input = x.scales[(token + m) * x.groups + g];
        const int32_t sum = x.sums[(token + m) * x.groups + g];
        Integers product = dots[m][p];
        if constexpr (THIRD == Third::none) product = product - Integers::all(ZERO<VALUES> * sum);
        if constexpr (THIRD == Third::zeros) product = product - zero * Integers::all(sum);
        sums[m][p] = Floats::fma(product.floats() * Floats::all(of_input), scale, sums[m][p]);
        if constexpr (THIRD == Third::offsets)
          sums[m][p] = Floats::fma(offset, Floats::all(of_input * float(sum)), sums[m][p]);
      }
    }
  }
  for (int m = 0; m < TOKENS; m++)
    for (int p = 0; p < PANELS; p++) a.out.store(sums[m][p], token + m, (panel + p) * LANES);
}

template <Values VALUES, Third THIRD, int PANELS>
void rounded_panels(const RoundedLinear& a, int64_t panel) {
  int64_t token = a.first;
  for (; token + 4 <= a.last; token += 4) rounded_tile<VALUES, THIRD, 4, PANELS>(a, token, panel);
  for (; token < a.last; token++) rounded_tile<VALUES, THIRD, 1, PANELS>(a, token, panel);
}

template <Values VALUES, Third THIRD>
void rounded_pairs(const RoundedLinear& a, int64_t begin, int64_t end) {
  const int64_t panels = a.n / LANES;
  for (int64_t panel = begin * 2; panel < std::min(end * 2, panels); panel += 2)
    panel + 2 <= panels ? rounded_panels<VALUES, THIRD, 2>(a, panel) : rounded_panels<VALUES, THIRD, 1>(a, panel);
}

// Computes the outputs of panels [2 * begin, 2 * end).
inline void run(const RoundedLinear& a, int64_t begin, int64_t end) {
  with_kind(a.weights, [&](auto values, auto third) { rounded_pairs<values(), third()>(a, begin, end); });
}

}  // namespace mllm
