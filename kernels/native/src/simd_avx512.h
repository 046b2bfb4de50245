// Vector operations for AVX-512 with BF16 and VNNI. A vector is 16 floats in one register.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "format.h"

namespace quire {
namespace {

constexpr int kThisLevel = 2;

using V = __m512;

inline V zero() { return _mm512_setzero_ps(); }
inline V set1(float x) { return _mm512_set1_ps(x); }
inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, V x) { _mm512_storeu_ps(p, x); }
// One permutation moves each word to the upper half of its lane; a conversion and a shift would be two operations.
inline V load(const uint16_t* p) {
  const __m512i place = _mm512_setr_epi32(0x00000, 0x10001, 0x20002, 0x30003, 0x40004, 0x50005, 0x60006, 0x70007, 0x80008,
                                          0x90009, 0xa000a, 0xb000b, 0xc000c, 0xd000d, 0xe000e, 0xf000f);
  const __m512i words = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, place, words));
}
inline V load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// The exponent of float16 is biased by 15, that of e4m3 by 7. So the bits in float16 are a number that is 2^8 too small;
// subnormal numbers included. All are exact. NaN needs no case, because it has a scale of NaN.
inline V load(const Fp8* p) {
  const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(static_cast<short>(0xbfff)));
  return _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256.0f));
}
// The 32 elements of a group of an int4 KV cache. A permutation uses the lowest four bits of a lane as index.
inline void load_group(const Int4* p, float scale, float offset, V* out) {
  const V codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const V elements = _mm512_fmadd_ps(codes, _mm512_set1_ps(scale), _mm512_set1_ps(offset));
  const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  out[0] = _mm512_permutexvar_ps(pairs, elements);
  out[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), elements);
}
// Sixteen numbers in float16.
inline V load_halves(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// Sixteen bytes as integers of 32 bits.
inline __m512i bytes_of(const char* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// Scales and zero points of a group of int4 weights (format.h).
inline V load_scales(const char* header) {
  const __m512i high = _mm512_castps_si512(load(reinterpret_cast<const uint16_t*>(header)));
  return _mm512_castsi512_ps(_mm512_or_si512(high, _mm512_slli_epi32(bytes_of(header + 32), 8)));
}
inline V load_zero_points(const char* header) { return _mm512_cvtepi32_ps(bytes_of(header + 48)); }
inline void store(uint16_t* p, V x) {
  const __m256bh rounded = _mm512_cvtneps_pbh(x);
  std::memcpy(p, &rounded, sizeof rounded);
}
inline void store(int8_t* p, V x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
// Stores 32 integers from 0 to 15, the codes of a group of an int4 KV cache.
inline void store_halves(Int4* p, V low, V high) {
  const __m512i pairs = _mm512_or_si512(_mm512_cvtps_epi32(low), _mm512_slli_epi32(_mm512_cvtps_epi32(high), 4));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(pairs));
}
inline uint16_t to_half(float x) { return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }
inline float from_half(uint16_t x) { return _cvtsh_ss(x); }
inline V add(V x, V y) { return _mm512_add_ps(x, y); }
inline V sub(V x, V y) { return _mm512_sub_ps(x, y); }
inline V mul(V x, V y) { return _mm512_mul_ps(x, y); }
inline V div(V x, V y) { return _mm512_div_ps(x, y); }
inline V fma(V x, V y, V z) { return _mm512_fmadd_ps(x, y, z); }
inline V fused(V x, V y, V z) { return fma(x, y, z); }
inline V max(V x, V y) { return _mm512_max_ps(x, y); }
inline V min(V x, V y) { return _mm512_min_ps(x, y); }
inline V abs(V x) { return _mm512_abs_ps(x); }
inline V round(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
inline V scale_by_power(V x, V n) { return _mm512_scalef_ps(x, n); }
inline float sum(V x) { return _mm512_reduce_add_ps(x); }
inline V load_mixed(const uint16_t* p) { return load(p); }
inline V mix(V x) { return x; }
inline V unmix(V x) { return x; }

using Partial = V;
inline Partial no_sum() { return zero(); }
inline Partial add_product(Partial sum, V x, V y) { return fma(x, y, sum); }
inline void finish_eight(const Partial* sums, float* out) {
  const auto half = [&](int i) {
    return _mm256_add_ps(_mm512_castps512_ps256(sums[i]), _mm512_extractf32x8_ps(sums[i], 1));
  };
  const auto four = [&](int i) {
    return _mm256_hadd_ps(_mm256_hadd_ps(half(i), half(i + 1)), _mm256_hadd_ps(half(i + 2), half(i + 3)));
  };
  const __m256 low = four(0), high = four(4);
  const __m256 crossed = _mm256_permute2f128_ps(low, high, 0x21), blended = _mm256_blend_ps(low, high, 0xf0);
  _mm256_storeu_ps(out, _mm256_add_ps(crossed, blended));
}

inline uint32_t not_less(V x, V y) { return _mm512_cmp_ps_mask(x, y, _CMP_NLT_UQ); }
inline V bits_as_float(V x) { return _mm512_cvtepi32_ps(_mm512_castps_si512(x)); }

using W = __m512i;

inline W wide(uint64_t x) { return _mm512_set1_epi64(static_cast<int64_t>(x)); }
inline W count_from(uint64_t first) { return _mm512_add_epi64(wide(first), _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7)); }
inline W product(W x, W y) { return _mm512_mul_epu32(x, y); }
inline W upper(W x) { return _mm512_srli_epi64(x, 32); }
inline W either(W x, W y) { return _mm512_xor_si512(x, y); }
inline void in_order(W w0, W w1, W w2, W w3, V* words) {
  const W first = _mm512_mask_blend_epi32(0xaaaa, w0, _mm512_slli_epi64(w1, 32));
  const W second = _mm512_mask_blend_epi32(0xaaaa, w2, _mm512_slli_epi64(w3, 32));
  words[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi64(first, second));
  words[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi64(first, second));
}
inline V words_as_float(V words) { return _mm512_cvtepu32_ps(_mm512_castps_si512(words)); }

inline void prefetch_near(const char* p) { _mm_prefetch(p, _MM_HINT_T0); }
inline void prefetch_far(const char* p) { _mm_prefetch(p, _MM_HINT_T1); }

struct Float32Step {
  static constexpr bool kGrouped = false;
  using Sum = V;
  using Weight = V;
  using Input = V;
  using Element = float;
  static constexpr int kHalves = 1;
  static constexpr int kInputs = 1;
  static Sum zero_sum() { return zero(); }
  static Weight weight(const char* line, int) { return _mm512_load_ps(line); }
  static Input input(const Element* x, int) { return _mm512_set1_ps(*x); }
  static Sum dot(Sum sum, Input x, Weight w) { return _mm512_fmadd_ps(x, w, sum); }
  static V to_float(Sum sum) { return sum; }
};

#ifdef QUIRE_AVX512_MODEL  // replacement of the instructions in tests
inline __m512bh as_bf16(__m512i x) { return model_as_bf16(x); }
inline __m512i dot_bytes(__m512i sum, __m512i x, __m512i w) { return _mm512_dpbusd_epi32(sum, x, w); }
inline __m512i dot_words(__m512i sum, __m512i x, __m512i w) { return _mm512_dpwssd_epi32(sum, x, w); }
#else
inline __m512bh as_bf16(__m512i x) { return (__m512bh)x; }
// _mm512_dpbusd_epi32(sum, x, w) as assembly, because GCC 12 keeps the sums of a tile in memory with the intrinsic.
inline __m512i dot_bytes(__m512i sum, __m512i x, __m512i w) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
  return sum;
}
// Adds the products of pairs of words.
inline __m512i dot_words(__m512i sum, __m512i x, __m512i w) {
  __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
  return sum;
}
#endif

// Sixteen lanes of two words, or of one integer.
using Words = __m512i;

inline Words no_words() { return _mm512_setzero_si512(); }
inline Words load_words(const char* p) { return _mm512_castps_si512(load(reinterpret_cast<const float*>(p))); }
inline Words set1_words(const int16_t* p) {  // a pair
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return _mm512_set1_epi32(pair);
}
inline V words_to_float(Words sums) { return _mm512_cvtepi32_ps(sums); }
// Rounds 16 floats to words.
inline void store_words(int16_t* p, V x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
}
// Lanes 0, 2, ... of x and then y, or lanes 1, 3, ...
inline Words alternate(Words x, Words y, int64_t odd) {
  const Words even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  return _mm512_permutex2var_epi32(x, _mm512_add_epi32(even, _mm512_set1_epi32(static_cast<int32_t>(odd))), y);
}
// Converts pairs of float16.
inline void widen_pairs(Words pairs, V* first, V* second) {
  *first = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs));
  *second = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
}
// The codes of one group of the keys of 16 tokens, `stride` bytes apart: a token per lane, and two elements per vector.
// Vector 4 d + j has elements 4 d + j / 2 and 4 d + j / 2 + 2; for an odd j, 16 more.
inline void load_keys(const char* p, int64_t stride, Words* out) {
  Words rows[4];
  for (int row = 0; row < 4; ++row) {
    const auto of_token = [&](int token) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + token * stride));
    };
    rows[row] = _mm512_inserti32x4(_mm512_castsi128_si512(of_token(row)), of_token(row + 4), 1);
    rows[row] = _mm512_inserti32x4(_mm512_inserti32x4(rows[row], of_token(row + 8), 2), of_token(row + 12), 3);
  }
  const Words low01 = _mm512_unpacklo_epi32(rows[0], rows[1]), high01 = _mm512_unpackhi_epi32(rows[0], rows[1]);
  const Words low23 = _mm512_unpacklo_epi32(rows[2], rows[3]), high23 = _mm512_unpackhi_epi32(rows[2], rows[3]);
  const Words columns[4] = {_mm512_unpacklo_epi64(low01, low23), _mm512_unpackhi_epi64(low01, low23),
                            _mm512_unpacklo_epi64(high01, high23), _mm512_unpackhi_epi64(high01, high23)};
  const Words codes = _mm512_set1_epi32(0x000f000f);
  for (int column = 0; column < 4; ++column) {
    out[4 * column] = _mm512_and_si512(columns[column], codes);
    out[4 * column + 1] = _mm512_and_si512(_mm512_srli_epi32(columns[column], 4), codes);
    out[4 * column + 2] = _mm512_and_si512(_mm512_srli_epi32(columns[column], 8), codes);
    out[4 * column + 3] = _mm512_and_si512(_mm512_srli_epi32(columns[column], 12), codes);
  }
}
// The codes of one group of the values of 16 tokens: an element per lane, and two tokens per vector. Vector 2 i has
// elements 0 .. 15 of tokens 2 i and 2 i + 1, and the next one elements 16 .. 31.
inline void load_values(const char* p, int64_t stride, Words* out) {
  const Words codes = _mm512_set1_epi32(0x000f000f);
  for (int i = 0; i < 8; ++i, p += 2 * stride) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + stride));
    const Words pairs = _mm512_cvtepu8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(x, y), _mm_unpacklo_epi8(x, y)));
    out[2 * i] = _mm512_and_si512(pairs, codes);
    out[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi32(pairs, 4), codes);
  }
}
// The largest lane of each of four vectors.
inline void largest_of_four(const V* x, float* out) {
  const auto both = [](V first, V second) {
    return _mm512_max_ps(_mm512_unpacklo_ps(first, second), _mm512_unpackhi_ps(first, second));
  };
  const __m512i low = _mm512_castps_si512(both(x[0], x[1])), high = _mm512_castps_si512(both(x[2], x[3]));
  const V four = _mm512_max_ps(_mm512_castsi512_ps(_mm512_unpacklo_epi64(low, high)),
                               _mm512_castsi512_ps(_mm512_unpackhi_epi64(low, high)));
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
  _mm_storeu_ps(out, _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)));
}

