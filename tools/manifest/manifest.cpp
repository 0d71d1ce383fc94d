#include "tools/manifest/manifest.hpp"

#include <algorithm>
#include <limits>
#include <span>

#include "codegen/error.hpp"
#include "codegen/strict_json.hpp"
#include "codegen/suggest.hpp"
#include "tools/manifest/models.hpp"

namespace flashjit {
namespace {

using Json = nlohmann::json;
using Words = std::span<const std::string_view>;

[[noreturn]] void refuse(const std::string& where, const std::string& what) {
  throw Error(ErrorCode::invalid_argument, "manifest: " + where + (where.empty() ? "" : " ") + what);
}

std::string or_meant(std::string_view word, Words known) {
  const std::string_view meant = closest(word, known);
  return meant.empty() ? listed(known) : std::string(meant);
}

void require_fields(const std::string& where, const Json& object, Words known) {
  if (!object.is_object()) refuse(where, "is not an object");
  for (const auto& [name, value] : object.items()) {
    if (std::find(known.begin(), known.end(), name) == known.end())
      refuse(where, "has an unknown field " + in_quotes(name) + "; known: " + or_meant(name, known));
  }
}

Shape read_shape(const std::string& where, const Json& json) {
  constexpr std::string_view fields[] = {"batch",       "seqlen_q",     "seqlen_k",
                                         "num_heads_q", "num_heads_kv", "page_size"};
  require_fields(where, json, fields);
  const auto size = [&](const char* name, int absent) {
    if (!json.contains(name)) return absent;
    const Json& value = json[name];
    if (!value.is_number_integer() || value < 1 || value > std::numeric_limits<int>::max())
      refuse(where + "." + name, "is not a whole number of 1 or more");
    return value.get<int>();
  };
  if (!json.contains("seqlen_q")) refuse(where, "has no seqlen_q");
  Shape shape{.batch = size("batch", 1), .seqlen_q = size("seqlen_q", 1)};
  shape.seqlen_k = size("seqlen_k", shape.seqlen_q);
  shape.num_heads_q = size("num_heads_q", 1);
  shape.num_heads_kv = size("num_heads_kv", shape.num_heads_q);
  shape.page_size = size("page_size", 0);
  if (shape.num_heads_q % shape.num_heads_kv != 0)
    refuse(where + ".num_heads_q", "is not a multiple of num_heads_kv");
  return shape;
}

// "ops" of a model: what it is prebuilt for.
std::vector<Operation> read_ops(const std::string& where, const Json& entry) {
  if (!entry.contains("ops")) return {Operation::forward};
  constexpr std::pair<std::string_view, Operation> known[] = {{"forward", Operation::forward},
                                                              {"backward", Operation::backward}};
  const Json& list = entry["ops"];
  if (!list.is_array() || list.empty())
    refuse(where + ".ops", R"(is not a list of operations; ["forward", "backward"] would work)");
  std::vector<Operation> ops;
  for (const Json& name : list) {
    const auto op = std::find_if(std::begin(known), std::end(known),
                                 [&](const auto& item) { return name == item.first; });
    if (op == std::end(known))
      refuse(where + ".ops", "has " + name.dump() + "; a model has forward and backward");
    ops.push_back(op->second);
  }
  return ops;
}

void add_model(const std::string& where, std::string_view name, const std::vector<Operation>& ops,
               std::vector<ManifestItem>& items) {
  std::vector<std::string_view> names;
  for (const Model& model : models()) {
    names.push_back(model.name);
    if (model.name != name) continue;
    for (const Operation op : ops)
      for (AttentionSpec& spec : specs_of(model, op)) items.push_back({std::move(spec), model.shapes, true});
    return;
  }
  refuse(where, in_quotes(name) + " is not a known model; known: " + or_meant(name, names));
}

void add_spec(const Json& json, std::vector<Shape> shapes, std::vector<ManifestItem>& items) {
  const bool any_shape = shapes.empty();
  items.push_back({AttentionSpec::from_json(json.dump()), std::move(shapes), any_shape});
}

void add_entry(const std::string& where, const Json& entry, std::vector<ManifestItem>& items) {
  constexpr std::string_view fields[] = {"model", "ops", "spec", "shapes"};
  require_fields(where, entry, fields);
  if (entry.contains("model") == entry.contains("spec"))
    refuse(where, "must have either a \"model\" or a \"spec\"");
  if (entry.contains("model")) {
    if (entry.contains("shapes")) refuse(where, "has shapes beside a model, which has its own");
    if (!entry["model"].is_string()) refuse(where + ".model", "is not a name");
    return add_model(where + ".model", entry["model"].get_ref<const std::string&>(), read_ops(where, entry),
                     items);
  }
  if (entry.contains("ops")) refuse(where, "has ops beside a spec, which has its \"op\"");
  std::vector<Shape> shapes;
  if (entry.contains("shapes")) {
    const Json& list = entry["shapes"];
    if (!list.is_array() || list.empty()) refuse(where + ".shapes", "is not a list of shapes");
    for (std::size_t i = 0; i < list.size(); ++i)
      shapes.push_back(read_shape(where + ".shapes[" + std::to_string(i) + "]", list[i]));
  }
  try {
    add_spec(entry["spec"], std::move(shapes), items);
  } catch (const Error& error) {
    throw Error(error.code(), "manifest: " + where + ".spec: " + error.message(), error.detail());
  }
}

}  // namespace

std::vector<ManifestItem> parse_manifest(std::string_view text) {
  std::vector<ManifestItem> items;
  const std::size_t start = text.find_first_not_of(" \t\r\n");
  if (start == std::string_view::npos) refuse("", "is empty");
  if (text[start] != '{') {
    add_model("", text.substr(start, text.find_last_not_of(" \t\r\n") + 1 - start), {Operation::forward},
              items);
    return items;
  }
  const Json json = parse_strict_json(text, "the manifest", ErrorCode::invalid_argument);
  if (!json.contains("kernels")) {
    add_spec(json, {}, items);
    return items;
  }
  constexpr std::string_view fields[] = {"kernels"};
  require_fields("the whole", json, fields);
  const Json& kernels = json["kernels"];
  if (!kernels.is_array() || kernels.empty()) refuse("kernels", "is not a list of models and specs");
  for (std::size_t i = 0; i < kernels.size(); ++i)
    add_entry("kernels[" + std::to_string(i) + "]", kernels[i], items);
  return items;
}

}  // namespace flashjit
