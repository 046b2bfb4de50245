#if QUIRE_X86_LEVELS
#include "simd_avx2.h"

#include "kernels.inc"

const quire::Kernels* quire::avx2_kernels() { return &kTable; }
#else
#include "levels.h"

const quire::Kernels* quire::avx2_kernels() { return nullptr; }
#endif
