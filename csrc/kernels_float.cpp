// SPDX-License-Identifier: Apache-2.0
#include "backward_pass.h"
#include "forward_pass.h"

namespace linbias::LINBIAS_VARIANT {

template void forward_pass<float>(const Call&, const Codec<float>&, const ForwardResult&);
template void backward_pass<float>(const Call&, const Codec<float>&, const BackwardCall&);

}  // namespace linbias::LINBIAS_VARIANT
