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

uint16_t narrow(float x) {  // to nearest, ties to even; finite
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Quantises `count` weights of one group and output; `to` is the place of the output in the first line of the group.
void quantise_group(const float* weight, int64_t count, bool symmetric, int64_t lane, uint8_t* group) {
  float low = 0.0f, high = 0.0f;
  for (int64_t i = 0; i < count; ++i) low = std::min(low, weight[i]), high = std::max(high, weight[i]);
  const uint16_t rounded = narrow(symmetric ? (high > -low ? high : low) / -8.0f : (high - low) / 15.0f);
  const float scale = widen(rounded), inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
  const long zero_point = symmetric ? 8 : std::clamp(std::lrintf(-low * inverse), 0L, 15L);
  std::memcpy(group + 2 * lane, &rounded, sizeof rounded);  // a bf16: the further bits are zero
  group[3 * kBlock + lane] = static_cast<uint8_t>(zero_point);
  for (int64_t i = 0; i < count; ++i) {
    const long value = std::clamp(std::lrintf(weight[i] * inverse) + zero_point, 0L, 15L);
    group[(1 + i / 8) * kLine + 4 * lane + i % 4] |= static_cast<uint8_t>(value << (i / 4 % 2 * 4));
  }
}

float int4_weight(const Linear& linear, int64_t output, int64_t input) {
  const int64_t lane = output % kBlock, i = input % kGroup;
  const uint8_t* const group = static_cast<const uint8_t*>(linear.packed) +
                               output / kBlock * num_lines(kInt4, linear.inputs) * kLine +
                               input / kGroup * kGroupLines * kLine;
  const int value = group[(1 + i / 8) * kLine + 4 * lane + i % 4] >> (i / 4 % 2 * 4) & 15;
  uint16_t high;
  std::memcpy(&high, group + 2 * lane, sizeof high);
  const uint32_t bits = static_cast<uint32_t>(high) << 16 | static_cast<uint32_t>(group[2 * kBlock + lane]) << 8;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return static_cast<float>(value - group[3 * kBlock + lane]) * scale;
}

float half_at(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, sizeof half);
  const uint32_t exponent = half >> 10 & 31, mantissa = half & 1023;
  const float size = exponent == 0    ? std::ldexp(static_cast<float>(mantissa), -24)
                     : exponent == 31 ? (mantissa == 0 ? INFINITY : NAN)
                                      : std::ldexp(static_cast<float>(mantissa + 1024), static_cast<int>(exponent) - 25);
  return half >> 15 != 0 ? -size : size;
}

// Unpacks the weights of one output of a type of GGUF.
void unpack_blocks(const Linear& linear, int64_t output, float* out) {
  const int format = linear.format;
  const BlockLayout layout = block_layout(format);
  const int64_t lane = output % kBlock, high_lines = format == kQ5_K || format == kQ6_K ? 1 : 0;
  const uint8_t* block = static_cast<const uint8_t*>(linear.packed) +
                         output / kBlock * num_lines(format, linear.inputs) * kLine;
  for (int64_t first = 0; first < linear.inputs; first += layout.inputs, block += layout.lines() * kLine) {
    const float of_block = half_at(block + 2 * lane), of_offsets = half_at(block + 2 * kBlock + 2 * lane);
    const uint8_t* const factors = block + kLine + lane;
    for (int64_t group = 0; group < layout.groups(); ++group) {
      float scale = group == 0 ? of_block : of_offsets, offset = 0.0f;
      if (format == kQ6_K) {
        scale = of_block * static_cast<float>(static_cast<int8_t>(factors[group * kBlock]));
      } else if (format != kQ4_0 && format != kQ8_0) {
        scale = of_block * static_cast<float>(factors[group * kBlock]);
        offset = of_offsets * static_cast<float>(factors[(layout.groups() + group) * kBlock]);
      }
      const uint8_t* const high = block + (layout.header_lines + group * layout.group_lines) * kLine + 4 * lane;
      const uint8_t* const low = high + high_lines * kLine;
      for (int64_t i = 0; i < layout.group_inputs; ++i) {
        const int64_t input = first + group * layout.group_inputs + i, quad = i / 4;
        if (input >= linear.inputs) return;
        int code = low[quad / 2 * kLine + i % 4] >> (quad % 2 * 4) & 15;
        if (format == kQ8_0) code = static_cast<int8_t>(low[quad * kLine + i % 4]);
        if (format == kQ4_0) code -= 8;
        if (format == kQ5_K) code |= (high[i % 4] >> quad & 1) << 4;
        if (format == kQ6_K) code = (code | (high[i % 4] >> 2 * quad & 3) << 4) - 32;
        out[input] = static_cast<float>(code) * scale - offset;
      }
    }
  }
}

}  // namespace

int64_t activation_stride(const Kernels& kernels, int format, int64_t inputs) {
  if (is_gguf(format)) {
    const int64_t padded = round_up(inputs, kGgufInputs);
    return padded + round_up(padded / kSummed * static_cast<int64_t>(sizeof(float)), kLine) + kLine;
  }
  const int64_t bytes = format == kInt4 ? ceil_div(inputs, kGroup) * (kGroup + static_cast<int64_t>(sizeof(float)))
                                        : round_up(inputs, 16) * kernels.activation_bytes[format];
  return round_up(bytes, kLine) + kLine;  // the additional line spreads rows over cache sets
}

