// The table of a spec's optional fields. Canonical text, JSON,
// hash, rendered text and the features of families follow from it.
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
                   std::optional<KvScale> AttentionSpec::*, std::vector<Mask> AttentionSpec::*,
                   std::optional<Rotary> AttentionSpec::*, std::vector<std::string> AttentionSpec::*,
                   std::vector<DeclaredTable> AttentionSpec::*, std::vector<DeclaredScalar> AttentionSpec::*,
                   PinnedConfig AttentionSpec::*>;
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
    {"batch_invariant", &AttentionSpec::batch_invariant},
    {"o_dtype", &AttentionSpec::o_dtype},
    {"parts_dtype", &AttentionSpec::parts_dtype},
    {"grad_dtype", &AttentionSpec::grad_dtype},
    {"kv_dtype", &AttentionSpec::kv_dtype},
    {"kv_scale", &AttentionSpec::kv_scale},
    {"score", &AttentionSpec::score},
    {"tables", &AttentionSpec::tables},
    {"scalars", &AttentionSpec::scalars},
    {"sink_logits", &AttentionSpec::sink_logits},
    {"precise", &AttentionSpec::precise},
    {"append", &AttentionSpec::append},
    {"rotary", &AttentionSpec::rotary},
    {"config", &AttentionSpec::config},
};

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
