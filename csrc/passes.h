// SPDX-License-Identifier: Apache-2.0
// The passes of one variant. Those of each compute type are compiled in a file of their own, so that a build uses every
// core.
#pragma once

#include "codec.h"

namespace linbias::LINBIAS_VARIANT {

template <class C>
void forward_pass(const Call& call, const Codec<C>& codec, const ForwardResult& result);
template <class C>
void backward_pass(const Call& call, const Codec<C>& codec, const BackwardCall& back);

}  // namespace linbias::LINBIAS_VARIANT
