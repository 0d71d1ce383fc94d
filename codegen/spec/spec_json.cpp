// AttentionSpec::from_json: strict. Every message names the field, the value, the rule and what would work.
#include <array>
#include <climits>
#include <cmath>
#include <span>
#include <utility>

#include "codegen/base/float_state.hpp"
#include "codegen/base/strict_json.hpp"
#include "codegen/base/suggest.hpp"
#include "codegen/spec/builtin_names.hpp"
#include "codegen/spec/declarations.hpp"
#include "codegen/spec/mask_rules.hpp"
#include "codegen/spec/spec.hpp"
#include "codegen/spec/spec_fields.hpp"

namespace flashjit {
namespace {

using Json = nlohmann::json;
using Names = std::span<const std::string_view>;

constexpr auto names_of_spec = [] {
  std::array<std::string_view, 3 + std::size(spec_fields)> names = {"op", "dtype", "head_dim"};
  std::transform(std::begin(spec_fields), std::end(spec_fields), names.begin() + 3,
                 [](const SpecField& field) { return field.name; });
  return names;
}();
constexpr auto operations = [] {
  std::array<Operation, num_operations> all;
  std::transform(std::begin(operation_table), std::end(operation_table), all.begin(),
                 [](const OperationInfo& row) { return row.op; });
  return all;
}();
constexpr auto names_of_config = [] {
  std::array<std::string_view, 8> names;
  std::size_t count = 0;
  for_each_choice([&](const char* name, auto, auto) { names.at(count++) = name; });
  return names;
}();
constexpr std::array table_dtypes = {DType::fp32,  DType::fp16, DType::bf16,
                                     DType::int32, DType::int8, DType::uint8};
constexpr std::array scalar_dtypes = {DType::fp32, DType::int32};
// Calls visit(a default mask) for every kind; formulas have no kind but names of their own.
template <class Visit, std::size_t... i>
constexpr void for_each_kind(Visit&& visit, std::index_sequence<i...>) {
  (visit(std::variant_alternative_t<i, Mask>{}), ...);
}
template <class Visit>
constexpr void for_each_kind(Visit&& visit) {
  constexpr std::size_t kinds = std::variant_size_v<Mask> - 1;
  static_assert(std::is_same_v<std::variant_alternative_t<kinds, Mask>, FormulaMask>);
  for_each_kind(visit, std::make_index_sequence<kinds>());
}
constexpr auto mask_kinds = [] {
  std::array<std::string_view, std::variant_size_v<Mask> + std::size(builtin_masks)> names;
  std::size_t count = 0;
  for_each_kind([&](const auto& mask) { names.at(count++) = mask.kind; });
  for (const std::string_view name : builtin_masks) names.at(count++) = name;
  names.at(count++) = "neighbourhood";
  return names;
}();

std::string shown(const Json& value) {
  switch (value.type()) {
    case Json::value_t::object:
      return "an object";
    case Json::value_t::array:
      return "a list";
    case Json::value_t::string:
      return in_quotes(value.get_ref<const std::string&>());
    default:
      return value.dump();
  }
}

// A spec says these things, but not by a field of that name; other libraries have parameters of these names.
constexpr std::pair<std::string_view, const char*> said_otherwise[] = {
    {"window", "mask [\"sliding_window\"], with window_left and window_right at a launch,"},
    {"window_size", "mask [\"sliding_window\"], with window_left and window_right at a launch,"},
    {"window_left", "mask [\"sliding_window\"], with window_left at a launch,"},
    {"window_right", "mask [\"sliding_window\"], with window_right at a launch,"},
    {"num_sinks", "mask [{\"kind\": \"sliding_window\", \"sinks\": true}], with num_sinks at a launch,"},
    {"attn_mask", "a mask of kind block_sparse or a formula in mask"},
    {"dropout_p", "dropout true, with dropout_p at a launch,"},
    {"scale", "softmax_scale at a launch"},
    {"sm_scale", "softmax_scale at a launch"},
    {"softmax_scale", "softmax_scale at a launch"},
    {"alibi_slopes", "score [\"alibi\"], with alibi_slopes at a launch,"},
    {"logits_soft_cap", "score [\"softcap\"], with softcap at a launch,"},
    {"page_size", "paged true, with page_size in the shape that a kernel is asked for,"},
    {"cu_seqlens", "varlen true, with cu_seqlens_q and cu_seqlens_k at a launch,"},
    {"batch", "the shape that a kernel is asked for"},
    {"heads", "the shape that a kernel is asked for"},
    {"num_heads", "the shape that a kernel is asked for"},
    {"num_heads_q", "the shape that a kernel is asked for"},
    {"num_heads_kv", "the shape that a kernel is asked for"},
    {"seqlen", "the shape that a kernel is asked for"},
    {"seqlen_q", "the shape that a kernel is asked for"},
    {"seqlen_k", "the shape that a kernel is asked for"},
};

// "; mask ["causal"] would work" for a field of the spec that is the name of something else in it.
std::string where_instead(std::string_view field) {
  const auto works = [](const std::string& text) { return "; " + text + " would work"; };
  for (const auto& [name, instead] : said_otherwise)
    if (field == name) return works(instead);
  std::string_view word = field;
  if (word.starts_with("is_")) word.remove_prefix(3);
  if (word.ends_with("_mask")) word.remove_suffix(5);
  const auto is_one_of = [&](Names names) {
    return std::find(names.begin(), names.end(), word) != names.end();
  };
  if (is_one_of(mask_kinds)) return works("mask [" + json_string(word) + "]");
  if (is_one_of(builtin_scores)) return works("score [" + json_string(word) + "]");
  if (is_one_of(names_of_config)) return works("config {" + json_string(word) + ": ...}");
  return {};
}

// One JSON object whose fields are all known. `path`, such as "config.", precedes field names in messages.
class Object {
 public:
  Object(const Json& json, std::string path, Names known) : json_(json), path_(std::move(path)) {
    for (const auto& [name, value] : json.items()) {
      if (std::find(known.begin(), known.end(), name) != known.end()) continue;
      std::string hint = did_you_mean(name, known);
      // Masks are asked for a window's sizes, too.
      if (path_.empty() || path_.starts_with("mask["))
        if (std::string instead = where_instead(name); !instead.empty()) hint = std::move(instead);
      invalid("unknown field " + in_quotes(path_ + name) + "; the fields are " + listed(known) + hint);
    }
  }

