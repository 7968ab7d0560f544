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

// Fields of linbias.problem.Operands; the centroids and radii of bounds are not used.
constexpr int kQuery = 0, kKey = 1, kValue = 2, kSlopes = 3, kFutureSlopes = 4, kQueryPositions = 5, kKeyPositions = 6,
    kQuerySegments = 7, kKeySegments = 8, kKeyMask = 9, kAttnMask = 10, kKeyRanks = 11, kQueryUnbiased = 12,
    kKeyUnbiased = 13, kBoundNorms = 14, kSeed = 17;

int64_t size_of(const nb::tuple& operands, int field, int dim) {
  return nb::cast<int64_t>(nb::cast<nb::tuple>(operands[field][1])[dim]);
}

void read_sizes(const nb::tuple& operands, Call& call) {
  call.B = size_of(operands, kQuery, 0), call.H = size_of(operands, kQuery, 1);
  call.T = size_of(operands, kQuery, 2), call.D = size_of(operands, kQuery, 3);
  call.G = size_of(operands, kValue, 1), call.S = size_of(operands, kValue, 2), call.V = size_of(operands, kValue, 3);
  if (call.metric != Metric::none && !operands[kKeyPositions].is_none()) call.C = size_of(operands, kKeyPositions, 2);
}

void read_operands(const nb::tuple& operands, Call& call) {
  const int64_t B = call.B, T = call.T, S = call.S, C = call.C;
  const int place = C > 0 ? 3 : 2;
  const int64_t blocks = call.bounds_block > 0 ? (S + call.bounds_block - 1) / call.bounds_block : 0;
  const int64_t query[] = {B, call.H, T, call.D}, key[] = {B, call.G, S, call.D}, value[] = {B, call.G, S, call.V};
  const int64_t slopes[] = {B, call.H}, query_place[] = {B, T, C}, key_place[] = {B, S, C};
  const int64_t pairs[] = {B, call.H, T, S}, norms[] = {B, call.G, blocks};
  read_array(operands[kQuery], "query", 4, query, call.query);
  read_array(operands[kKey], "key", 4, key, call.key);
  read_array(operands[kValue], "value", 4, value, call.value);
  read_array(operands[kSlopes], "slopes", 2, slopes, call.slopes);
  read_array(operands[kFutureSlopes], "future_slopes", 2, slopes, call.future_slopes);
  read_array(operands[kQueryPositions], "query_positions", place, query_place, call.query_positions);
  read_array(operands[kKeyPositions], "key_positions", place, key_place, call.key_positions);
  read_array(operands[kQuerySegments], "query_segments", 2, query_place, call.query_segments);
  read_array(operands[kKeySegments], "key_segments", 2, key_place, call.key_segments);
  read_array(operands[kKeyMask], "key_mask", 2, key_place, call.key_mask);
  read_array(operands[kAttnMask], "attn_mask", 4, pairs, call.attn_mask);
  read_array(operands[kKeyRanks], "key_ranks", 2, key_place, call.key_ranks);
  read_array(operands[kQueryUnbiased], "query_unbiased", 2, query_place, call.query_unbiased);
  read_array(operands[kKeyUnbiased], "key_unbiased", 2, key_place, call.key_unbiased);
  read_array(operands[kBoundNorms], "bound_norms", 3, norms, call.bound_norms);
  Array<int64_t> seed;
  read_array(operands[kSeed], "seed", 0, nullptr, seed);
  call.seed = seed.data;
}

void check(const Call& call) {
  if (call.G < 1 || call.H % call.G != 0) throw nb::value_error("query heads must be a multiple of key heads");
  if (bool(call.query_positions) != bool(call.key_positions)) throw nb::value_error("positions come in pairs");
  if (bool(call.query_segments) != bool(call.key_segments)) throw nb::value_error("segments come in pairs");
  if (call.metric != Metric::none && !call.query_positions) throw nb::value_error("a metric needs positions");
  if (call.dropout_p > 0 && !call.seed) throw nb::value_error("dropout needs a seed");
}

Metric metric_named(nb::handle name) {
  if (name.is_none()) return Metric::none;
  return nb::cast<std::string>(name) == "euclidean" ? Metric::euclidean : Metric::manhattan;
}

// environment: dtype, threads, variant; options: linbias.problem.Options.
Call read_call(const nb::tuple& environment, const nb::tuple& options, const nb::tuple& operands) {
  Call call;
  call.dtype = static_cast<DType>(nb::cast<int>(environment[0]));
  call.threads = nb::cast<int>(environment[1]);
  call.causal = nb::cast<bool>(options[0]);
  call.left = limit(options[1]);
  call.right = limit(options[2]);
  call.sinks = nb::cast<int64_t>(options[3]);
  call.prefix = nb::cast<int64_t>(options[4]);
  call.metric = metric_named(options[5]);
  call.scale = nb::cast<double>(options[6]);
  call.has_softcap = !options[7].is_none();
  if (call.has_softcap) call.softcap = nb::cast<double>(options[7]);
  call.dropout_p = nb::cast<double>(options[8]);
  call.tolerance = nb::cast<double>(options[9]);
  call.bounds_block = nb::cast<int64_t>(options[10]);
  read_sizes(operands, call);
  read_operands(operands, call);
  check(call);
  return call;
}

const Kernels& kernels_of(const nb::tuple& environment) {
  const std::string variant = nb::cast<std::string>(environment[2]);
  if (variant.empty()) return best_kernels();
  if (const Kernels* kernels = find_kernels(variant.c_str())) return *kernels;
  throw nb::value_error(("no kernels named '" + variant + "' run on this machine").c_str());
}

void* address(nb::handle value) {
  return value.is_none() ? nullptr : reinterpret_cast<void*>(nb::cast<std::uintptr_t>(value));
}

// results: addresses of out, lse, skipped, computed.
void forward(const nb::tuple& environment, const nb::tuple& options, const nb::tuple& operands,
             const nb::tuple& results) {
  const Kernels& kernels = kernels_of(environment);
  const Call call = read_call(environment, options, operands);
  const ForwardResult result{address(results[0]), address(results[1]), address(results[2]),
                             static_cast<int64_t*>(address(results[3]))};
  nb::gil_scoped_release release;
  kernels.forward(call, result);
}

// saved: views of out, grad_out, lse, grad_lse; results: addresses of the gradients of query, key, value, slopes and
// future slopes, None where not wanted.
void backward(const nb::tuple& environment, const nb::tuple& options, const nb::tuple& operands,
              const nb::tuple& saved, const nb::tuple& results) {
  const Kernels& kernels = kernels_of(environment);
  const Call call = read_call(environment, options, operands);
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
  m.def("forward", &linbias::forward, nb::arg("environment"), nb::arg("options"), nb::arg("operands"), nb::arg("results"));
  m.def("backward", &linbias::backward, nb::arg("environment"), nb::arg("options"), nb::arg("operands"),
        nb::arg("saved"), nb::arg("results"));
  m.def("has_variant", &linbias::has_variant, nb::arg("name"));
  // What backends/native.py must agree with: raised whenever the order or meaning of an argument changes.
  m.attr("interface") = 2;
  m.def("variant", [] { return std::string(linbias::best_kernels().name); });
}
