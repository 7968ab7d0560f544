// SPDX-License-Identifier: Apache-2.0
// The door from Python: finds the fields of the named tuples of linbias.semantics.problem by their names, checks shapes
// and dtypes, turns tensors into a Call, releases the GIL, forwards.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "call.h"
#include "dlpack.h"

namespace nb = nanobind;

namespace linbias {
namespace {

// A field of a named tuple; its place is looked up once, by `bind`.
struct Field {
  const char* name;
  Py_ssize_t place = -1;

  nb::handle of(nb::handle tuple) const { return PyTuple_GetItem(tuple.ptr(), place); }
};

struct {
  Field query{"query"}, key{"key"}, value{"value"}, slopes{"slopes"}, future_slopes{"future_slopes"};
  Field query_positions{"query_positions"}, key_positions{"key_positions"};
  Field query_segments{"query_segments"}, key_segments{"key_segments"};
  Field key_mask{"key_mask"}, attn_mask{"attn_mask"}, key_ranks{"key_ranks"};
  Field query_unbiased{"query_unbiased"}, key_unbiased{"key_unbiased"}, bound_norms{"bound_norms"}, seed{"seed"};
  Field key_lengths{"key_lengths"}, block_table{"block_table"};
} operand;
struct {
  Field causal{"causal"}, left{"left"}, right{"right"}, sinks{"sinks"}, prefix{"prefix"}, metric{"metric"};
  Field scale{"scale"}, softcap{"softcap"}, dropout_p{"dropout_p"}, tolerance{"tolerance"};
  Field bounds_block{"bounds_block"}, paged_keys{"paged_keys"};
} option;
struct {
  Field out{"out"}, lse{"lse"}, lse_low{"lse_low"}, skipped{"skipped"}, computed{"computed"};
} result;
struct {
  Field query{"query"}, key{"key"}, value{"value"}, slopes{"slopes"}, future_slopes{"future_slopes"};
} gradient;

const dlpack::ExchangeTable* table = nullptr;

template <class Fields>
void find_fields(Fields& fields, const nb::tuple& names, nb::list& found) {
  Field* field = reinterpret_cast<Field*>(&fields);
  for (std::size_t i = 0; i < sizeof(Fields) / sizeof(Field); ++i, ++field) {
    field->place = -1;
    for (std::size_t at = 0; at < names.size(); ++at)
      if (nb::cast<std::string>(names[at]) == field->name) field->place = Py_ssize_t(at);
    if (field->place < 0) throw nb::key_error(field->name);
    found.append(field->name);
  }
}

// The names of Operands, Options, Result and Gradients; returns those that are read. A field of another name is never
// looked at: native.py leaves calls that use one to other backends.
nb::list bind(nb::capsule exchange, const nb::tuple& operands, const nb::tuple& options, const nb::tuple& results,
              const nb::tuple& gradients) {
  nb::list found;
  find_fields(operand, operands, found), find_fields(option, options, found);
  find_fields(result, results, found), find_fields(gradient, gradients, found);
  const auto* given = static_cast<const dlpack::ExchangeTable*>(exchange.data());
  if (given->version.major != 1 || !given->view) throw nb::value_error("needs the exchange table of DLPack 1");
  table = given;
  return found;
}

dlpack::Tensor view(nb::handle tensor) {
  dlpack::Tensor seen;
  if (table->view(tensor.ptr(), &seen) != 0) throw nb::python_error();
  // An empty tensor has no address, yet it is there.
  char* start = seen.data ? static_cast<char*>(seen.data) : reinterpret_cast<char*>(std::uintptr_t(64));
  seen.data = start + seen.byte_offset;
  return seen;
}

[[noreturn]] void refuse(const char* name, const std::string& why) {
  throw nb::value_error((std::string(name) + " " + why).c_str());
}

template <class X>
void read(nb::handle from, const char* name, dlpack::DType dtype, int dims, const int64_t* shape, Array<X>& out) {
  if (from.is_none()) return;
  const dlpack::Tensor tensor = view(from);
  if (tensor.dtype.code != dtype.code || tensor.dtype.bits != dtype.bits || tensor.device.type != dlpack::cpu)
    refuse(name, "must have the dtype that native.py promises, on the CPU");
  if (tensor.ndim != dims)
    refuse(name, "must have " + std::to_string(dims) + " dimensions, got " + std::to_string(tensor.ndim));
  for (int d = 0; d < dims; ++d) {
    if (tensor.shape[d] != shape[d] && tensor.shape[d] != 1)
      refuse(name, "must have size 1 or " + std::to_string(shape[d]) + " in dimension " + std::to_string(d) + ", got " +
                       std::to_string(tensor.shape[d]));
    out.stride[d] = tensor.shape[d] == 1 ? 0 : tensor.strides[d];
  }
  out.data = static_cast<const X*>(tensor.data);
}

constexpr dlpack::DType integers{dlpack::integer, 64, 1}, booleans{dlpack::boolean, 8, 1};

// The accumulating dtype.
dlpack::DType sums_of(const Call& call) {
  return {dlpack::floating, std::uint8_t(call.dtype == DType::f64 ? 64 : 32), 1};
}

DType dtype_of(const dlpack::DType& dtype) {
  if (dtype.code == dlpack::bfloat) return DType::bf16;
  return dtype.bits == 64 ? DType::f64 : dtype.bits == 32 ? DType::f32 : DType::f16;
}

int64_t limit(nb::handle value) { return value.is_none() ? kUnlimited : nb::cast<int64_t>(value); }

void read_options(nb::handle options, Call& call) {
  call.causal = nb::cast<bool>(option.causal.of(options));
  call.left = limit(option.left.of(options));
  call.right = limit(option.right.of(options));
  call.sinks = nb::cast<int64_t>(option.sinks.of(options));
  call.prefix = nb::cast<int64_t>(option.prefix.of(options));
  if (const nb::handle metric = option.metric.of(options); !metric.is_none())
    call.metric = nb::cast<std::string>(metric) == "euclidean" ? Metric::euclidean : Metric::manhattan;
  call.scale = nb::cast<double>(option.scale.of(options));
  const nb::handle softcap = option.softcap.of(options);
  call.has_softcap = !softcap.is_none();
  if (call.has_softcap) call.softcap = nb::cast<double>(softcap);
  call.dropout_p = nb::cast<double>(option.dropout_p.of(options));
  call.tolerance = nb::cast<double>(option.tolerance.of(options));
  call.bounds_block = nb::cast<int64_t>(option.bounds_block.of(options));
}

void read_optional(nb::handle operands, Call& call) {
  const int64_t B = call.B, T = call.T, S = call.S, C = call.C;
  const int64_t blocks = call.bounds_block > 0 ? (S + call.bounds_block - 1) / call.bounds_block : 0;
  const int64_t slopes[] = {B, call.H}, queries[] = {B, T, C}, keys[] = {B, S, C};
  const int64_t pairs[] = {B, call.H, T, S};
  const int64_t norms[] = {call.page ? call.pages : B, call.G, call.page ? 1 : blocks};
  const dlpack::DType sums = sums_of(call), places = call.metric == Metric::none ? integers : sums;
  const int place_dims = call.metric == Metric::none ? 2 : 3;
  const auto field = [&](const Field& f, dlpack::DType dtype, int dims, const int64_t* shape, auto& out) {
    read(f.of(operands), f.name, dtype, dims, shape, out);
  };
  field(operand.future_slopes, sums, 2, slopes, call.future_slopes);
  field(operand.query_positions, places, place_dims, queries, call.query_positions);
  field(operand.key_positions, places, place_dims, keys, call.key_positions);
  field(operand.query_segments, integers, 2, queries, call.query_segments);
  field(operand.key_segments, integers, 2, keys, call.key_segments);
  field(operand.key_mask, booleans, 2, keys, call.key_mask);
  field(operand.attn_mask, booleans, 4, pairs, call.attn_mask);
  field(operand.key_ranks, integers, 2, keys, call.key_ranks);
  field(operand.query_unbiased, booleans, 2, queries, call.query_unbiased);
  field(operand.key_unbiased, booleans, 2, keys, call.key_unbiased);
  field(operand.bound_norms, sums, 3, norms, call.bound_norms);
  field(operand.key_lengths, integers, 1, &B, call.key_lengths);
  Array<int64_t> seed;
  field(operand.seed, integers, 0, nullptr, seed);
  call.seed = seed.data;
}

void check(const Call& call) {
  if (call.G < 1 || call.H % call.G != 0) throw nb::value_error("query heads must be a multiple of key heads");
  if (bool(call.query_positions) != bool(call.key_positions)) throw nb::value_error("positions come in pairs");
  if (bool(call.query_segments) != bool(call.key_segments)) throw nb::value_error("segments come in pairs");
  if (call.metric != Metric::none && !call.query_positions) throw nb::value_error("a metric needs positions");
  if (call.dropout_p > 0 && !call.seed) throw nb::value_error("dropout needs a seed");
}

// Key and value as pages (pages, G, page, .): S keys an item, where the table says.
void read_pages(nb::handle table, nb::handle options, const dlpack::Tensor& value, Call& call) {
  call.S = nb::cast<int64_t>(option.paged_keys.of(options));
  call.pages = value.shape[0], call.page = value.shape[2];
  if (call.S > 0 && (call.page < 1 || call.pages < 1)) throw nb::value_error("pages must hold keys");
  const int64_t stretches = call.S > 0 ? (call.S + call.page - 1) / call.page : 0;
  const int64_t given = view(table).ndim == 2 ? view(table).shape[1] : 0;
  if (given < stretches) throw nb::value_error("block_table must have an entry for each stretch of keys");
  const int64_t entries[] = {call.B, given};
  read(table, "block_table", integers, 2, entries, call.block_table);
}

// Returns the dtype of the elements.
dlpack::DType read_call(nb::handle operands, nb::handle options, int threads, Call& call) {
  if (!table) throw nb::value_error("`bind` comes first");
  const dlpack::Tensor query = view(operand.query.of(operands)), value = view(operand.value.of(operands));
  if (query.ndim != 4 || value.ndim != 4) throw nb::value_error("query and value must have 4 dimensions");
  call.dtype = dtype_of(query.dtype);
  call.threads = threads;
  call.B = query.shape[0], call.H = query.shape[1], call.T = query.shape[2], call.D = query.shape[3];
  call.G = value.shape[1], call.S = value.shape[2], call.V = value.shape[3];
  const nb::handle pages = operand.block_table.of(operands);
  const int64_t keys[] = {pages.is_none() ? call.B : value.shape[0], call.G, call.S, call.D}, slopes[] = {call.B, call.H};
  read(operand.query.of(operands), "query", query.dtype, 4, query.shape, call.query);
  read(operand.key.of(operands), "key", query.dtype, 4, keys, call.key);
  read(operand.value.of(operands), "value", query.dtype, 4, value.shape, call.value);
  if (!pages.is_none()) read_pages(pages, options, value, call);
  read(operand.slopes.of(operands), "slopes", sums_of(call), 2, slopes, call.slopes);
  read_options(options, call);
  const nb::handle places = operand.key_positions.of(operands);
  if (call.metric != Metric::none && !places.is_none()) call.C = view(places).shape[2];
  read_optional(operands, call);
  check(call);
  return query.dtype;
}

const Kernels& kernels_of(const char* variant) {
  if (*variant == 0) return best_kernels();
  if (const Kernels* kernels = find_kernels(variant)) return *kernels;
  throw nb::value_error(("no kernels named '" + std::string(variant) + "' run on this machine").c_str());
}

void* address(nb::handle tensor) { return tensor.is_none() ? nullptr : view(tensor).data; }

// results: a Result of contiguous tensors to fill; beside `out`, all or none of them.
void forward(const nb::tuple& operands, const nb::tuple& options, const nb::tuple& results, int threads,
             const char* variant) {
  const Kernels& kernels = kernels_of(variant);
  Call call;
  read_call(operands, options, threads, call);
  const ForwardResult into{address(result.out.of(results)), address(result.lse.of(results)),
                           address(result.lse_low.of(results)), address(result.skipped.of(results)),
                           static_cast<int64_t*>(address(result.computed.of(results)))};
  nb::gil_scoped_release release;
  kernels.forward(call, into);
}

// gradients: Gradients of contiguous tensors to fill, None where not wanted; those of slopes are (B, H).
void backward(const nb::tuple& operands, const nb::tuple& options, nb::handle out, nb::handle lse, nb::handle lse_low,
              nb::handle grad_out, nb::handle grad_lse, const nb::tuple& gradients, int threads, const char* variant) {
  const Kernels& kernels = kernels_of(variant);
  Call call;
  const dlpack::DType elements = read_call(operands, options, threads, call), sums = sums_of(call);
  const int64_t rows[] = {call.B, call.H, call.T, call.V};
  BackwardCall back;
  read(out, "out", elements, 4, rows, back.out);
  read(grad_out, "grad_out", elements, 4, rows, back.grad_out);
  read(lse, "lse", sums, 3, rows, back.lse);
  read(lse_low, "lse_low", sums, 3, rows, back.lse_low);
  read(grad_lse, "grad_lse", sums, 3, rows, back.grad_lse);
  back.grad_query = address(gradient.query.of(gradients));
  back.grad_key = address(gradient.key.of(gradients));
  back.grad_value = address(gradient.value.of(gradients));
  back.grad_slopes = address(gradient.slopes.of(gradients));
  back.grad_future_slopes = address(gradient.future_slopes.of(gradients));
  nb::gil_scoped_release release;
  kernels.backward(call, back);
}

}  // namespace
}  // namespace linbias

NB_MODULE(_native, m) {
  m.def("bind", &linbias::bind);
  m.def("forward", &linbias::forward);
  m.def("backward", &linbias::backward, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
        nb::arg().none(), nb::arg(), nb::arg(), nb::arg());
  m.def("has_variant", [](const char* name) { return linbias::find_kernels(name) != nullptr; });
  m.def("variant", [] { return std::string(linbias::best_kernels().name); });
}
