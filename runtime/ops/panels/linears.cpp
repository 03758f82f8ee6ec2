// The ops mllm::panel_linear, integer_panel_linear, rounded_panel_linear and those of experts for a CPU (ops.py and
// expert_ops.py have their meaning).
// Loading the library registers them with torch, by its stable C interface.

#include <omp.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "exact.h"
#include "experts.h"
#include "rounded.h"

namespace mllm {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t BYTES_OF_A_THREAD = 256 << 10;    // of weights, which one reads in less than threads take to meet
constexpr int64_t PRODUCTS_OF_A_THREAD = 4 << 20;

Number number_type(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return Number::f32;
    case ScalarType::BFloat16: return Number::bf16;
    case ScalarType::Half: return Number::f16;
    default: STD_TORCH_CHECK(false, "expected float32, bfloat16 or float16");
  }
}

// A linear's inputs, as rows of K numbers, and the tensor of its outputs.
struct Operands {
  Tensor x, out;
  int64_t m, n, k;
  Rows rows;
  Outputs outputs;

  Operands(const Tensor& given, int64_t n, const std::optional<Tensor>& bias) : x(given), n(n) {
    const int64_t dims = x.dim();
    k = x.size(dims - 1);
    m = k ? x.numel() / k : 0;
    const bool has_rows = dims == 2 && x.stride(1) == 1;
    if (!has_rows && !x.is_contiguous()) x = torch::stable::contiguous(x);
    std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
    sizes[dims - 1] = n;
    out = torch::stable::new_empty(x, sizes);
    rows = {x.const_data_ptr(), number_type(x), has_rows ? x.stride(0) : k};
    STD_TORCH_CHECK(rows.type != Number::f16, "expected inputs in float32 or bfloat16");
    outputs = {out.mutable_data_ptr(), bias ? bias->const_data_ptr() : nullptr, rows.type, n};
  }
};

int64_t pairs_of(int64_t n) { return (n / LANES + 1) / 2; }

// As many threads as there is work for, each with a pair of panels at least.
int64_t threads_for(int64_t pairs, int64_t weight_bytes, int64_t products) {
  const int64_t wanted = std::max(weight_bytes / BYTES_OF_A_THREAD, products / PRODUCTS_OF_A_THREAD);
  return std::max<int64_t>(1, std::min<int64_t>({omp_get_max_threads(), pairs, wanted}));
}

template <class Linear>
void run_in_threads(const Linear& linear, int64_t weight_bytes, int64_t products) {
  const int64_t pairs = pairs_of(linear.n), threads = threads_for(pairs, weight_bytes, products);
  if (threads == 1) return run(linear, 0, pairs);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < threads; i++) run(linear, pairs * i / threads, pairs * (i + 1) / threads);
}

// The rows in float32, which `wide` then holds.
Rows in_float32(const Rows& rows, int64_t m, int64_t k, std::vector<float>& wide) {
  if (rows.type == Number::f32) return rows;
  wide.resize(m * k);
  for (int64_t token = 0; token < m; token++)
    for (int64_t i = 0; i < k; i++) wide[token * k + i] = widened(rows.half(token)[i]);
  return {wide.data(), Number::f32, k};
}

Tensor panel_linear(Tensor x, Tensor weight, std::optional<Tensor> bias) {
  Operands a(x, weight.size(0), bias);
  if (!a.m) return a.out;
  const Number type = number_type(weight);
  std::vector<float> wide;
  if (!MULTIPLIES_BF16) a.rows = in_float32(a.rows, a.m, a.k, wide);
  const FloatLinear linear{a.rows, weight.const_data_ptr(), type, a.m, a.n, a.k, a.outputs};
  run_in_threads(linear, a.n * a.k * (type == Number::f32 ? 4 : 2), a.m * a.n * a.k);
  return a.out;
}

