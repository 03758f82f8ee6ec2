// Attention over the paged KV cache on a CPU: decodes, prompts, and decodes that share a prefix, in one pass.
//
// A unit of work is a few query rows of some KV heads and a range of keys. It reads keys in blocks of 64 and keeps
// the softmax's running maximum and sum (Milakov and Gimelshein 2018; FlashAttention-2 has the same recurrence).
// Decodes are cut every 512 keys, whatever else is in the batch: a request's numbers depend neither on others nor on
// threads. A decode's unit has all heads where threads allow: a page is then read in memory's order.
//
// Shape legend: T tokens, H query heads, Hk KV heads, G = H / Hk, D head dim, Dv value head dim.
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;  // floats of a vector
constexpr int TILE_ROWS = 6;
#else
constexpr int W = 8;
constexpr int TILE_ROWS = 3;
#endif
constexpr int TILE_KEYS = 4;
constexpr int KEYS_AHEAD = 8;  // that are fetched early: rows of a head do not follow each other
constexpr int TILE_VECTORS = 4;
constexpr int KEY_BLOCK = 64;
constexpr int KEY_SPLIT = 512;
constexpr int MOST_ROWS = 96;
constexpr int FEWEST_PACKED_ROWS = 12;  // below, transposing keys costs more than it saves
constexpr int64_t FEWEST_PRODUCTS = 1 << 19;  // for which waking threads pays

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));
typedef uint16_t hvec __attribute__((vector_size(2 * W)));
typedef float vec_any __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint16_t hvec_any __attribute__((vector_size(2 * W), aligned(2), may_alias));

using bf16 = uint16_t;

inline vec load(const float* from) { return *reinterpret_cast<const vec_any*>(from); }
inline vec load(const bf16* from) {
  hvec half = *reinterpret_cast<const hvec_any*>(from);
  return reinterpret_cast<vec>(__builtin_convertvector(half, uvec) << 16);
}
inline void store(float* to, vec value) { *reinterpret_cast<vec_any*>(to) = value; }
inline void store(bf16* to, vec value) {  // to the nearest, ties to even; NaN stays NaN
  uvec bits = reinterpret_cast<uvec>(value);
  uvec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  uvec result = value == value ? rounded : uvec{} + 0x7fc0u;
  *reinterpret_cast<hvec_any*>(to) = __builtin_convertvector(result, hvec);
}
template <class E>
inline void fetch(const E* from, int count) {
  for (int i = 0; i < count; i += 64 / sizeof(E)) __builtin_prefetch(from + i);
}
inline vec all(float value) { return vec{} + value; }
inline vec larger(vec a, vec b) { return a > b ? a : b; }

typedef float vec8 __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));

