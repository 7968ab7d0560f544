// SPDX-License-Identifier: Apache-2.0
// Working memory of one call: allocated before the threads start, so that no tile allocates.
#pragma once

#include <cstdlib>
#include <cstring>
#include <new>

#include "call.h"
#include "variant.h"

namespace linbias::LINBIAS_VARIANT {

// A cache-line aligned array of plain data, uninitialised unless asked for. std::vector would emit code of this vector
// width under a name that other variants share.
template <class X>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size, bool zeroed = false) { reset(size, zeroed); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  void reset(int64_t size, bool zeroed = false) {
    std::free(data_);
    data_ = nullptr;
    size_ = size;
    if (size <= 0) return;
    std::size_t bytes = (static_cast<std::size_t>(size) * sizeof(X) + 63) / 64 * 64;
    data_ = static_cast<X*>(std::aligned_alloc(64, bytes));
    if (!data_) throw std::bad_alloc();
    if (zeroed) std::memset(static_cast<void*>(data_), 0, bytes);
  }
  X* data() { return data_; }
  const X* data() const { return data_; }
  int64_t size() const { return size_; }
  X& operator[](int64_t i) { return data_[i]; }
  const X& operator[](int64_t i) const { return data_[i]; }

 private:
  X* data_ = nullptr;
  int64_t size_ = 0;
};

// Objects with constructors, one a worker.
template <class X>
class Objects {
 public:
  explicit Objects(int64_t size) : data_(new X[static_cast<std::size_t>(size)]), size_(size) {}
  Objects(const Objects&) = delete;
  Objects& operator=(const Objects&) = delete;
  ~Objects() { delete[] data_; }
  X& operator[](int64_t i) { return data_[i]; }
  int64_t size() const { return size_; }

 private:
  X* data_;
  int64_t size_;
};

LINBIAS_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
LINBIAS_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
template <class X>
LINBIAS_INLINE X lesser(X a, X b) {
  return b < a ? b : a;
}
template <class X>
LINBIAS_INLINE X greater(X a, X b) {
  return a < b ? b : a;
}

}  // namespace linbias::LINBIAS_VARIANT
