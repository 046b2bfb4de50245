// Tile registers of AMX: eight of 16 rows of 64 bytes. Their numbers are part of the instructions, so they are template
// arguments here. Assembly instead of the compiler's intrinsics, which do not say that a load reads memory.
#pragma once

#include "format.h"

namespace quire {
namespace {

constexpr int64_t kTileRows = 16;

// Operand of ldtilecfg.
struct alignas(64) TileShapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

#ifndef QUIRE_AVX512_MODEL  // in tests amx_model.h replaces the instructions

inline void configure_tiles(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" ::"m"(shapes)); }
// Frees the state of the tiles, which the system would else save at every switch of threads.
inline void release_tiles() { __asm__ volatile("tilerelease"); }

template <int T>
inline void zero_tile() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline void load_tile(const void* p, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void store_tile(void* p, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
// Adds the products of bf16 pairs: rows of tile X by lines of packed weights in tile W.
template <int Sum, int X, int W>
inline void dot_tiles_bf16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(X), "i"(W));
}
// The same for four unsigned bytes of X and four signed bytes of W.
template <int Sum, int X, int W>
inline void dot_tiles_bytes() {
  __asm__ volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(X), "i"(W));
}
// The same for signed bytes of both.
template <int Sum, int X, int W>
inline void dot_tiles_signed_bytes() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(X), "i"(W));
}

#endif

}  // namespace
}  // namespace quire
