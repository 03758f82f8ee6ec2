// Sixteen lanes of float32 and int32, for AVX-512, AVX2 and any other CPU; chosen by what the compiler is told to use.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#endif

namespace mllm {

constexpr int LANES = 16;

// MXFP4: floats of four bits, times powers of two in bytes (E8M0); the smallest power is no normal number.
constexpr int32_t E2M1_ZERO = 12, SMALLEST_E8M0 = 0x00400000;
// Each float doubled, and this zero added.
constexpr uint8_t SHIFTED_E2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

inline float widened(uint16_t bfloat16) {
  uint32_t bits = uint32_t(bfloat16) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Rounds to the nearest, ties to even; NaN stays one.
inline uint16_t narrowed(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

struct Floats {
  __m512 v;
  static Floats zero() { return {_mm512_setzero_ps()}; }
  static Floats all(float x) { return {_mm512_set1_ps(x)}; }
  static Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Floats load_bf16(const uint16_t* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  static Floats load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  Floats operator+(Floats o) const { return {_mm512_add_ps(v, o.v)}; }
  Floats operator*(Floats o) const { return {_mm512_mul_ps(v, o.v)}; }
  static Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
};

struct Integers {
  __m512i v;
  static Integers zero() { return {_mm512_setzero_si512()}; }
  static Integers all(int32_t x) { return {_mm512_set1_epi32(x)}; }
  static Integers load(const void* p) { return {_mm512_loadu_si512(p)}; }
  static Integers load_u8(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
  Integers operator-(Integers o) const { return {_mm512_sub_epi32(v, o.v)}; }
  Integers operator*(Integers o) const { return {_mm512_mullo_epi32(v, o.v)}; }
  Integers shifted_bytes() const { return {_mm512_xor_si512(v, _mm512_set1_epi8(-128))}; }
  Floats first_halves() const { return {_mm512_castsi512_ps(_mm512_slli_epi32(v, 16))}; }
  Floats second_halves() const { return {_mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(-65536)))}; }
  Integers low_nibbles() const { return {_mm512_and_si512(v, _mm512_set1_epi8(15))}; }
  Integers high_nibbles() const { return {_mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15))}; }
  Floats floats() const { return {_mm512_cvtepi32_ps(v)}; }
  // Of each lane the nibble or byte that begins at a bit, as a number.
  Floats nibble(int bit) const {
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(v, bit), numbers)};  // which reads four bits of a lane
  }
  Floats byte(int bit) const {
    return {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(v, bit), _mm512_set1_epi32(255)))};
  }
  Floats signed_byte(int bit) const {
    return {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 24 - bit), 24))};
  }
  Floats e2m1(int bit) const {
    const __m512 numbers = _mm512_setr_ps(0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6);
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(v, bit), numbers)};
  }
  Integers shifted_e2m1() const {
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)SHIFTED_E2M1)), v)};
  }
  Floats e8m0() const {
    return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(v, 23), _mm512_set1_epi32(SMALLEST_E8M0)))};
  }
};

// Adds to each lane four products: unsigned bytes of `weights` times signed bytes of `inputs`.
inline Integers dot(Integers sums, Integers weights, Integers inputs) {
#if defined(__AVX512VNNI__)
  return {_mm512_dpbusd_epi32(sums.v, weights.v, inputs.v)};
#else
  const __m512i low = _mm512_set1_epi16(0xff);
  __m512i even = _mm512_madd_epi16(_mm512_and_si512(weights.v, low), _mm512_srai_epi16(_mm512_slli_epi16(inputs.v, 8), 8));
  __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(weights.v, 8), _mm512_srai_epi16(inputs.v, 8));
  return {_mm512_add_epi32(sums.v, _mm512_add_epi32(even, odd))};
#endif
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

struct Floats {
  __m256 a, b;
  static Floats zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static __m256 half_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
  }
  static Floats load_bf16(const uint16_t* p) { return {half_bf16(p), half_bf16(p + 8)}; }
  static __m256 half_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
  static Floats load_f16(const uint16_t* p) { return {half_f16(p), half_f16(p + 8)}; }
  void store(float* p) const { _mm256_storeu_ps(p, a), _mm256_storeu_ps(p + 8, b); }
  Floats operator+(Floats o) const { return {_mm256_add_ps(a, o.a), _mm256_add_ps(b, o.b)}; }
  Floats operator*(Floats o) const { return {_mm256_mul_ps(a, o.a), _mm256_mul_ps(b, o.b)}; }
  static Floats fma(Floats x, Floats y, Floats z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
  }
};

