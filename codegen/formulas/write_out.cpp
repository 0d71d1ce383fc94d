#include "codegen/formulas/write_out.hpp"

#include <algorithm>
#include <span>
#include <vector>

#include "codegen/arguments/table.hpp"
#include "codegen/base/suggest.hpp"
#include "codegen/formulas/builtin_formulas.hpp"
#include "codegen/formulas/derivatives.hpp"
#include "codegen/formulas/formula.hpp"
#include "codegen/formulas/formula_words.hpp"
#include "codegen/formulas/formula_work.hpp"
#include "codegen/spec/declarations.hpp"
#include "codegen/spec/mask_rules.hpp"

namespace flashjit {
namespace {

using Kind = TableDimension::Kind;

// Names stand in formulas, beside the arguments of a launch and in the names of gradients.
void check_name(const AttentionSpec& spec, const std::string& field, const std::string& name) {
  check_identifier(field, name);
  const std::string shown = field + " " + in_quotes(name);
  if (find_variable(name) || find_function(name) || name == "inf")
    invalid(shown + " has a meaning in formulas; another name would work");
  for (const Argument& argument : arguments)
    if (name == argument.name) invalid(shown + " is an argument of launches; another name would work");
  const auto count = [&](const auto& all) {
    return std::count_if(all.begin(), all.end(), [&](const auto& one) { return one.name == name; });
  };
  if (count(spec.tables) + count(spec.scalars) > 1)
    invalid(shown + " is declared twice; another name would work");
  if (name.starts_with(gradient_prefix) &&
      find_declared(spec.tables, std::string_view(name).substr(prefix_size)) >= 0)
    invalid(shown + " is the gradient of table " + name.substr(2) + "; another name would work");
}

void check_dimension(const AttentionSpec& spec, const std::string& path, const TableDimension& dim) {
  const std::string text = to_string(dim),
                    shown = path + " " + (dim.kind == Kind::number ? text : in_quotes(text));
  if (dim.kind == Kind::number) {
    if (dim.size < 1) invalid(shown + " is not a size; at least 1 would work");
    return;
  }
  const std::span<const std::string_view> names = names_of_dimensions();
  const bool named = dim.kind != Kind::free;
  if (!named && (!is_identifier(dim.name) || dim.name.size() > longest_name))
    invalid(shown + " is no dimension; a number, one of " + listed(names) +
            ", or a name of its own would work");
  if (dim.or_one && !may_be_one(dim.kind))
    invalid(shown +
            " is no dimension: only batch, heads_q, heads_kv, seqlen_q and seqlen_k may be 1 instead");
  if (!named) {
    // A misspelt size of the launch would be a dimension of any size.
    for (const std::string_view part : {"batch", "head", "seq", "total"})
      if (dim.name.find(part) != std::string::npos)
        invalid(shown + " is none of " + listed(names) + did_you_mean(dim.name, names) +
                (closest(dim.name, names).empty() ? "; a" : " A") + " name of its own must not contain " +
                std::string(part));
  }
  if (dim.kind == Kind::total_q && !spec.varlen)
    invalid(shown + " is a size of packed sequences; batch and seqlen_q, or \"varlen\": true, would work");
  if (dim.kind == Kind::total_k && key_layout(spec) != KeyLayout::packed)
    invalid(shown + " is a size of packed keys, which this spec has not; batch and seqlen_k would work");
}

void check_declarations(const AttentionSpec& spec) {
  for (const DeclaredTable& table : spec.tables) {
    check_name(spec, "tables", table.name);
    const std::string path = "tables." + table.name;
    if (table.dtype == DType::int64 || table.dtype == DType::fp8_e4m3 || table.dtype == DType::fp8_e5m2)
      invalid(path + ".dtype " + to_string(table.dtype) +
              " is none of tables; fp32, fp16, bf16, int32, int8 or uint8 would work");
    if (table.grad && type_of(table.dtype) != FormulaType::real)
      invalid(path + ".grad true, but its " + to_string(table.dtype) +
              " are integers, which have no derivative; fp32, fp16 or bf16, or leaving grad out, would work");
    const std::size_t rank = table.shape.size();
    if (rank < 1 || rank > most_dimensions)
      invalid(path + ".shape has " + std::to_string(rank) + " dimensions, 1 to " +
              std::to_string(most_dimensions) + " would work" + (rank == 0 ? "; scalars have none" : ""));
    for (std::size_t i = 0; i < rank; ++i)
      check_dimension(spec, path + ".shape[" + std::to_string(i) + "]", table.shape[i]);
  }
  for (const DeclaredScalar& scalar : spec.scalars) {
    check_name(spec, "scalars", scalar.name);
    if (scalar.dtype != DType::fp32 && scalar.dtype != DType::int32)
      invalid("scalars." + scalar.name + " " + to_string(scalar.dtype) +
              " is no dtype of scalars; fp32 or int32 would work");
  }
}

// The declared names that formulas read.
struct Used {
  std::vector<bool> tables, scalars;
  std::vector<bool> in_scores;  // tables

