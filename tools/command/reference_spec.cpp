// The reference's page of spec fields. tools/spec.schema.json says what each field may be (a test holds it to
// the parser); the kernel families say which operations have it on which targets.
#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "codegen/families/kernel_family.hpp"
#include "tools/command/reference.hpp"

namespace flashjit::command {

extern const char spec_schema[];

namespace {

using Json = nlohmann::ordered_json;
using Rows = std::vector<std::vector<std::string>>;

std::string code_of(const Json& value) {
  return "`" + (value.is_string() ? value.get<std::string>() : value.dump()) + "`";
}

std::string values_of(const Json& field) {
  if (field.contains("enum")) {
    std::string text;
    for (const Json& word : field["enum"]) text += (text.empty() ? "" : ", ") + code_of(word);
    return text;
  }
  const std::string type = field.value("type", "");
  if (type == "boolean") return "`true`, `false`";
  if (type == "integer") {
    std::string text = field["minimum"].dump() + " to " + field["maximum"].dump();
    if (field.contains("multipleOf")) text += ", multiples of " + field["multipleOf"].dump();
    return text;
  }
  if (type == "string") return "a text of at most " + field["maxLength"].dump() + " characters";
  if (type == "array") return "a list of at most " + field["maxItems"].dump();
  if (field.contains("maxProperties"))
    return "an object of at most " + field["maxProperties"].dump() + " names";
  return "an object";
}

bool is_required(const Json& parent, const std::string& name) {
  const Json names = parent.value("required", Json::array());
  return std::find(names.begin(), names.end(), name) != names.end();
}

// A row for each property, and for those within it: "config.block_m".
void add_fields(const Json& parent, const std::string& path, Rows& rows) {
  const Json properties = parent.value("properties", Json::object());
  for (const auto& [name, field] : properties.items()) {
    if (field.contains("const")) continue;
    rows.push_back({"`" + path + name + "`", values_of(field),
                    is_required(parent, name)   ? "required"
                    : field.contains("default") ? code_of(field["default"])
                                                : "",
                    field.value("description", "")});
    add_fields(field, path + name + ".", rows);
    if (const Json& named = field.value("additionalProperties", Json(false)); named.is_object()) {
      const std::string member = path + name + ".NAME";
      rows.push_back({"`" + member + "`", values_of(named), "", named.value("description", "")});
      add_fields(named, member + ".", rows);
    }
  }
}

// The targets of the operation that pass the test: "all", "GPUs", "sm_90a", "no".
template <class Test>
std::string targets_text(Operation op, Test&& test) {
  std::vector<std::string> names, cuda, cpu;
  std::size_t all_cuda = 0, all_cpu = 0;
  for (const Target& target : Target::all()) {
    const std::vector<Operation> has = operations_on(target);
    if (std::find(has.begin(), has.end(), op) == has.end()) continue;
    ++(target.is_cuda() ? all_cuda : all_cpu);
    if (test(family_of(op, target))) (target.is_cuda() ? cuda : cpu).push_back(target.str());
  }
  if (cuda.empty() && cpu.empty()) return "no";
  if (cuda.size() == all_cuda && cpu.size() == all_cpu) return "all";
  const auto add = [&](const std::vector<std::string>& of, std::size_t all, const char* together) {
    if (of.size() == all && all) {
      names.push_back(together);
    } else {
      names.insert(names.end(), of.begin(), of.end());
    }
  };
  add(cuda, all_cuda, "GPUs");
  add(cpu, all_cpu, "CPUs");
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

bool has(KernelFamily::Names names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// One row of the table of kernels: the feature, and for each operation the targets that have it.
template <class Test>
void add_feature(const std::string& feature, Test&& test, Rows& rows) {
  std::vector<std::string> row = {"`" + feature + "`"};
  for (const OperationInfo& operation : operation_table) row.push_back(targets_text(operation.op, test));
  rows.push_back(std::move(row));
}

// The largest head dimension of each operation: "GPUs 256, CPUs 1024".
void add_head_dim(const std::string& name, Range KernelFamily::* range, Rows& rows) {
  std::vector<std::string> row = {"`" + name + "`, up to"};
  for (const OperationInfo& operation : operation_table) {
    std::vector<int> sizes;
    for (const Target& target : Target::all()) sizes.push_back((family_of(operation.op, target).*range).last);
    std::sort(sizes.begin(), sizes.end());
    sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
    std::string text;
    for (const int size : sizes) {
      const std::string where = targets_text(
          operation.op, [&](const KernelFamily& family) { return (family.*range).last == size; });
      text += (text.empty() ? "" : "; ") + std::to_string(size) + (where == "all" ? "" : " on " + where);
    }
    row.push_back(std::move(text));
  }
  rows.push_back(std::move(row));
}

}  // namespace

std::string spec_page() {
  const Json schema = Json::parse(spec_schema);
  Rows fields, masks, kernels;
  add_fields(schema, "", fields);
  for (const Json& mask : schema["properties"]["mask"]["items"]["anyOf"]) {
    if (mask.value("type", "") != "object") continue;
    const Json& properties = mask["properties"];
    const std::string kind =
        properties.contains("kind") ? properties["kind"]["const"].get<std::string>() : "formula";
    masks.push_back({"`" + kind + "`", "", "", mask["description"]});
    if (properties.contains("kind")) add_fields(mask, kind + ".", masks);
  }

  add_head_dim("head_dim", &KernelFamily::head_dim, kernels);
  add_head_dim("head_dim_v", &KernelFamily::head_dim_v, kernels);
  for (const std::string_view dtype : all_dtypes)
    add_feature(
        "dtype " + std::string(dtype), [&](const KernelFamily& family) { return has(family.dtypes, dtype); },
        kernels);
  for (const SpecField& field : spec_fields) {
    const bool is_flag = std::holds_alternative<bool AttentionSpec::*>(field.member);
    const bool changed = is_flag && AttentionSpec{}.*std::get<bool AttentionSpec::*>(field.member);
    add_feature(
        std::string(field.name) + (changed ? " false" : ""),
        [&](const KernelFamily& family) { return has(family.fields, field.name); }, kernels);
  }
  for (const std::string_view mask : all_masks)
    add_feature(
        "mask " + std::string(mask), [&](const KernelFamily& family) { return has(family.masks, mask); },
        kernels);
  for_each_choice([&](const char* name, auto, auto) {
    add_feature(
        "config." + std::string(name), [&](const KernelFamily& family) { return family.has_choice(name); },
        kernels);
  });

  std::vector<std::string> heads = {"field"};
  for (const OperationInfo& operation : operation_table) heads.push_back(operation.name);
  return page_head("Fields of a spec", "spec",
                   {"`op`, `dtype` and `head_dim` are required. An absent field has its default. "
                    "[spec.schema.json](../spec.schema.json) says the same to a validator."}) +
         "\n## Fields\n\n" + markdown_table({"field", "values", "default", "meaning"}, fields) +
         "\n## Masks\n\nAn element of `mask` is the name of a mask, an object with its `kind` and fields, or "
         "a "
         "formula.\n\n" +
         markdown_table({"mask", "values", "default", "meaning"}, masks) +
         "\n## Operations and targets\n\nThe table says on which targets an operation has kernels for a "
         "field that "
         "is not at its default. `all` are all targets.\n`no` means that the operation refuses the field, or "
         "that it "
         "has no meaning there.\n\n" +
         markdown_table(heads, kernels);
}

}  // namespace flashjit::command
