// AMX: the tile registers compute products over bf16, int8 and int4 weights, and the attention of chunks over a bf16, int8 or
// int4 cache. Everything else is AVX-512.
#if QUIRE_X86_LEVELS
#include "simd_avx512.h"
#include "tiles.h"

#include "kernels.inc"

namespace quire {
namespace {

#include "linear_tiles.inc"
#include "attention_tiles.inc"

constexpr Kernels with_tiles() {
  Kernels kernels = kTable;
  kernels.level = kAmx;
  kernels.max_tile_rows = 2 * kTileRows;
  kernels.chunk_bytes = 1 << 20;  // these processors have second-level caches of 2 MiB
  kernels.linear = linear_by_tiles;
  kernels.to_activations = to_activation_lines;
  kernels.attend_chunk = attend_chunk_by_tiles;
  kernels.attend_latent = attend_latent_by_tiles;
  return kernels;
}

constexpr Kernels kAmxTable = with_tiles();

}  // namespace
}  // namespace quire

const quire::Kernels* quire::amx_kernels() { return &kAmxTable; }
#else
#include "levels.h"

const quire::Kernels* quire::amx_kernels() { return nullptr; }
#endif
