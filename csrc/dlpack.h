// SPDX-License-Identifier: Apache-2.0
// What of DLPack 1.3 (https://dmlc.github.io/dlpack) is used: the table of functions by which torch lets an extension
// look at its tensors without a call of Python, and without torch's headers.
#pragma once

#include <cstdint>

namespace linbias::dlpack {

enum : std::int32_t { cpu = 1 };
enum : std::uint8_t { integer = 0, floating = 2, bfloat = 4, boolean = 6 };

struct DType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  struct { std::int32_t type, id; } device;
  std::int32_t ndim;
  DType dtype;
  std::int64_t *shape, *strides;
  std::uint64_t byte_offset;
};

struct ExchangeTable {
  struct { std::uint32_t major, minor; } version;
  void* previous;
  void *allocate, *from_object, *to_object;
  int (*view)(void* object, Tensor* out);  // borrows; -1 with a Python exception set
  void* current_stream;
};

}  // namespace linbias::dlpack
