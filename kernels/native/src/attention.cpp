#include "attention.h"

#include <algorithm>
#include <cstring>

#include "threads.h"

namespace quire {
namespace {

constexpr int64_t kFewTokens = 12;  // shorter chunks are computed like decode, without packing keys
constexpr int64_t kFewWithWindow = 4;  // the same for rows longer than the sliding window, whose keys are loaded per token
constexpr int64_t kTasksPerThread = 4;

enum Kind { kTokens, kFew, kChunk };

// Returns which kernel computes a row.
Kind kind_of(const Attention& a, int64_t row) {
  const int64_t tokens = a.query_start[row + 1] - a.query_start[row], context = a.context_lens[row];
  if (context <= 0 || tokens <= 1) return kTokens;
  if (a.sliding_window > 0 && context > a.sliding_window) return tokens < kFewWithWindow ? kTokens : kChunk;
  return tokens < kFewTokens ? kFew : kChunk;
}

void attend_tokens(const Kernels& kernels, const Attention& a, int64_t row, int64_t first_kv_head,
                   int64_t last_kv_head) {
  const int64_t begin = a.query_start[row], end = a.query_start[row + 1], context = a.context_lens[row];
  const int64_t group = a.num_heads / a.num_kv_heads * a.head_dim;
  for (int64_t token = begin; token < end; ++token)
    if (context > 0)
      kernels.attend_token(a, token, row, context - (end - token) + 1, first_kv_head, last_kv_head);
    else  // padding
      std::memset(a.out + token * a.out_stride + first_kv_head * group, 0,
                  (last_kv_head - first_kv_head) * group * sizeof(float));
}

}  // namespace

// Rows in decode are split only as far as the threads need, so that heads are read in long runs. Tasks start with the
// last rows, because chunks, which take longest, come after the rows in decode.
void attend_pages(const Kernels& kernels, const Attention& a) {
  int64_t by_head = 0;  // rows with a task per KV head
  for (int64_t row = 0; row < a.num_rows; ++row) by_head += kind_of(a, row) == kTokens ? 0 : 1;
  const int64_t others = a.num_rows - by_head, wanted = kTasksPerThread * num_threads();
  const int64_t parts =
      others == 0 ? 1 : std::min<int64_t>(a.num_kv_heads, std::max<int64_t>(1, ceil_div(wanted, others)));
  const int64_t heads = ceil_div(a.num_kv_heads, parts);
  parallel_for(a.num_rows * a.num_kv_heads, [&](int64_t task) {
    const int64_t row = a.num_rows - 1 - task / a.num_kv_heads, kv_head = task % a.num_kv_heads;
    const Kind kind = kind_of(a, row);
    if (kind == kChunk)
      kernels.attend_chunk(a, row, kv_head);
    else if (kind == kFew)
      kernels.attend_few(a, row, kv_head);
    else if (kv_head % heads == 0)
      attend_tokens(kernels, a, row, kv_head, std::min(kv_head + heads, static_cast<int64_t>(a.num_kv_heads)));
  });
}

}  // namespace quire
