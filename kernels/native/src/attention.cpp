#include "attention.h"

#include <algorithm>
#include <cstring>
#include <vector>

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

namespace {

constexpr int64_t kPartKeys = 512;  // of latent attention in decode; longer rows have longer parts
constexpr int64_t kMostParts = 16;
constexpr int64_t kPartFloats = 8 << 20;  // results of parts that are kept at a time

// Returns the number of keys of a part. It depends only on the power of two above the row's length, so that a draft and
// the token that verifies it nearly always have the same parts.
int64_t keys_per_part(int64_t context) {
  int64_t keys = kPartKeys;
  while (keys * kMostParts < context) keys *= 2;
  return keys;
}

// Tasks of one row, whose results are at `stats` and `sums`.
struct LatentRow {
  int64_t row, tokens, first_task, parts, head_groups, heads_per_group;
  int64_t stats, sums;  // offsets; `sums` is -1 if there is one part, whose sums are the result
};

LatentRow plan_latent(const LatentAttention& a, int64_t row) {
  const int64_t tokens = a.query_start[row + 1] - a.query_start[row], context = a.context_lens[row];
  LatentRow plan{row, tokens, 0, 1, 1, a.num_heads, 0, -1};
  if (tokens < kFewTokens) {
    plan.parts = ceil_div(context, keys_per_part(context));
  } else {  // keys are packed once per group
    plan.head_groups = std::min<int64_t>(a.num_heads, kTasksPerThread * num_threads());
    plan.heads_per_group = ceil_div(a.num_heads, plan.head_groups);
    plan.head_groups = ceil_div(a.num_heads, plan.heads_per_group);
  }
  return plan;
}

}  // namespace

// A row with few tokens is divided by keys, a chunk by heads. Rows are computed in groups, so that the results of their
// parts need little memory.
void attend_latents(const Kernels& kernels, const LatentAttention& a) {
  static thread_local std::vector<LatentRow> rows;
  static thread_local std::vector<float> stats, sums;
  const int64_t width = static_cast<int64_t>(a.num_heads) * a.rank;  // of a token's result, which may begin after 2^31
  for (int64_t next = 0; next < a.num_rows;) {
    rows.clear();
    int64_t num_tasks = 0, num_stats = 0, num_sums = 0, num_queries = 0;
    for (; next < a.num_rows && (rows.empty() || num_sums < kPartFloats); ++next) {
      const int64_t tokens = a.query_start[next + 1] - a.query_start[next];
      if (a.context_lens[next] <= 0)  // padding
        std::memset(a.out + a.query_start[next] * width, 0, static_cast<size_t>(tokens * width) * sizeof(float));
      if (a.context_lens[next] <= 0 || tokens == 0) continue;
      LatentRow plan = plan_latent(a, next);
      plan.first_task = num_tasks;
      plan.stats = num_stats;
      num_tasks += plan.parts * plan.head_groups;
      num_queries += tokens * a.num_heads;
      num_stats += plan.parts * tokens * a.num_heads;
      if (plan.parts > 1) {
        plan.sums = num_sums;
        num_sums += plan.parts * tokens * a.num_heads * a.rank;
      }
      rows.push_back(plan);
    }
    if (stats.size() < static_cast<size_t>(2 * num_stats)) stats.resize(2 * num_stats);
    if (sums.size() < static_cast<size_t>(num_sums)) sums.resize(num_sums);
    // Threads of the pool would see their own vectors.
    const LatentRow* const plans = rows.data();
    const int64_t num_rows = static_cast<int64_t>(rows.size());
    float* const tops = stats.data();
    float* const totals = tops + num_stats;
    float* const partial = sums.data();
    const auto row_of = [&](int64_t task) -> const LatentRow& {
      return *(std::upper_bound(plans, plans + num_rows, task,
                                [](int64_t value, const LatentRow& plan) { return value < plan.first_task; }) - 1);
    };
    const auto out_of = [&](const LatentRow& plan) { return a.out + a.query_start[plan.row] * width; };
    parallel_for(num_tasks, [&](int64_t task) {
      const LatentRow& plan = row_of(task);
      const int64_t queries = plan.tokens * a.num_heads, own = task - plan.first_task;
      const int64_t part = own / plan.head_groups, group = own % plan.head_groups;
      const int64_t keys = plan.parts > 1 ? keys_per_part(a.context_lens[plan.row]) : a.context_lens[plan.row];
      LatentPart p;
      p.row = plan.row;
      p.first_head = group * plan.heads_per_group;
      p.last_head = std::min<int64_t>(p.first_head + plan.heads_per_group, a.num_heads);
      p.begin = part * keys;
      p.end = std::min<int64_t>(p.begin + keys, a.context_lens[plan.row]);
      p.few = plan.tokens < kFewTokens;
      p.sums = plan.sums < 0 ? out_of(plan) + p.first_head * a.rank : partial + plan.sums + part * queries * a.rank;
      p.token_stride = a.num_heads * a.rank;
      // The statistics of a group of heads are contiguous.
      const int64_t at = plan.stats + part * queries + p.first_head * plan.tokens;
      p.tops = tops + at;
      p.totals = totals + at;
      kernels.attend_latent(a, p);
    });
    parallel_chunks(num_queries, 64, [&](int64_t begin, int64_t end) {
      int64_t first = 0;  // of the row's queries
      for (int64_t i = 0; i < num_rows && first < end; ++i) {
        const LatentRow& plan = plans[i];
        const int64_t queries = plan.tokens * a.num_heads;
        for (int64_t at = std::max(begin, first); at < std::min(end, first + queries); ++at) {
          const int64_t token = (at - first) / a.num_heads, head = (at - first) % a.num_heads;
          const int64_t first_head = head / plan.heads_per_group * plan.heads_per_group;
          const int64_t heads = std::min<int64_t>(plan.heads_per_group, a.num_heads - first_head);
          const int64_t stat = plan.stats + first_head * plan.tokens + token * heads + head - first_head;
          float* const out = out_of(plan) + (token * a.num_heads + head) * a.rank;
          const float* const from =
              plan.sums < 0 ? out : partial + plan.sums + (token * a.num_heads + head) * a.rank;
          kernels.combine_latent(from, tops + stat, totals + stat, plan.parts, queries * a.rank, queries, a.rank, out);
        }
        first += queries;
      }
    });
  }
}

}  // namespace quire
