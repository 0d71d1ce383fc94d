// Every field of a spec, of its masks, of rotary embedding and of config is declared with its values. A value
// outside of them is refused, and the schema has the same values.
#include "codegen/spec/field_values.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "codegen/spec/spec.hpp"
#include "codegen/spec/spec_fields.hpp"
#include "expect_error.h"

namespace flashjit {
namespace {

using Json = nlohmann::ordered_json;

// A field without its values does not compile.
static_assert(std::is_invocable_v<FieldCheck, const char*, const int&, Range>);
static_assert(!std::is_invocable_v<FieldCheck, const char*, const int&>);
static_assert(!std::is_invocable_v<FieldCheck, const char*, const CausalAlign&>);
static_assert(std::is_constructible_v<SpecField, const char*, int AttentionSpec::*, Range>);
static_assert(!std::is_constructible_v<SpecField, const char*, int AttentionSpec::*>);
static_assert(!std::is_constructible_v<SpecField, const char*, std::optional<DType> AttentionSpec::*>);
static_assert(!std::is_constructible_v<SpecField, const char*, std::optional<KvScale> AttentionSpec::*>);

// Values of a type that none of its fields may have, with their texts.
std::vector<std::pair<int, std::string>> outside(const int&, const Range& range) {
  std::set<int> values = {-5, 0, range.first - range.step};
  if (range.step > 1) values.insert(range.first + 1);
  if (range.last != INT_MAX) values.insert({range.last + 1, range.last + range.step, INT_MAX});
  std::vector<std::pair<int, std::string>> all;
  for (const int value : values)
    if (!range.has(value)) all.emplace_back(value, std::to_string(value));
  return all;
}
template <class Enum, class Values>
  requires std::is_enum_v<Enum>
std::vector<std::pair<Enum, std::string>> outside(const Enum&, const Values&) {
  return {{static_cast<Enum>(100), "unknown"}};
}
template <class Value, class Values>
auto outside(const std::optional<Value>&, const Values& values) {
  return outside(Value{}, values);
}
template <class Value>
std::vector<std::pair<Value, std::string>> outside(const Value&) {
  return {};
}

// Gives a field each value that it may not have, except its default, and expects that spec() is refused.
template <class Value, class Spec, class... Values>
void refuse(const char* name, Value& value, Spec spec, const Values&... values) {
  const Value usual = value;
  for (const auto& [wrong, shown] : outside(usual, values...)) {
    if (Value(wrong) == usual) continue;
    SCOPED_TRACE(name + (" " + shown));
    value = wrong;
    expect_error(ErrorCode::invalid_spec, {name, shown.c_str(), "would work"},
                 [&] { (void)spec().validated(); });
    value = usual;
  }
}

// A member that converts to anything; how many of them an aggregate has.
struct Anything {
  template <class T>
  operator T() const {
    return {};
  }
};
template <class T, class... Members>
constexpr int count_members() {
  if constexpr (requires { T{Members{}..., Anything{}}; })
    return count_members<T, Members..., Anything>();
  else
    return sizeof...(Members);
}

// make(part) is a spec that has the mask, or the rotary embedding.
template <class Part, class Make>
void check_part(Make make) {
  Part part;
  int fields = 0;
  Part::for_each_field(part, [&](const char* name, auto& value, const auto&... values) {
    ++fields;
    refuse(name, value, [&] { return make(part); }, values...);
  });
  // No text has the sizes that a formula allows, since they change no kernel.
  const int beside = std::is_same_v<Part, FormulaMask> ? 1 : 0;
  EXPECT_EQ(fields + beside, count_members<Part>()) << "for_each_field leaves a member out";
}
template <class Visit>
void for_each_kind(Visit visit) {
  [&]<std::size_t... i>(std::index_sequence<i...>) {
    (visit(std::variant_alternative_t<i, Mask>{}), ...);
  }(std::make_index_sequence<std::variant_size_v<Mask>>());
}

TEST(FieldValues, OfMasks) {
  for_each_kind([](const auto& of) {
    using Kind = std::decay_t<decltype(of)>;
    SCOPED_TRACE(Kind::kind);
    check_part<Kind>([](const Kind& mask) { return AttentionSpec{.head_dim = 64, .mask = {mask}}; });
  });
}

TEST(FieldValues, OfRotary) {
  check_part<Rotary>([](const Rotary& rotary) {
    return AttentionSpec{.op = Operation::append_kv, .head_dim = 64, .rotary = rotary};
  });
}

TEST(FieldValues, OfConfig) {
  AttentionSpec spec{.head_dim = 64};
  for_each_choice_and_values([&](const char* name, auto, auto pin, const auto&... values) {
    refuse(name, spec.config.*pin, [&] { return spec; }, values...);
  });
}

// The values of a field of the table, which depend on its type.
template <class Visit, class Value>
void with_values(Visit visit, const SpecField& field, const Value&) {
  if constexpr (std::is_same_v<Value, int>)
    visit(field.range);
  else if constexpr (std::is_same_v<Value, std::optional<DType>>)
    visit(field.dtypes);
  else if constexpr (std::is_same_v<Value, std::optional<KvScale>>)
    visit(field.scales);
}

TEST(FieldValues, OfSpecs) {
  AttentionSpec spec{.head_dim = 64};
  const auto make = [&] { return spec; };
  refuse("head_dim", spec.head_dim, make, head_dims);
  int checked = 0;
  for (const SpecField& field : spec_fields)
    std::visit(
        [&](auto member) {
          const auto check = [&](const auto& values) {
            ++checked;
            if constexpr (requires { outside(spec.*member, values); })
              refuse(field.name, spec.*member, make, values);
          };
          with_values(check, field, spec.*member);
        },
        field.member);
  EXPECT_EQ(checked, 6);  // head_dim_v, four dtypes, kv_scale
}

// The schema's words for the values of a field. A field's own range may have no last value; the schema's is
// then what families take.
void expect_values(const Json& property) {
  EXPECT_TRUE(property["type"] == "boolean" || property["type"] == "string") << property;
}
void expect_values(const Json& property, const Range& range) {
  EXPECT_EQ(property["minimum"], range.first) << property;
  EXPECT_EQ(property.value("multipleOf", 1), range.step) << property;
  if (range.last != INT_MAX) {
    EXPECT_EQ(property["maximum"], range.last) << property;
  }
}
template <class Values>
void expect_values(const Json& property, const Values& values) {
  std::set<std::string> words, in_schema;
  for (const auto value : values) words.insert(to_string(value));
  for (const Json& word : property["enum"]) in_schema.insert(word.get<std::string>());
  EXPECT_EQ(in_schema, words) << property;
}
template <class Part>
void expect_part(const Json& properties) {
  const Part part;
  Part::for_each_field(part, [&](const char* name, const auto&, const auto&... values) {
    SCOPED_TRACE(name);
    ASSERT_TRUE(properties.contains(name));
    expect_values(properties[name], values...);
  });
}

TEST(FieldValues, AreThoseOfTheSchema) {
  std::ifstream file(FLASHJIT_SOURCE_DIR "/tools/spec.schema.json");
  const Json properties = Json::parse(file)["properties"];
  expect_values(properties["head_dim"], head_dims);
  const AttentionSpec spec;
  for (const SpecField& field : spec_fields) {
    SCOPED_TRACE(field.name);
    ASSERT_TRUE(properties.contains(field.name));
    const auto check = [&](const auto& values) { expect_values(properties[field.name], values); };
    std::visit([&](auto member) { with_values(check, field, spec.*member); }, field.member);
  }
  expect_part<Rotary>(properties["rotary"]["properties"]);
  const Json& pins = properties["config"]["properties"];
  for_each_choice_and_values([&](const char* name, auto, auto, const auto&... values) {
    SCOPED_TRACE(name);
    ASSERT_TRUE(pins.contains(name));
    expect_values(pins[name], values...);
  });
  for_each_kind([&](const auto& of) {
    using Kind = std::decay_t<decltype(of)>;
    SCOPED_TRACE(Kind::kind);
    int found = 0;
    for (const Json& one : properties["mask"]["items"]["anyOf"]) {
      const Json& of_one = one.value("properties", Json::object());
      const bool is_formula = std::is_same_v<Kind, FormulaMask> && of_one.contains("formula");
      if (!is_formula && of_one.value("kind", Json::object()).value("const", "") != Kind::kind) continue;
      ++found;
      expect_part<Kind>(of_one);
    }
    EXPECT_EQ(found, 1);
  });
}

}  // namespace
}  // namespace flashjit
