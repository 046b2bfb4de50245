// Vector operations in plain C++, for any processor. They are slow, but have the structure of the AVX-512 level (one
// half per step, bf16 and unsigned activations, tiles of several blocks), so that tests cover all of its code except
// its instructions.
#pragma once

#include <cmath>
#include <cstring>

#include "format.h"

namespace quire {
namespace {

constexpr int kThisLevel = 0;

struct V {
  float lane[16];
};

template <class Function>
inline V each(Function function) {
  V out;
  for (int i = 0; i < 16; ++i) out.lane[i] = function(i);
  return out;
}
inline float widen1(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}
inline uint16_t narrow1(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
inline V zero() { return each([](int) { return 0.0f; }); }
inline V set1(float x) { return each([=](int) { return x; }); }
inline V load(const float* p) { return each([=](int i) { return p[i]; }); }
inline void store(float* p, V x) { std::memcpy(p, x.lane, sizeof x.lane); }
inline V load(const uint16_t* p) { return each([=](int i) { return widen1(p[i]); }); }
inline V load(const int8_t* p) {
  return each([&](int i) { return static_cast<float>(p[i]); });
}
// In float32 the bits of an e4m3 number are one that is 2^120 too small, because the exponents are biased by 127 and 7.
inline V load(const Fp8* p) {
  return each([&](int i) {
    const uint32_t bits = static_cast<uint32_t>(p[i].bits & 0x80) << 24 | static_cast<uint32_t>(p[i].bits & 0x7f) << 20;
    float small;
    std::memcpy(&small, &bits, sizeof small);
    return small * 0x1p120f;
  });
}
inline float from_half(uint16_t x) {
  // In float32 the bits of a float16 number are one that is 2^112 too small, because the exponents are biased by 127 and 15.
  const uint32_t magnitude = x & 0x7fffu;
  uint32_t bits = magnitude << 13;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  wide *= 0x1p112f;
  if (magnitude >= 0x7c00u) {  // infinity or NaN
    bits = 0x7f800000u | magnitude << 13;
    std::memcpy(&wide, &bits, sizeof wide);
  }
  return (x & 0x8000u) != 0 ? -wide : wide;
}
// Rounds to nearest, ties to even; NaN stays NaN.
inline uint16_t to_half(float x) {
  uint32_t word;
  std::memcpy(&word, &x, sizeof word);
  const uint32_t magnitude = word & 0x7fffffffu, sign = word >> 16 & 0x8000u;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  const uint32_t normal = (magnitude + 0xfffu + (magnitude >> 13 & 1)) >> 13;
  // Below 2^-14 steps are 2^-24: the sum with 2^23 has the rounded number of steps in its low bits.
  const float steps = std::fabs(x) * 0x1p24f + 8388608.0f;
  uint32_t subnormal;
  std::memcpy(&subnormal, &steps, sizeof subnormal);
  if (magnitude < 0x38800000u) return static_cast<uint16_t>(sign | (subnormal & 0x7fffu));
  const uint32_t code = normal - (112u << 10);
  return static_cast<uint16_t>(sign | (code < 0x7c00u ? code : 0x7c00u));
}
inline void load_group(const Int4* p, float scale, float offset, V* out) {
  for (int i = 0; i < 16; ++i) {
    out[0].lane[i] = static_cast<float>(p[i].pair & 15) * scale + offset;
    out[1].lane[i] = static_cast<float>(p[i].pair >> 4) * scale + offset;
  }
}
inline V load_halves(const uint16_t* p) { return each([=](int i) { return from_half(p[i]); }); }
inline void store_halves(Int4* p, V low, V high) {
  const auto code = [](float x) { return x == x ? static_cast<int>(x) : 0; };
  for (int i = 0; i < 16; ++i) p[i].pair = static_cast<uint8_t>(code(low.lane[i]) | code(high.lane[i]) << 4);
}
inline V load_scales(const char* header) {
  return each([=](int i) {
    uint16_t high;
    std::memcpy(&high, header + 2 * i, sizeof high);
    const uint32_t bits = static_cast<uint32_t>(high) << 16 | static_cast<uint32_t>(static_cast<uint8_t>(header[32 + i])) << 8;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return scale;
  });
}
inline V load_zero_points(const char* header) {
  return each([=](int i) { return static_cast<float>(static_cast<uint8_t>(header[48 + i])); });
}
inline void store(uint16_t* p, V x) {
  for (int i = 0; i < 16; ++i) p[i] = narrow1(x.lane[i]);
}
inline void store(int8_t* p, V x) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(std::nearbyintf(x.lane[i]));
}
inline V add(V x, V y) { return each([&](int i) { return x.lane[i] + y.lane[i]; }); }
inline V sub(V x, V y) { return each([&](int i) { return x.lane[i] - y.lane[i]; }); }
inline V mul(V x, V y) { return each([&](int i) { return x.lane[i] * y.lane[i]; }); }
inline V div(V x, V y) { return each([&](int i) { return x.lane[i] / y.lane[i]; }); }
inline V fma(V x, V y, V z) { return each([&](int i) { return x.lane[i] * y.lane[i] + z.lane[i]; }); }
inline V fused(V x, V y, V z) {
  return each([&](int i) { return std::fma(x.lane[i], y.lane[i], z.lane[i]); });
}
inline V max(V x, V y) { return each([&](int i) { return x.lane[i] > y.lane[i] ? x.lane[i] : y.lane[i]; }); }
inline V min(V x, V y) { return each([&](int i) { return x.lane[i] < y.lane[i] ? x.lane[i] : y.lane[i]; }); }
inline V abs(V x) { return each([&](int i) { return std::fabs(x.lane[i]); }); }
inline V round(V x) { return each([&](int i) { return std::nearbyintf(x.lane[i]); }); }
inline V scale_by_power(V x, V n) {
  return each([&](int i) { return std::isnan(n.lane[i]) ? n.lane[i] : std::ldexp(x.lane[i], static_cast<int>(n.lane[i])); });
}
inline float sum(V x) {
  float total = 0.0f;
  for (int i = 0; i < 16; ++i) total += x.lane[i];
  return total;
}
// A level may widen bf16 in any order; this one puts the first element last.
inline V mix(V x) { return each([&](int i) { return x.lane[(i + 1) % 16]; }); }
inline V unmix(V x) { return each([&](int i) { return x.lane[(i + 15) % 16]; }); }
inline V load_mixed(const uint16_t* p) { return mix(load(p)); }

using Partial = V;
inline Partial no_sum() { return zero(); }
inline Partial add_product(Partial sum, V x, V y) { return fma(x, y, sum); }
inline void finish_eight(const Partial* sums, float* out) {
  for (int i = 0; i < 8; ++i) out[i] = sum(sums[i]);
}

struct Words {
  union Lane {
    int16_t pair[2];
    int32_t sum;
  } lane[16];
};

inline Words no_words() { return Words{}; }
inline Words load_words(const char* p) {
  Words words;
  std::memcpy(&words, p, sizeof words);
  return words;
}
inline Words set1_words(const int16_t* p) {
  Words words;
  for (Words::Lane& lane : words.lane) std::memcpy(&lane, p, sizeof lane);
  return words;
}
inline Words dot_words(Words sum, Words x, Words w) {
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 2; ++k) sum.lane[i].sum += x.lane[i].pair[k] * w.lane[i].pair[k];
  return sum;
}
inline V words_to_float(Words sums) { return each([&](int i) { return static_cast<float>(sums.lane[i].sum); }); }
inline void store_words(int16_t* p, V x) {
  for (int i = 0; i < 16; ++i) p[i] = x.lane[i] == x.lane[i] ? static_cast<int16_t>(std::nearbyintf(x.lane[i])) : 0;
}
inline Words alternate(Words x, Words y, int64_t odd) {
  Words words;
  for (int i = 0; i < 16; ++i) words.lane[i] = (i < 8 ? x : y).lane[i % 8 * 2 + odd];
  return words;
}
inline void widen_pairs(Words pairs, V* first, V* second) {
  *first = each([&](int i) { return from_half(static_cast<uint16_t>(pairs.lane[i].pair[0])); });
  *second = each([&](int i) { return from_half(static_cast<uint16_t>(pairs.lane[i].pair[1])); });
}
// Code of element 0 .. 31 of a group.
inline int16_t code_of(const char* group, int element) {
  return static_cast<int16_t>(static_cast<uint8_t>(group[element % 16]) >> element / 16 * 4 & 15);
}
inline void load_keys(const char* p, int64_t stride, Words* out) {
  for (int i = 0; i < 16; ++i)
    for (int token = 0; token < 16; ++token)
      for (int k = 0; k < 2; ++k)
        out[i].lane[token].pair[k] = code_of(p + token * stride, i % 2 * 16 + i / 4 * 4 + i % 4 / 2 + 2 * k);
}
inline void load_values(const char* p, int64_t stride, Words* out) {
  for (int i = 0; i < 16; ++i)
    for (int element = 0; element < 16; ++element)
      for (int k = 0; k < 2; ++k)
        out[i].lane[element].pair[k] = code_of(p + (i / 2 * 2 + k) * stride, i % 2 * 16 + element);
}
inline void largest_of_four(const V* x, float* out) {
  for (int i = 0; i < 4; ++i) {
    out[i] = x[i].lane[0];
    for (float lane : x[i].lane) out[i] = lane > out[i] ? lane : out[i];
  }
}

inline uint32_t not_less(V x, V y) {
  uint32_t lanes = 0;
  for (int i = 0; i < 16; ++i) lanes |= static_cast<uint32_t>(!(x.lane[i] < y.lane[i])) << i;
  return lanes;
}
inline V bits_as_float(V x) {
  return each([&](int i) {
    int32_t bits;
    std::memcpy(&bits, &x.lane[i], sizeof bits);
    return static_cast<float>(bits);
  });
}

struct W {
  uint64_t lane[8];
};

template <class Function>
inline W each_wide(Function function) {
  W out;
  for (int i = 0; i < 8; ++i) out.lane[i] = function(i);
  return out;
}
inline W wide(uint64_t x) { return each_wide([=](int) { return x; }); }
inline W count_from(uint64_t first) { return each_wide([=](int i) { return first + static_cast<uint64_t>(i); }); }
inline W product(W x, W y) {
  return each_wide([&](int i) { return (x.lane[i] & 0xffffffffu) * (y.lane[i] & 0xffffffffu); });
}
inline W upper(W x) { return each_wide([&](int i) { return x.lane[i] >> 32; }); }
inline W either(W x, W y) { return each_wide([&](int i) { return x.lane[i] ^ y.lane[i]; }); }
inline void in_order(W w0, W w1, W w2, W w3, V* words) {
  const W* const of[4] = {&w0, &w1, &w2, &w3};
  for (int i = 0; i < 32; ++i) {
    const uint32_t word = static_cast<uint32_t>(of[i % 4]->lane[i / 4]);
    std::memcpy(&words[i / 16].lane[i % 16], &word, sizeof word);
  }
}
inline V words_as_float(V words) {
  return each([&](int i) {
    uint32_t word;
    std::memcpy(&word, &words.lane[i], sizeof word);
    return static_cast<float>(word);
  });
}

inline void prefetch_near(const char*) {}
inline void prefetch_far(const char*) {}

struct Float32Step {
  static constexpr bool kGrouped = false;
  using Sum = V;
  using Weight = V;
  using Input = float;
  using Element = float;
  static constexpr int kHalves = 1;
  static constexpr int kInputs = 1;
  static Sum zero_sum() { return zero(); }
  static Weight weight(const char* line, int) { return load(reinterpret_cast<const float*>(line)); }
  static Input input(const Element* x, int) { return *x; }
  static Sum dot(Sum sum, Input x, Weight w) { return fma(set1(x), w, sum); }
  static V to_float(Sum sum) { return sum; }
};

// Writes the `count` first pairs of 16 rows as columns: pair c of row r to line c, lane r. Rows are `stride` elements apart.
inline void transpose_pairs(const uint16_t* from, int64_t stride, int64_t count, char* to) {
  for (int64_t row = 0; row < 16; ++row)
    for (int64_t c = 0; c < count; ++c) std::memcpy(to + c * kLine + row * 4, from + row * stride + 2 * c, 4);
}

struct BFloat16Step {
  static constexpr bool kGrouped = false;
  struct Weight {
    uint16_t pair[16][2];
  };
  struct Input {
    float pair[2];
  };
  using Sum = V;
  using Element = uint16_t;
  static constexpr int kHalves = 1;
  static constexpr int kInputs = 2;
  static Sum zero_sum() { return zero(); }
  static Weight weight(const char* line, int) {
    Weight w;
    std::memcpy(&w, line, sizeof w);
    return w;
  }
  static Input input(const Element* x, int) { return {{widen1(x[0]), widen1(x[1])}}; }
  static Sum dot(Sum sum, Input x, Weight w) {
    return each([&](int i) {
      return sum.lane[i] + x.pair[0] * widen1(w.pair[i][0]) + x.pair[1] * widen1(w.pair[i][1]);
    });
  }
  static V to_float(Sum sum) { return sum; }
};

struct Int8Step {
  static constexpr bool kGrouped = false;
  struct Sum {
    int32_t lane[16];
  };
  struct Weight {
    int8_t four[16][4];
  };
  struct Input {
    uint8_t four[4];
  };
  using Element = uint8_t;
  static constexpr int kHalves = 1;
  static constexpr int kInputs = 4;
  static constexpr int kOffset = 128;
  static Sum zero_sum() { return Sum{}; }
  static Weight weight(const char* line, int) {
    Weight w;
    std::memcpy(&w, line, sizeof w);
    return w;
  }
  static Input input(const Element* x, int) { return {{x[0], x[1], x[2], x[3]}}; }
  static Sum dot(Sum sum, Input x, Weight w) {
    for (int i = 0; i < 16; ++i)
      for (int k = 0; k < 4; ++k) sum.lane[i] += static_cast<int32_t>(x.four[k]) * w.four[i][k];
    return sum;
  }
  static V to_float(Sum sum) { return each([&](int i) { return static_cast<float>(sum.lane[i]); }); }
  static void quantise(const float* x, float inverse, Element* out) {
    for (int i = 0; i < 16; ++i) out[i] = static_cast<uint8_t>(static_cast<int>(std::nearbyintf(x[i] * inverse)) + kOffset);
  }
};

struct Int4Step : Int8Step {
  static constexpr bool kGrouped = true;
  static constexpr int kParts = 2;
  static constexpr int kHalves = 2;
  static constexpr int kInputs = 8;
  using Element = int8_t;
  struct Input {
    int8_t four[4];
  };
  static Weight weight(const char* line, int half) {
    Weight w;
    for (int i = 0; i < 64; ++i) w.four[i / 4][i % 4] = static_cast<int8_t>(static_cast<uint8_t>(line[i]) >> 4 * half & 15);
    return w;
  }
  static Input input(const Element* x, int half) { return {{x[4 * half], x[4 * half + 1], x[4 * half + 2], x[4 * half + 3]}}; }
  static Sum dot(Sum sum, Input x, Weight w) {
    for (int i = 0; i < 16; ++i)
      for (int k = 0; k < 4; ++k) sum.lane[i] += x.four[k] * w.four[i][k];
    return sum;
  }
};

template <int kFormat>
struct GgufStep : Int4Step {
  template <int kQuad>
  static Weight weight(const char* low, const char* high) {
    constexpr int kBits = kFormat == kQ5_K ? 1 : 2;
    Weight w = Int4Step::weight(low, kQuad % 2);
    for (int i = 0; i < 64; ++i) {
      const int bits = static_cast<uint8_t>(high[i]) >> kBits * kQuad & ((1 << kBits) - 1);
      w.four[i / 4][i % 4] = static_cast<int8_t>(w.four[i / 4][i % 4] | bits << 4);
    }
    return w;
  }
  using Int4Step::weight;
};

template <>
struct GgufStep<kQ8_0> : Int4Step {
  static Weight weight(const char* line) {
    Weight w;
    std::memcpy(&w, line, sizeof w);
    return w;
  }
};
constexpr int kByteOffset = 0;  // added to the weights of Q8_0 before the product

// Small tiles of every shape, so that tests cover all paths and compilation is fast.
constexpr bool kFewRegisters = false;
constexpr int kMaxTileRows = 3;
constexpr int kGgufTileRows = 3;  // of the types of GGUF
constexpr int64_t kChunkBytes = 1 << 18;  // of second-level caches of any size
constexpr int tile_blocks(int rows) { return rows == 1 ? 4 : rows == 2 ? 3 : 2; }

}  // namespace
}  // namespace quire
