// C functions of the library, called through ctypes, which releases the GIL. They do not throw and do not return memory
// that the caller must free. `level` is one of quire_levels().
#include <algorithm>
#include <atomic>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "attention.h"
#include "buffer.h"
#include "decoder.h"
#include "levels.h"
#include "linear.h"
#include "sampling.h"
#include "shared_sum.h"
#include "threads.h"

#define QUIRE_API extern "C" __attribute__((visibility("default")))

namespace {

using namespace quire;

// Version of the ABI: increased with every change of a structure or function, together with ABI in library.py.
constexpr int kAbi = 16;

const Kernels* kernels_of(int level) {
  switch (level) {
    case kAmx: return amx_kernels();
    case kAvx512: return avx512_kernels();
    case kAvx2: return avx2_kernels();
    default: return portable_kernels();
  }
}

// Whether the processor has the tile registers, the system saves them, and it allows this process to use them. The
// permission is for all threads of the process, and asking again is harmless.
bool has_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned kXsave = 1u << 27, kTileUnits = 1u << 22 | 1u << 24 | 1u << 25;  // BF16, TILE, INT8
  constexpr unsigned kTileState = 3u << 17;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kXsave) == 0) return false;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kTileUnits) != kTileUnits) return false;
  __asm__("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  return (a & kTileState) == kTileState && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// Checks for the instruction sets that setup.py enables for a level.
bool runs_here(int level) {
  if (kernels_of(level) == nullptr) return false;
#if defined(__x86_64__)
  if (level == kAvx2)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (level == kAvx512)
    return __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  if (level == kAmx) return runs_here(kAvx512) && has_tiles();
#endif
  return level == kPortable;
}

}  // namespace

QUIRE_API int quire_abi() { return kAbi; }

// Returns the bit mask of the levels that are compiled and that this processor supports.
QUIRE_API int quire_levels() {
  int mask = 0;
  for (int level : {kPortable, kAvx2, kAvx512, kAmx})
    if (runs_here(level)) mask |= 1 << level;
  return mask;
}

QUIRE_API void quire_set_num_threads(int count) { set_num_threads(count); }

QUIRE_API void quire_pack_in_place(int format, void* weight, int64_t outputs, int64_t inputs) {
  pack_in_place(format, weight, outputs, inputs);
}

QUIRE_API void quire_quantise(int format, const void* weight, int64_t stride, int64_t outputs, int64_t inputs,
                              int8_t* packed, float* scales, int32_t* sums) {
  quantise(format, weight, stride, outputs, inputs, packed, scales, sums);
}

QUIRE_API void quire_quantise_int4(int format, const void* weight, int64_t stride, int64_t outputs, int64_t inputs,
                                   int symmetric, uint8_t* packed) {
  quantise_int4(format, weight, stride, outputs, inputs, symmetric != 0, packed);
}

// x [rows][inputs] float32 or bfloat16, contiguous; out as `store` says.
QUIRE_API void quire_linear(int level, const Linear* linear, int x_format, const void* x, int64_t rows, void* out,
                            int64_t out_stride, int store) {
  static thread_local Buffer work, work_scales;
  const Kernels& kernels = *kernels_of(level);
  const int64_t inputs = linear->inputs, padded = round_up(inputs, 16);
  const int64_t stride = activation_stride(kernels, linear->format, inputs);
  char* const activations = work.of<char>(rows * stride);
  float* const scales = work_scales.of<float>(rows);
  parallel_chunks(rows, 4096 / padded, [&](int64_t begin, int64_t end) {
    static thread_local Buffer wide;
    for (int64_t row = begin; row < end; ++row) {
      const char* const from = static_cast<const char*>(x) + row * inputs * element_bytes(x_format);
      const float* values = reinterpret_cast<const float*>(from);
      if (x_format == kBFloat16) {
        float* const widened = wide.of<float>(padded);
        kernels.load_part(x_format, from, inputs, widened);
        values = widened;
      }
      kernels.to_activations(linear->format, values, inputs, padded, activations + row * stride, scales + row);
    }
  });
  multiply(kernels, {linear, activations, stride, scales, out, out_stride, store, 0, rows, 0, 0});
}

// Reads memory with all threads, to measure how fast that is; returns a sum of the words. bytes: a multiple of 64.
QUIRE_API uint64_t quire_read(const uint64_t* words, int64_t bytes) {
  constexpr int64_t kPart = 1 << 17, kStreams = 4;
  const int64_t lines = bytes / kLine;
  std::atomic<uint64_t> total{0};
  parallel_chunks(lines, kPart / kLine, [&](int64_t begin, int64_t end) {
    const int64_t per_stream = (end - begin) / kStreams;
    const uint64_t* const first = words + begin * 8;
    uint64_t sums[8] = {};
    for (int64_t line = 0; line < per_stream; ++line)
      for (int64_t stream = 0; stream < kStreams; ++stream)
        for (int i = 0; i < 8; ++i) sums[i] += first[(stream * per_stream + line) * 8 + i];
    for (const uint64_t sum : sums) total += sum;
  });
  return total;
}

QUIRE_API void quire_attention(int level, const Attention* attention) {
  attend_pages(*kernels_of(level), *attention);
}

QUIRE_API void quire_latent_attention(int level, const LatentAttention* attention) {
  attend_latents(*kernels_of(level), *attention);
}

