// SPDX-License-Identifier: Apache-2.0
#include "forward_pass.h"

namespace linbias::LINBIAS_VARIANT {

template void forward_pass<float>(const Call&, const Codec<float>&, const ForwardResult&);

}  // namespace linbias::LINBIAS_VARIANT
