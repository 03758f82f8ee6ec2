// Weights in few bits, in panels: values [N / 16, K / 4, 16, 4] of eight bits, [N / 16, K / 8, 16, 4] of four, two a
// byte; scales and what stands beside them [N / 16, G, 16].
//
// Shape legend: N outputs, K inputs, G groups of inputs that share a scale.
#pragma once

#include <type_traits>
#include <vector>

#include "floats.h"

namespace mllm {

enum class Values { four_bits, signed_bytes, bytes };
enum class Third { none, zeros, offsets };

struct IntegerWeights {
  const uint8_t* values;
  const void* scales;
  const void* third;  // zero points in uint8, or offsets of the scales' type
  Values kind;
  Number scale_type;
  Third third_kind;
  int64_t group;
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
  switch (a.third_kind) {
    case Third::none: return then(four_bits, none);
    case Third::zeros: return then(four_bits, zeros);
    case Third::offsets: return then(four_bits, offsets);
  }
}

inline Floats load_scales(const void* data, Number type, int64_t place) {
  switch (type) {
    case Number::f32: return Floats::load((const float*)data + place);
    case Number::bf16: return Floats::load_bf16((const uint16_t*)data + place);
    default: return Floats::load_f16((const uint16_t*)data + place);
  }
}

}  // namespace mllm
