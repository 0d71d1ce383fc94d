// tools/spec.schema.json agrees exactly with AttentionSpec::from_json. The test tries every field, word
// and limit of the schema on the parser, and looks up every word of the parser's messages in the schema.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>

#include "codegen/spec.hpp"

namespace flashjit {
namespace {

using Json = nlohmann::ordered_json;

Json load_schema() {
  std::ifstream file(FLASHJIT_SOURCE_DIR "/tools/spec.schema.json");
  EXPECT_TRUE(file);
  return Json::parse(file);
}

// The error's message, or "" if the spec is accepted or only kernels are missing: no version has them of all
// ops.
std::string refusal(const Json& spec) {
  try {
    AttentionSpec::from_json(spec.dump());
    return {};
  } catch (const Error& error) {
    const bool no_kernels = error.code() == ErrorCode::unsupported && !error.message().starts_with("op ");
    return no_kernels ? "" : error.message();
  }
}

// Makes a spec from an object's fields: they belong to the spec itself, its config or its only mask.
using Place = Json (*)(const Json& object);
Json smallest() {
  return {{"op", "forward"}, {"dtype", "bf16"}, {"head_dim", 64}};
}
Json in_spec(const Json& object) {
  Json spec = smallest();
  spec.update(object);
  return spec;
}
Json in_config(const Json& object) {
  Json spec = smallest();
  spec["config"] = object;
  return spec;
}
Json in_rotary(const Json& object) {
  Json spec = {{"op", "append_kv"}, {"dtype", "bf16"}, {"head_dim", 256}};
  spec["rotary"] = object;
  return spec;
}
template <class Kind>
Json in_mask(const Json& object) {
  Json spec = smallest();
  Json mask = {{"kind", Kind::kind}};
  mask.update(object);
  spec["mask"] = Json::array({mask});
  return spec;
}
struct PrefixLm {
  static constexpr char kind[] = "prefix_lm";
};
constexpr Place in_masks[] = {in_mask<CausalMask>,      in_mask<SlidingWindowMask>, in_mask<PaddingMask>,
                              in_mask<BlockSparseMask>, in_mask<TreeMask>,          in_mask<PrefixLm>};

// The words of "...; the fields are a, b and c" or "... is not one of a, b and c".
std::set<std::string> words_after(const std::string& message, const std::string& start) {
  const std::size_t at = message.find(start);
  if (at == std::string::npos) return {};
  std::string list = message.substr(at + start.size());
  list = list.substr(0, list.find(';'));
  std::set<std::string> words;
  std::istringstream in(list);
  for (std::string word; in >> word;) {
    if (word.back() == ',') word.pop_back();
    if (word != "and") words.insert(word);
  }
  return words;
}

void check_property(const std::string& name, const Json& property, Place place) {
  SCOPED_TRACE(name);
  // Tries several operations and dtypes: fields, and the dtypes of other tensors, depend on them.
  const auto accepts = [&](const Json& value) {
    std::string message;
    for (const char* op : {"merge", "append_kv", "decode", "forward"}) {
      for (const char* dtype : {"fp16", "fp32", "bf16"}) {
        Json spec = place(Json{{name, value}});
        if (name != "op") spec["op"] = op;
        if (name != "dtype") spec["dtype"] = dtype;
        message = refusal(spec);
        if (message.empty()) return message;
      }
    }
    return message;
  };
  const Json wrong_types[] = {nullptr, 0.5, "zzz", Json::array({0.5}), Json{{"zzz", 1}}};
  for (const Json& wrong : wrong_types) EXPECT_NE(accepts(wrong), "") << wrong;
  if (property.contains("default")) {
    EXPECT_EQ(accepts(property["default"]), "");
    EXPECT_EQ(AttentionSpec::from_json(place(Json{{name, property["default"]}}).dump()),
              AttentionSpec::from_json(place(Json::object()).dump()))
        << "the schema's default is not the parser's";
  }
  if (property.contains("enum")) {
    std::set<std::string> allowed;
    for (const Json& value : property["enum"]) {
      EXPECT_EQ(accepts(value), "");
      if (value.is_string()) allowed.insert(value.get<std::string>());
      if (value.is_boolean()) {
        EXPECT_NE(accepts(!value.get<bool>()), "");
      }
    }
    std::set<std::string> accepted;
    for (const std::string& word : words_after(accepts("zzz"), " is not one of ")) {
      if (accepts(word).empty()) accepted.insert(word);
    }
    EXPECT_EQ(accepted, allowed);
  } else if (property["type"] == "boolean") {
    EXPECT_EQ(accepts(true), "");
    EXPECT_EQ(accepts(false), "");
  } else if (property["type"] == "integer") {
    const int low = property["minimum"], high = property["maximum"];
    const int step = property.value("multipleOf", 1);
    for (int value = low - 2 * step; value <= high + 2 * step; ++value) {
      const bool allowed = value >= low && value <= high && value % step == 0;
      ASSERT_EQ(accepts(value).empty(), allowed) << value;
    }
  } else {
    EXPECT_TRUE(property["type"] == "object" || property["type"] == "array") << "not checked by this test";
  }
}

void check_object(const Json& schema, Place place) {
  EXPECT_EQ(schema["additionalProperties"], false);
  std::set<std::string> names;
  for (const auto& [name, property] : schema["properties"].items()) {
    names.insert(name);
    check_property(name, property, place);
  }
  EXPECT_EQ(words_after(refusal(place(Json{{"zzzzzzzzzzzz", 1}})), "; the fields are "), names);
}

TEST(Schema, AgreesWithTheParser) {
  const Json schema = load_schema();
  ASSERT_EQ(refusal(smallest()), "");
  check_object(schema, in_spec);
  check_object(schema["properties"]["config"], in_config);
  check_object(schema["properties"]["rotary"], in_rotary);
  const Json& masks = schema["properties"]["mask"]["items"]["anyOf"];
  ASSERT_EQ(masks.size(), 1 + std::size(in_masks) + 3);  // the last ones are a neighbourhood and formulas
  for (std::size_t i = 0; i < std::size(in_masks); ++i) {
    const Json& mask = masks[i + 1];
    EXPECT_EQ(mask["additionalProperties"], false);
    EXPECT_EQ(mask["properties"]["kind"], Json({{"const", masks[0]["enum"][i]}}));
    std::set<std::string> names;
    for (const auto& [name, property] : mask["properties"].items()) {
      names.insert(name);
      if (name != "kind") check_property(name, property, in_masks[i]);
    }
    EXPECT_EQ(words_after(refusal(in_masks[i](Json{{"zzzzzzzzzzzz", 1}})), "; the fields are "), names);
  }
  std::set<std::string> kinds = {"neighbourhood"}, neighbourhood;
  for (const auto& [name, property] : masks[masks.size() - 3]["properties"].items())
    neighbourhood.insert(name);
  EXPECT_EQ(words_after(refusal(in_spec({{"mask", {{{"kind", "neighbourhood"}, {"zzzzzzzzzzzz", 1}}}}})),
                        "; the fields are "),
            neighbourhood);
  for (const Json& name : masks[0]["enum"]) kinds.insert(name.get<std::string>());
  EXPECT_EQ(words_after(refusal(in_spec({{"mask", {"zzz"}}})), " is not one of "), kinds);
  for (const Json& name : masks[0]["enum"]) {
    Json spec = smallest();
    spec["mask"] = Json::array({name});
    EXPECT_EQ(refusal(spec), "");
  }
}

TEST(Schema, FormulasAndTheirDeclarations) {
  const Json properties = load_schema()["properties"];
  const Json& masks = properties["mask"]["items"]["anyOf"];
  EXPECT_EQ(masks[masks.size() - 2]["required"], Json::array({"formula"}));
  EXPECT_EQ(masks.back()["type"], "string");
  const auto spec = [](const std::string& dtype_of_table, const std::string& dtype_of_scalar) {
    return in_spec({{"mask", {"table[key] < scalar", {{"formula", "key < 3"}}}},
                    {"tables", {{"table", {{"dtype", dtype_of_table}, {"shape", {"seqlen_k"}}}}}},
                    {"scalars", {{"scalar", dtype_of_scalar}}}});
  };
  std::set<std::string> tables, scalars;
  for (const Json& dtype : properties["tables"]["additionalProperties"]["properties"]["dtype"]["enum"])
    tables.insert(dtype.get<std::string>());
  for (const Json& dtype : properties["scalars"]["additionalProperties"]["enum"])
    scalars.insert(dtype.get<std::string>());
  EXPECT_EQ(words_after(refusal(spec("zzz", "fp32")), " is not one of "), tables);
  EXPECT_EQ(words_after(refusal(spec("fp32", "zzz")), " is not one of "), scalars);
  for (const std::string& table : tables)
    for (const std::string& scalar : scalars) EXPECT_EQ(refusal(spec(table, scalar)), "");
}

TEST(Schema, RequiredFields) {
  const Json required = load_schema()["required"];
  const Json spec = smallest();
  EXPECT_EQ(required.size(), spec.size());
  for (const Json& name : required) {
    Json without = spec;
    without.erase(name.get<std::string>());
    EXPECT_NE(refusal(without), "") << name;
  }
}

}  // namespace
}  // namespace flashjit