struct Integers {
  __m256i a, b;
  static Integers zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static Integers all(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static Integers load(const void* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
  }
  static Integers load_u8(const uint8_t* p) {
    __m128i bytes = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
  }
  Integers operator-(Integers o) const { return {_mm256_sub_epi32(a, o.a), _mm256_sub_epi32(b, o.b)}; }
  Integers operator*(Integers o) const { return {_mm256_mullo_epi32(a, o.a), _mm256_mullo_epi32(b, o.b)}; }
  static __m256i low(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
  static __m256i shifted(__m256i x) { return _mm256_xor_si256(x, _mm256_set1_epi8(-128)); }
  Integers shifted_bytes() const { return {shifted(a), shifted(b)}; }
  static __m256 first(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
  static __m256 second(__m256i x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(-65536))); }
  Floats first_halves() const { return {first(a), first(b)}; }
  Floats second_halves() const { return {second(a), second(b)}; }
  Integers low_nibbles() const { return {low(a), low(b)}; }
  Integers high_nibbles() const { return {low(_mm256_srli_epi16(a, 4)), low(_mm256_srli_epi16(b, 4))}; }
  Floats floats() const { return {_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)}; }
  static __m256i part(__m256i x, int bit, int mask) {
    return _mm256_and_si256(_mm256_srli_epi32(x, bit), _mm256_set1_epi32(mask));
  }
  static __m256i signed_part(__m256i x, int bit) { return _mm256_srai_epi32(_mm256_slli_epi32(x, 24 - bit), 24); }
  // Of each lane the nibble or byte that begins at a bit, as a number.
  Floats nibble(int bit) const { return Integers{part(a, bit, 15), part(b, bit, 15)}.floats(); }
  Floats byte(int bit) const { return Integers{part(a, bit, 255), part(b, bit, 255)}.floats(); }
  Floats signed_byte(int bit) const { return Integers{signed_part(a, bit), signed_part(b, bit)}.floats(); }
  static __m256 half_e2m1(__m256i x, int bit) {
    const __m256 sizes = _mm256_setr_ps(0, 0.5, 1, 1.5, 2, 3, 4, 6);
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(x, 28 - bit), _mm256_set1_epi32(INT32_MIN));
    const __m256 size = _mm256_permutevar8x32_ps(sizes, _mm256_srli_epi32(x, bit));  // which reads three bits of a lane
    return _mm256_xor_ps(size, _mm256_castsi256_ps(sign));
  }
  Floats e2m1(int bit) const { return {half_e2m1(a, bit), half_e2m1(b, bit)}; }
  static __m256i half_shifted_e2m1(__m256i x) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)SHIFTED_E2M1)), x);
  }
  Integers shifted_e2m1() const { return {half_shifted_e2m1(a), half_shifted_e2m1(b)}; }
  static __m256 half_e8m0(__m256i x) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_slli_epi32(x, 23), _mm256_set1_epi32(SMALLEST_E8M0)));
  }
  Floats e8m0() const { return {half_e8m0(a), half_e8m0(b)}; }
};

inline __m256i half_dot(__m256i sums, __m256i weights, __m256i inputs) {
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(sums, weights, inputs);
#else
  // Not by maddubs: the sum of two products of eight bits would saturate.
  const __m256i low = _mm256_set1_epi16(0xff);
  __m256i even = _mm256_madd_epi16(_mm256_and_si256(weights, low), _mm256_srai_epi16(_mm256_slli_epi16(inputs, 8), 8));
  __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(weights, 8), _mm256_srai_epi16(inputs, 8));
  return _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
#endif
}

inline Integers dot(Integers sums, Integers weights, Integers inputs) {
  return {half_dot(sums.a, weights.a, inputs.a), half_dot(sums.b, weights.b, inputs.b)};
}

