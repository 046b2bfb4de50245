// A whole matrix product, split into tasks, and the packing of weights.
#pragma once

#include "levels.h"

namespace quire {

// Computes all of `whole`: rows 0 .. last_row; its block range is ignored.
void multiply(const Kernels& kernels, const LinearTask& whole);

// Packs float32 or bf16 weights [outputs][inputs] in place, with both sizes padded (with zeros) to 16 and to whole
// steps.
void pack_in_place(int format, void* weight, int64_t outputs, int64_t inputs);

// Quantises rows of float32 or bf16, `stride` elements apart, to int8: q = round(w / scale), scale = max |w| of the row
// / 127.
void quantise(int format, const void* weight, int64_t stride, int64_t outputs, int64_t inputs, int8_t* packed,
              float* scales, int32_t* sums);

// Unpacks the weights of one output to float32.
void unpack_row(const Linear& linear, int64_t output, float* out);

}  // namespace quire