// Writes the `count` first pairs of 16 rows as columns: pair c of row r to line c, lane r. Rows are `stride` elements apart.
inline void transpose_pairs(const uint16_t* from, int64_t stride, int64_t count, char* to) {
  const __mmask16 wanted = static_cast<__mmask16>((1u << count) - 1);
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int row = 0; row < 16; ++row) a[row] = _mm512_maskz_loadu_epi32(wanted, from + row * stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
    for (int half = 0; half < 16; half += 8) {
      b[half + i] = _mm512_shuffle_i32x4(a[half + i], a[half + i + 4], 0x88);
      b[half + i + 4] = _mm512_shuffle_i32x4(a[half + i], a[half + i + 4], 0xdd);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
    a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
  }
#pragma GCC unroll 16
  for (int c = 0; c < 16; ++c)
    if (c < count) _mm512_storeu_si512(to + c * kLine, a[c]);
}

struct BFloat16Step {
  static constexpr bool kGrouped = false;
  using Sum = V;
  using Weight = __m512bh;
  using Input = __m512bh;
  using Element = uint16_t;
  static constexpr int kHalves = 1;
  static constexpr int kInputs = 2;
  static Sum zero_sum() { return zero(); }
  static Weight weight(const char* line, int) { return as_bf16(_mm512_load_si512(line)); }
  static Input input(const Element* x, int) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return as_bf16(_mm512_set1_epi32(pair));
  }
  static Sum dot(Sum sum, Input x, Weight w) { return _mm512_dpbf16_ps(sum, x, w); }
  static V to_float(Sum sum) { return sum; }
};