#else

// GCC and Clang make of these loops what the CPU has.
struct Floats {
  float v[LANES];
  template <class F>
  static Floats of(F f) {
    Floats made;
    for (int i = 0; i < LANES; i++) made.v[i] = f(i);
    return made;
  }
  static Floats zero() { return all(0); }
  static Floats all(float x) { return of([&](int) { return x; }); }
  static Floats load(const float* p) { return of([&](int i) { return p[i]; }); }
  static Floats load_bf16(const uint16_t* p) { return of([&](int i) { return widened(p[i]); }); }
  static Floats load_f16(const uint16_t* p) {
    return of([&](int i) {
      uint32_t sign = uint32_t(p[i] >> 15) << 31, exponent = p[i] >> 10 & 31, part = p[i] & 1023;
      float size = exponent == 31 ? (part ? NAN : INFINITY)
                                  : std::ldexp(float(exponent ? part | 1024 : part), int(exponent ? exponent : 1) - 25);
      return sign ? -size : size;
    });
  }
  void store(float* p) const { std::memcpy(p, v, sizeof v); }
  Floats operator+(Floats o) const { return of([&](int i) { return v[i] + o.v[i]; }); }
  Floats operator*(Floats o) const { return of([&](int i) { return v[i] * o.v[i]; }); }
  static Floats fma(Floats a, Floats b, Floats c) { return of([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
};

struct Integers {
  int32_t v[LANES];
  template <class F>
  static Integers of(F f) {
    Integers made;
    for (int i = 0; i < LANES; i++) made.v[i] = f(i);
    return made;
  }
  static Integers zero() { return all(0); }
  static Integers all(int32_t x) { return of([&](int) { return x; }); }
  static Integers load(const void* p) {
    Integers made;
    std::memcpy(made.v, p, sizeof made.v);
    return made;
  }
  static Integers load_u8(const uint8_t* p) { return of([&](int i) { return int32_t(p[i]); }); }
  Integers operator-(Integers o) const { return of([&](int i) { return v[i] - o.v[i]; }); }
  Integers operator*(Integers o) const { return of([&](int i) { return v[i] * o.v[i]; }); }
  Integers shifted_bytes() const { return of([&](int i) { return v[i] ^ int32_t(0x80808080u); }); }
  Floats first_halves() const { return Floats::of([&](int i) { return widened(uint16_t(v[i])); }); }
  Floats second_halves() const { return Floats::of([&](int i) { return widened(uint16_t(v[i] >> 16)); }); }
  Integers low_nibbles() const { return of([&](int i) { return v[i] & 0x0f0f0f0f; }); }
  Integers high_nibbles() const { return of([&](int i) { return v[i] >> 4 & 0x0f0f0f0f; }); }
  Floats floats() const { return Floats::of([&](int i) { return float(v[i]); }); }
  // Of each lane the nibble or byte that begins at a bit, as a number.
  Floats nibble(int bit) const { return Floats::of([&](int i) { return float(v[i] >> bit & 15); }); }
  Floats byte(int bit) const { return Floats::of([&](int i) { return float(uint8_t(v[i] >> bit)); }); }
  Floats signed_byte(int bit) const { return Floats::of([&](int i) { return float(int8_t(v[i] >> bit)); }); }
  Floats e2m1(int bit) const {
    return Floats::of([&](int i) { return (float(SHIFTED_E2M1[v[i] >> bit & 15]) - E2M1_ZERO) / 2; });
  }
  Integers shifted_e2m1() const {
    return of([&](int i) {
      uint32_t bytes = 0;
      for (int bit = 0; bit < 32; bit += 8) bytes |= uint32_t(SHIFTED_E2M1[v[i] >> bit & 15]) << bit;
      return int32_t(bytes);
    });
  }
  Floats e8m0() const { return Floats::of([&](int i) { return std::ldexp(1.0f, v[i] - 127); }); }
};

inline Integers dot(Integers sums, Integers weights, Integers inputs) {
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < 32; j += 8) sums.v[i] += int32_t(uint8_t(weights.v[i] >> j)) * int8_t(inputs.v[i] >> j);
  return sums;
}

#endif

}  // namespace mllm
