// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <initializer_list>

#include "call.h"

namespace linbias {

#ifdef LINBIAS_HAS_AVX512
namespace avx512 {
const Kernels& kernels();
}
#endif
#ifdef LINBIAS_HAS_AVX2
namespace avx2 {
const Kernels& kernels();
}
#endif
namespace baseline {
const Kernels& kernels();
}

const Kernels* find_kernels(const char* name) {
#ifdef LINBIAS_HAS_AVX512
  if (std::strcmp(name, "avx512") == 0)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
               ? &avx512::kernels()
               : nullptr;
#endif
#ifdef LINBIAS_HAS_AVX2
  if (std::strcmp(name, "avx2") == 0)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")
               ? &avx2::kernels()
               : nullptr;
#endif
  return std::strcmp(name, "baseline") == 0 ? &baseline::kernels() : nullptr;
}

const Kernels& best_kernels() {
  for (const char* name : {"avx512", "avx2"})
    if (const Kernels* kernels = find_kernels(name)) return *kernels;
  return baseline::kernels();
}

}  // namespace linbias
