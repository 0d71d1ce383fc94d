#include "codegen/spec/spec_fields.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "codegen/base/suggest.hpp"
#include "codegen/spec/declarations.hpp"
#include "codegen/spec/mask_rules.hpp"

namespace flashjit {
namespace {

// A value of any type, to count the members that an aggregate has.
struct AnyValue {
  template <class T>
  operator T() const {  // NOLINT(google-explicit-constructor): an initializer converts it
    throw Error(ErrorCode::internal, "a value that is never made");
  }
};
template <class T, std::size_t count>
constexpr bool takes_values = []<std::size_t... i>(std::index_sequence<i...>) {
  return requires { T{(static_cast<void>(i), AnyValue{})...}; };
}(std::make_index_sequence<count>());
constexpr std::size_t num_members = 3 + std::size(spec_fields);  // op, dtype and head_dim are not optional
static_assert(takes_values<AttentionSpec, num_members> && !takes_values<AttentionSpec, num_members + 1>,
              "for_each_field has every member: others would be in no text and never be refused");

std::string json_of(bool value) {
  return value ? "true" : "false";
}
std::string json_of(int value) {
  return std::to_string(value);
}
std::string json_of(const std::optional<DType>& value) {
  return std::string("\"") + (value ? to_string(*value) : "") + "\"";
}
std::string json_of(const std::optional<KvScale>& value) {
  return std::string("\"") + (value ? to_string(*value) : "") + "\"";
}
std::string json_of(const std::vector<Mask>& masks) {
  std::string text;
  for (const Mask& mask : masks) text += (text.empty() ? "" : ", ") + to_json(mask);
  return "[" + text + "]";
}
std::string json_of(const std::vector<std::string>& formulas) {
  std::string text;
  for (const std::string& formula : formulas) text += (text.empty() ? "" : ", ") + json_string(formula);
  return "[" + text + "]";
}
std::string json_of(const DeclaredTable& table) {
  return std::string(R"({"dtype": ")") + to_string(table.dtype) + R"(", "shape": )" +
         shape_text(table.shape, "\"") + (table.grad ? ", \"grad\": true}" : "}");
}
std::string json_of(const DeclaredScalar& scalar) {
  return std::string("\"") + to_string(scalar.dtype) + "\"";
}
// An object by name.
template <class Declared>
std::string json_of(const std::vector<Declared>& all) {
  std::string text;
  for (const Declared& one : all)
    text += (text.empty() ? "" : ", ") + json_string(one.name) + ": " + json_of(one);
  return "{" + text + "}";
}
std::string json_of(RotaryStyle style) {
  return std::string("\"") + to_string(style) + "\"";
}
// Its style, and what is not at its default.
std::string json_of(const std::optional<Rotary>& rotary) {
  if (!rotary) return "null";
  std::string text;
  rotary->for_each_field(*rotary, [&]<class Value>(const char* name, const Value& value, const auto&...) {
    if (std::is_same_v<Value, RotaryStyle> || value != Value{})
      text += std::string(text.empty() ? "\"" : ", \"") + name + "\": " + json_of(value);
  });
  return "{" + text + "}";
}
std::string json_of(const PinnedConfig& config) {
  return to_json(config);
}

// The fields of a part of the spec, whose names follow the path.
struct PartCheck : FieldCheck {
  using FieldCheck::operator();
  // 0 is the default.
  void operator()(const char* name, const int& value, const Range& range) const {
    if (value != 0) FieldCheck::operator()(name, value, range);
  }
  template <class Value, class Values>
  void operator()(const char* name, const std::optional<Value>& value, const Values& values) const {
    if (value) FieldCheck::operator()(name, *value, values);
  }
  template <class Value>
  void operator()(const char*, const std::optional<Value>&) const
    requires(std::is_same_v<Value, bool>)
  {}
};

void check_field(const SpecField& field, int value) {
  if (value != 0) check_value(field.name, value, field.range);
}
void check_field(const SpecField& field, const std::optional<DType>& value) {
  if (value) check_value(field.name, *value, field.dtypes);
}
void check_field(const SpecField& field, const std::optional<KvScale>& value) {
  if (value) check_value(field.name, *value, field.scales);
}
void check_field(const SpecField&, const std::vector<Mask>& masks) {
  for (const Mask& mask : masks) check_values(mask);
}
void check_field(const SpecField&, const std::optional<Rotary>& rotary) {
  if (rotary) rotary->for_each_field(*rotary, PartCheck{{"rotary."}});
}
void check_field(const SpecField&, const PinnedConfig& config) {
  for_each_choice_and_values([&](const char* name, auto, auto pin, const auto&... values) {
    PartCheck{{"config."}}(name, config.*pin, values...);
  });
}
// Formulas, tables and scalars have rules of their own (declarations.hpp); a bool has none.
template <class Value>
void check_field(const SpecField&, const Value&) {
  static_assert(std::is_same_v<Value, bool> || std::is_same_v<Value, std::vector<std::string>> ||
                std::is_same_v<Value, std::vector<DeclaredTable>> ||
                std::is_same_v<Value, std::vector<DeclaredScalar>>);
}

}  // namespace

void check_fields(const AttentionSpec& spec) {
  for (const SpecField& field : spec_fields)
    std::visit([&](auto member) { check_field(field, spec.*member); }, field.member);
}

AttentionSpec without_defaults(AttentionSpec spec) {
  spec.mask = canonical(std::move(spec.mask));
  const auto by_name = [](const auto& a, const auto& b) { return a.name < b.name; };
  std::sort(spec.tables.begin(), spec.tables.end(), by_name);
  std::sort(spec.scalars.begin(), spec.scalars.end(), by_name);
  if (!info_of(spec.op).writes_gradients)
    for (DeclaredTable& table : spec.tables) table.grad = false;
  if (!has_formulas(spec)) spec.precise = false;
  if (spec.head_dim_v == spec.head_dim) spec.head_dim_v = 0;
  if (spec.o_dtype == spec.dtype) spec.o_dtype.reset();
  if (spec.parts_dtype == DType::fp32) spec.parts_dtype.reset();
  if (spec.sum) spec.lse = false;  // a sum has none
  if (spec.kv_dtype == spec.dtype) spec.kv_dtype.reset();
  if (spec.kv_scale == KvScale::tensor) spec.kv_scale.reset();
  if (spec.grad_dtype == spec.dtype) spec.grad_dtype.reset();
  if (spec.rotary && spec.rotary->dim == spec.head_dim - spec.rotary->first) spec.rotary->dim = 0;
  return spec;
}

std::vector<GivenField> given_fields(const AttentionSpec& spec, std::span<const SpecField> table) {
  const AttentionSpec given = without_defaults(spec), defaults;
  std::vector<GivenField> fields;
  for (const SpecField& field : table) {
    std::visit(
        [&](auto member) {
          if (given.*member != defaults.*member) fields.push_back({field, json_of(given.*member)});
        },
        field.member);
  }
  return fields;
}

std::string canonical_text(const AttentionSpec& spec, std::span<const SpecField> table) {
  std::string text = std::string(R"({"op": ")") + to_string(spec.op) + R"(", "dtype": ")" +
                     to_string(spec.dtype) + R"(", "head_dim": )" + std::to_string(spec.head_dim);
  for (const GivenField& given : given_fields(spec, table))
    text += std::string(", \"") + given.field.name + "\": " + given.text;
  return text + "}";
}

}  // namespace flashjit
