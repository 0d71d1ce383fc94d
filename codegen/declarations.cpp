#include "declarations.hpp"

#include <algorithm>
#include <array>
#include <span>

#include "arguments.hpp"
#include "builtin_formulas.hpp"
#include "derivatives.hpp"
#include "formula_words.hpp"
#include "formula_work.hpp"
#include "mask_rules.hpp"
#include "suggest.hpp"

namespace flashjit {
namespace {

using Kind = TableDimension::Kind;

struct NamedDimension {
  std::string_view name;
  Kind kind;
  const char* index;     // the variable that usually indexes it
  bool leading = false;  // an index may leave it out
  bool or_one = false;
};
// The kernel adds an entry's first row or key to indices of total_q and total_k, so these are never shared.
constexpr NamedDimension named_dimensions[] = {
    {"batch", Kind::batch, "batch", true, true},
    {"heads_q", Kind::heads_q, "head", true, true},
    {"heads_kv", Kind::heads_kv, "head_kv", true, true},
    {"seqlen_q", Kind::seqlen_q, "row", false, true},
    {"seqlen_k", Kind::seqlen_k, "key", false, true},
    {"total_q", Kind::total_q, "row"},
    {"total_k", Kind::total_k, "key"},
};
constexpr auto dimension_names = [] {
  std::array<std::string_view, std::size(named_dimensions)> names;
  for (std::size_t i = 0; i < names.size(); ++i) names[i] = named_dimensions[i].name;
  return names;
}();
constexpr std::string_view or_one = " or 1";
constexpr std::size_t prefix_size = sizeof gradient_prefix - 1;

const NamedDimension* find_dimension(Kind kind) {
  for (const NamedDimension& named : named_dimensions)
    if (named.kind == kind) return &named;
  return nullptr;
}

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
  const NamedDimension* const named = find_dimension(dim.kind);
  if (!named && (!is_identifier(dim.name) || dim.name.size() > longest_name))
    invalid(shown + " is no dimension; a number, one of " + listed(dimension_names) +
            ", or a name of its own would work");
  if (dim.or_one && (!named || !named->or_one))
    invalid(shown +
            " is no dimension: only batch, heads_q, heads_kv, seqlen_q and seqlen_k may be 1 instead");
  if (!named) {
    // A misspelt size of the launch would be a dimension of any size.
    for (const std::string_view part : {"batch", "head", "seq", "total"})
      if (dim.name.find(part) != std::string::npos)
        invalid(shown + " is none of " + listed(dimension_names) + did_you_mean(dim.name, dimension_names) +
                (closest(dim.name, dimension_names).empty() ? "; a" : " A") +
                " name of its own must not contain " + std::string(part));
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

void check_count(const char* field, std::size_t count, std::size_t most) {
  if (count > most)
    invalid(std::string(field) + " has " + std::to_string(count) + " entries, at most " +
            std::to_string(most) + " would work");
}

void check_identifier(const std::string& field, const std::string& name) {
  if (!is_identifier(name) || name.size() > longest_name || name.starts_with("_"))
    invalid(field + " " + in_quotes(name) + " is no name of formulas: at most " +
            std::to_string(longest_name) + " letters, digits and _, a letter first");
}

TableDimension dimension_of(std::string_view text) {
  TableDimension dim;
  if (text.ends_with(or_one)) {
    dim.or_one = true;
    text.remove_suffix(or_one.size());
  }
  for (const NamedDimension& named : named_dimensions)
    if (named.name == text) dim.kind = named.kind;
  if (dim.kind == Kind::free) dim.name = text;
  return dim;
}

std::string to_string(const TableDimension& dim) {
  if (dim.kind == Kind::number) return std::to_string(dim.size);
  const NamedDimension* const named = find_dimension(dim.kind);
  return (named ? std::string(named->name) : dim.name) + std::string(dim.or_one ? or_one : "");
}

std::string shape_text(const std::vector<TableDimension>& shape, const char* quote) {
  std::string text;
  for (const TableDimension& dim : shape) {
    const std::string name = to_string(dim);
    text += text.empty() ? "" : ", ";
    text += dim.kind == Kind::number ? name : *quote ? json_string(name) : name;
  }
  return "[" + text + "]";
}

FormulaType type_of(DType dtype) {
  const bool real = dtype == DType::fp32 || dtype == DType::fp16 || dtype == DType::bf16;
  return real ? FormulaType::real : FormulaType::integer;
}

std::size_t leading_dimensions(const DeclaredTable& table) {
  const auto end = std::find_if(table.shape.begin(), table.shape.end(), [](const TableDimension& dim) {
    const NamedDimension* const named = find_dimension(dim.kind);
    return !named || !named->leading;
  });
  return static_cast<std::size_t>(end - table.shape.begin());
}

const char* usual_index(const TableDimension& dim) {
  const NamedDimension* const named = find_dimension(dim.kind);
  return named ? named->index : "0";
}

std::optional<std::int64_t> size_in(const Shape& shape, const TableDimension& dim) {
  switch (dim.kind) {
    case Kind::number:
      return dim.size;
    case Kind::batch:
      return shape.batch;
    case Kind::heads_q:
      return shape.num_heads_q;
    case Kind::heads_kv:
      return shape.num_heads_kv;
    case Kind::seqlen_q:
      return shape.seqlen_q;
    case Kind::seqlen_k:
      return shape.seqlen_k;
    case Kind::total_q:
      return shape.total_q;
    case Kind::total_k:
      return shape.total_k;
    case Kind::free:
      break;
  }
  return std::nullopt;
}

bool has_formulas(const AttentionSpec& spec) {
  return !spec.score.empty() || find_mask<FormulaMask>(spec.mask);
}

std::string gradient_name(const DeclaredTable& table) {
  return std::string(gradient_prefix) + table.name;
}

bool has_table_gradients(const AttentionSpec& spec) {
  return std::any_of(spec.tables.begin(), spec.tables.end(), [](const auto& table) { return table.grad; });
}

bool is_gradient_name(std::string_view name, const DeclaredTable& table) {
  return table.grad && name.starts_with(gradient_prefix) && name.substr(prefix_size) == table.name;
}

int place_of_name(const AttentionSpec& spec, std::string_view name) {
  const auto is_its_gradient = [&](const DeclaredTable& table) { return is_gradient_name(name, table); };
  if (find_declared(spec.tables, name) < 0 && find_declared(spec.scalars, name) < 0 &&
      std::none_of(spec.tables.begin(), spec.tables.end(), is_its_gradient))
    return -1;
  const auto before = [&](const auto& all) {
    return std::count_if(all.begin(), all.end(), [&](const auto& one) { return one.name < name; });
  };
  // Names of gradients come in the order of their tables, after all names that are less than the prefix.
  const auto gradients = std::count_if(spec.tables.begin(), spec.tables.end(), [&](const auto& table) {
    return table.grad && (name.starts_with(gradient_prefix) ? table.name < name.substr(prefix_size)
                                                            : gradient_prefix < name);
  });
  return static_cast<int>(before(spec.tables) + before(spec.scalars) + gradients);
}

Declared declared_at(const AttentionSpec& spec, int place) {
  for (const DeclaredTable& table : spec.tables) {
    if (place_of_name(spec, table.name) == place) return {.table = &table};
    if (!table.grad) continue;
    std::array<char, prefix_size + longest_name> name;
    const auto end = std::copy_n(gradient_prefix, prefix_size, name.begin());
    std::copy(table.name.begin(), table.name.end(), end);
    if (place_of_name(spec, {name.data(), prefix_size + table.name.size()}) == place)
      return {.table = &table, .gradient = true};
  }
  for (const DeclaredScalar& scalar : spec.scalars)
    if (place_of_name(spec, scalar.name) == place) return {.scalar = &scalar};
  return {};
}

int count_of_names(const AttentionSpec& spec) {
  const auto gradients =
      std::count_if(spec.tables.begin(), spec.tables.end(), [](const auto& table) { return table.grad; });
  return static_cast<int>(spec.tables.size() + spec.scalars.size()) + static_cast<int>(gradients);
}

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
