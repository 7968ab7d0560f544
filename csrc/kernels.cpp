// SPDX-License-Identifier: Apache-2.0
// The entry points of one variant. Compiled once per vector width; see variant.h.
#include "pack.h"
#include "passes.h"

namespace linbias::LINBIAS_VARIANT {
namespace {

#define LINBIAS_TEXT_(x) #x
#define LINBIAS_TEXT(x) LINBIAS_TEXT_(x)

void forward(const Call& call, const ForwardResult& result) {
  switch (call.dtype) {
    case DType::f32: return forward_pass(call, codec_of<float>(), result);
    case DType::f64: return forward_pass(call, codec_of<double>(), result);
    case DType::bf16: return forward_pass(call, codec_of<Bf16>(), result);
    case DType::f16: return forward_pass(call, codec_of<Half>(), result);
  }
}

void backward(const Call& call, const BackwardCall& back) {
  switch (call.dtype) {
    case DType::f32: return backward_pass(call, codec_of<float>(), back);
    case DType::f64: return backward_pass(call, codec_of<double>(), back);
    case DType::bf16: return backward_pass(call, codec_of<Bf16>(), back);
    case DType::f16: return backward_pass(call, codec_of<Half>(), back);
  }
}

}  // namespace

const Kernels& kernels() {
  static const Kernels table = {LINBIAS_TEXT(LINBIAS_VARIANT), forward, backward};
  return table;
}

}  // namespace linbias::LINBIAS_VARIANT
