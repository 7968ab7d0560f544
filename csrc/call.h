// SPDX-License-Identifier: Apache-2.0
// One call as plain data: what bindings.cpp fills and the kernels read. No vector type, no torch, no Python.
//
// Shape legend: B batch, H query heads, G key/value heads, T queries, S keys, D head dim, V value dim, C coordinates.
#pragma once

#include <cstdint>

namespace linbias {

using std::int32_t;
using std::int64_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

// An inclusive limit that is never reached.
constexpr int64_t kUnlimited = INT64_MAX;

enum class DType : int { f32 = 0, f64 = 1, bf16 = 2, f16 = 3 };
enum class Metric : int { none = 0, euclidean = 1, manhattan = 2 };

// A tensor: strides in elements, 0 along a broadcast dimension; data is null where the call has no such tensor.
template <class X>
struct Array {
  const X* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};

  explicit operator bool() const { return data != nullptr; }
  const X* at(int64_t a, int64_t b = 0, int64_t c = 0, int64_t d = 0) const {
    return data + a * stride[0] + b * stride[1] + c * stride[2] + d * stride[3];
  }
};

// A tensor of a type that is known at run time: indexed with the size of its elements, or rebound to their type.
template <>
struct Array<void> {
  const void* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};

  explicit operator bool() const { return data != nullptr; }
  const char* at(int64_t bytes, int64_t a, int64_t b = 0, int64_t c = 0) const {
    return static_cast<const char*>(data) + (a * stride[0] + b * stride[1] + c * stride[2]) * bytes;
  }
  template <class X>
  Array<X> as() const {
    return {static_cast<const X*>(data), {stride[0], stride[1], stride[2], stride[3]}};
  }
};

// The tensors and numbers of linbias.semantics.problem.Operands and Options.
struct Call {
  DType dtype = DType::f32;
  int64_t B = 0, H = 0, G = 0, T = 0, S = 0, D = 0, V = 0, C = 0;

  Array<void> query, key, value;               // (B, H|G, T|S, D|V), dtype; key and value in pages: (pages, G, page, .)
  Array<void> slopes, future_slopes;           // (b, H), accumulating dtype
  Array<void> query_positions, key_positions;  // (b, T|S) int64, or (b, T|S, C) accumulating dtype
  Array<int64_t> query_segments, key_segments; // (b, T|S)
  Array<uint8_t> key_mask;                     // (b, S)
  Array<uint8_t> attn_mask;                    // (B, H, T, S), broadcast by stride 0
  Array<int64_t> key_ranks;                    // (b, S)
  Array<uint8_t> query_unbiased, key_unbiased; // (b, T|S)
  Array<void> bound_norms;                     // (B, G, blocks), accumulating dtype; of pages: (pages, G, 1)
  Array<int64_t> key_lengths;                  // (b): the keys that an item has of S
  Array<int64_t> block_table;                  // (B, n): the page of each stretch of `page` keys
  const int64_t* seed = nullptr;

  bool causal = false;
  int64_t left = kUnlimited, right = kUnlimited;
  int64_t sinks = 0, prefix = 0;
  Metric metric = Metric::none;
  double scale = 1.0;
  bool has_softcap = false;
  double softcap = 0.0;
  double dropout_p = 0.0;
  double tolerance = 0.0;
  int64_t bounds_block = 0;
  int64_t page = 0, pages = 0;  // keys of a page, and pages; 0 without a block table
  int threads = 1;

  int64_t group() const { return H / G; }
  int64_t keys(int64_t b) const {
    if (!key_lengths) return S;
    const int64_t given = *key_lengths.at(b);
    return given < 0 ? 0 : given < S ? given : S;
  }
  // The page of stretch n. Entries of which no key exists may hold anything; what is read for them is hidden.
  int64_t page_of(int64_t b, int64_t n) const {
    const int64_t given = *block_table.at(b, n);
    return given < 0 ? 0 : given < pages ? given : pages - 1;
  }
};

// Contiguous results of a forward pass. Where only the output is wanted, the others are null, all of them.
struct ForwardResult {
  void* out = nullptr;          // (B, H, T, V), dtype
  void* lse = nullptr;          // (B, H, T), accumulating dtype
  void* lse_low = nullptr;      // (B, H, T), accumulating dtype: what rounding takes from lse
  void* skipped = nullptr;      // (B, H, T), accumulating dtype
  int64_t* computed = nullptr;  // (B, H)

  bool out_only() const { return !lse; }
};

// What backward reads beside the call, and what it writes; a null gradient was not asked for. Contiguous results.
struct BackwardCall {
  Array<void> out, grad_out;   // (B, H, T, V), dtype; grad_out null: zero
  Array<void> lse, lse_low, grad_lse;  // (B, H, T), accumulating dtype; grad_lse null: zero
  void* grad_query = nullptr;  // (B, H, T, D), dtype
  void* grad_key = nullptr;    // (B, G, S, D), dtype
  void* grad_value = nullptr;  // (B, G, S, V), dtype
  void* grad_slopes = nullptr;         // (B, H), accumulating dtype; summed over a broadcast batch by the caller
  void* grad_future_slopes = nullptr;  // (B, H), accumulating dtype
};

// The entry points of one vector width.
struct Kernels {
  const char* name;
  void (*forward)(const Call&, const ForwardResult&);
  void (*backward)(const Call&, const BackwardCall&);
};

// The widest that the processor supports; those of that name, or null where not built or not supported.
const Kernels& best_kernels();
const Kernels* find_kernels(const char* name);

}  // namespace linbias