  void add(const FormulaNode& node, FormulaUse use) {
    const auto declared = static_cast<std::size_t>(node.declared);
    if (node.kind == FormulaNode::Kind::table) {
      tables[declared] = true;
      if (use == FormulaUse::score) in_scores[declared] = true;
    }
    if (node.kind == FormulaNode::Kind::scalar) scalars[declared] = true;
    for (const FormulaNode& operand : node.operands) add(operand, use);
  }
};

template <class Declared>
void check_used(const char* field, const std::vector<Declared>& all, const std::vector<bool>& used) {
  for (std::size_t i = 0; i < all.size(); ++i)
    if (!used[i])
      invalid(std::string(field) + "." + all[i].name + " is read by no formula; leaving it out would work");
}

}  // namespace

void write_out_formulas(AttentionSpec& spec) {
  const auto check_counts = [&] {
    check_count("mask", spec.mask.size(), most_masks);
    check_count("score", spec.score.size(), most_formulas);
    check_count("tables", spec.tables.size(), most_tables);
    check_count("scalars", spec.scalars.size(), most_scalars);
  };
  check_counts();
  write_out_names(spec);
  check_counts();  // names declare tables and scalars
  check_declarations(spec);
  Used used{std::vector<bool>(spec.tables.size()), std::vector<bool>(spec.scalars.size()),
            std::vector<bool>(spec.tables.size())};
  std::size_t work = 0;
  const auto write_out = [&](std::string& text, FormulaUse use, const std::string& field, std::size_t index) {
    const auto refuse = [&](const std::string& why) {
      invalid(field + "[" + std::to_string(index) + "] " + in_quotes(text) + ", " + why);
    };
    try {
      const FormulaNode formula = parse_formula(text, use, spec);
      used.add(formula, use);
      std::string canonical = formula_text(formula, spec);
      if (canonical.size() > most_characters)
        refuse("written out: it has " + std::to_string(canonical.size()) + " characters, at most " +
               std::to_string(most_characters) + " would work");
      const std::size_t before = work;
      work += work_of(formula, use, spec.precise);
      if (info_of(spec.op).writes_gradients && use == FormulaUse::score && work <= most_work)
        work += work_of_derivatives(formula, spec, most_work - work);
      if (work > most_work)
        refuse(
            "it and its derivatives are more work for a compiler than a spec's formulas may be, " +
            std::to_string(most_work) + " operations, of which those before it take " +
            std::to_string(before) +
            " (one of a mask counts 4, a function or quotient of reals 16 or, if exact, 64, an element of a "
            "table 16 or, in a mask, 64, a division of integers by no number 128); fewer operations would "
            "work");
      text = std::move(canonical);
    } catch (const Error& error) {
      if (error.message().starts_with("column ")) refuse(error.message());
      throw;
    }
  };
  std::size_t masks = 0;
  for (std::size_t i = 0; i < spec.mask.size(); ++i) {
    auto* const mask = std::get_if<FormulaMask>(&spec.mask[i]);
    if (!mask) continue;
    write_out(mask->formula, FormulaUse::mask, "mask", i);
    ++masks;
  }
  for (std::size_t i = 0; i < spec.score.size(); ++i) write_out(spec.score[i], FormulaUse::score, "score", i);
  if (masks > most_formulas)
    invalid("mask has " + std::to_string(masks) + " formulas, at most " + std::to_string(most_formulas) +
            " would work; a && b makes one of two");
  check_used("tables", spec.tables, used.tables);
  for (std::size_t i = 0; i < spec.tables.size(); ++i)
    if (spec.tables[i].grad && !used.in_scores[i])
      invalid("tables." + spec.tables[i].name +
              ".grad true, but no score reads the table, and masks have no gradients; leaving grad out would "
              "work");
  check_used("scalars", spec.scalars, used.scalars);
}

}  // namespace flashjit
