// A whole matrix product, split into tasks, and the packing of weights.
#pragma once

#include "levels.h"

namespace quire {

// Bytes from one row of activations to the next.
int64_t activation_stride(const Kernels& kernels, int format, int64_t inputs);

// Computes all of `whole`: rows 0 .. last_row; its block range is ignored.
void multiply(const Kernels& kernels, const LinearTask& whole);

// Computes several products as `multiply` does, in one parallel loop.
void multiply_all(const Kernels& kernels, const LinearTask* wholes, int64_t count);

// Packs float32 or bf16 weights [outputs][inputs] in place, with both sizes padded (with zeros) to 16 and to whole
// steps.
void pack_in_place(int format, void* weight, int64_t outputs, int64_t inputs);

// Quantises rows of float32 or bf16, `stride` elements apart, to int8: q = round(w / scale), scale = max |w| of the row
// / 127.
void quantise(int format, const void* weight, int64_t stride, int64_t outputs, int64_t inputs, int8_t* packed,
              float* scales, int32_t* sums);

// The same to int4, by groups: q = round(w / scale) + zero point. The scale of a group is its range divided by 15; if
// `symmetric`, the zero point is 8, and the largest |w| becomes 0.
void quantise_int4(int format, const void* weight, int64_t stride, int64_t outputs, int64_t inputs, bool symmetric,
                   uint8_t* packed);

// Unpacks the weights of one output to float32.
void unpack_row(const Linear& linear, int64_t output, float* out);

}  // namespace quire
