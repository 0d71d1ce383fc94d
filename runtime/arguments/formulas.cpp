#include "runtime/arguments/formulas.hpp"

#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string_view>
#include <utility>

#include "codegen/arguments/table.hpp"
#include "codegen/formulas/formula_traits.hpp"
#include "codegen/spec/declarations.hpp"
#include "runtime/arguments/checks.hpp"
#include "runtime/arguments/overlap.hpp"

namespace flashjit {
namespace {

using Kind = TableDimension::Kind;

static_assert(device::most_formula_tables == most_tables && device::most_formula_scalars == most_scalars &&
              device::most_table_dims == most_dimensions);

const NamedArgument& find(const AttentionArgs& args, std::string_view name) {
  for (const NamedArgument& argument : args.named)
    if (argument.name == name) return argument;
  refuse_argument("named argument ", std::string(name), " is missing");
}

// The sizes of free dimensions, by the first table that has each.
class FreeSizes {
 public:
  void check(const DeclaredTable& table, const Tensor& t, int dim) {
    const std::string_view name = table.shape[static_cast<std::size_t>(dim)].name;
    for (int i = 0; i < count_; ++i) {
      const Bound& bound = bounds_[static_cast<std::size_t>(i)];
      if (bound.name != name) continue;
      if (bound.size != t.shape[dim])
        refuse_argument("table ", table.name, " has shape ", shape_text(t), ": dimension ", dim, " must be ",
                        bound.size, ", since ", std::string(name), " is ", bound.size, " in table ",
                        bound.table);
      return;
    }
    bounds_[static_cast<std::size_t>(count_++)] = {name, table.name.c_str(), t.shape[dim]};
  }

 private:
  struct Bound {
    std::string_view name;
    const char* table;
    std::int64_t size;
  };
  std::array<Bound, most_tables * most_dimensions> bounds_;
  int count_ = 0;
};

class Check {
 public:
  Check(const AttentionSpec& spec, Device device, const AttentionArgs& args, const device::ProblemParams& p)
      : spec_(spec), device_(device), args_(args), p_(p) {}

  void table(const DeclaredTable& declared, device::FormulaTable& to) {
    const auto* const given = std::get_if<Tensor>(&find(args_, declared.name).value);
    if (!given)
      refuse_argument("table ", declared.name, " was given as a number, the spec declares it as ",
                      to_string(declared.dtype), " ", shape_text(declared.shape, ""));
    const Tensor& t = *given;
    const std::string& name = declared.name;
    const int rank = static_cast<int>(declared.shape.size());
    if (t.rank != rank)
      refuse_argument("table ", name, " has rank ", t.rank, ", the spec declares ", rank, " dimensions, ",
                      shape_text(declared.shape, ""));
    if (t.dtype != declared.dtype)
      refuse_argument("table ", name, " has dtype ", to_string(t.dtype), ", the spec declares ",
                      to_string(declared.dtype));
    require_memory(name.c_str(), t, device_);
    const std::size_t bytes = size_of(t.dtype);
    if (reinterpret_cast<std::uintptr_t>(t.data) % bytes && has_elements(t))
      refuse_argument("table ", name, "'s data pointer is not aligned to ", bytes, " bytes");
    for (int dim = 0; dim < rank; ++dim) {
      check_size(declared, t, dim);
      to.strides[dim] = stride(t, dim);
      check_stride(declared, t, dim);
      to.sizes[dim] = size(t, dim);
    }
    to.data = has_elements(t) ? t.data : nullptr;
  }

  device::u32 scalar(const DeclaredScalar& declared) const {
    const auto* const given = std::get_if<double>(&find(args_, declared.name).value);
    if (!given) refuse_argument("scalar ", declared.name, " was given as a tensor; a number would work");
    const double value = *given;
    if (declared.dtype == DType::int32) {
      using Limits = std::numeric_limits<std::int32_t>;
      if (!(value >= Limits::min() && value <= Limits::max() && value == std::trunc(value)))
        refuse_argument("scalar ", declared.name, " is ", value, ", it must be an integer of 32 bits");
      return std::bit_cast<device::u32>(static_cast<std::int32_t>(value));
    }
    if (std::isfinite(value) && std::abs(value) > std::numeric_limits<float>::max())
      refuse_argument("scalar ", declared.name, " is ", value, ", beyond float32; inf would work");
    return std::bit_cast<device::u32>(static_cast<float>(value));
  }

