// Thread pool for kernels that take between ten microseconds and some milliseconds.
//
// The caller also works, and never waits for a thread that has not started: tasks are taken one by one from a counter,
// so that a worker that wakes late finds no task. A core that is busy with other work thus costs only its share,
// whereas a barrier over a fixed partition would wait for it. Workers poll for the next job for a short time and then
// sleep, so that an idle server uses no CPU.
#pragma once

#include <cstdint>

namespace quire {

using TaskFunction = void (*)(const void* context, std::int64_t task);

// Runs function(context, task) for task 0 .. num_tasks - 1, on the caller and the pool; returns when all have ended. A
// concurrent second caller works alone.
void run_tasks(std::int64_t num_tasks, TaskFunction function, const void* context);

void set_num_threads(int num_threads);
int num_threads();

template <class Function>
void parallel_for(std::int64_t num_tasks, const Function& function) {
  run_tasks(
      num_tasks,
      [](const void* context, std::int64_t task) { (*static_cast<const Function*>(context))(task); },
      &function);
}

// Runs function(begin, end) over `count` items in tasks of at least `grain` items.
template <class Function>
void parallel_chunks(std::int64_t count, std::int64_t grain, const Function& function) {
  const std::int64_t step = grain < 1 ? 1 : grain;
  parallel_for((count + step - 1) / step, [&](std::int64_t task) {
    const std::int64_t begin = task * step;
    function(begin, begin + step < count ? begin + step : count);
  });
}

}  // namespace quire
