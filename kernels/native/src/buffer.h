// Memory that is kept between calls and grows with the largest call.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "format.h"

namespace quire {

class Buffer {
 public:
  template <class T>
  T* of(int64_t count) {
    const int64_t bytes = round_up(count * static_cast<int64_t>(sizeof(T)), kLine);
    if (bytes > size_) {
      std::free(memory_);
      memory_ = std::aligned_alloc(kLine, bytes);
      if (memory_ == nullptr) std::abort();
      size_ = bytes;
    }
    return static_cast<T*>(memory_);
  }
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(memory_); }

 private:
  void* memory_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace quire