  const Json* find(const char* name) const {
    const auto it = json_.find(name);
    return it == json_.end() ? nullptr : &*it;
  }

  void read(const char* name, bool& out) const {
    const Json* value = find(name);
    if (value == nullptr) return;
    if (!value->is_boolean()) invalid(wrong(name, *value, "must be true or false"));
    out = value->get<bool>();
  }

  // validated() refuses what is not in the range.
  void read(const char* name, int& out, const Range&) const {
    const Json* value = find(name);
    if (value == nullptr) return;
    const double number = value->is_number() ? value->get<double>() : NAN;
    if (number != std::trunc(number)) invalid(wrong(name, *value, "must be an integer"));
    if (std::fabs(number) > INT_MAX) invalid(wrong(name, *value, "is far out of range"));
    out = static_cast<int>(number);
  }

  template <class T, class... Values>
  void read(const char* name, std::optional<T>& out, const Values&... values) const {
    if (find(name) == nullptr) return;
    read(name, out.emplace(), values...);
  }

  // The enumerator of `values` whose to_string() is the field's text.
  template <class Enum, class Values>
    requires std::is_enum_v<Enum>
  void read(const char* name, Enum& out, const Values& values) const {
    const Json* value = find(name);
    if (value == nullptr) return;
    const std::vector<std::string_view> names = words_of(values);
    if (!value->is_string()) invalid(wrong(name, *value, "must be one of " + listed(names) + ", in quotes"));
    const auto& word = value->get_ref<const std::string&>();
    const auto it = std::find(names.begin(), names.end(), word);
    if (it == names.end()) {
      invalid(wrong(name, *value, "is not one of " + listed(names) + did_you_mean(word, names)));
    }
    out = values[it - names.begin()];
  }

