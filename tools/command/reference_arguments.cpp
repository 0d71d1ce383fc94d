// The reference's page of arguments, from the table of codegen/arguments/table.hpp.
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "codegen/arguments/table.hpp"
#include "codegen/families/kernel_family.hpp"
#include "tools/command/reference.hpp"

namespace flashjit::command {
namespace {

struct Variant {
  std::string text;
  AttentionSpec spec;
  bool of_scales = false;
};

AttentionSpec plain(Operation op) {
  AttentionSpec spec;
  spec.op = op;
  spec.dtype = DType::bf16;
  if (info_of(op).copies) spec.kv_scale = KvScale::token_head;  // it has no others
  return spec;
}

// The plain spec, and that with one more choice, as far as the operation has it.
std::vector<Variant> variants_of(Operation op) {
  std::vector<Variant> variants = {{"", plain(op)}};
  for (const SpecField& field : spec_fields) {
    const auto* flag = std::get_if<bool AttentionSpec::*>(&field.member);
    if (!flag || !computes_field(op, field.name)) continue;
    variants.push_back({std::string("`") + field.name + "`", plain(op)});
    variants.back().spec.*(*flag) = !(plain(op).*(*flag));
  }
  if (computes_field(op, "kv_scale") && !info_of(op).copies)
    for (const bool paged : {false, true})
      for (const KvScale scale : kv_scales) {
        if (paged && (scale != KvScale::token_head || !computes_field(op, "paged"))) continue;
        Variant variant{std::string("`") + to_string(scale) + (paged ? "` and `paged`" : "`"), plain(op),
                        true};
        variant.spec.kv_scale = scale;
        variant.spec.paged = paged;
        variants.push_back(std::move(variant));
      }
  return variants;
}

std::string shape_of(const flashjit::Argument& argument, const std::vector<Variant>& variants) {
  const std::string usual = argument.layout_of(variants.front().spec);
  std::string text = usual;
  for (const Variant& variant : variants) {
    const std::string other = argument.layout_of(variant.spec);
    if (other != usual && argument.layout.of_scales == variant.of_scales)
      text += "; " + variant.text + ": " + other;
  }
  return text;
}

// The fields that decide the dtype, the one that wins first.
std::string dtype_of(const flashjit::Argument& argument, Operation op) {
  const auto* number = argument.tensor() ? nullptr : &argument.member;
  if (number)
    return std::holds_alternative<std::optional<int> AttentionArgs::*>(*number)             ? "int"
           : std::holds_alternative<std::optional<std::uint64_t> AttentionArgs::*>(*number) ? "uint64"
           : std::holds_alternative<std::optional<float> AttentionArgs::*>(*number)         ? "float"
                                                                                            : "double";
  const AttentionSpec usual = plain(op);
  std::string text;
  for (const SpecField& field : spec_fields)
    if (const auto* dtype = std::get_if<std::optional<DType> AttentionSpec::*>(&field.member)) {
      AttentionSpec spec = usual;
      spec.*(*dtype) = DType::int8;  // no argument has it otherwise
      if (computes_field(op, field.name) && argument.dtype(spec) == DType::int8)
        text += std::string("`") + field.name + "`, else ";
    }
  AttentionSpec other = usual;
  other.rotary.emplace().tables = DType::int8;
  if (argument.dtype(other) == DType::int8) text += "`rotary.tables`, else ";
  other = usual;
  other.dtype = DType::int8;
  return text + (argument.dtype(other) == DType::int8 ? "`dtype`" : to_string(argument.dtype(usual)));
}

std::string role_of(const flashjit::Argument& argument, const AttentionSpec& spec) {
  switch (argument.role_in(spec)) {
    case Role::input:
      return "input";
    case Role::output:
      return "output";
    case Role::table:
      return "table";
    case Role::number:
      return "number";
    case Role::workspace:
      return "workspace";
  }
  return {};
}

std::string operation_text(Operation op) {
  const std::vector<Variant> variants = variants_of(op);
  std::vector<std::vector<std::string>> rows;
  for (const flashjit::Argument& argument : arguments) {
    if (!(argument.operations & argument_table::bit(op))) continue;
    bool always = true, with_values = argument.needs.of_values;  // of every variant that has a v of its own
    for (const Variant& variant : variants) {
      always = always && has_argument(variant.spec, argument);
      with_values = with_values && (has_argument(variant.spec, argument) || variant.spec.v_in_k);
    }
    const bool optional = !argument.required || argument.optional_in & argument_table::bit(op);
    std::string condition = always        ? ""
                            : with_values ? condition_text(argument_table::values(Needs::nothing))
                                          : condition_text(argument.needs);
    if (info_of(op).copies && argument.needs.needs == Needs::kv_dtype)
      condition = "an 8-bit `kv_dtype` and `kv_scale` `token_head`" +
                  std::string(argument.needs.of_values ? ", no `v_in_k`" : "");
    rows.push_back(
        {"`" + std::string(argument.name) + "`", std::to_string(argument.id),
         role_of(argument, variants.front().spec), dtype_of(argument, op),
         argument.tensor() ? shape_of(argument, variants) : "",
         std::string(optional ? "optional" : "required") + (condition.empty() ? "" : ", with " + condition),
         argument.meaning});
  }
  return std::string("\n## ") + to_string(op) + "\n\n" +
         markdown_table({"argument", "id", "role", "dtype", "shape", "given", "meaning"}, rows);
}

}  // namespace

std::string arguments_page() {
  std::string text = page_head(
      "Arguments of a launch", "arguments",
      {"In C++ an argument is a member of `AttentionArgs`, in C a pair of `FLASHJIT_ARG_NAME` and value; "
       "`do` is the "
       "member `d_o`. The id is the number of the C name. "
       "[attention_args.hpp](../../codegen/arguments/attention_args.hpp) has the rules of each.",
       "The role says what a launch does with an argument. It reads the elements of an input and writes an "
       "output. A "
       "table holds integers that say what to compute.",
       "Tables and scalars that a spec declares are given by their names. Their ids in C begin with " +
           std::to_string(first_named_id) +
           ", in the order of the names. A backward writes `d_NAME`, float32, for each table with `\"grad\": "
           "true`."});
  for (const OperationInfo& row : operation_table) text += operation_text(row.op);
  return text;
}

}  // namespace flashjit::command
