// What each AMX instruction of kernels/native/src/tiles.h does, in plain C++ for processors that have none: written from
// the operation sections of Intel's instruction reference. Included before that header, together with avx512_model.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace amx_model {

struct Tile {
  int rows = 0, row_bytes = 0;
  std::uint8_t data[16][64] = {};

  template <class T>
  T get(int row, int i) const {
    T out;
    std::memcpy(&out, data[row] + i * sizeof(T), sizeof out);
    return out;
  }
  template <class T>
  void set(int row, int i, T x) {
    std::memcpy(data[row] + i * sizeof(T), &x, sizeof x);
  }
};

inline thread_local Tile tiles[8];

// An instruction faults if its tiles are not configured, or if their shapes do not fit.
inline void require(bool fits) {
  if (!fits) __builtin_trap();
}

inline Tile& configured(int number) {
  require(tiles[number].rows > 0);
  return tiles[number];
}

inline void require_fit(const Tile& sum, const Tile& x, const Tile& w) {
  require(sum.rows == x.rows && sum.row_bytes == w.row_bytes && x.row_bytes / 4 == w.rows);
}

inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
inline float widened(std::uint16_t x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// TDPBF16PS: the even products of a row are summed up, and the odd ones, each fused; then both sums are added together and
// to the tile. Denormals are zero on the way in and out.
inline void dot_bf16(Tile& sum, const Tile& x, const Tile& w) {
  require_fit(sum, x, w);
  for (int row = 0; row < sum.rows; ++row)
    for (int n = 0; n < sum.row_bytes / 4; ++n) {
      float parts[2] = {0.0f, 0.0f};
      for (int k = 0; k < x.row_bytes / 4; ++k)
        for (int part = 0; part < 2; ++part) {
          const float a = flushed(widened(x.get<std::uint16_t>(row, 2 * k + part)));
          const float b = flushed(widened(w.get<std::uint16_t>(k, 2 * n + part)));
          parts[part] = flushed(std::fma(a, b, parts[part]));
        }
      sum.set(row, n, flushed(flushed(sum.get<float>(row, n)) + flushed(parts[0] + parts[1])));
    }
}

// TDPBUSD: unsigned bytes of x times signed bytes of w, added without saturation.
inline void dot_bytes(Tile& sum, const Tile& x, const Tile& w) {
  require_fit(sum, x, w);
  for (int row = 0; row < sum.rows; ++row)
    for (int n = 0; n < sum.row_bytes / 4; ++n) {
      std::uint32_t total = sum.get<std::uint32_t>(row, n);
      for (int k = 0; k < x.row_bytes; ++k)
        total += static_cast<std::uint32_t>(x.get<std::uint8_t>(row, k) * w.get<std::int8_t>(k / 4, 4 * n + k % 4));
      sum.set(row, n, total);
    }
}

// TDPBSSD: the same for signed bytes of both.
inline void dot_signed_bytes(Tile& sum, const Tile& x, const Tile& w) {
  require_fit(sum, x, w);
  for (int row = 0; row < sum.rows; ++row)
    for (int n = 0; n < sum.row_bytes / 4; ++n) {
      std::uint32_t total = sum.get<std::uint32_t>(row, n);
      for (int k = 0; k < x.row_bytes; ++k)
        total += static_cast<std::uint32_t>(x.get<std::int8_t>(row, k) * w.get<std::int8_t>(k / 4, 4 * n + k % 4));
      sum.set(row, n, total);
    }
}

}  // namespace amx_model

namespace quire {
namespace {

// Zeros all tiles.
template <class Shapes>
inline void configure_tiles(const Shapes& shapes) {
  amx_model::require(sizeof shapes == 64 && shapes.palette == 1);
  for (int i = 0; i < 8; ++i) {
    amx_model::require(shapes.rows[i] <= 16 && shapes.row_bytes[i] <= 64);
    amx_model::tiles[i] = {};
    amx_model::tiles[i].rows = shapes.rows[i];
    amx_model::tiles[i].row_bytes = shapes.row_bytes[i];
  }
}
inline void release_tiles() {
  for (auto& tile : amx_model::tiles) tile = {};
}
template <int T>
inline void zero_tile() {
  std::memset(amx_model::configured(T).data, 0, sizeof amx_model::Tile::data);
}
// Rows and bytes that the shape does not have become zero.
template <int T>
inline void load_tile(const void* p, std::int64_t stride) {
  auto& tile = amx_model::configured(T);
  std::memset(tile.data, 0, sizeof tile.data);
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(tile.data[row], static_cast<const char*>(p) + row * stride, tile.row_bytes);
}
template <int T>
inline void store_tile(void* p, std::int64_t stride) {
  const auto& tile = amx_model::configured(T);
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(static_cast<char*>(p) + row * stride, tile.data[row], tile.row_bytes);
}
template <int Sum, int X, int W>
inline void dot_tiles_bf16() {
  amx_model::dot_bf16(amx_model::configured(Sum), amx_model::configured(X), amx_model::configured(W));
}
template <int Sum, int X, int W>
inline void dot_tiles_bytes() {
  amx_model::dot_bytes(amx_model::configured(Sum), amx_model::configured(X), amx_model::configured(W));
}
template <int Sum, int X, int W>
inline void dot_tiles_signed_bytes() {
  amx_model::dot_signed_bytes(amx_model::configured(Sum), amx_model::configured(X), amx_model::configured(W));
}

}  // namespace
}  // namespace quire
