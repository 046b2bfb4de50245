#include "shared_sum.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

constexpr std::int64_t kSlotFloats = 1 << 15;
constexpr int kPolls = 4000;  // some tens of microseconds
constexpr int kYieldsPerLook = 64;

struct alignas(64) Turn {
  std::atomic<std::uint64_t> published;  // sums to which this rank has given its numbers
};
static_assert(sizeof(Turn) == 64 && std::atomic<std::uint64_t>::is_always_lock_free, "shared between processes");

bool wait_for(const Turn& turn, std::uint64_t wanted, double timeout_s) {
  const auto reached = [&] { return turn.published.load(std::memory_order_acquire) >= wanted; };
  for (int polls = 0; polls < kPolls; ++polls) {
    if (reached()) return true;
#if defined(__x86_64__)
    _mm_pause();
#endif
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  for (int yields = 0; !reached(); ++yields) {
    if (yields % kYieldsPerLook == 0 && std::chrono::steady_clock::now() > until) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace

std::int64_t shared_sum_bytes(std::int64_t ranks) {
  return ranks * static_cast<std::int64_t>(sizeof(Turn) + 2 * kSlotFloats * sizeof(float));
}

bool shared_sum(void* shared, std::int64_t rank, std::int64_t ranks, float* data, std::int64_t count, double timeout_s) {
  Turn* const turns = static_cast<Turn*>(shared);
  float* const slots = reinterpret_cast<float*>(turns + ranks);
  while (count > 0) {
    const std::int64_t part = std::min(count, kSlotFloats);
    const std::uint64_t turn = turns[rank].published.load(std::memory_order_relaxed) + 1;
    float* const set = slots + static_cast<std::int64_t>(turn % 2) * ranks * kSlotFloats;
    std::memcpy(set + rank * kSlotFloats, data, part * sizeof(float));
    turns[rank].published.store(turn, std::memory_order_release);
    for (std::int64_t other = 0; other < ranks; ++other) {
      if (!wait_for(turns[other], turn, timeout_s)) return false;
      const float* const from = set + other * kSlotFloats;
      if (other == 0)
        std::memcpy(data, from, part * sizeof(float));
      else
        for (std::int64_t i = 0; i < part; ++i) data[i] += from[i];
    }
    data += part;
    count -= part;
  }
  return true;
}

}  // namespace quire
