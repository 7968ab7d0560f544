// SPDX-License-Identifier: Apache-2.0
// The entry points of one variant. Compiled once per vector width; see variant.h.
#include "forward_pass.h"

namespace linbias::LINBIAS_VARIANT {
namespace {

#define LINBIAS_TEXT_(x) #x
#define LINBIAS_TEXT(x) LINBIAS_TEXT_(x)

void forward(const Call& call, const ForwardResult& result) {
  switch (call.dtype) {
    case DType::f32: return forward_pass<float>(call, result);
    case DType::f64: return forward_pass<double>(call, result);
    case DType::bf16: return forward_pass<Bf16>(call, result);
    case DType::f16: return forward_pass<Half>(call, result);
  }
}

}  // namespace

const Kernels& kernels() {
  static const Kernels table = {LINBIAS_TEXT(LINBIAS_VARIANT), forward, nullptr};
  return table;
}

}  // namespace linbias::LINBIAS_VARIANT
