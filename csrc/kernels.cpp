// SPDX-License-Identifier: Apache-2.0
// The entry points of one variant. Compiled once per vector width; see variant.h.
#include "pack.h"
#include "passes.h"

namespace linbias::LINBIAS_VARIANT {
namespace {

#define LINBIAS_TEXT_(x) #x
#define LINBIAS_TEXT(x) LINBIAS_TEXT_(x)

template <class Pass>
void with_codec(const Call& call, const Pass& pass) {
  switch (call.dtype) {
    case DType::f32: return pass(codec_of<float>());
    case DType::f64: return pass(codec_of<double>());
    case DType::bf16: return pass(codec_of<Bf16>());
    case DType::f16: return pass(codec_of<Half>());
  }
}

void forward(const Call& call, const ForwardResult& result) {
  with_codec(call, [&](const auto& codec) { forward_pass(call, codec, result); });
}

void backward(const Call& call, const BackwardCall& back) {
  with_codec(call, [&](const auto& codec) { backward_pass(call, codec, back); });
}

}  // namespace

const Kernels& kernels() {
  static const Kernels table = {LINBIAS_TEXT(LINBIAS_VARIANT), forward, backward};
  return table;
}

}  // namespace linbias::LINBIAS_VARIANT
