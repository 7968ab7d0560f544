// SPDX-License-Identifier: Apache-2.0
// The door from Python: checks shapes, turns tensors' addresses into a Call, releases the GIL, forwards.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "call.h"
#include "dispatch.h"

namespace nb = nanobind;

namespace linbias {
namespace {

// A tensor as native.py hands it over: (address, shape, strides in elements); None where the call has none.
constexpr int kMostDims = 4;

template <class X>
void read_array(nb::handle source, const char* name, int dims, const int64_t* expected, Array<X>& out) {
  if (source.is_none()) return;
  const nb::tuple parts = nb::cast<nb::tuple>(source);
  const nb::tuple shape = nb::cast<nb::tuple>(parts[1]), stride = nb::cast<nb::tuple>(parts[2]);
  if (static_cast<int>(shape.size()) != dims)
    throw nb::value_error((std::string(name) + " must have " + std::to_string(dims) + " dimensions, got " +
                           std::to_string(shape.size()))
                              .c_str());
  for (int d = 0; d < dims; ++d) {
    const int64_t size = nb::cast<int64_t>(shape[d]);
    if (size != expected[d] && size != 1)
      throw nb::value_error((std::string(name) + " must have size 1 or " + std::to_string(expected[d]) +
                             " in dimension " + std::to_string(d) + ", got " + std::to_string(size))
                                .c_str());
    out.stride[d] = size == 1 ? 0 : nb::cast<int64_t>(stride[d]);
  }
  const auto address = nb::cast<std::uintptr_t>(parts[0]);
  // An empty tensor has no address, yet it is there.
  out.data = reinterpret_cast<const X*>(address ? address : std::uintptr_t(64));
}

int64_t limit(nb::handle value) { return value.is_none() ? kUnlimited : nb::cast<int64_t>(value); }

// Order of linbias.problem.Operands.
void read_operands(const nb::tuple& operands, Call& call) {
  const int64_t B = call.B, T = call.T, S = call.S, C = call.C;
  const int place = C > 0 ? 3 : 2;
  const int64_t blocks = call.bounds_block > 0 ? (S + call.bounds_block - 1) / call.bounds_block : 0;
  const int64_t query[] = {B, call.H, T, call.D}, key[] = {B, call.G, S, call.D}, value[] = {B, call.G, S, call.V};
  const int64_t slopes[] = {B, call.H}, query_place[] = {B, T, C}, key_place[] = {B, S, C};
  const int64_t pairs[] = {B, call.H, T, S}, norms[] = {B, call.G, blocks};
  read_array(operands[0], "query", 4, query, call.query);
  read_array(operands[1], "key", 4, key, call.key);
  read_array(operands[2], "value", 4, value, call.value);
  read_array(operands[3], "slopes", 2, slopes, call.slopes);
  read_array(operands[4], "future_slopes", 2, slopes, call.future_slopes);
  read_array(operands[5], "query_positions", place, query_place, call.query_positions);
  read_array(operands[6], "key_positions", place, key_place, call.key_positions);
  read_array(operands[7], "query_segments", 2, query_place, call.query_segments);
  read_array(operands[8], "key_segments", 2, key_place, call.key_segments);
  read_array(operands[9], "key_mask", 2, key_place, call.key_mask);
  read_array(operands[10], "attn_mask", 4, pairs, call.attn_mask);
  read_array(operands[11], "key_ranks", 2, key_place, call.key_ranks);
  read_array(operands[12], "query_unbiased", 2, query_place, call.query_unbiased);
  read_array(operands[13], "key_unbiased", 2, key_place, call.key_unbiased);
  read_array(operands[14], "bound_norms", 3, norms, call.bound_norms);
  Array<int64_t> seed;
  read_array(operands[15], "seed", 0, nullptr, seed);
  call.seed = seed.data;
}

void check(const Call& call) {
  if (call.G < 1 || call.H % call.G != 0) throw nb::value_error("query heads must be a multiple of key heads");
  if (bool(call.query_positions) != bool(call.key_positions)) throw nb::value_error("positions come in pairs");
  if (bool(call.query_segments) != bool(call.key_segments)) throw nb::value_error("segments come in pairs");
  if (call.metric != Metric::none && !call.query_positions) throw nb::value_error("a metric needs positions");
  if (call.dropout_p > 0 && !call.seed) throw nb::value_error("dropout needs a seed");
}

// sizes: dtype, B, H, G, T, S, D, V, C, threads; options: in the order of linbias.problem.Options, metric as a number.
Call read_call(const nb::tuple& sizes, const nb::tuple& options, const nb::tuple& operands) {
  Call call;
  call.dtype = static_cast<DType>(nb::cast<int>(sizes[0]));
  int64_t* const fields[] = {&call.B, &call.H, &call.G, &call.T, &call.S, &call.D, &call.V, &call.C};
  for (int i = 0; i < 8; ++i) *fields[i] = nb::cast<int64_t>(sizes[i + 1]);
  call.threads = nb::cast<int>(sizes[9]);
  call.causal = nb::cast<bool>(options[0]);
  call.left = limit(options[1]);
  call.right = limit(options[2]);
  call.sinks = nb::cast<int64_t>(options[3]);
  call.prefix = nb::cast<int64_t>(options[4]);
  call.metric = static_cast<Metric>(nb::cast<int>(options[5]));
  call.scale = nb::cast<double>(options[6]);
  call.has_softcap = !options[7].is_none();
  if (call.has_softcap) call.softcap = nb::cast<double>(options[7]);
  call.dropout_p = nb::cast<double>(options[8]);
  call.tolerance = nb::cast<double>(options[9]);
  call.bounds_block = nb::cast<int64_t>(options[10]);
  read_operands(operands, call);
  check(call);
  return call;
}

const Kernels& kernels_named(const char* variant) {
  if (!*variant) return best_kernels();
  if (const Kernels* kernels = find_kernels(variant)) return *kernels;
  throw nb::value_error((std::string("no kernels named '") + variant + "' run on this machine").c_str());
}

void* address(nb::handle value) {
  return value.is_none() ? nullptr : reinterpret_cast<void*>(nb::cast<std::uintptr_t>(value));
}

// results: addresses of out, lse, skipped, computed.
void forward(const nb::tuple& sizes, const nb::tuple& options, const nb::tuple& operands, const nb::tuple& results,
             const char* variant) {
  const Kernels& kernels = kernels_named(variant);
  const Call call = read_call(sizes, options, operands);
  const ForwardResult result{address(results[0]), address(results[1]), address(results[2]),
                             static_cast<int64_t*>(address(results[3]))};
  nb::gil_scoped_release release;
  kernels.forward(call, result);
}

// saved: views of out, grad_out, lse, grad_lse; results: addresses of the gradients of query, key, value, slopes and
// future slopes, None where not wanted.
void backward(const nb::tuple& sizes, const nb::tuple& options, const nb::tuple& operands, const nb::tuple& saved,
              const nb::tuple& results, const char* variant) {
  const Kernels& kernels = kernels_named(variant);
  const Call call = read_call(sizes, options, operands);
  const int64_t rows[] = {call.B, call.H, call.T, call.V};
  BackwardCall back;
  read_array(saved[0], "out", 4, rows, back.out);
  read_array(saved[1], "grad_out", 4, rows, back.grad_out);
  read_array(saved[2], "lse", 3, rows, back.lse);
  read_array(saved[3], "grad_lse", 3, rows, back.grad_lse);
  back.grad_query = address(results[0]);
  back.grad_key = address(results[1]);
  back.grad_value = address(results[2]);
  back.grad_slopes = address(results[3]);
  back.grad_future_slopes = address(results[4]);
  nb::gil_scoped_release release;
  kernels.backward(call, back);
}

bool has_variant(const char* name) { return find_kernels(name) != nullptr; }

}  // namespace
}  // namespace linbias

NB_MODULE(_native, m) {
  m.def("forward", &linbias::forward, nb::arg("sizes"), nb::arg("options"), nb::arg("operands"), nb::arg("results"),
        nb::arg("variant") = "");
  m.def("backward", &linbias::backward, nb::arg("sizes"), nb::arg("options"), nb::arg("operands"), nb::arg("saved"),
        nb::arg("results"), nb::arg("variant") = "");
  m.def("has_variant", &linbias::has_variant, nb::arg("name"));
  m.def("variant", [] { return std::string(linbias::best_kernels().name); });
}
