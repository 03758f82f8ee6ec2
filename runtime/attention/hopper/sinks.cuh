// Attention sinks, where a layer has them (SINKS): logits of query heads that take weight and have no value.

// A query head's sink's part of its sum of weights, whose largest logit, to base 2, is `top`.
__device__ __forceinline__ float sink_weight(const unsigned short* sinks, int query_head, float top) {
  return exp2f(first_of(sinks[query_head]) * 1.4426950408889634f - top);
}
