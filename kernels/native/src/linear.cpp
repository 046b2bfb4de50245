#include "linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "threads.h"

namespace quire {
namespace {

constexpr int64_t kTaskBytes = 1 << 17;  // of weights; takes some ten microseconds

float widen(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

float element(int format, const void* p, int64_t i) {
  return format == kFloat32 ? static_cast<const float*>(p)[i] : widen(static_cast<const uint16_t*>(p)[i]);
}

template <class T>
void pack_block(T* block, int64_t inputs, std::vector<T>& copy) {
  constexpr int64_t per = 4 / sizeof(T);
  copy.assign(block, block + kBlock * inputs);
  for (int64_t i = 0; i < kBlock; ++i)
    for (int64_t input = 0; input < inputs; ++input)
      block[(input / per * kBlock + i) * per + input % per] = copy[i * inputs + input];
}

template <class T>
void pack_blocks(T* weight, int64_t outputs, int64_t inputs) {
  const int64_t padded = round_up(inputs, 4 / sizeof(T));
  parallel_chunks(ceil_div(outputs, kBlock), 8, [=](int64_t begin, int64_t end) {
    std::vector<T> copy;
    for (int64_t block = begin; block < end; ++block) pack_block(weight + block * kBlock * padded, padded, copy);
  });
}

}  // namespace

void multiply(const Kernels& kernels, const LinearTask& whole) {
  const Linear& linear = *whole.linear;
  const int64_t rows = whole.last_row, tall = kernels.max_tile_rows;
  if (rows <= 0) return;
  // Many rows are split into chunks that fit into a core's cache; each chunk reads all weights.
  const int64_t in_cache = std::max(tall, kernels.chunk_bytes / whole.x_stride / tall * tall);
  const int64_t num_chunks = ceil_div(rows, in_cache), chunk = ceil_div(ceil_div(rows, num_chunks), tall) * tall;
  // Enough tasks, so that a core with other work does not delay the others.
  const int64_t num_blocks = ceil_div(linear.outputs, kBlock);
  const int64_t block_bytes = num_steps(linear.format, linear.inputs) * kLine;
  const int64_t wanted = num_threads() == 1 ? 1 : 8 * num_threads();
  const int64_t smallest = std::max<int64_t>(4, kTaskBytes / block_bytes);
  const int64_t per_task = round_up(std::max(smallest, ceil_div(num_blocks, wanted)), 4);
  const int64_t num_columns = ceil_div(num_blocks, per_task);
  parallel_for(num_columns * num_chunks, [&](int64_t task) {
    LinearTask part = whole;
    part.first_row = task / num_columns * chunk;
    part.last_row = std::min(rows, part.first_row + chunk);
    part.begin_block = task % num_columns * per_task;
    part.end_block = std::min(num_blocks, part.begin_block + per_task);
    if (part.first_row < part.last_row) kernels.linear(part);
  });
}

void pack_in_place(int format, void* weight, int64_t outputs, int64_t inputs) {
  if (format == kFloat32)
    pack_blocks(static_cast<float*>(weight), outputs, inputs);
  else
    pack_blocks(static_cast<uint16_t*>(weight), outputs, inputs);
}

void quantise(int format, const void* weight, int64_t stride, int64_t outputs, int64_t inputs, int8_t* packed,
              float* scales, int32_t* sums) {
  const int64_t steps = num_steps(kInt8, inputs);
  parallel_chunks(ceil_div(outputs, kBlock), 8, [=](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      int8_t* const to = packed + block * steps * kLine;
      std::memset(to, 0, steps * kLine);
      for (int64_t lane = 0; lane < kBlock; ++lane) {
        const int64_t output = block * kBlock + lane;
        scales[output] = 0.0f;
        sums[output] = 0;
        if (output >= outputs) continue;
        float largest = 0.0f;
        for (int64_t i = 0; i < inputs; ++i)
          largest = std::max(largest, std::fabs(element(format, weight, output * stride + i)));
        const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        scales[output] = largest / 127.0f;
        for (int64_t i = 0; i < inputs; ++i) {
          const long value = std::lrintf(element(format, weight, output * stride + i) * inverse);
          to[(i / 4 * kBlock + lane) * 4 + i % 4] = static_cast<int8_t>(value);
          sums[output] += static_cast<int32_t>(value);
        }
      }
    }
  });
}

void unpack_row(const Linear& linear, int64_t output, float* out) {
  const int64_t per = inputs_per_step(linear.format), bytes = element_bytes(linear.format);
  const char* const block = static_cast<const char*>(linear.packed) +
                            output / kBlock * num_steps(linear.format, linear.inputs) * kLine +
                            output % kBlock * per * bytes;
  for (int64_t i = 0; i < linear.inputs; ++i) {
    const char* const at = block + i / per * kLine;
    if (linear.format == kInt8)
      out[i] = static_cast<float>(reinterpret_cast<const int8_t*>(at)[i % per]) * linear.scales[output];
    else
      out[i] = element(linear.format, at, i % per);
  }
}

}  // namespace quire