namespace {

// Split of one product into tasks: columns of blocks, and chunks of rows.
struct Split {
  int64_t num_columns, blocks, num_chunks, rows;
};

// `num_products` are computed at once.
Split split_of(const Kernels& kernels, const LinearTask& whole, int64_t num_products) {
  const Linear& linear = *whole.linear;
  const int64_t rows = whole.last_row, tall = kernels.max_tile_rows;
  if (rows <= 0) return {};
  // Many rows are split into chunks that fit into a core's cache; each chunk reads all weights.
  const int64_t in_cache = std::max(tall, kernels.chunk_bytes / whole.x_stride / tall * tall);
  const int64_t num_chunks = ceil_div(rows, in_cache), chunk = ceil_div(ceil_div(rows, num_chunks), tall) * tall;
  // Enough tasks, so that a core with other work does not delay the others.
  const int64_t num_blocks = ceil_div(linear.outputs, kBlock);
  const int64_t block_bytes = num_lines(linear.format, linear.inputs) * kLine;
  const int64_t wanted = num_threads() == 1 ? 1 : ceil_div(8 * num_threads(), num_products);
  const int64_t smallest = std::max<int64_t>(4, kTaskBytes / block_bytes);
  const int64_t per_task = round_up(std::max(smallest, ceil_div(num_blocks, wanted)), 4);
  return {ceil_div(num_blocks, per_task), per_task, num_chunks, chunk};
}

void run_part(const Kernels& kernels, const LinearTask& whole, const Split& split, int64_t task) {
  LinearTask part = whole;
  part.first_row = task / split.num_columns * split.rows;
  part.last_row = std::min(whole.last_row, part.first_row + split.rows);
  part.begin_block = task % split.num_columns * split.blocks;
  part.end_block = std::min(ceil_div(whole.linear->outputs, kBlock), part.begin_block + split.blocks);
  if (part.first_row < part.last_row) kernels.linear(part);
}

// Appends a product, or those of its parts.
void add_parts(const LinearTask& whole, std::vector<LinearTask>& products) {
  if (whole.linear->format != kParts) {
    products.push_back(whole);
    return;
  }
  const Linear* const parts = static_cast<const Linear*>(whole.linear->packed);
  LinearTask task = whole;
  for (int32_t i = 0; i < whole.linear->count; ++i) {
    task.linear = parts + i;
    products.push_back(task);
    task.out = static_cast<char*>(task.out) + parts[i].outputs * (whole.store == kStoreBFloat16 ? 2 : 4);
  }
}

}  // namespace

void multiply(const Kernels& kernels, const LinearTask& whole) {
  if (whole.linear->format == kParts) return multiply_all(kernels, &whole, 1);
  const Split split = split_of(kernels, whole, 1);
  parallel_for(split.num_columns * split.num_chunks, [&](int64_t task) { run_part(kernels, whole, split, task); });
}

void multiply_all(const Kernels& kernels, const LinearTask* wholes, int64_t count) {
  struct Planned {
    Split split;
    int64_t first_task;
  };
  std::vector<LinearTask> products;
  for (int64_t i = 0; i < count; ++i) add_parts(wholes[i], products);
  std::vector<Planned> planned(products.size());
  int64_t num_tasks = 0;
  for (size_t i = 0; i < products.size(); ++i) {
    planned[i] = {split_of(kernels, products[i], static_cast<int64_t>(products.size())), num_tasks};
    num_tasks += planned[i].split.num_columns * planned[i].split.num_chunks;
  }
  parallel_for(num_tasks, [&](int64_t task) {
    const auto after = std::upper_bound(planned.begin(), planned.end(), task,
                                        [](int64_t value, const Planned& each) { return value < each.first_task; });
    const int64_t i = after - planned.begin() - 1;
    run_part(kernels, products[i], planned[i].split, task - planned[i].first_task);
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
  const int64_t lines = num_lines(kInt8, inputs);
  parallel_chunks(ceil_div(outputs, kBlock), 8, [=](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      int8_t* const to = packed + block * lines * kLine;
      std::memset(to, 0, lines * kLine);
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

void quantise_int4(int format, const void* weight, int64_t stride, int64_t outputs, int64_t inputs, bool symmetric,
                   uint8_t* packed) {
  const int64_t block_bytes = num_lines(kInt4, inputs) * kLine;
  parallel_chunks(ceil_div(outputs, kBlock), 8, [=](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      uint8_t* const to = packed + block * block_bytes;
      std::memset(to, 0, block_bytes);
      for (int64_t lane = 0; lane < std::min(kBlock, outputs - block * kBlock); ++lane)
        for (int64_t first = 0; first < inputs; first += kGroup) {
          const int64_t count = std::min(kGroup, inputs - first), at = (block * kBlock + lane) * stride + first;
          float weights[kGroup];
          for (int64_t i = 0; i < count; ++i) weights[i] = element(format, weight, at + i);
          quantise_group(weights, count, symmetric, lane, to + first / kGroup * kGroupLines * kLine);
        }
    }
  });
}

void unpack_row(const Linear& linear, int64_t output, float* out) {
  if (linear.format == kParts) {
    const Linear* part = static_cast<const Linear*>(linear.packed);
    for (; output >= part->outputs; ++part) output -= part->outputs;
    return unpack_row(*part, output, out);
  }
  if (is_gguf(linear.format)) return unpack_blocks(linear, output, out);
  const int64_t per = inputs_per_step(linear.format), bytes = element_bytes(linear.format);
  const char* const block = static_cast<const char*>(linear.packed) +
                            output / kBlock * num_lines(linear.format, linear.inputs) * kLine +
                            output % kBlock * per * bytes;
  for (int64_t i = 0; i < linear.inputs; ++i) {
    const char* const at = block + i / per * kLine;
    if (linear.format == kInt4)
      out[i] = int4_weight(linear, output, i);
    else if (linear.format == kInt8)
      out[i] = static_cast<float>(reinterpret_cast<const int8_t*>(at)[i % per]) * linear.scales[output];
    else
      out[i] = element(linear.format, at, i % per);
  }
}

}  // namespace quire