IntegerWeights weights_of(const Tensor& values, const Tensor& scales, const std::optional<Tensor>& third, int64_t k,
                          int64_t group) {
  const bool is_signed = values.scalar_type() == ScalarType::Char, has_bytes = values.size(values.dim() - 1) == k;
  const bool are_floats = scales.scalar_type() == ScalarType::Byte;
  return {(const uint8_t*)values.const_data_ptr(),
          scales.const_data_ptr(),
          third ? third->const_data_ptr() : nullptr,
          is_signed    ? Values::signed_bytes
          : has_bytes  ? Values::bytes
          : are_floats ? Values::four_bit_floats
                       : Values::four_bits,
          are_floats ? Number::e8m0 : number_type(scales),
          !third ? Third::none : third->scalar_type() == ScalarType::Byte ? Third::zeros : Third::offsets,
          group};
}

Tensor integer_panel_linear(Tensor x, Tensor values, Tensor scales, std::optional<Tensor> third,
                            std::optional<Tensor> bias, int64_t group) {
  Operands a(x, values.size(0), bias);
  if (!a.m) return a.out;
  std::vector<float> wide, sums;
  a.rows = in_float32(a.rows, a.m, a.k, wide);
  const IntegerWeights weights = weights_of(values, scales, third, a.k, group);
  const SumOrder order = order_of(a.m);
  if (takes_sums(weights, order)) sums = sums_of_groups(a.rows, a.m, a.k, group);
  const ExactLinear linear{a.rows, sums.data(), weights, a.m, a.n, a.k, a.outputs, order};
  run_in_threads(linear, values.numel(), a.m * a.n * a.k);
  return a.out;
}

Tensor rounded_panel_linear(Tensor x, Tensor values, Tensor scales, std::optional<Tensor> third,
                            std::optional<Tensor> bias, int64_t group) {
  Operands a(x, values.size(0), bias);
  if (!a.m) return a.out;
  const IntegerWeights weights = weights_of(values, scales, third, a.k, group);
  QuantisedInputs inputs(a.m, a.k, group);
#pragma omp parallel for schedule(static) if (a.m * a.k >= PRODUCTS_OF_A_THREAD / 16)
  for (int64_t m = 0; m < a.m; m++) inputs.quantise(a.rows, m, weights.kind);
  const RoundedLinear linear{&inputs, weights, 0, a.m, a.n, a.outputs};
  run_in_threads(linear, values.numel(), a.m * a.n * a.k / 4);
  return a.out;
}

std::vector<int64_t> experts_in(const Tensor& ids, int64_t experts) {
  const Tensor rows = torch::stable::contiguous(ids);
  const bool is_long = rows.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(is_long || rows.scalar_type() == ScalarType::Int, "expected experts in int64 or int32");
  std::vector<int64_t> found(rows.numel());
  for (size_t i = 0; i < found.size(); i++) {
    found[i] = is_long ? ((const int64_t*)rows.const_data_ptr())[i] : ((const int32_t*)rows.const_data_ptr())[i];
    STD_TORCH_CHECK(found[i] >= 0 && found[i] < experts, "a router chose expert ", found[i], " of ", experts);
  }
  return found;
}

// Of experts' linears: rows of inputs in the order of their experts, and places of outputs in the step.
struct ExpertOperands {
  ExpertRows order;
  std::vector<int64_t> chosen;
  Tensor out;
  int64_t m, n, k;
  std::vector<float> inputs;  // [M, K]
  Rows rows;
  Outputs outputs;

  ExpertOperands(const Tensor& x, const Tensor& ids, int64_t experts, int64_t n, const std::optional<Tensor>& bias,
                 bool of_tokens)
      : order(experts_in(ids, experts), experts), chosen(order.chosen()), m(ids.numel()), n(n), k(x.size(1)) {
    const Tensor given = torch::stable::contiguous(x);
    const Number type = number_type(given);
    STD_TORCH_CHECK(type != Number::f16, "expected inputs in float32 or bfloat16");
    std::vector<float> wide;
    const Rows source = in_float32({given.const_data_ptr(), type, k}, x.size(0), k, wide);
    inputs.reserve(m * k);
    for (int64_t place : order.places) {
      const float* row = source.f32(of_tokens ? place / ids.size(1) : place);
      inputs.insert(inputs.end(), row, row + k);
    }
    rows = {inputs.data(), Number::f32, k};
    out = torch::stable::new_empty(given, {m, n});
    outputs = {out.mutable_data_ptr(), bias ? bias->const_data_ptr() : nullptr, type, n};
  }

