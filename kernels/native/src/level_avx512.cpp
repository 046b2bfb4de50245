#if QUIRE_X86_LEVELS
#include "simd_avx512.h"

#include "kernels.inc"

const quire::Kernels* quire::avx512_kernels() { return &kTable; }
#else
#include "levels.h"

const quire::Kernels* quire::avx512_kernels() { return nullptr; }
#endif
