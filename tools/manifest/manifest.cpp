#include "tools/manifest/manifest.hpp"

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include "codegen/base/error.hpp"
#include "codegen/base/strict_json.hpp"
#include "codegen/base/suggest.hpp"
#include "tools/manifest/models.hpp"

namespace flashjit {
namespace {

using Json = nlohmann::json;
using Words = std::span<const std::string_view>;

constexpr std::size_t most_entries = 4096;  // of the list of kernels, and of an entry's list of shapes

[[noreturn]] void refuse(const std::string& where, const std::string& what) {
  throw Error(ErrorCode::invalid_argument, "manifest: " + where + (where.empty() ? "" : " ") + what);
}

void check_length(const std::string& where, const Json& list) {
  if (list.size() > most_entries)
    refuse(where, "has " + std::to_string(list.size()) + " entries; at most " + std::to_string(most_entries) +
                      " would work");
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

// The words of a list of texts, each known and once.
template <class Known>
std::vector<std::size_t> read_words(const std::string& where, const Json& list, const Known& known,
                                    const char* example) {
  if (!list.is_array() || list.empty()) refuse(where, std::string("is not a list of ") + example);
  std::vector<std::size_t> places;
  for (const Json& word : list) {
    const auto* const found =
        std::find_if(std::begin(known), std::end(known), [&](std::string_view name) { return word == name; });
    if (found == std::end(known)) refuse(where, "has " + word.dump() + "; known: " + listed(known));
    const auto place = static_cast<std::size_t>(found - std::begin(known));
    if (std::find(places.begin(), places.end(), place) != places.end())
      refuse(where, "has " + word.dump() + " twice; once would work");
    places.push_back(place);
  }
  return places;
}

// "use", "ops", "kv_dtype", "kv_scale" and "tree" of a model: what it is prebuilt for.
std::vector<ModelUse> read_uses(const std::string& where, const Json& entry, const Model& model) {
  std::vector<std::string_view> known;
  std::string of_caches;
  for (const OperationInfo& op : operation_table) {
    if (!op.of_models) continue;
    known.emplace_back(op.name);
    if (op.caches == When::always) of_caches += (of_caches.empty() ? "" : ", ") + in_quotes(op.name);
  }
  // The spec's own words, and its errors.
  AttentionSpec cache{.op = Operation::decode, .head_dim = 64};
  const bool names_cache = entry.contains("kv_dtype") || entry.contains("kv_scale");
  if (names_cache) {
    Json spec = {{"op", "decode"}, {"dtype", "bf16"}, {"head_dim", 64}};
    for (const char* field : {"kv_dtype", "kv_scale"})
      if (entry.contains(field)) spec[field] = entry[field];
    try {
      cache = AttentionSpec::from_json(spec.dump());
    } catch (const Error& error) {
      refuse(where, "has a cache that no spec has: " + error.message());
    }
  }
  bool tree = false;
  if (entry.contains("tree")) {
    if (!entry["tree"].is_boolean()) refuse(where + ".tree", "is neither true nor false");
    tree = entry["tree"].get<bool>();
  }
  if (entry.contains("use")) {
    if (entry.contains("ops"))
      refuse(where, "has a use beside ops; the use names its operations, so one of both would work");
    std::vector<ModelUse> uses;
    bool serves = false;
    for (const std::size_t place :
         read_words(where + ".use", entry["use"], purposes, R"(uses; ["train", "serve"] would work)")) {
      const auto purpose = static_cast<Purpose>(place);
      serves |= purpose == Purpose::serve;
      std::vector<ModelCache> caches;
      if (names_cache) caches.push_back({cache.kv_dtype, cache.kv_scale});
      for (const ModelUse& use : uses_for(model, purpose, caches, tree)) uses.push_back(use);
    }
    if ((names_cache || tree) && !serves)
      refuse(where, std::string("has ") + (tree ? "tree" : "kv_dtype") +
                        ", which serving has; \"use\": [\"serve\"] would work");
    return uses;
  }
  const Json list = entry.contains("ops") ? entry["ops"] : Json::array({"forward"});
  if (!list.is_array() || list.empty())
    refuse(where + ".ops", R"(is not a list of operations; ["forward", "backward"] would work)");
  std::vector<ModelUse> uses;
  bool caches = false, seen[num_operations] = {};
  for (const Json& name : list) {
    const auto* const op =
        std::find_if(std::begin(operation_table), std::end(operation_table),
                     [&](const OperationInfo& row) { return row.of_models && name == row.name; });
    if (op == std::end(operation_table))
      refuse(where + ".ops", "has " + name.dump() + "; a model has " + listed(known));
    if (std::exchange(seen[op - operation_table], true))
      refuse(where + ".ops", "has " + name.dump() + " twice; once would work");
    uses.push_back({.op = op->op, .kv_dtype = cache.kv_dtype, .kv_scale = cache.kv_scale});
    caches |= op->caches == When::always;
    if (tree && op->few_rows)
      uses.push_back({.op = op->op, .kv_dtype = cache.kv_dtype, .kv_scale = cache.kv_scale, .tree = true});
  }
  if (tree && std::none_of(uses.begin(), uses.end(), [](const ModelUse& use) { return use.tree; }))
    refuse(where, R"(has trees of draft tokens and no decode; "ops": ["decode"] would work)");
  if (names_cache && !caches)
    refuse(where, "has a kv_dtype, which caches have, and no operation on them; \"ops\": [" + of_caches +
                      "] would work");
  return uses;
}

const Model& model_named(const std::string& where, std::string_view name) {
  std::vector<std::string_view> names;
  for (const Model& model : models()) {
    if (model.name == name) return model;
    names.push_back(model.name);
  }
  refuse(where, in_quotes(name) + " is not a known model; known: " + or_meant(name, names));
}

void add_model(const std::string& where, const Model& model, const std::vector<ModelUse>& uses,
               std::vector<ManifestItem>& items) {
  const std::size_t before = items.size();
  for (const ModelUse& use : uses) try {
      for (AttentionSpec& spec : specs_of(model, use)) {
        // Two uses may share kernels.
        if (std::none_of(items.begin() + static_cast<std::ptrdiff_t>(before), items.end(),
                         [&](const ManifestItem& item) { return item.spec == spec; }))
          items.push_back({std::move(spec), shapes_of(model, use), true, use.optional});
      }
    } catch (const Error& error) {
      refuse(where, error.message());
    }
}

void add_spec(const Json& json, std::vector<Shape> shapes, std::vector<ManifestItem>& items) {
  const bool any_shape = shapes.empty();
  items.push_back({AttentionSpec::from_json(json.dump()), std::move(shapes), any_shape});
}

void add_entry(const std::string& where, const Json& entry, std::vector<ManifestItem>& items) {
  constexpr std::string_view fields[] = {"model",    "use",  "ops",  "kv_dtype",
                                         "kv_scale", "tree", "spec", "shapes"};
  require_fields(where, entry, fields);
  if (entry.contains("model") == entry.contains("spec"))
    refuse(where, "must have either a \"model\" or a \"spec\"");
  if (entry.contains("model")) {
    if (entry.contains("shapes")) refuse(where, "has shapes beside a model, which has its own");
    if (!entry["model"].is_string()) refuse(where + ".model", "is not a name");
    const Model& model = model_named(where + ".model", entry["model"].get_ref<const std::string&>());
    return add_model(where + ".model", model, read_uses(where, entry, model), items);
  }
  for (const char* field : {"use", "ops", "kv_dtype", "kv_scale", "tree"})
    if (entry.contains(field))
      refuse(where, std::string("has ") + field + " beside a spec, which says it itself");
  std::vector<Shape> shapes;
  if (entry.contains("shapes")) {
    const Json& list = entry["shapes"];
    if (!list.is_array() || list.empty()) refuse(where + ".shapes", "is not a list of shapes");
    check_length(where + ".shapes", list);
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
    add_model("", model_named("", text.substr(start, text.find_last_not_of(" \t\r\n") + 1 - start)),
              {ModelUse{}}, items);
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
  check_length("kernels", kernels);
  for (std::size_t i = 0; i < kernels.size(); ++i)
    add_entry("kernels[" + std::to_string(i) + "]", kernels[i], items);
  return items;
}

}  // namespace flashjit
