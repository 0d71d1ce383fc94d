// tools/spec.schema.json agrees exactly with AttentionSpec::from_json. The test tries every field, word
// and limit of the schema on the parser, and looks up every word of the parser's messages in the schema.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "codegen/spec/spec.hpp"

namespace flashjit {
namespace {

using Json = nlohmann::ordered_json;

Json load_schema() {
  std::ifstream file(FLASHJIT_SOURCE_DIR "/tools/spec.schema.json");
  EXPECT_TRUE(file);
  return Json::parse(file);
}

// The error's message, or "" if the spec is accepted or only kernels are missing: no version has them of all
// ops and heads, and the schema has those that there are.
std::string refusal(const Json& spec) {
  try {
    AttentionSpec::from_json(spec.dump());
    return {};
  } catch (const Error& error) {
    const bool no_kernels = error.code() == ErrorCode::unsupported && !error.message().starts_with("op ") &&
                            !error.message().starts_with("head_dim");
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
  // The widest head, of which all columns are too many.
  Json spec = {{"op", "append_kv"}, {"dtype", "bf16"}, {"head_dim", 1024}}, rotary = {{"dim", 2}};
  rotary.update(object);
  spec["rotary"] = rotary;
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
// The places of every kind but formulas, whose names are kinds, too.
constexpr auto in_masks = []<std::size_t... i>(std::index_sequence<i...>) {
  return std::array<Place, sizeof...(i) + 1>{in_mask<std::variant_alternative_t<i, Mask>>...,
                                             in_mask<PrefixLm>};
}(std::make_index_sequence<std::variant_size_v<Mask> - 1>());

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
    // A wide range at its ends, and every 997th value between them.
    const auto is_between = [&](int value) { return value > low + 1000 && value < high - 2000; };
    for (int value = low - 2 * step; value <= high + 2 * step; value += is_between(value) ? 997 : 1) {
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

// Whether the value is of the schema. Throws for a keyword that it does not know: no part of the schema is
// passed over.
bool is_of(const Json& schema, const Json& value) {
  const auto every = [](const Json& values, auto&& holds) {
    return std::all_of(values.begin(), values.end(), holds);
  };
  const auto matches = [&](const Json& pattern) {
    return std::regex_search(value.get<std::string>(), std::regex(pattern.get<std::string>()));
  };
  const double number = value.is_number() ? value.get<double>() : 0;
  using Rule = std::function<bool(const Json&)>;
  const std::map<std::string, Rule> rules = {
      {"type",
       [&](const Json& type) {
         return type == "object"    ? value.is_object()
                : type == "array"   ? value.is_array()
                : type == "string"  ? value.is_string()
                : type == "boolean" ? value.is_boolean()
                : type == "integer" ? value.is_number() && number == std::trunc(number)
                                    : throw std::logic_error("unknown type");
       }},
      {"enum", [&](const Json& all) { return !every(all, [&](const Json& one) { return one != value; }); }},
      {"const", [&](const Json& one) { return one == value; }},
      {"anyOf",
       [&](const Json& all) { return !every(all, [&](const Json& one) { return !is_of(one, value); }); }},
      {"not", [&](const Json& one) { return !is_of(one, value); }},
      {"minimum", [&](const Json& low) { return !value.is_number() || number >= low.get<double>(); }},
      {"maximum", [&](const Json& high) { return !value.is_number() || number <= high.get<double>(); }},
      {"multipleOf", [&](const Json& step) { return std::fmod(number, step.get<double>()) == 0; }},
      {"pattern", [&](const Json& pattern) { return !value.is_string() || matches(pattern); }},
      {"maxLength",
       [&](const Json& most) {
         return !value.is_string() || value.get<std::string>().size() <= most.get<std::size_t>();
       }},
      {"minItems",
       [&](const Json& least) { return !value.is_array() || value.size() >= least.get<std::size_t>(); }},
      {"maxItems",
       [&](const Json& most) { return !value.is_array() || value.size() <= most.get<std::size_t>(); }},
      {"maxProperties",
       [&](const Json& most) { return !value.is_object() || value.size() <= most.get<std::size_t>(); }},
      {"items",
       [&](const Json& item) {
         return !value.is_array() || every(value, [&](const Json& one) { return is_of(item, one); });
       }},
      {"required",
       [&](const Json& names) {
         return !value.is_object() ||
                every(names, [&](const Json& name) { return value.contains(name.get<std::string>()); });
       }},
      {"propertyNames",
       [&](const Json& of_names) {
         const auto items = value.items();
         return std::all_of(items.begin(), items.end(),
                            [&](const auto& item) { return is_of(of_names, item.key()); });
       }},
      {"properties",
       [&](const Json& properties) {
         const auto items = properties.items();
         return std::all_of(items.begin(), items.end(), [&](const auto& item) {
           return !value.is_object() || !value.contains(item.key()) || is_of(item.value(), value[item.key()]);
         });
       }},
      {"additionalProperties",
       [&](const Json& other) {
         if (!value.is_object()) return true;
         const Json known = schema.value("properties", Json::object());
         const auto items = value.items();
         return std::all_of(items.begin(), items.end(), [&](const auto& item) {
           return known.contains(item.key()) || (other.is_object() && is_of(other, item.value()));
         });
       }},
  };
  bool holds = true;
  for (const auto& [keyword, rule] : schema.items()) {
    if (keyword == "description" || keyword == "default" || keyword == "title" || keyword == "$schema")
      continue;
    holds = rules.at(keyword)(rule) && holds;
  }
  return holds;
}

// Lists, names and texts at their limits and beyond, where the schema and the parser must say the same.
TEST(Schema, LimitsOfListsNamesAndTexts) {
  const Json schema = load_schema();
  const auto agree = [&](const Json& spec) {
    const std::string message = refusal(spec);
    EXPECT_EQ(is_of(schema, spec), message.empty()) << spec.dump().substr(0, 300) << "\n" << message;
    return message.empty();
  };
  const auto table = [](const Json& shape) { return Json{{"dtype", "fp32"}, {"shape", shape}}; };
  // A score that reads all of the tables and scalars.
  const auto with_declared = [&](const Json& tables, const Json& scalars) {
    std::string sum = "score";
    for (const auto& [name, declared] : tables.items()) {
      sum += " + " + name + "[0";
      if (declared["shape"].is_array())
        for (std::size_t i = 1; i < declared["shape"].size(); ++i) sum += ", 0";
      sum += "]";
    }
    for (const auto& [name, dtype] : scalars.items()) sum += " + " + name;
    return in_spec({{"varlen", true}, {"score", {sum}}, {"tables", tables}, {"scalars", scalars}});
  };
  for (const int count : {7, 8, 9, 15, 16, 17}) {
    Json tables = Json::object(), scalars = Json::object();
    for (int i = 0; i < count; ++i) {
      tables["t" + std::to_string(i)] = table({4});
      scalars["s" + std::to_string(i)] = "fp32";
    }
    EXPECT_EQ(agree(with_declared(tables, Json::object())), count <= 8);
    EXPECT_EQ(agree(with_declared(Json::object(), scalars)), count <= 16);
    EXPECT_EQ(agree(in_spec({{"score", std::vector<std::string>(count, "score / 2")}})), count <= 8);
  }
  for (const std::string& name :
       {std::string("a"), std::string("a_1"), std::string("_a"), std::string("1a"), std::string("a b"),
        std::string("\u00e9"), std::string(), std::string(64, 'a'), std::string(65, 'a')}) {
    agree(with_declared({{name, table({4})}}, Json::object()));
    agree(with_declared(Json::object(), {{name, "fp32"}}));
    agree(with_declared({{"t", table({name})}}, Json::object()));
  }
  for (const char* size : {"batch", "batch or 1", "heads_q or 1", "heads_kv", "seqlen_q or 1",
                           "seqlen_k or 1", "total_q", "total_k", "total_q or 1", "n", "n or 1", "batch or 2",
                           "batch  or 1", "headless", "my_seq", "total", "subtotal"})
    agree(with_declared({{"t", table({size})}}, Json::object()));
  for (const Json& size : {Json(0), Json(1), Json(-1), Json(4.0), Json(4.5), Json(2147483647),
                           Json(2147483648), Json(nullptr), Json(true), Json::array({4})})
    agree(with_declared({{"t", table(Json::array({size}))}}, Json::object()));
  for (const int rank : {0, 1, 6, 7})
    EXPECT_EQ(agree(with_declared({{"t", table(std::vector<int>(rank, 2))}}, Json::object())),
              rank >= 1 && rank <= 6);
  for (const std::size_t length : {4096, 4097}) {
    std::string text = "key < 3";
    text.insert(0, length - text.size(), ' ');
    EXPECT_EQ(agree(in_spec({{"mask", {text}}})), length == 4096);
    EXPECT_EQ(agree(in_spec({{"mask", {{{"formula", text}}}}})), length == 4096);
    text.replace(length - 7, 7, "score+1");
    EXPECT_EQ(agree(in_spec({{"score", {text}}})), length == 4096);
  }
  const auto neighbourhood = [&](const Json& lists) {
    Json mask = {{"kind", "neighbourhood"}, {"shape", {8, 8}}, {"window", {2, 2}}};
    mask.update(lists);
    return agree(in_spec({{"mask", Json::array({mask})}}));
  };
  EXPECT_TRUE(neighbourhood({{"dilation", {4, 4.0}}}));
  EXPECT_TRUE(neighbourhood({{"shape", {8.0, 8}}, {"window", {2, 2.0}}}));
  for (const char* list : {"shape", "window", "dilation"})
    for (const Json& value :
         {Json::array(), Json::array({0, 2}), Json::array({2, -1}), Json::array({2.5, 2}),
          Json::array({2, "2"}), Json::array({2, 2, 2, 2}), Json::array({2, 1e10}), Json(2)})
      EXPECT_FALSE(neighbourhood({{list, value}})) << list << value;
  const Json most = {{"kind", "neighbourhood"}, {"shape", {1 << 30}}, {"window", {1 << 30}}};
  EXPECT_TRUE(agree(in_spec({{"mask", Json::array({most})}})));
}

TEST(Schema, ExamplesAreOfIt) {
  const Json schema = load_schema();
  int examples = 0;
  for (const auto& file : std::filesystem::directory_iterator(FLASHJIT_SOURCE_DIR "/tools/examples")) {
    if (file.path().extension() != ".json") continue;
    ++examples;
    EXPECT_TRUE(is_of(schema, Json::parse(std::ifstream(file.path())))) << file.path();
  }
  EXPECT_GT(examples, 0);
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