  void require(const char* name, const char* example) const {
    if (find(name) != nullptr) return;
    invalid("required field " + in_quotes(path_ + name) + " is missing; for example \"" + name +
            "\": " + example);
  }

  std::string wrong(const char* name, const Json& value, const std::string& rule) const {
    return path_ + name + " " + shown(value) + " " + rule;
  }

 private:
  const Json& json_;
  std::string path_;
};

// A mask's fields, or a rotary embedding's, beside those that are `known`.
template <class Kind>
Kind read_fields(const Json& json, const std::string& path, std::vector<std::string_view> known = {}) {
  Kind given;
  given.for_each_field(given, [&](const char* name, auto&, const auto&...) { known.emplace_back(name); });
  const Object fields(json, path + ".", known);
  given.for_each_field(given, [&](const char* name, auto& value, const auto&... values) {
    fields.read(name, value, values...);
  });
  return given;
}

// {"formula": "key <= position"}
std::string read_formula(const Json& json, const std::string& path) {
  constexpr std::string_view known[] = {"formula"};
  const Object fields(json, path + ".", known);
  const Json& text = *fields.find("formula");
  if (!text.is_string())
    invalid(fields.wrong("formula", text, R"(must be a text; "key <= position" would work)"));
  return text.get<std::string>();
}

Mask read_builtin(const Json& json, const std::string& path, std::string_view name) {
  constexpr std::string_view known[] = {"kind"};
  if (json.is_object()) Object(json, path + ".", known);
  return FormulaMask{std::string(name)};
}

Mask read_neighbourhood(const Json& json, const std::string& path) {
  constexpr char example[] = R"({"kind": "neighbourhood", "shape": [56, 56], "window": [7, 7]})";
  if (!json.is_object())
    invalid(path + R"( "neighbourhood" has no shape and window; )" + example + " would work");
  const Object fields(json, path + ".", neighbourhood_fields);
  fields.require("shape", "[56, 56]");
  fields.require("window", "[7, 7]");
  std::vector<int> lists[3];
  for (int i = 0; i < 3; ++i) {
    const char* const name = neighbourhood_fields[i + 1].data();
    const Json* const list = fields.find(name);
    if (!list) continue;
    const auto fits = [](const Json& value) {
      const double number = value.is_number() ? value.get<double>() : NAN;
      return number == std::trunc(number) && std::fabs(number) <= INT_MAX;
    };
    if (!list->is_array() || list->empty() || !std::all_of(list->begin(), list->end(), fits))
      invalid(fields.wrong(name, *list, "must be a list of 1 to 3 integers; [7, 7] would work"));
    for (const Json& value : *list) lists[i].push_back(value.get<int>());
  }
  return FormulaMask::neighbourhood(lists[0], lists[1], lists[2]);
}

Mask read_mask(const Json& json, const std::string& path) {
  const Json* kind = &json;
  if (json.is_object()) {
    if (json.contains("formula")) return FormulaMask{read_formula(json, path)};
    const auto it = json.find("kind");
    if (it == json.end())
      invalid(path + " has no \"kind\"; one of " + listed(mask_kinds) + " is required, or a \"formula\"");
    kind = &*it;
  }
  if (!kind->is_string()) {
    invalid(path + " " + shown(*kind) +
            " must be the name of a mask, a formula, or an object with its \"kind\"; \"causal\" would work");
  }
  const auto& word = kind->get_ref<const std::string&>();
  if (!json.is_object() && !is_identifier(word)) return FormulaMask{word};
  for (const std::string_view name : builtin_masks)
    if (word == name) return read_builtin(json, path, name);
  if (word == "neighbourhood") return read_neighbourhood(json, path);
  std::optional<Mask> mask;
  for_each_kind([&](auto named) {
    using Kind = decltype(named);
    if (word == named.kind) mask = json.is_object() ? read_fields<Kind>(json, path, {"kind"}) : Kind{};
  });
  if (mask) return *mask;
  invalid(path + " " + in_quotes(word) + " is not one of " + listed(mask_kinds) +
          did_you_mean(word, mask_kinds));
}

void read_field(const Object& fields, const char* name, std::vector<Mask>& out) {
  const Json* masks = fields.find(name);
  if (!masks) return;
  if (!masks->is_array())
    invalid(fields.wrong(name, *masks, R"(must be a list of masks; ["causal"] would work)"));
  check_count(name, masks->size(), most_masks);
  for (std::size_t i = 0; i < masks->size(); ++i)
    out.push_back(read_mask((*masks)[i], std::string(name) + "[" + std::to_string(i) + "]"));
}

void read_field(const Object& fields, const char* name, std::vector<std::string>& out) {
  const Json* formulas = fields.find(name);
  if (!formulas) return;
  if (!formulas->is_array())
    invalid(
        fields.wrong(name, *formulas, R"(must be a list of formulas; ["score / 2", "alibi"] would work)"));
  check_count(name, formulas->size(), most_formulas);
  for (std::size_t i = 0; i < formulas->size(); ++i) {
    const Json& formula = (*formulas)[i];
    if (!formula.is_string())
      invalid(std::string(name) + "[" + std::to_string(i) + "] " + shown(formula) +
              R"( must be a formula, in quotes; "score / 2" would work)");
    out.push_back(formula.get<std::string>());
  }
}

std::vector<TableDimension> read_shape(const Json& shape, const std::string& path) {
  std::vector<TableDimension> dims;
  if (!shape.is_array())
    invalid(path + " " + shown(shape) + R"( must be a list of sizes; ["batch", "seqlen_k"] would work)");
  for (const Json& dim : shape) {
    const double number = dim.is_number() ? dim.get<double>() : NAN;
    if (dim.is_string()) {
      dims.push_back(dimension_of(dim.get_ref<const std::string&>()));
    } else if (number == std::trunc(number) && std::fabs(number) <= INT_MAX) {
      dims.push_back({.kind = TableDimension::Kind::number, .size = static_cast<int>(number)});
    } else {
      invalid(path + "[" + std::to_string(dims.size()) + "] " + shown(dim) +
              R"( must be an integer or a name; 128 or "seqlen_k" would work)");
    }
  }
  return dims;
}

void read_field(const Object& fields, const char* name, std::vector<DeclaredTable>& out) {
  const Json* tables = fields.find(name);
  if (!tables) return;
  constexpr char example[] = R"({"dtype": "fp32", "shape": ["heads_q"]})";
  if (!tables->is_object())
    invalid(fields.wrong(name, *tables,
                         std::string(R"(must be an object; {"slope": )") + example + "} would work"));
  check_count(name, tables->size(), most_tables);
  for (const auto& [table, value] : tables->items()) {
    check_identifier(name, table);
    const std::string path = std::string(name) + "." + table;
    if (!value.is_object())
      invalid(path + " " + shown(value) + " must be an object; " + example + " would work");
    constexpr std::string_view known[] = {"dtype", "shape", "grad"};
    const Object members(value, path + ".", known);
    members.require("dtype", R"("fp32")");
    members.require("shape", R"(["heads_q"])");
    DeclaredTable declared{.name = table};
    members.read("dtype", declared.dtype, table_dtypes);
    declared.shape = read_shape(*members.find("shape"), path + ".shape");
    members.read("grad", declared.grad);
    out.push_back(std::move(declared));
  }
}

void read_field(const Object& fields, const char* name, std::vector<DeclaredScalar>& out) {
  const Json* scalars = fields.find(name);
  if (!scalars) return;
  if (!scalars->is_object())
    invalid(fields.wrong(name, *scalars, R"(must be an object; {"cap": "fp32"} would work)"));
  check_count(name, scalars->size(), most_scalars);
  std::vector<std::string_view> names;
  for (const auto& [scalar, value] : scalars->items()) {
    check_identifier(name, scalar);
    names.push_back(scalar);
  }
  const Object members(*scalars, std::string(name) + ".", names);
  for (const std::string_view scalar : names) {
    DeclaredScalar declared{.name = std::string(scalar)};
    members.read(declared.name.c_str(), declared.dtype, scalar_dtypes);
    out.push_back(std::move(declared));
  }
}

void read_field(const Object& fields, const char* name, std::optional<Rotary>& out) {
  const Json* rotary = fields.find(name);
  if (!rotary) return;
  if (!rotary->is_object())
    invalid(fields.wrong(name, *rotary, R"(must be an object; {"style": "half"} would work)"));
  out = read_fields<Rotary>(*rotary, name);
  if (rotary->contains("dim") && out->dim == 0)
    invalid(
        "rotary.dim 0 rotates nothing; leaving rotary out would work, or leaving dim out, which means "
        "head_dim");
}

void read_field(const Object& fields, const char* name, PinnedConfig& out) {
  const Json* config = fields.find(name);
  if (!config) return;
  if (!config->is_object())
    invalid(fields.wrong(name, *config, R"(must be an object; {"block_m": 128} would work)"));
  const Object pins(*config, std::string(name) + ".", names_of_config);
  for_each_choice_and_values([&](const char* choice, auto, auto pin, const auto&... values) {
    pins.read(choice, out.*pin, values...);
  });
}

void read_field(const Object& fields, const SpecField& field, bool& out) {
  fields.read(field.name, out);
}
void read_field(const Object& fields, const SpecField& field, int& out) {
  fields.read(field.name, out, field.range);
}
void read_field(const Object& fields, const SpecField& field, std::optional<DType>& out) {
  fields.read(field.name, out, field.dtypes);
}
void read_field(const Object& fields, const SpecField& field, std::optional<KvScale>& out) {
  fields.read(field.name, out, field.scales);
}
template <class Value>
void read_field(const Object& fields, const SpecField& field, Value& out) {
  read_field(fields, field.name, out);
}

}  // namespace

namespace {

// The fields of the text, which may contradict each other.
AttentionSpec read_spec(std::string_view text) {
  const Json json = parse_strict_json(text, "the spec", ErrorCode::invalid_spec, most_spec_bytes);
  if (!json.is_object()) {
    invalid("a spec must be an object, not " + shown(json) +
            R"(; {"op": "forward", "dtype": "bf16", "head_dim": 128} would work)");
  }
  const Object fields(json, "", names_of_spec);
  fields.require("op", R"("forward")");
  fields.require("dtype", R"("bf16")");
  fields.require("head_dim", "128");

  AttentionSpec spec;
  fields.read("op", spec.op, operations);
  fields.read("dtype", spec.dtype, float_dtypes);
  fields.read("head_dim", spec.head_dim, head_dims);
  for (const SpecField& field : spec_fields)
    std::visit([&](auto member) { read_field(fields, field, spec.*member); }, field.member);
  if (fields.find("head_dim_v") != nullptr && spec.head_dim_v == 0) {
    invalid("head_dim_v 0 has no columns; 8 would work, or leaving it out, which means head_dim");
  }
  return spec;
}

}  // namespace

AttentionSpec AttentionSpec::from_json(std::string_view text) {
  const DefaultFloatState state;
  return read_spec(text).validated();
}

AttentionSpec AttentionSpec::from_json(std::string_view text, Operation op) {
  const DefaultFloatState state;
  return read_spec(text).for_op(op);
}

}  // namespace flashjit
