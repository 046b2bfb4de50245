#include "simd_portable.h"

#include "kernels.inc"

const quire::Kernels* quire::portable_kernels() { return &kTable; }