 private:
  void check_size(const DeclaredTable& table, const Tensor& t, int dim) {
    const TableDimension& declared = table.shape[static_cast<std::size_t>(dim)];
    if (declared.or_one && t.shape[dim] == 1) return;
    // Tables may be made for longer sequences than a packed launch has. Lengths in pages are data.
    const bool packed_keys = key_layout(spec_) == KeyLayout::packed;
    switch (declared.kind) {
      case Kind::number:
        return exactly(table, t, dim, declared.size, "as the spec says");
      case Kind::batch:
        return exactly(table, t, dim, p_.batch, "the batch");
      case Kind::heads_q:
        return exactly(table, t, dim, p_.num_heads_q, "num_heads_q");
      case Kind::heads_kv:
        return exactly(table, t, dim, p_.num_heads_kv, "num_heads_kv");
      case Kind::seqlen_q:
        if (spec_.offsets)
          return at_least(table, t, dim, std::min(p_.seqlen_q, 1), "so that rows have elements");
        if (spec_.varlen)
          return at_least(table, t, dim, p_.seqlen_q,
                          "seqlen_q of the longest sequence; max_seqlen_q says it");
        return exactly(table, t, dim, p_.seqlen_q, "seqlen_q");
      case Kind::seqlen_k:
        if (spec_.paged || spec_.offsets)
          return at_least(table, t, dim, std::min(p_.seqlen_k, 1), "so that keys have elements");
        if (packed_keys)
          return at_least(table, t, dim, p_.seqlen_k,
                          "seqlen_k of the longest sequence; max_seqlen_k says it");
        return exactly(table, t, dim, p_.seqlen_k, "seqlen_k");
      case Kind::total_q:
        return exactly(table, t, dim, p_.total_q, "total_q");
      case Kind::total_k:
        return exactly(table, t, dim, p_.total_k, "total_k");
      case Kind::free:
        at_least(table, t, dim, 1, "so that any index has an element");
        return sizes_.check(table, t, dim);
    }
  }

  // Kernels compute addresses along rows and keys from 32 bits.
  void check_stride(const DeclaredTable& table, const Tensor& t, int dim) const {
    const Kind kind = table.shape[static_cast<std::size_t>(dim)].kind;
    const bool outer = kind == Kind::batch || kind == Kind::heads_q || kind == Kind::heads_kv;
    const std::int64_t by = stride(t, dim), most = std::numeric_limits<std::int32_t>::max() /
                                                   static_cast<std::int64_t>(size_of(t.dtype));
    if (!outer && (by > most || by < -most) && has_elements(t))
      refuse_argument("table ", table.name, " has stride ", by, " along dimension ", dim,
                      ": only strides along batch entries and heads may exceed 2^31 bytes");
  }

  void exactly(const DeclaredTable& table, const Tensor& t, int dim, std::int64_t expected,
               const char* what) const {
    if (t.shape[dim] != expected) refuse_size(table, t, dim, "", expected, what);
  }
  void at_least(const DeclaredTable& table, const Tensor& t, int dim, std::int64_t needed,
                const char* what) const {
    if (t.shape[dim] < needed) refuse_size(table, t, dim, "at least ", needed, what);
  }
  [[noreturn]] static void refuse_size(const DeclaredTable& table, const Tensor& t, int dim,
                                       const char* relation, std::int64_t expected, const char* what) {
    refuse_argument("table ", table.name, " has shape ", shape_text(t), ": dimension ", dim, " must be ",
                    relation, expected, ", ", what,
                    table.shape[static_cast<std::size_t>(dim)].or_one ? ", or 1" : "");
  }

