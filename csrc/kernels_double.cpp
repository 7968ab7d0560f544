// SPDX-License-Identifier: Apache-2.0
#include "backward_pass.h"
#include "forward_pass.h"

namespace linbias::LINBIAS_VARIANT {

template void forward_pass<double>(const Call&, const Codec<double>&, const ForwardResult&);
template void backward_pass<double>(const Call&, const Codec<double>&, const BackwardCall&);

}  // namespace linbias::LINBIAS_VARIANT