// vpdpbusd multiplies unsigned activations by signed weights. 128 is added to each activation, and 128 times the sum of
// the weights is subtracted at the end.
struct Int8Step {
  static constexpr bool kGrouped = false;
  using Sum = __m512i;
  using Weight = __m512i;
  using Input = __m512i;
  using Element = uint8_t;
  static constexpr int kHalves = 1;
  static constexpr int kInputs = 4;
  static constexpr int kOffset = 128;
  static Sum zero_sum() { return _mm512_setzero_si512(); }
  static Weight weight(const char* line, int) { return _mm512_load_si512(line); }
  static Input input(const Element* x, int) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return _mm512_set1_epi32(four);
  }
  static Sum dot(Sum sum, Input x, Weight w) { return dot_bytes(sum, x, w); }
  static V to_float(Sum sum) { return _mm512_cvtepi32_ps(sum); }
  static void quantise(const float* x, float inverse, Element* out) {
    const __m512i words = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(inverse)));
    const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_add_epi32(words, _mm512_set1_epi32(kOffset)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
  }
};

// Here the weights are the unsigned operand of vpdpbusd, and the activations are signed.
struct Int4Step {
  using Sum = __m512i;
  using Weight = __m512i;
  using Input = __m512i;
  using Element = int8_t;
  static constexpr bool kGrouped = true;
  static constexpr int kParts = 1;
  static constexpr int kHalves = 2;
  static constexpr int kInputs = 8;
  static Sum zero_sum() { return _mm512_setzero_si512(); }
  static Weight weight(const char* line, int half) {
    const __m512i x = _mm512_load_si512(line);
    return _mm512_and_si512(half == 0 ? x : _mm512_srli_epi32(x, 4), _mm512_set1_epi32(0x0f0f0f0f));
  }
  static Input input(const Element* x, int half) {
    int32_t four;
    std::memcpy(&four, x + 4 * half, sizeof four);
    return _mm512_set1_epi32(four);
  }
  static Sum dot(Sum sum, Input x, Weight w) { return dot_bytes(sum, w, x); }
  static V to_float(Sum sum) { return _mm512_cvtepi32_ps(sum); }
};

