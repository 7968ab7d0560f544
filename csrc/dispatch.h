// SPDX-License-Identifier: Apache-2.0
// Which variant of the kernels this machine runs.
#pragma once

#include "call.h"

namespace linbias {

// The widest variant that the processor supports.
const Kernels& best_kernels();

// The variant of that name, or null if it was not built or the processor lacks its instructions.
const Kernels* find_kernels(const char* name);

}  // namespace linbias
