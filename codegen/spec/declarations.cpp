#include "codegen/spec/declarations.hpp"

#include <algorithm>
#include <array>

#include "codegen/base/suggest.hpp"
#include "codegen/spec/mask_rules.hpp"

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

const NamedDimension* find_dimension(Kind kind) {
  for (const NamedDimension& named : named_dimensions)
    if (named.kind == kind) return &named;
  return nullptr;
}

}  // namespace

std::span<const std::string_view> names_of_dimensions() {
  return dimension_names;
}

bool may_be_one(TableDimension::Kind kind) {
  const NamedDimension* const named = find_dimension(kind);
  return named && named->or_one;
}

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

}  // namespace flashjit
