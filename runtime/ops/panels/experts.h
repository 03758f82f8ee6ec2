// Mixtures of experts: a step's rows in the order of their experts, and experts' linears divided among threads.
//
// Shape legend: T tokens, k experts a token, E experts.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace mllm {

struct ExpertRows {
  std::vector<int64_t> firsts;  // [E + 1]: an expert's first row
  std::vector<int64_t> places;  // [T·k]: where a row is in the step

  // Each of `ids` is an expert.
  ExpertRows(const std::vector<int64_t>& ids, int64_t experts) : firsts(experts + 1), places(ids.size()) {
    for (int64_t id : ids) firsts[id + 1]++;
    for (int64_t expert = 0; expert < experts; expert++) firsts[expert + 1] += firsts[expert];
    std::vector<int64_t> next = firsts;
    for (size_t i = 0; i < ids.size(); i++) places[next[ids[i]]++] = int64_t(i);
  }

  int64_t count(int64_t expert) const { return firsts[expert + 1] - firsts[expert]; }

  std::vector<int64_t> chosen() const {
    std::vector<int64_t> experts;
    for (size_t expert = 0; expert + 1 < firsts.size(); expert++)
      if (count(int64_t(expert))) experts.push_back(int64_t(expert));
    return experts;
  }
};

constexpr int64_t PAIRS_AT_ONCE = 8;  // of panels: experts with many rows take longer, so threads take parts in turn

// Runs `linear_of(expert)` of each chosen one, all `pairs` of its panels.
template <class LinearOf>
void run_experts(const std::vector<int64_t>& chosen, int64_t pairs, int64_t threads, const LinearOf& linear_of) {
  const int64_t parts = (pairs + PAIRS_AT_ONCE - 1) / PAIRS_AT_ONCE, all = int64_t(chosen.size()) * parts;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
  for (int64_t i = 0; i < all; i++) {
    const int64_t begin = i % parts * PAIRS_AT_ONCE;
    run(linear_of(chosen[i / parts]), begin, std::min(begin + PAIRS_AT_ONCE, pairs));
  }
}

}  // namespace mllm
