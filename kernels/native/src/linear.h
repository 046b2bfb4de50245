// A whole product as tasks, and how weights are packed.
#pragma once

#include "levels.h"

namespace quire {

// All of `whole`: its rows are 0 .. last_row, its blocks are ignored.
void multiply(const Kernels& kernels, const LinearTask& whole);

// Packs float32 or bf16 weights in place. They lie as [outputs][inputs], both padded (with zeros) to 16 and to whole
// steps.
void pack_in_place(int format, void* weight, int64_t outputs, int64_t inputs);

// Rows of float32 or bf16, `stride` elements apart, as int8: q = round(w / scale), scale = max |w| of the row / 127.
void quantise(int format, const void* weight, int64_t stride, int64_t outputs, int64_t inputs, int8_t* packed,
              float* scales, int32_t* sums);

// The weights of one output, as float32.
void unpack_row(const Linear& linear, int64_t output, float* out);

}  // namespace quire