  const AttentionSpec& spec_;
  const Device device_;
  const AttentionArgs& args_;
  const device::ProblemParams& p_;
  FreeSizes sizes_;
};

// A name with a prefix, without allocation.
struct Name {
  char text[longest_name + 16];
  Name(const char* prefix, std::string_view name) {
    std::snprintf(text, sizeof text, "%s%.*s", prefix, static_cast<int>(name.size()), name.data());
  }
};

// The gradient of what `like`, a checked table or the sink logits, holds. as: "as table slope".
device::GradientTable gradient_of(const char* name, const Tensor& t, const char* as, const Tensor& like,
                                  Device device) {
  if (t.rank != like.rank)
    refuse_argument(name, " has rank ", t.rank, ", it must have ", like.rank, " dimensions, ", as);
  if (t.dtype != DType::fp32)
    refuse_argument(name, " has dtype ", to_string(t.dtype), "; gradients of tables are fp32");
  require_memory(name, t, device);
  require_address(name, t, sizeof(float));
  device::GradientTable made{};
  made.rank = t.rank;
  made.count = 1;
  for (int dim = 0; dim < t.rank; ++dim) {
    require_shape(name, t, dim, like.shape[dim], as);
    made.sizes[dim] = size(t, dim);
    made.strides[dim] = stride(t, dim);
    made.count *= t.shape[dim];
  }
  if (made.count == 0) return {};
  std::int64_t inside = 1;
  made.is_contiguous = true;
  for (int dim = t.rank - 1; dim >= 0; inside *= t.shape[dim--])
    made.is_contiguous = made.is_contiguous && (t.shape[dim] == 1 || t.strides[dim] == inside);
  require_distinct_rows(name, t);
  made.data = static_cast<float*>(t.data);
  return made;
}

const Tensor& gradient_given(const AttentionArgs& args, const DeclaredTable& table) {
  for (const NamedArgument& argument : args.named) {
    if (!is_gradient_name(argument.name, table)) continue;
    if (const auto* tensor = std::get_if<Tensor>(&argument.value)) return *tensor;
    refuse_argument(gradient_name(table), " was given as a number; a tensor would work");
  }
  refuse_argument("named argument ", gradient_name(table), " is missing");
}

}  // namespace

std::optional<device::GradientParams> check_gradient_arguments(const AttentionSpec& spec, Device device,
                                                               const AttentionArgs& args) {
  std::optional<device::GradientParams> made;
  if (!has_gradients(spec)) return made;
  device::GradientParams& gradients = made.emplace();
  gradients = {};
  for (std::size_t i = 0; i < spec.tables.size(); ++i) {
    const DeclaredTable& table = spec.tables[i];
    if (!table.grad) continue;
    const Name name(gradient_prefix, table.name), as("as table ", table.name);
    const Tensor& given = gradient_given(args, table);
    gradients.tables[i] =
        gradient_of(name.text, given, as.text, std::get<Tensor>(find(args, table.name).value), device);
  }
  if (spec.sink_logits) {
    const Tensor& given = require<&AttentionArgs::d_sink_logits>(spec, args, device);
    gradients.tables[most_tables] =
        gradient_of("d_sink_logits", given, "as sink_logits", *args.sink_logits, device);
  }
  return made;
}

std::optional<device::FormulaParams> check_formula_arguments(const AttentionSpec& spec, Device device,
                                                             const AttentionArgs& args,
                                                             const device::ProblemParams& problem,
                                                             float scale) {
  std::optional<device::FormulaParams> made;
  if (!reads_formula_params(spec)) return made;
  device::FormulaParams& formulas = made.emplace();
  formulas.scale = scale;
  Check check(spec, device, args, problem);
  for (std::size_t i = 0; i < spec.tables.size(); ++i) check.table(spec.tables[i], formulas.tables[i]);
  for (std::size_t i = 0; i < spec.scalars.size(); ++i) formulas.scalars[i] = check.scalar(spec.scalars[i]);
  if (!spec.sink_logits) return made;
  const Tensor& logits = require<&AttentionArgs::sink_logits>(spec, args, device);
  require_shape("sink_logits", logits, 0, problem.num_heads_q, "num_heads_q");
  require_address("sink_logits", logits, sizeof(float));
  formulas.sink_logits = static_cast<const float*>(logits.data);
  formulas.sink_stride = stride(logits, 0);
  return made;
}

}  // namespace flashjit
