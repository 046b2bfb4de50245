// Memory layout: element types, packed weights, activations.
//
// Packed weights. Outputs are split into blocks of 16; one step of a block is one cache line of 64 bytes:
//
//     float32  [outputs / 16][inputs    ][16]       16 outputs x 1 input
//     bf16     [outputs / 16][inputs / 2][16][2]    16 outputs x 2 inputs
//     int8     [outputs / 16][inputs / 4][16][4]    16 outputs x 4 inputs
//     int4     [outputs / 16][inputs / 64][1 + 8][16][4]
//
// padded with zeros to whole lines. A block is contiguous, so that a matrix-vector product streams whole blocks from
// memory, without a horizontal sum at the end. A tile of rows uses each loaded line for all its rows. This is the
// operand order of vdpbf16ps and vpdpbusd; without these instructions shifts widen the lanes. A block has the size of
// its 16 rows, so that float32 and bf16 are packed in place.
//
// int4: 64 inputs are a group, in which each output has a scale and a zero point. The first line of a group has the
// upper 16 bits of the 16 scales in float32, their next 8 bits (the lowest 8 are zero), and the zero points as bytes. So
// a scale may be any bf16 or float16. Each of the eight lines after it has two lines of int8: byte [o][k] of
// line i has the unsigned weight of input 8 i + k in its lower half, and that of input 8 i + 4 + k in its upper half.
#pragma once

#include <cstdint>

namespace quire {

using std::int16_t;
using std::int32_t;
using std::int64_t;
using std::int8_t;
using std::uint16_t;
using std::uint32_t;
using std::uint8_t;

// kFp8 is a format of a KV cache only. kInt4 is laid out differently in weights and in a KV cache.
enum Format : int { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kInt4 = 3, kFp8 = 4 };

// A number in the e4m3 format of OCP: one sign, four exponent, three mantissa bits.
struct Fp8 {
  uint8_t bits;
};
constexpr float kLargestFp8 = 448.0f;

// Two codes of an int4 KV cache.
struct Int4 {
  uint8_t pair;
};

constexpr int64_t kBlock = 16;  // outputs of a block, and lanes of a vector
constexpr int64_t kLine = 64;   // bytes
constexpr int64_t kGroup = 64;  // int4: inputs of a group
constexpr int64_t kGroupLines = 9;
constexpr int64_t kKvGroup = 32;  // int4: elements of a group of a KV cache

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

constexpr int64_t element_bytes(int format) { return format == kFloat32 ? 4 : format == kBFloat16 ? 2 : 1; }

// KV cache [blocks][kv_heads][block_size][head_dim]. int8 and fp8: each head of a block has [block_size][head_dim] bytes,
// then [block_size] scales in float32; an element is its byte times the scale of its token.
//
// int4: each head of a block has [block_size][head_dim / 2] bytes, then [block_size][head_dim / 32][2] numbers in float16:
// the scale and the zero of each group of 32 elements. An element is its code times the scale, plus the zero. Byte j of
// a group has the codes of its elements j and j + 16.

// Bytes of one head of one token without scales.
constexpr int64_t kv_code_bytes(int format, int64_t head_dim) {
  return format == kInt4 ? head_dim / 2 : head_dim * element_bytes(format);
}
// Bytes of its scales.
constexpr int64_t kv_scale_bytes(int format, int64_t head_dim) {
  return format == kInt4 ? head_dim / kKvGroup * 4 : format == kInt8 || format == kFp8 ? 4 : 0;
}
// Bytes of one head of one block.
constexpr int64_t kv_head_bytes(int format, int64_t head_dim, int64_t block_size) {
  return block_size * (kv_code_bytes(format, head_dim) + kv_scale_bytes(format, head_dim));
}

constexpr int64_t inputs_per_step(int format) { return 4 / element_bytes(format); }
// Lines of one block of weights.
constexpr int64_t num_lines(int format, int64_t inputs) {
  return format == kInt4 ? ceil_div(inputs, kGroup) * kGroupLines : ceil_div(inputs, inputs_per_step(format));
}

// One linear layer. y = x W^T + bias; int8: W[o][i] = q[o][i] * scales[o]; int4: (q[o][i] - zero) * scale of the group.
struct Linear {
  int32_t format;
  int32_t pad;
  int64_t outputs;
  int64_t inputs;
  const void* packed;
  const float* bias;    // [outputs], or null
  const float* scales;  // int8: [outputs rounded up to 16]
  const int32_t* sums;  // int8: [outputs rounded up to 16], sum over i of q[o][i]
};

}  // namespace quire