template <int kFormat>
struct GgufStep : Int4Step {};

template <>
struct GgufStep<kQ5_K> : Int4Step {
  template <int kQuad>
  static Weight weight(const char* low, const char* high) {
    const __m512i x = _mm512_load_si512(high);
    const __m512i moved = kQuad < 4 ? _mm512_slli_epi32(x, kQuad < 4 ? 4 - kQuad : 0)
                                    : _mm512_srli_epi32(x, kQuad < 4 ? 0 : kQuad - 4);
    return _mm512_or_si512(Int4Step::weight(low, kQuad % 2), _mm512_and_si512(moved, _mm512_set1_epi32(0x10101010)));
  }
};

template <>
struct GgufStep<kQ6_K> : Int4Step {
  template <int kQuad>
  static Weight weight(const char* low, const char* high) {
    const __m512i x = _mm512_load_si512(high);
    const __m512i moved = kQuad < 2 ? _mm512_slli_epi32(x, kQuad < 2 ? 4 - 2 * kQuad : 0)
                                    : _mm512_srli_epi32(x, kQuad < 2 ? 0 : 2 * kQuad - 4);
    return _mm512_or_si512(Int4Step::weight(low, kQuad % 2), _mm512_and_si512(moved, _mm512_set1_epi32(0x30303030)));
  }
};

template <>
struct GgufStep<kQ8_0> : Int4Step {
  static Weight weight(const char* line) {
    return _mm512_xor_si512(_mm512_load_si512(line), _mm512_set1_epi32(static_cast<int>(0x80808080u)));
  }
};
constexpr int kByteOffset = 128;  // added to the weights of Q8_0, because vpdpbusd takes them unsigned

inline V int_to_float(const int32_t* p) { return _mm512_cvtepi32_ps(_mm512_load_si512(p)); }

// Unpacks one group of a block of int4 weights to 16 lines of int8, without the zero points.
inline void unpack_group(const char* group, char* out) {
  const __m512i zero_points = _mm512_mullo_epi32(bytes_of(group + 48), _mm512_set1_epi32(0x01010101));
  for (int line = 0; line < kGroupLines - 1; ++line)
    for (int half = 0; half < 2; ++half)
      _mm512_store_si512(out + (2 * line + half) * kLine,
                         _mm512_sub_epi8(Int4Step::weight(group + (1 + line) * kLine, half), zero_points));
}

// 32 registers, up to 24 of them for sums. Tasks are multiples of four blocks, and thus also of two.
constexpr bool kFewRegisters = false;
constexpr int kMaxTileRows = 12;
constexpr int kGgufTileRows = 12;  // of the types of GGUF
constexpr int64_t kChunkBytes = 1 << 19;  // of second-level caches of 1 MiB or more
constexpr int tile_blocks(int rows) { return rows <= 6 ? 4 : 2; }

}  // namespace
}  // namespace quire
