// SPDX-License-Identifier: Apache-2.0
// The entry points of one variant. Compiled once per vector width; see variant.h.
#include "backward_pass.h"
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

void backward(const Call& call, const BackwardCall& back) {
  switch (call.dtype) {
    case DType::f32: return backward_pass<float>(call, back);
    case DType::f64: return backward_pass<double>(call, back);
    case DType::bf16: return backward_pass<Bf16>(call, back);
    case DType::f16: return backward_pass<Half>(call, back);
  }
}

}  // namespace

const Kernels& kernels() {
  static const Kernels table = {LINBIAS_TEXT(LINBIAS_VARIANT), forward, backward};
  return table;
}

}  // namespace linbias::LINBIAS_VARIANT
