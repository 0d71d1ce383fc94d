// The table of a spec's optional fields. Canonical text, JSON,
// hash, rendered text and the features of families follow from it.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "codegen/spec/spec.hpp"

namespace flashjit {

struct SpecField {
  using Member =
      std::variant<bool AttentionSpec::*, int AttentionSpec::*, std::optional<DType> AttentionSpec::*,
                   std::optional<KvScale> AttentionSpec::*, std::vector<Mask> AttentionSpec::*,
                   std::optional<Rotary> AttentionSpec::*, std::vector<std::string> AttentionSpec::*,
                   std::vector<DeclaredTable> AttentionSpec::*, std::vector<DeclaredScalar> AttentionSpec::*,
                   PinnedConfig AttentionSpec::*>;
  const char* name;
  Member member;
  // The values that the field may have: an integer by its range, a word by its list.
  Range range = {.first = 0};
  std::span<const DType> dtypes = {};
  std::span<const KvScale> scales = {};

  // An integer without a range and a word without a list do not compile. Lists, rotary and config have values
  // of their own.
  constexpr SpecField(const char* field, int AttentionSpec::* of, Range values)
      : name(field), member(of), range(values) {}
  constexpr SpecField(const char* field, std::optional<DType> AttentionSpec::* of,
                      std::span<const DType> values)
      : name(field), member(of), dtypes(values) {}
  constexpr SpecField(const char* field, std::optional<KvScale> AttentionSpec::* of,
                      std::span<const KvScale> values)
      : name(field), member(of), scales(values) {}
  template <class T>
    requires(!std::is_same_v<T, int> && !std::is_same_v<T, std::optional<DType>> &&
             !std::is_same_v<T, std::optional<KvScale>>)
  constexpr SpecField(const char* field, T AttentionSpec::* of) : name(field), member(of) {}
};

// AttentionSpec::for_each_field has the fields.
inline constexpr auto spec_fields = [] {
  constexpr std::size_t count = [] {
    std::size_t fields = 0;
    AttentionSpec::for_each_field([&](const char*, auto, const auto&...) { ++fields; });
    return fields;
  }();
  return [&]<std::size_t... i>(std::index_sequence<i...>) {
    const auto at = [](std::size_t place) {
      std::optional<SpecField> found;
      AttentionSpec::for_each_field([&](const char* name, auto member, const auto&... values) {
        if (place-- == 0) found.emplace(name, member, values...);
      });
      return *found;
    };
    return std::array<SpecField, count>{at(i)...};
  }(std::make_index_sequence<count>());
}();

// Throws invalid_spec if the value of a field is none of those that it may have.
void check_fields(const AttentionSpec& spec);

// The spec with masks, tables and scalars in canonical order, and without values that only spell out a
// default, such as a head_dim_v equal to head_dim, or mean nothing to the operation: gradients of tables.
// Fields at their default then equal those of AttentionSpec{}.
AttentionSpec without_defaults(AttentionSpec spec);

// A field's value as JSON.
struct GivenField {
  SpecField field;
  std::string text;
};
// The fields of the table that are not at their default.
std::vector<GivenField> given_fields(const AttentionSpec& spec,
                                     std::span<const SpecField> table = spec_fields);

// AttentionSpec::to_json() for a spec whose optional fields are those of the table.
std::string canonical_text(const AttentionSpec& spec, std::span<const SpecField> table = spec_fields);

}  // namespace flashjit