// Four sums of lanes that are left of a vector's.
inline vec4 folded(vec8 x) {
  return __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
}
#if defined(__AVX512F__)
inline vec4 folded(vec x) {
  return folded(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
}
#endif

inline float sum_of(vec x) {
  const vec4 left = folded(x);
  return (left[0] + left[2]) + (left[1] + left[3]);
}

// The sums of four vectors, as a vector.
inline vec4 sums_of(vec a, vec b, vec c, vec d) {
  const vec4 w = folded(a), x = folded(b), y = folded(c), z = folded(d);
  const vec4 first = __builtin_shufflevector(w, x, 0, 4, 1, 5) + __builtin_shufflevector(w, x, 2, 6, 3, 7);
  const vec4 second = __builtin_shufflevector(y, z, 0, 4, 1, 5) + __builtin_shufflevector(y, z, 2, 6, 3, 7);
  return __builtin_shufflevector(first, second, 0, 1, 4, 5) + __builtin_shufflevector(first, second, 2, 3, 6, 7);
}

// Rows become columns: log2(W) times, the first half of the rows is interleaved with the second.
inline void transpose(vec* rows) {
  for (int width = 1; width < W; width *= 2) {
    vec mixed[W];
    for (int i = 0; i < W / 2; i++) {
      const vec a = rows[i], b = rows[i + W / 2];
#if defined(__AVX512F__)
      mixed[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      mixed[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
      mixed[2 * i] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
      mixed[2 * i + 1] = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#endif
    }
    for (int i = 0; i < W; i++) rows[i] = mixed[i];
  }
}

// e^x for x <= 88, within 2 units of the last place: 2^n times a polynomial (Cephes, expf). NaN stays NaN.
inline vec exp_of(vec x) {
  x = x < all(-87.0f) ? all(-87.0f) : x;
  const vec shift = all(12582912.0f);
  vec n = (x * 1.44269504088896341f + shift) - shift;
  vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vec p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
  return p * reinterpret_cast<vec>(power);
}

inline float exp_of(float x) { return exp_of(all(x))[0]; }

inline vec tanh_of(vec x) {
  vec square = x * x;
  vec small = x * (1.0f - square * (0.333333333f - square * 0.133333333f));
  vec bounded = x > all(20.0f) ? all(20.0f) : (x < all(-20.0f) ? all(-20.0f) : x);
  vec large = 1.0f - 2.0f / (exp_of(2.0f * bounded) + 1.0f);
  return square < all(2.5e-3f) ? small : large;
}

const float NOTHING = -__builtin_inff();

}  // namespace

extern "C" {

// Sizes that all steps of a layer share. attend.py has the same fields.
struct Layer {
  int64_t num_heads, num_kv_heads, head_dim, v_head_dim;
  int64_t window_left;       // -1: none
  int64_t chunk;             // 0: none
  int64_t is_bf16;           // q, k, v, out and the cache; else float32
  int64_t values_are_keys;   // the first v_head_dim columns of keys: latents
  const float* sinks;        // [H] or null
  const float* slopes;       // [H] or null
  float scale, soft_cap;     // 0: none
};

// Queries of one request: rows [first, first + count) of T, at the last positions of the first `length`.
struct Part {
  int32_t row, first, count, length, sees_ahead;
};

struct Batch {
  const Part* parts;
  const int32_t* table;  // slot of each position, row after row
  int64_t table_width;
  int64_t num_parts;
  int64_t num_decodes;  // leading parts of one query each that may share keys
  int64_t num_threads;
};

struct Rows {  // [T, heads, width], the last dimension in a row
  void* data;
  int64_t token_stride, head_stride;
};

struct Operands {
  Rows q, out, k, v;            // k and v: new ones, to be written; null: they are in the cache
  void *key_cache, *value_cache;  // [slots, Hk, D], [slots, Hk, Dv]
  const int64_t* slots;         // [T]
  int64_t num_tokens;
  int64_t num_shared;           // first tokens of all decodes, read once for them
};

}  // extern "C"

namespace {

// Where a unit leaves its rows: in `out`, or as partial sums that are merged at the end.
struct Unit {
  int32_t head, end_head, row, first_token, num_tokens, first_key, end_key;
  int32_t position;  // of the first token; tokens of a shared unit see all of its keys
  bool is_shared, sees_ahead;
  int64_t partial;  // of its first row; -1: none
  int64_t partial_stride;  // between tokens
};

struct Merge {  // partial sums of a token's heads: `count` of each
  int32_t token, count;
  int64_t partial;
};

struct Scratch {
  std::vector<float> queries, scores, keys, values, sums, maxima, totals, factors;
  void fit(int64_t rows, int64_t d, int64_t dv) {
    queries.resize(rows * d);
    scores.resize(rows * KEY_BLOCK);
    keys.resize(d * KEY_BLOCK);
    values.resize(dv * KEY_BLOCK);
    sums.resize(rows * dv);
    maxima.resize(rows);
    totals.resize(rows);
    factors.resize(rows);
  }
};

struct Partials {
  std::vector<float> sums, maxima, totals;
};

// scores [R, 64] = queries [R, D] · keys [D, 64]
template <int R>
void multiply_tile(const float* q, const float* keys, int d, float* scores) {
  for (int column = 0; column < KEY_BLOCK; column += TILE_VECTORS * W) {
    vec acc[R][TILE_VECTORS] = {};
    for (int i = 0; i < d; i++) {
      vec k[TILE_VECTORS];
      for (int v = 0; v < TILE_VECTORS; v++) k[v] = load(keys + i * KEY_BLOCK + column + v * W);
      for (int r = 0; r < R; r++)
        for (int v = 0; v < TILE_VECTORS; v++) acc[r][v] += q[r * d + i] * k[v];
    }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < TILE_VECTORS; v++) store(scores + r * KEY_BLOCK + column + v * W, acc[r][v]);
  }
}

// sums [R, Dv] = sums · factor of the row + weights [R, n] · values [n, Dv]
template <class E, int R, int V>
void add_values(const float* weights, const float* factors, const E* const* values, int n, int dv, float* sums) {
  vec acc[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) acc[r][v] = load(sums + r * dv + v * W) * factors[r];
  for (int j = 0; j < n; j++) {
    fetch(values[std::min(j + KEYS_AHEAD, n - 1)], V * W);
    vec x[V];
    for (int v = 0; v < V; v++) x[v] = load(values[j] + v * W);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) acc[r][v] += weights[r * KEY_BLOCK + j] * x[v];
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(sums + r * dv + v * W, acc[r][v]);
}

template <class E, int R>
void add_value_rows(const float* weights, const float* factors, const E* const* values, int n, int dv, float* sums) {
  const E* moved[KEY_BLOCK];
  for (int column = 0; column < dv;) {
    for (int j = 0; j < n; j++) moved[j] = values[j] + column;
    if (dv - column >= TILE_VECTORS * W) {
      add_values<E, R, TILE_VECTORS>(weights, factors, moved, n, dv, sums + column);
      column += TILE_VECTORS * W;
    } else {
      add_values<E, R, 1>(weights, factors, moved, n, dv, sums + column);
      column += W;
    }
  }
}

template <class Function, int R>
void by_tile(int rows, int row, Function&& function) {
  if constexpr (R > 0) {
    if (rows == R) {
      function(row, std::integral_constant<int, R>());
      return;
    }
    by_tile<Function, R - 1>(rows, row, std::forward<Function>(function));
  }
}

// function(row, number of rows) for tiles of rows.
template <class Function>
void each_tile(int rows, Function&& function) {
  for (int row = 0; row < rows; row += TILE_ROWS)
    by_tile<Function, TILE_ROWS>(std::min(TILE_ROWS, rows - row), row, std::forward<Function>(function));
}

// scores [R, n] = queries [R, D] · keys: each key is read once, for all rows of a tile.
template <class E, int R>
void multiply_keys(const float* q, const E* const* keys, int n, int d, float* scores) {
  for (int j = 0; j < n; j += TILE_KEYS) {
    const E* four[TILE_KEYS];
    for (int x = 0; x < TILE_KEYS; x++) {
      four[x] = keys[std::min(j + x, n - 1)];
      fetch(keys[std::min(j + x + KEYS_AHEAD, n - 1)], d);
    }
    vec acc[R][TILE_KEYS] = {};
    for (int i = 0; i < d; i += W) {
      vec k[TILE_KEYS];
      for (int x = 0; x < TILE_KEYS; x++) k[x] = load(four[x] + i);
      for (int r = 0; r < R; r++) {
        const vec query = load(q + r * d + i);
        for (int x = 0; x < TILE_KEYS; x++) acc[r][x] += query * k[x];
      }
    }
    for (int r = 0; r < R; r++) {
      const vec4 sums = sums_of(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
      std::memcpy(scores + r * KEY_BLOCK + j, &sums, sizeof(sums));
    }
  }
}

template <class E>
class Attention {
 public:
  Attention(const Layer& layer, const Batch& batch, const Operands& operands)
      : layer_(layer), batch_(batch), operands_(operands), group_(layer.num_heads / layer.num_kv_heads) {
    plan();
  }

  void run() {
    const bool is_large = products_ >= FEWEST_PRODUCTS && batch_.num_threads > 1;
#pragma omp parallel num_threads(static_cast<int>(batch_.num_threads)) if (is_large)
    {
      if (operands_.k.data != nullptr) {
#pragma omp for schedule(static)
        for (int64_t token = 0; token < operands_.num_tokens; token++) write(token);
      }
#pragma omp for schedule(dynamic, 1)
      for (size_t i = 0; i < units_.size(); i++) attend(units_[i]);
      if (!merges_.empty()) {
#pragma omp for schedule(static)
        for (size_t i = 0; i < merges_.size(); i++) merge(merges_[i]);
      }
    }
  }

 private:
  // Planning ------------------------------------------------------------------------------------------------------

  int first_key(int position) const {
    int64_t first = 0;
    if (layer_.window_left >= 0) first = std::max<int64_t>(first, position - layer_.window_left);
    if (layer_.chunk) first = std::max<int64_t>(first, position / layer_.chunk * layer_.chunk);
    return static_cast<int>(first);
  }

  void plan() {
    heads_of_unit_ = heads_of_decodes();
    const int shared = static_cast<int>(operands_.num_shared);
    const int shared_splits = (shared + KEY_SPLIT - 1) / KEY_SPLIT;
    int64_t partial = 0;
    if (shared) {
      // A decode's sums over shared keys come first, then as many as its own keys fill.
      std::vector<int64_t> starts(batch_.num_decodes);
      for (int64_t i = 0; i < batch_.num_decodes; i++) {
        starts[i] = partial;
        const int own = splits_of(shared, batch_.parts[i].length);
        merges_.push_back({batch_.parts[i].first, shared_splits + own, partial});
        partial += (shared_splits + own) * layer_.num_heads;
      }
      plan_shared(shared, shared_splits, starts);
      for (int64_t i = 0; i < batch_.num_decodes; i++)
        plan_decode(batch_.parts[i], shared, starts[i] + shared_splits * layer_.num_heads);
    }
    for (int64_t i = shared ? batch_.num_decodes : 0; i < batch_.num_parts; i++) {
      const Part& part = batch_.parts[i];
      if (part.count > 1) {
        plan_prompt(part);
        continue;
      }
      const int first = first_key(part.length - 1), splits = splits_of(first, part.length);
      if (splits > 1) merges_.push_back({part.first, splits, partial});
      plan_decode(part, first, splits > 1 ? partial : -1);
      if (splits > 1) partial += splits * layer_.num_heads;
    }
    partials_.sums.resize(partial * layer_.v_head_dim);
    partials_.maxima.resize(partial);
    partials_.totals.resize(partial);
  }

  // As many KV heads of a decode as leave two units for each thread, if there are that many.
  int heads_of_decodes() const {
    const int64_t wanted = batch_.num_threads > 1 ? 2 * batch_.num_threads : 1;
    int64_t parts = 0;
    for (int64_t i = 0; i < batch_.num_parts && parts < wanted; i++) {
      const int length = batch_.parts[i].length;
      parts += splits_of(first_key(length - 1), length);
    }
    return static_cast<int>(std::max<int64_t>(1, layer_.num_kv_heads * parts / wanted));
  }

  static int splits_of(int first, int end) { return (end - 1) / KEY_SPLIT - first / KEY_SPLIT + 1; }

  void add(Unit unit) {
    products_ += static_cast<int64_t>(unit.num_tokens) * (unit.end_head - unit.head) * group_ *
                 (unit.end_key - unit.first_key) * (layer_.head_dim + layer_.v_head_dim);
    units_.push_back(unit);
  }

  // One query against keys [first, length), cut at multiples of KEY_SPLIT.
  void plan_decode(const Part& part, int first, int64_t partial) {
    for (int head = 0; head < layer_.num_kv_heads; head += heads_of_unit_) {
      const int end_head = std::min<int>(layer_.num_kv_heads, head + heads_of_unit_);
      int64_t at = partial;
      for (int key = first; key < part.length;) {
        const int end = std::min(part.length, (key / KEY_SPLIT + 1) * KEY_SPLIT);
        add({head, end_head, part.row, part.first, 1, key, end, part.length - 1, false, part.sees_ahead != 0, at, 0});
        if (at >= 0) at += layer_.num_heads;
        key = end;
      }
    }
  }

  void plan_shared(int shared, int splits, const std::vector<int64_t>& starts) {
    // Decodes bring one token each, one behind another. A unit has those whose partial sums follow each other evenly:
    // whose own keys fill as many splits.
    const int most = std::max<int>(1, MOST_ROWS / group_);
    for (int64_t i = 0; i < batch_.num_decodes;) {
      const int64_t stride = i + 1 < batch_.num_decodes ? starts[i + 1] - starts[i] : 0;
      int64_t end = i + 1;
      while (end < batch_.num_decodes && end - i < most && starts[end] - starts[end - 1] == stride) end++;
      for (int head = 0; head < layer_.num_kv_heads; head++)
        for (int s = 0; s < splits; s++)
          add({head, head + 1, batch_.parts[0].row, batch_.parts[i].first, static_cast<int32_t>(end - i), s * KEY_SPLIT,
               std::min(shared, (s + 1) * KEY_SPLIT), shared, true, true, starts[i] + s * layer_.num_heads, stride});
      i = end;
    }
  }

  void plan_prompt(const Part& part) {
    const int most = std::max<int>(1, MOST_ROWS / group_), prefix = part.length - part.count;
    for (int from = (part.count - 1) / most * most; from >= 0; from -= most) {  // the longest first
      const int count = std::min(most, part.count - from), position = prefix + from;
      const int end = part.sees_ahead ? part.length : position + count;
      for (int head = 0; head < layer_.num_kv_heads; head++)
        add({head, head + 1, part.row, part.first + from, count, first_key(position), end, position, false,
             part.sees_ahead != 0, -1, 0});
    }
  }

  // Working -------------------------------------------------------------------------------------------------------

  void write(int64_t token) {
    copy_heads(operands_.k, token, operands_.key_cache, layer_.head_dim);
    if (!layer_.values_are_keys) copy_heads(operands_.v, token, operands_.value_cache, layer_.v_head_dim);
  }

  void copy_heads(const Rows& rows, int64_t token, void* cache, int64_t width) {
    E* to = static_cast<E*>(cache) + operands_.slots[token] * layer_.num_kv_heads * width;
    const E* from = static_cast<const E*>(rows.data) + token * rows.token_stride;
    for (int64_t head = 0; head < layer_.num_kv_heads; head++)
      std::memcpy(to + head * width, from + head * rows.head_stride, width * sizeof(E));
  }

  int64_t slot(const Unit& unit, int position) const {
    return batch_.table[unit.row * batch_.table_width + position];
  }

  const E* key(int64_t slot, int head) const {
    return static_cast<const E*>(operands_.key_cache) + (slot * layer_.num_kv_heads + head) * layer_.head_dim;
  }

  const E* value(int64_t slot, int head) const {
    if (layer_.values_are_keys) return key(slot, head);
    return static_cast<const E*>(operands_.value_cache) + (slot * layer_.num_kv_heads + head) * layer_.v_head_dim;
  }

  void attend(const Unit& unit) {
    static thread_local Scratch scratch;
    const int rows = unit.num_tokens * group_, num_heads = unit.end_head - unit.head;
    const int all_rows = rows * num_heads, dv = layer_.v_head_dim;
    scratch.fit(all_rows, layer_.head_dim, dv);
    read_queries(unit, scratch.queries.data());
    std::fill_n(scratch.sums.begin(), all_rows * dv, 0.0f);
    std::fill_n(scratch.maxima.begin(), all_rows, NOTHING);
    std::fill_n(scratch.totals.begin(), all_rows, 0.0f);
    int64_t slots[KEY_BLOCK];
    for (int from = unit.first_key; from < unit.end_key; from += KEY_BLOCK) {
      const int n = std::min(KEY_BLOCK, unit.end_key - from);
      for (int j = 0; j < n; j++) slots[j] = slot(unit, from + j);
      for (int i = 0; i < num_heads; i++) score(slots, unit.head + i, n, rows, i * rows, scratch);
      for (int i = 0; i < num_heads; i++) bend(unit, unit.head + i, from, n, rows, i * rows, scratch);
      weigh(all_rows, scratch);
      for (int i = 0; i < num_heads; i++) sum(slots, unit.head + i, n, rows, i * rows, scratch);
    }
    for (int row = 0; row < all_rows; row++) {
      const int head = (unit.head + row / rows) * group_ + row % group_, token = row % rows / group_;
      if (unit.partial >= 0)
        keep(unit.partial + token * unit.partial_stride + head, row, scratch);
      else
        finish(unit.first_token + token, head, scratch.maxima[row], scratch.totals[row],
               scratch.sums.data() + row * dv);
    }
  }

  // [heads, tokens, G, D], times the scale.
  void read_queries(const Unit& unit, float* queries) const {
    const int d = layer_.head_dim;
    for (int head = unit.head; head < unit.end_head; head++)
      for (int token = 0; token < unit.num_tokens; token++)
        for (int g = 0; g < group_; g++, queries += d) {
          const E* from = static_cast<const E*>(operands_.q.data) +
                          (unit.first_token + token) * operands_.q.token_stride +
                          (head * group_ + g) * operands_.q.head_stride;
          for (int i = 0; i < d; i += W) store(queries + i, load(from + i) * layer_.scale);
        }
  }

  // The scores of a head's rows, which begin at `first`.
  void score(const int64_t* slots, int head, int n, int rows, int first, Scratch& scratch) const {
    const int d = layer_.head_dim;
    const float* queries = scratch.queries.data() + first * d;
    float* scores = scratch.scores.data() + first * KEY_BLOCK;
    const E* keys[KEY_BLOCK];
    for (int j = 0; j < n; j++) keys[j] = key(slots[j], head);
    if (rows < FEWEST_PACKED_ROWS) {
      each_tile(rows, [&](int row, auto count) {
        multiply_keys<E, decltype(count)::value>(queries + row * d, keys, n, d, scores + row * KEY_BLOCK);
      });
      return;
    }
    float* packed = scratch.keys.data();  // [D, 64]; columns behind the last key repeat it
    for (int j = 0; j < KEY_BLOCK; j += W)
      for (int i = 0; i < d; i += W) {
        vec block[W];
        for (int x = 0; x < W; x++) block[x] = load(keys[std::min(j + x, n - 1)] + i);
        transpose(block);
        for (int x = 0; x < W; x++) store(packed + (i + x) * KEY_BLOCK + j, block[x]);
      }
    each_tile(rows, [&](int row, auto count) {
      multiply_tile<decltype(count)::value>(queries + row * d, packed, d, scores + row * KEY_BLOCK);
    });
  }

  // The soft cap, the bias by distance, and the mask, over scores in place.
  void bend(const Unit& unit, int head, int from, int n, int rows, int first_row, Scratch& scratch) const {
    for (int row = 0; row < rows; row++) {
      float* scores = scratch.scores.data() + (first_row + row) * KEY_BLOCK;
      const int position = unit.position + row / group_;
      if (layer_.soft_cap > 0)
        for (int j = 0; j < KEY_BLOCK; j += W)
          store(scores + j, layer_.soft_cap * tanh_of(load(scores + j) / layer_.soft_cap));
      if (layer_.slopes != nullptr) {
        const float slope = layer_.slopes[head * group_ + row % group_];
        for (int j = 0; j < n; j++) scores[j] += slope * static_cast<float>(from + j - position);
      }
      int first = 0, end = n;
      if (!unit.is_shared) {
        first = std::min(n, std::max(0, first_key(position) - from));
        if (!unit.sees_ahead) end = std::max(first, std::min(n, position + 1 - from));
      }
      std::fill(scores, scores + first, NOTHING);
      std::fill(scores + end, scores + KEY_BLOCK, NOTHING);
    }
  }

  // Scores become weights relative to the row's new maximum; `factors` bring older sums to it.
  static void weigh(int rows, Scratch& scratch) {
    for (int row = 0; row < rows; row++) {
      float* scores = scratch.scores.data() + row * KEY_BLOCK;
      vec most = load(scores);
      for (int j = W; j < KEY_BLOCK; j += W) most = larger(most, load(scores + j));
      float maximum = scratch.maxima[row];
      for (int i = 0; i < W; i++) maximum = most[i] > maximum ? most[i] : maximum;
      const float before = scratch.maxima[row];
      const bool sees_none = maximum == NOTHING;  // so far: its weights are zeros, not e^(-inf + inf)
      const vec reference = all(sees_none ? 0.0f : maximum);
      vec total{};
      for (int j = 0; j < KEY_BLOCK; j += W) {
        const vec x = load(scores + j);
        const vec weight = x == all(NOTHING) ? vec{} : exp_of(x - reference);
        store(scores + j, weight);
        total += weight;
      }
      const float factor = before == NOTHING ? 0.0f : exp_of(before - maximum);
      scratch.factors[row] = factor;
      scratch.totals[row] = scratch.totals[row] * factor + sum_of(total);
      scratch.maxima[row] = maximum;
    }
  }

  void sum(const int64_t* slots, int head, int n, int rows, int first, Scratch& scratch) const {
    const int dv = layer_.v_head_dim;
    const E* values[KEY_BLOCK];
    for (int j = 0; j < n; j++) values[j] = value(slots[j], head);
    if (sizeof(E) == sizeof(float) || rows < FEWEST_PACKED_ROWS) {
      add_to_sums(values, n, rows, first, scratch);
      return;
    }
    const float* widened[KEY_BLOCK];
    for (int j = 0; j < n; j++) {
      float* to = scratch.values.data() + j * dv;
      for (int i = 0; i < dv; i += W) store(to + i, load(values[j] + i));
      widened[j] = to;
    }
    add_to_sums(widened, n, rows, first, scratch);
  }

  template <class V>
  void add_to_sums(const V* const* values, int n, int rows, int first, Scratch& scratch) const {
    const int dv = layer_.v_head_dim;
    each_tile(rows, [&](int tile, auto count) {
      const int row = first + tile;
      add_value_rows<V, decltype(count)::value>(scratch.scores.data() + row * KEY_BLOCK, scratch.factors.data() + row,
                                                values, n, dv, scratch.sums.data() + row * dv);
    });
  }

  void keep(int64_t at, int row, const Scratch& scratch) {
    const int dv = layer_.v_head_dim;
    std::copy_n(scratch.sums.data() + row * dv, dv, partials_.sums.data() + at * dv);
    partials_.maxima[at] = scratch.maxima[row];
    partials_.totals[at] = scratch.totals[row];
  }

  void merge(const Merge& of) {
    static thread_local std::vector<float> sums;
    const int dv = layer_.v_head_dim;
    sums.resize(dv);
    for (int head = 0; head < layer_.num_heads; head++) {
      float maximum = NOTHING, total = 0;
      for (int s = 0; s < of.count; s++) {
        const float one = partials_.maxima[of.partial + s * layer_.num_heads + head];
        maximum = one > maximum ? one : maximum;
      }
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int s = 0; s < of.count; s++) {
        const int64_t at = of.partial + s * layer_.num_heads + head;
        const float factor = partials_.maxima[at] == NOTHING ? 0.0f : exp_of(partials_.maxima[at] - maximum);
        total += factor * partials_.totals[at];
        const float* from = partials_.sums.data() + at * dv;
        for (int i = 0; i < dv; i += W) store(sums.data() + i, load(sums.data() + i) + factor * load(from + i));
      }
      finish(of.token, head, maximum, total, sums.data());
    }
  }

  void finish(int64_t token, int64_t head, float maximum, float total, const float* sums) {
    float factor = 1;
    if (layer_.sinks != nullptr) {  // one more term of the softmax, without a value
      const float sink = layer_.sinks[head], most = std::max(maximum, sink);
      factor = exp_of(maximum - most);
      total = total * factor + exp_of(sink - most);
    }
    E* to = static_cast<E*>(operands_.out.data) + token * operands_.out.token_stride +
            head * operands_.out.head_stride;
    const float share = factor / total;
    for (int i = 0; i < layer_.v_head_dim; i += W) store(to + i, load(sums + i) * share);
  }

  const Layer& layer_;
  const Batch& batch_;
  const Operands& operands_;
  const int group_;
  int heads_of_unit_ = 1;  // of a decode
  int64_t products_ = 0;
  std::vector<Unit> units_;
  std::vector<Merge> merges_;
  Partials partials_;
};

}  // namespace

// Writes new keys and values into the cache, and attends. Gives 0, or 1 where memory ends.
extern "C" int paged_attention(const Layer* layer, const Batch* batch, const Operands* operands) {
  try {
    if (layer->is_bf16)
      Attention<bf16>(*layer, *batch, *operands).run();
    else
      Attention<float>(*layer, *batch, *operands).run();
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}
