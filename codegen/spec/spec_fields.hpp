// The table of a spec's optional fields. Canonical text, JSON,
// hash, rendered text and the features of families follow from it.
#pragma once

#include <optional>
#include <span>
#include <string>
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
  // What the field may be: an integer by its range, a word by its list.
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

// Families say how large a head may be.
inline constexpr Range head_dims = {.first = 8, .step = 8};
inline constexpr std::array kv_dtypes = {DType::int8, DType::fp8_e4m3, DType::fp8_e5m2,
                                         DType::bf16, DType::fp16,     DType::fp32};

// In the order of canonical text.
inline constexpr SpecField spec_fields[] = {
    {"head_dim_v", &AttentionSpec::head_dim_v, head_dims},
    {"mask", &AttentionSpec::mask},
    {"dropout", &AttentionSpec::dropout},
    {"lse", &AttentionSpec::lse},
    {"varlen", &AttentionSpec::varlen},
    {"paged", &AttentionSpec::paged},
    {"deterministic", &AttentionSpec::deterministic},
    {"batch_invariant", &AttentionSpec::batch_invariant},
    {"o_dtype", &AttentionSpec::o_dtype, float_dtypes},
    {"parts_dtype", &AttentionSpec::parts_dtype, float_dtypes},
    {"grad_dtype", &AttentionSpec::grad_dtype, float_dtypes},
    {"kv_dtype", &AttentionSpec::kv_dtype, kv_dtypes},
    {"kv_scale", &AttentionSpec::kv_scale, kv_scales},
    {"score", &AttentionSpec::score},
    {"tables", &AttentionSpec::tables},
    {"scalars", &AttentionSpec::scalars},
    {"sink_logits", &AttentionSpec::sink_logits},
    {"precise", &AttentionSpec::precise},
    {"append", &AttentionSpec::append},
    {"rotary", &AttentionSpec::rotary},
    {"config", &AttentionSpec::config},
};

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