QUIRE_API void quire_head_products(int level, const HeadProducts* products) {
  const Kernels& kernels = *kernels_of(level);
  parallel_for(products->heads, [&](int64_t head) { kernels.multiply_head(*products, head); });
}

QUIRE_API void quire_convert(int level, int format, int to_float, const void* x, void* out, int64_t count) {
  const Kernels& kernels = *kernels_of(level);  // count: a multiple of 16
  parallel_chunks(count / 16, 4096, [&](int64_t begin, int64_t end) {
    const int64_t at = begin * 16, bytes = element_bytes(format), n = (end - begin) * 16;
    if (to_float != 0)
      kernels.load(format, static_cast<const char*>(x) + at * bytes, n, static_cast<float*>(out) + at);
    else
      kernels.store(format, static_cast<const float*>(x) + at, n, static_cast<char*>(out) + at * bytes);
  });
}

// Finds the index of the largest logit of each row of logits [rows][stride]; -1 if no logit can be chosen.
QUIRE_API void quire_argmax(int level, const float* x, int64_t rows, int64_t stride, int64_t count, int64_t* out) {
  const Kernels& kernels = *kernels_of(level);
  parallel_for(rows, [&](int64_t row) {
    bool finite = false;
    const int64_t index = kernels.argmax(x + row * stride, count, &finite);
    out[row] = finite ? index : -1;
  });
}

QUIRE_API void quire_sample(int level, const Sampling* sampling) { sample_rows(*kernels_of(level), *sampling); }

QUIRE_API void quire_delta_rule(int level, const DeltaRule* rule) {
  const Kernels& kernels = *kernels_of(level);
  parallel_for(rule->rows * rule->value_heads,
               [&](int64_t task) { kernels.delta_rule(*rule, task / rule->value_heads, task % rule->value_heads); });
}

QUIRE_API void quire_selective_scan(int level, const SelectiveScan* scan) {
  const Kernels& kernels = *kernels_of(level);
  parallel_for(scan->rows * scan->heads,
               [&](int64_t task) { kernels.selective_scan(*scan, task / scan->heads, task % scan->heads); });
}

QUIRE_API void quire_convolve(int level, const Convolution* convolution) {
  constexpr int64_t kPart = 4096;  // channels of one task, which takes some microseconds
  const Kernels& kernels = *kernels_of(level);
  const int64_t channels = convolution->channels, parts = ceil_div(channels, kPart);
  parallel_for(convolution->rows * parts, [&](int64_t task) {
    const int64_t begin = task % parts * kPart;
    kernels.convolve(*convolution, task / parts, begin, std::min(begin + kPart, channels));
  });
}

QUIRE_API void quire_convolve_tokens(int level, const TokenConvolution* convolution) {
  constexpr int64_t kPart = 1 << 16;  // elements of one task
  const Kernels& kernels = *kernels_of(level);
  parallel_chunks(convolution->tokens, kPart / std::max<int64_t>(convolution->channels, 1),
                  [&](int64_t begin, int64_t end) { kernels.convolve_tokens(*convolution, begin, end); });
}

QUIRE_API void quire_rms_norm(int level, const Norm* norm) {
  constexpr int64_t kPart = 1 << 14;  // elements of one task
  const Kernels& kernels = *kernels_of(level);
  parallel_chunks(norm->rows, kPart / std::max<int64_t>(norm->dim, 1),
                  [&](int64_t begin, int64_t end) { kernels.normalise(*norm, begin, end); });
}

QUIRE_API void quire_write_kv(const KvWrite* write) {
  constexpr int64_t kPart = 1 << 16;  // bytes of one task
  const KvWrite& w = *write;
  const int64_t token_bytes = w.heads * (w.key_bytes + w.value_bytes);
  parallel_chunks(w.tokens, kPart / std::max<int64_t>(token_bytes, 1), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = w.slots[token];
      if (slot < 0) continue;
      const int64_t tile = slot / w.block_size * w.heads, offset = slot % w.block_size;
      for (int64_t head = 0; head < w.heads; ++head) {
        const int64_t place = (tile + head) * w.block_size + offset;
        std::memcpy(w.k_cache + place * w.key_bytes, w.key + token * w.key_token_stride + head * w.key_head_stride,
                    w.key_bytes);
        std::memcpy(w.v_cache + place * w.value_bytes,
                    w.value + token * w.value_token_stride + head * w.value_head_stride, w.value_bytes);
      }
    }
  });
}

// nanoseconds: [kNumPhases], to which the times are added; or null.
// Returns 0, or 1 if the sum over the ranks failed.
QUIRE_API int quire_decoder(int level, const Decoder* decoder, const Step* step, int64_t* nanoseconds) {
  return run_decoder(*kernels_of(level), *decoder, *step, nanoseconds) ? 0 : 1;
}

QUIRE_API int64_t quire_shared_sum_bytes(int64_t ranks) { return shared_sum_bytes(ranks); }

// Returns 1, or 0 after a timeout.
QUIRE_API int quire_shared_sum(void* shared, int64_t rank, int64_t ranks, float* data, int64_t count,
                               double timeout_s) {
  return shared_sum(shared, rank, ranks, data, count, timeout_s) ? 1 : 0;
}
