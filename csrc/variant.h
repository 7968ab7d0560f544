// SPDX-License-Identifier: Apache-2.0
// The namespace and vector width of this translation unit. Every kernels*.cpp is compiled once per variant; all that
// depends on the width lives in linbias::LINBIAS_VARIANT, so that no two variants ever share a symbol.
#pragma once

#ifndef LINBIAS_VARIANT
#error "LINBIAS_VARIANT names the namespace of this build of the kernels"
#endif

#ifndef LINBIAS_VECTOR_BYTES
#if defined(__AVX512F__)
#define LINBIAS_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define LINBIAS_VECTOR_BYTES 32
#else
#define LINBIAS_VECTOR_BYTES 16
#endif
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
#define LINBIAS_REGISTERS 32
#else
#define LINBIAS_REGISTERS 16
#endif

// Whether a product and a sum round once.
#if defined(__FMA__) || defined(__aarch64__)
#define LINBIAS_FUSED 1
#else
#define LINBIAS_FUSED 0
#endif

#define LINBIAS_INLINE inline __attribute__((always_inline))
