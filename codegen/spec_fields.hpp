// The optional fields of a spec, once. Canonical text, JSON, hash, rendered text and what families refuse
// follow from this table.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "spec.hpp"

namespace flashjit {

struct SpecField {
  using Member =
      std::variant<bool AttentionSpec::*, int AttentionSpec::*, std::optional<DType> AttentionSpec::*,
                   std::vector<Mask> AttentionSpec::*, PinnedConfig AttentionSpec::*>;
  const char* name;
  Member member;
};

// In the order of canonical text.
inline constexpr SpecField spec_fields[] = {
    {"head_dim_v", &AttentionSpec::head_dim_v},
    {"mask", &AttentionSpec::mask},
    {"dropout", &AttentionSpec::dropout},
    {"lse", &AttentionSpec::lse},
    {"varlen", &AttentionSpec::varlen},
    {"paged", &AttentionSpec::paged},
    {"deterministic", &AttentionSpec::deterministic},
    {"o_dtype", &AttentionSpec::o_dtype},
    {"parts_dtype", &AttentionSpec::parts_dtype},
    {"config", &AttentionSpec::config},
};

// The spec with masks in canonical order, and without what says a default in other words: the value of
// head_dim as head_dim_v, say. Fields at their default then equal those of AttentionSpec{}.
AttentionSpec without_defaults(AttentionSpec spec);

// A field's value as JSON.
struct GivenField {
  SpecField field;
  std::string text;
};
// The fields of the table that are not at their default.
std::vector<GivenField> given_fields(const AttentionSpec& spec,
                                     std::span<const SpecField> table = spec_fields);

// AttentionSpec::to_json() where the table's are the fields that there are.
std::string canonical_text(const AttentionSpec& spec, std::span<const SpecField> table = spec_fields);

}  // namespace flashjit
