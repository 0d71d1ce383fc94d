#include "spec_fields.hpp"

#include <algorithm>

#include "declarations.hpp"
#include "mask_rules.hpp"
#include "suggest.hpp"

namespace flashjit {
namespace {

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
std::string json_of(const std::optional<Rotary>& rotary) {
  if (!rotary) return "null";
  std::string text = std::string(R"({"style": ")") + to_string(rotary->style) + "\"";
  if (rotary->dim) text += ", \"dim\": " + std::to_string(rotary->dim);
  if (rotary->q) text += ", \"q\": true";
  if (rotary->tables) text += ", \"tables\": " + json_of(rotary->tables);
  return text + "}";
}
std::string json_of(const PinnedConfig& config) {
  return to_json(config);
}

}  // namespace

AttentionSpec without_defaults(AttentionSpec spec) {
  spec.mask = canonical(std::move(spec.mask));
  const auto by_name = [](const auto& a, const auto& b) { return a.name < b.name; };
  std::sort(spec.tables.begin(), spec.tables.end(), by_name);
  std::sort(spec.scalars.begin(), spec.scalars.end(), by_name);
  if (spec.op != Operation::backward)
    for (DeclaredTable& table : spec.tables) table.grad = false;
  if (!has_formulas(spec)) spec.precise = false;
  if (spec.head_dim_v == spec.head_dim) spec.head_dim_v = 0;
  if (spec.o_dtype == spec.dtype) spec.o_dtype.reset();
  if (spec.parts_dtype == DType::fp32) spec.parts_dtype.reset();
  if (spec.kv_dtype == spec.dtype) spec.kv_dtype.reset();
  if (spec.kv_scale == KvScale::tensor) spec.kv_scale.reset();
  if (spec.grad_dtype == spec.dtype) spec.grad_dtype.reset();
  if (spec.rotary && spec.rotary->dim == spec.head_dim) spec.rotary->dim = 0;
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
