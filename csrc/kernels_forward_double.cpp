// SPDX-License-Identifier: Apache-2.0
#include "forward_pass.h"

namespace linbias::LINBIAS_VARIANT {

template void forward_pass<double>(const Call&, const Codec<double>&, const ForwardResult&);

}  // namespace linbias::LINBIAS_VARIANT
