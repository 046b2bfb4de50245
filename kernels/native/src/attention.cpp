#include "attention.h"

#include <cstring>

#include "threads.h"

namespace quire {
namespace {

constexpr int64_t kFewTokens = 4;  // a chunk shorter than this is not worth packing keys for

void attend_row(const Kernels& kernels, const Attention& a, int64_t row, int64_t kv_head) {
  const int64_t begin = a.query_start[row], end = a.query_start[row + 1], context = a.context_lens[row];
  if (context <= 0) {  // padding
    const int64_t group = a.num_heads / a.num_kv_heads * a.head_dim;
    for (int64_t token = begin; token < end; ++token)
      std::memset(a.out + token * a.out_stride + kv_head * group, 0, group * sizeof(float));
  } else if (end - begin < kFewTokens) {
    for (int64_t token = begin; token < end; ++token)
      kernels.attend_token(a, token, row, context - (end - token) + 1, kv_head);
  } else {
    kernels.attend_chunk(a, row, kv_head);
  }
}

}  // namespace

// The last rows first: chunks, which take longest, come after the rows in decode.
void attend_pages(const Kernels& kernels, const Attention& a) {
  parallel_for(a.num_rows * a.num_kv_heads, [&](int64_t task) {
    attend_row(kernels, a, a.num_rows - 1 - task / a.num_kv_heads, task % a.num_kv_heads);
  });
}

}  // namespace quire
