// The tables and scalars that a spec declares, and the bounds of a spec.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "codegen/base/shape.hpp"
#include "codegen/spec/spec.hpp"

namespace flashjit {

// Bounds of a spec. All texts that they allow together fit into so many bytes of JSON.
inline constexpr std::size_t most_spec_bytes = 256u << 10;
inline constexpr std::size_t most_masks = 32;  // of a list, equal ones included
inline constexpr std::size_t most_tables = 8, most_scalars = 16, most_formulas = 8, most_dimensions = 6;
inline constexpr std::size_t longest_name = 64;
inline constexpr char gradient_prefix[] = "d_";  // of the names of tables' gradients
inline constexpr std::size_t prefix_size = sizeof gradient_prefix - 1;

// Throws invalid_spec if a field has more entries than that.
void check_count(const char* field, std::size_t count, std::size_t most);

// Throws invalid_spec for a name that no formula could have.
void check_identifier(const std::string& field, const std::string& name);

// A dimension as JSON has it in quotes: "batch", "batch or 1", or the name of a free one.
TableDimension dimension_of(std::string_view text);
std::string to_string(const TableDimension& dimension);
// [batch, seqlen_k, 3], the words in `quote`.
std::string shape_text(const std::vector<TableDimension>& shape, const char* quote);

// The names of dimensions that are sizes of a launch. Whether a tensor may have size 1 there.
std::span<const std::string_view> names_of_dimensions();
bool may_be_one(TableDimension::Kind kind);

// How many dimensions an index may leave out: those of batch and heads that come first.
std::size_t leading_dimensions(const DeclaredTable& table);
// The variable that usually indexes the dimension, such as "key"; "0" for a number or a free one.
const char* usual_index(const TableDimension& dimension);

// The dimension's size in a launch of this shape, whose totals are set where sequences are packed; absent for
// a free one.
std::optional<std::int64_t> size_in(const Shape& shape, const TableDimension& dimension);

// The place of the declared name; -1 if there is none.
template <class Declared>
int find_declared(const std::vector<Declared>& all, std::string_view name) {
  for (std::size_t i = 0; i < all.size(); ++i)
    if (all[i].name == name) return static_cast<int>(i);
  return -1;
}

bool has_formulas(const AttentionSpec& spec);

// The name of a table's gradient; whether a name is that of a gradient that the table has.
std::string gradient_name(const DeclaredTable& table);
bool is_gradient_name(std::string_view name, const DeclaredTable& table);
bool has_table_gradients(const AttentionSpec& spec);

// A named argument of a launch: a table or scalar that the spec declares, or a table's gradient. One of
// `table` and `scalar` is null.
struct Declared {
  const DeclaredTable* table = nullptr;
  const DeclaredScalar* scalar = nullptr;
  bool gradient = false;  // of the table
  explicit operator bool() const { return table || scalar; }
  std::string name() const { return gradient ? gradient_name(*table) : table ? table->name : scalar->name; }
};
// The place of a name among those of tables, gradients and scalars together, in the order of names; -1 if
// there is none. The spec is canonical.
int place_of_name(const AttentionSpec& spec, std::string_view name);
// The name at that place; false if there are fewer.
Declared declared_at(const AttentionSpec& spec, int place);
// How many names there are.
int count_of_names(const AttentionSpec& spec);

}  // namespace flashjit
