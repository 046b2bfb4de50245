// Memory layout: element types, packed weights, activations.
//
// Packed weights. Outputs are split into blocks of 16; one step of a block is one cache line of 64 bytes:
//
//     float32  [outputs / 16][inputs    ][16]       16 outputs x 1 input
//     bf16     [outputs / 16][inputs / 2][16][2]    16 outputs x 2 inputs
//     int8     [outputs / 16][inputs / 4][16][4]    16 outputs x 4 inputs
//     int4     [outputs / 16][inputs / 64][1 + 8][16][4]
//     the types of GGUF: below
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
//
// Types of GGUF: [outputs / 16][inputs / block][header, then groups]. A group is 32 inputs, or 16 in Q6_K, with a scale.
//
//     type   block  header  group        bits per weight
//     Q4_0      64       1  4 low                  4.5
//     Q8_0      64       1  8 of bytes             8.5
//     Q4_K     256       5  4 low                  4.625
//     Q5_K     256       5  1 high, 4 low          5.625
//     Q6_K     256       5  1 high, 2 low          6.625    (numbers of lines)
//
// A low line is a line of int4: two quads of inputs. Bits 4 and above of quad i of a group are bits i (Q5_K), or 2 i and
// 2 i + 1 (Q6_K), of the bytes of its high line. The header of Q4_0 and Q8_0 has the 16 float16 scales of each of the two
// groups. That of the others has 16 scales and 16 scales of offsets of the block in float16, then as bytes the factors of
// the scales of each group (Q6_K: 16 groups, signed), and for Q4_K and Q5_K those of the offsets. All numbers are those
// of the file. A weight is
//
//     Q4_0: (q - 8) * scale; Q8_0: q * scale; Q6_K: (q - 32) * factor * scale
//     Q4_K, Q5_K: q * factor * scale - factor of the offset * scale of offsets
//
// kParts is a matrix whose outputs are those of several matrices of these types: `packed` points to them, and `count` is
// their number. All of them take the same activations: signed bytes, up to a whole number of 256, then the sum of each 16
// as a float.
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
enum Format : int {
  kFloat32 = 0,
  kBFloat16 = 1,
  kInt8 = 2,
  kInt4 = 3,
  kFp8 = 4,
  kQ4_0 = 5,
  kQ8_0 = 6,
  kQ4_K = 7,
  kQ5_K = 8,
  kQ6_K = 9,
  kParts = 10
};

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

// Layout of a type of GGUF: inputs of a block, lines of its header, inputs and lines of a group.
struct BlockLayout {
  int64_t inputs, header_lines, group_inputs, group_lines;
  constexpr int64_t groups() const { return inputs / group_inputs; }
  constexpr int64_t lines() const { return header_lines + groups() * group_lines; }
};
constexpr BlockLayout block_layout(int format) {
  return format == kQ4_0   ? BlockLayout{64, 1, 32, 4}
         : format == kQ8_0 ? BlockLayout{64, 1, 32, 8}
         : format == kQ4_K ? BlockLayout{256, 5, 32, 4}
         : format == kQ5_K ? BlockLayout{256, 5, 32, 5}
                           : BlockLayout{256, 5, 16, 3};
}
constexpr bool is_gguf(int format) { return format >= kQ4_0; }
constexpr int64_t kGgufInputs = 256;  // activations are padded to a whole number of these
constexpr int64_t kSummed = 16;       // activations of a sum

constexpr int64_t inputs_per_step(int format) { return 4 / element_bytes(format); }
// Lines of one block of weights.
constexpr int64_t num_lines(int format, int64_t inputs) {
  if (is_gguf(format)) return ceil_div(inputs, block_layout(format).inputs) * block_layout(format).lines();
  return format == kInt4 ? ceil_div(inputs, kGroup) * kGroupLines : ceil_div(inputs, inputs_per_step(format));
}

// One linear layer. y = x W^T + bias; int8: W[o][i] = q[o][i] * scales[o]; int4: (q[o][i] - zero) * scale of the group.
struct Linear {
  int32_t format;
  int32_t count;  // kParts
  int64_t outputs;
  int64_t inputs;
  const void* packed;
  const float* bias;    // [outputs], or null
  const float* scales;  // int8: [outputs rounded up to 16]
  const int32_t* sums;  // int8: [outputs rounded up to 16], sum over i of q[o][i]
};

}  // namespace quire