  Outputs outputs_of(int64_t expert) const {
    const char* bias = outputs.bias ? (const char*)outputs.bias + expert * n * size_of(outputs.type) : nullptr;
    return {outputs.data, bias, outputs.type, n, order.places.data()};
  }

  template <class LinearOf>
  void run(const IntegerWeights& weights, int64_t products, const LinearOf& linear_of) const {
    const int64_t pairs = pairs_of(n), experts = int64_t(chosen.size());
    const int64_t threads = threads_for(pairs * experts, weights.value_bytes(experts * n * k), products);
    run_experts(chosen, pairs, threads, linear_of);
  }
};

Tensor integer_panel_expert_linear(Tensor x, Tensor ids, Tensor values, Tensor scales, std::optional<Tensor> third,
                                   std::optional<Tensor> bias, int64_t group, bool of_tokens) {
  const int64_t experts = values.size(0);
  const ExpertOperands a(x, ids, experts, values.size(1), bias, of_tokens);
  const IntegerWeights weights = weights_of(values, scales, third, a.k, group);
  // By the step alone, so that a row's bits do not depend on how many its expert has.
  const SumOrder order = a.m < MANY * experts ? SumOrder::four_chains : SumOrder::floats;
  std::vector<float> sums;
  if (takes_sums(weights, order)) sums = sums_of_groups(a.rows, a.m, a.k, group);
  a.run(weights, a.m * a.n * a.k, [&](int64_t expert) {
    const int64_t first = a.order.firsts[expert];
    Outputs out = a.outputs_of(expert);
    out.places += first;
    const float* own_sums = sums.data() + (sums.empty() ? 0 : first * (a.k / group));
    return ExactLinear{a.rows.from(first), own_sums, weights.from(expert * a.n, a.k), a.order.count(expert), a.n, a.k,
                       out,                order};
  });
  return a.out;
}

Tensor rounded_panel_expert_linear(Tensor x, Tensor ids, Tensor values, Tensor scales, std::optional<Tensor> third,
                                   std::optional<Tensor> bias, int64_t group, bool of_tokens) {
  const ExpertOperands a(x, ids, values.size(0), values.size(1), bias, of_tokens);
  const IntegerWeights weights = weights_of(values, scales, third, a.k, group);
  QuantisedInputs inputs(a.m, a.k, group);
#pragma omp parallel for schedule(static) if (a.m * a.k >= PRODUCTS_OF_A_THREAD / 16)
  for (int64_t m = 0; m < a.m; m++) inputs.quantise(a.rows, m, weights.kind);
  a.run(weights, a.m * a.n * a.k / 4, [&](int64_t expert) {
    const int64_t first = a.order.firsts[expert], last = a.order.firsts[expert + 1];
    return RoundedLinear{&inputs, weights.from(expert * a.n, a.k), first, last, a.n, a.outputs_of(expert)};
  });
  return a.out;
}

}  // namespace
}  // namespace mllm

STABLE_TORCH_LIBRARY_IMPL(mllm, CPU, library) {
  library.impl("panel_linear", TORCH_BOX(&mllm::panel_linear));
  library.impl("integer_panel_linear", TORCH_BOX(&mllm::integer_panel_linear));
  library.impl("rounded_panel_linear", TORCH_BOX(&mllm::rounded_panel_linear));
  library.impl("integer_panel_expert_linear", TORCH_BOX(&mllm::integer_panel_expert_linear));
  library.impl("rounded_panel_expert_linear", TORCH_BOX(&mllm::rounded_panel_expert_linear));
}
