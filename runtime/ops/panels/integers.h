// Weights in few bits, in panels: values [N / 16, K / 4, 16, 4] of eight bits, [N / 16, K / 8, 16, 4] of four, two a
// byte; scales and what stands beside them [N / 16, G, 16]. Four bits with powers of two as scales are floats (MXFP4).
//
// Shape legend: N outputs, K inputs, G groups of inputs that share a scale.
#pragma once

#include <type_traits>
#include <vector>

#include "floats.h"

namespace mllm {

enum class Values { four_bits, four_bit_floats, signed_bytes, bytes };
enum class Third { none, zeros, offsets };

struct IntegerWeights {
  const uint8_t* values;
  const void* scales;
  const void* third;  // zero points in uint8, or offsets of the scales' type
  Values kind;
  Number scale_type;
  Third third_kind;
  int64_t group;

  int64_t value_bytes(int64_t numbers) const {
    return kind == Values::signed_bytes || kind == Values::bytes ? numbers : numbers / 2;
  }

  // The same from a row on, the first of a panel, of rows of k inputs.
  IntegerWeights from(int64_t row, int64_t k) const {
    IntegerWeights found = *this;
    const int64_t place = row * (k / group), size = third_kind == Third::zeros ? 1 : size_of(scale_type);
    found.values += value_bytes(row * k);
    found.scales = (const char*)scales + place * size_of(scale_type);
    if (third) found.third = (const char*)third + place * size;
    return found;
  }
};

// Calls `then` with the kinds of values and third as constants.
template <class Then>
void with_kind(const IntegerWeights& a, const Then& then) {
  using std::integral_constant;
  constexpr integral_constant<Third, Third::none> none;
  constexpr integral_constant<Third, Third::zeros> zeros;
  constexpr integral_constant<Third, Third::offsets> offsets;
  constexpr integral_constant<Values, Values::four_bits> four_bits;
  if (a.kind == Values::signed_bytes) return then(integral_constant<Values, Values::signed_bytes>(), none);
  if (a.kind == Values::bytes) return then(integral_constant<Values, Values::bytes>(), offsets);
  if (a.kind == Values::four_bit_floats) return then(integral_constant<Values, Values::four_bit_floats>(), none);
  switch (a.third_kind) {
    case Third::none: return then(four_bits, none);
    case Third::zeros: return then(four_bits, zeros);
    case Third::offsets: return then(four_bits, offsets);
  }
}

template <Values VALUES>
constexpr bool HAS_FOUR_BITS = VALUES == Values::four_bits || VALUES == Values::four_bit_floats;

inline Floats load_scales(const void* data, Number type, int64_t place) {
  switch (type) {
    case Number::f32: return Floats::load((const float*)data + place);
    case Number::bf16: return Floats::load_bf16((const uint16_t*)data + place);
    case Number::e8m0: return Integers::load_u8((const uint8_t*)data + place).e8m0();
    default: return Floats::load_f16((const uint16_t*)data + place);
  }
}

}  // namespace mllm
