#include "threads.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

constexpr auto kSpin = std::chrono::microseconds(60);  // longer than the time between two kernels of a step
constexpr int kSpinsPerLook = 64;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

class Pool {
 public:
  void resize(int num_threads) {
    const std::lock_guard<std::mutex> one_caller(caller_);
    wanted_.store(num_threads, std::memory_order_relaxed);
    for (; started_ < num_threads - 1; ++started_) {
      const int index = started_ + 1;
      // The threads are never joined: the process may exit while they sleep, and the pool is never destroyed.
      std::thread([this, index] { work(index); }).detach();
    }
  }

  int num_threads() const { return wanted_.load(std::memory_order_relaxed); }

  void run(std::int64_t num_tasks, TaskFunction function, const void* context) {
    if (num_tasks <= 1 || num_threads() <= 1 || !caller_.try_lock()) {
      for (std::int64_t task = 0; task < num_tasks; ++task) function(context, task);
      return;
    }
    function_ = function;
    context_ = context;
    num_tasks_ = num_tasks;
    next_task_.store(0, std::memory_order_relaxed);
    generation_ += kGeneration;
    state_.store(generation_ | kOpen, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      { const std::lock_guard<std::mutex> lock(sleep_); }
      wake_.notify_all();
    }
    take_tasks();
    // Close the job first, so that no more workers can join it; then wait for the workers that have joined.
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int looks = 0; (state_.load(std::memory_order_acquire) & kJoined) != 0; ++looks) {
      // The awaited thread may need this core.
      if (looks < 2000) relax(); else std::this_thread::yield();
    }
    caller_.unlock();
  }

 private:
  // state_: generation of the job, whether workers may join it, and the number of workers in it.
  static constexpr std::uint64_t kJoined = 0xffff;
  static constexpr std::uint64_t kOpen = 1 << 16;
  static constexpr std::uint64_t kGeneration = 1 << 17;

  void take_tasks() {
    for (;;) {
      const std::int64_t task = next_task_.fetch_add(1, std::memory_order_relaxed);
      if (task >= num_tasks_) return;
      function_(context_, task);
    }
  }

  bool is_new(std::uint64_t state, std::uint64_t done) const {
    return (state & kOpen) != 0 && (state / kGeneration) != done;
  }

  std::uint64_t wait_for_job(std::uint64_t done, int index) {
    auto until = std::chrono::steady_clock::now() + kSpin;
    for (int looks = 0;; ++looks) {
      const std::uint64_t state = state_.load(std::memory_order_acquire);
      if (is_new(state, done) && index < num_threads()) return state;
      relax();
      if (looks % kSpinsPerLook != kSpinsPerLook - 1 || std::chrono::steady_clock::now() < until) continue;
      std::unique_lock<std::mutex> lock(sleep_);
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] { return is_new(state_.load(std::memory_order_seq_cst), done) && index < num_threads(); });
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      until = std::chrono::steady_clock::now() + kSpin;
    }
  }

  void work(int index) {
    std::uint64_t done = 0;
    for (;;) {
      std::uint64_t state = wait_for_job(done, index);
      if (!state_.compare_exchange_strong(state, state + 1, std::memory_order_acq_rel)) continue;
      take_tasks();
      done = state / kGeneration;
      state_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  std::mutex caller_;
  std::atomic<int> wanted_{1};
  int started_ = 0;
  std::uint64_t generation_ = 0;
  alignas(64) std::atomic<std::uint64_t> state_{0};
  alignas(64) std::atomic<std::int64_t> next_task_{0};
  TaskFunction function_ = nullptr;
  const void* context_ = nullptr;
  std::int64_t num_tasks_ = 0;
  alignas(64) std::atomic<int> sleepers_{0};
  std::mutex sleep_;
  std::condition_variable wake_;
};

Pool& pool() {
  static Pool* const instance = new Pool;  // never deleted, because its threads outlive main
  return *instance;
}

}  // namespace

void run_tasks(std::int64_t num_tasks, TaskFunction function, const void* context) {
  pool().run(num_tasks, function, context);
}

void set_num_threads(int num_threads) { pool().resize(num_threads < 1 ? 1 : num_threads); }

int num_threads() { return pool().num_threads(); }

}  // namespace quire
