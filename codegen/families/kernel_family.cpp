#include "codegen/families/kernel_family.hpp"

#include <algorithm>

#include "codegen/base/suggest.hpp"

namespace flashjit {

// The build writes families.inc: FLASHJIT_FAMILY(NAME) for each file NAME.cpp of this folder that has one.
#define FLASHJIT_FAMILY(name)       \
  namespace name {                  \
  extern const KernelFamily family; \
  }
#include "families.inc"
#undef FLASHJIT_FAMILY

namespace {

constexpr const KernelFamily* families[] = {
#define FLASHJIT_FAMILY(name) &name::family,
#include "families.inc"
#undef FLASHJIT_FAMILY
};

const KernelFamily* find_family(Operation op, const Target& target) {
  const KernelFamily* found = nullptr;
  for (const KernelFamily* family : families) {
    if (family->op != op || !family->serves(target)) continue;
    if (found == nullptr || found->needs == Instructions::common) found = family;
  }
  return found;
}

bool has(KernelFamily::Names names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// One feature that a spec asks for beyond its operation.
struct Feature {
  KernelFamily::Names KernelFamily::* names;  // the list in which families name the feature
  std::string_view name;
  std::string text;     // as messages show it: "paged true"
  std::string instead;  // what would work; empty: the names in the family's list
};

std::vector<Feature> features_of(const AttentionSpec& spec, std::span<const SpecField> table) {
  const std::string dtype = to_string(spec.dtype);
  std::vector<Feature> features = {{&KernelFamily::dtypes, to_string(spec.dtype), "dtype " + dtype, ""}};
  for (const GivenField& given : given_fields(spec, table)) {
    const bool is_flag = std::holds_alternative<bool AttentionSpec::*>(given.field.member);
    const char* const instead = !is_flag ? "leaving it out" : given.text == "true" ? "false" : "true";
    constexpr std::size_t longest = 64;  // of a text in a message
    const std::string text =
        given.text.size() <= longest ? given.text : given.text.substr(0, longest) + "...";
    features.push_back(
        {&KernelFamily::fields, given.field.name, std::string(given.field.name) + " " + text, instead});
  }
  for (const Mask& mask : spec.mask) {
    const char* const kind = std::visit([](const auto& m) -> const char* { return m.kind; }, mask);
    features.push_back({&KernelFamily::masks, kind, std::string("mask ") + kind, "leaving it out"});
  }
  return features;
}

// A head dimension of a spec, and where families have its limits.
struct HeadDim {
  const char* name;
  int AttentionSpec::* value;
  Range KernelFamily::* range;
};
constexpr HeadDim head_dim_fields[] = {
    {"head_dim", &AttentionSpec::head_dim, &KernelFamily::head_dim},
    {"head_dim_v", &AttentionSpec::head_dim_v, &KernelFamily::head_dim_v},
};
std::string text_of(const HeadDim& field, const AttentionSpec& spec) {
  return std::string(field.name) + " " + std::to_string(spec.*field.value);
}
// "head_dim 512 is more than 256, the largest of op forward's kernels"
std::string too_large(const HeadDim& field, const AttentionSpec& spec, int largest) {
  return text_of(field, spec) + " is more than " + std::to_string(largest) + ", the largest of op " +
         to_string(spec.op) + "'s kernels";
}
// Multi-head latent attention in the form of one shared head: K of 576 elements, V their first 512
// (DeepSeek-V2, 2024).
bool has_latent_heads(const AttentionSpec& spec) {
  return spec.head_dim == 576 && (spec.head_dim_v == 512 || spec.head_dim_v == 576);
}

std::string alternatives(const Feature& feature, const KernelFamily& family) {
  if (!feature.instead.empty()) return feature.instead;
  std::string text;
  for (const std::string_view name : family.*feature.names) (text += text.empty() ? "" : " or ") += name;
  return text;
}

// "sm_90a and x86-64-v4": the targets whose family for the operation passes the test.
template <class Test>
std::string targets_where(Operation op, Test&& test) {
  std::vector<std::string> names;
  for (const Target& target : Target::all()) {
    const KernelFamily* family = find_family(op, target);
    if (family && test(*family)) names.push_back(target.str());
  }
  return listed(std::vector<std::string_view>(names.begin(), names.end()));
}

// "forward or merge": the operations that have kernels.
std::string operations_with_families() {
  std::string text;
  for (const OperationInfo& row : operation_table)
    if (std::any_of(std::begin(families), std::end(families),
                    [&](const KernelFamily* family) { return family->op == row.op; }))
      (text += text.empty() ? "" : " or ") += row.name;
  return text;
}

// Why the target has no kernels for the operation.
std::string absent(Operation op, const Target& target) {
  const std::string others = targets_where(op, [](const KernelFamily&) { return true; });
  return std::string("op ") + to_string(op) + " is not supported on " + target.str() + "; " +
         (others.empty() ? "op " + operations_with_families() : others) + " would work";
}

}  // namespace

std::string nothing_refused(const AttentionSpec&, const Target&) {
  return {};
}

ConfigAxes one_config(const AttentionSpec&, const Target& target) {
  return {.num_warps = {target.is_cuda() ? KernelConfig{}.num_warps : 1}};
}

std::string not_on_axes(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  const KernelFamily& family = family_of(spec.op, target);
  std::string why;
  family.axes(spec, target).for_each([&](const char* name, const auto& values, auto choice, auto) {
    if (!why.empty() || std::find(values.begin(), values.end(), config.*choice) != values.end()) return;
    std::string others;
    for (std::size_t i = 0; i < values.size(); ++i)
      others += (i == 0 ? "" : i + 1 == values.size() ? " or " : ", ") + choice_text(values[i]);
    why = std::string(name) + " " + choice_text(config.*choice) + " is not " + others;
  });
  return why;
}

std::string never_futile(const AttentionSpec&, const Target&, const KernelConfig&) {
  return {};
}

KernelConfig first_on_axes(const AttentionSpec& spec, const Target& target, const Shape&) {
  KernelConfig config;
  family_of(spec.op, target)
      .axes(spec, target)
      .for_each([&](const char*, const auto& values, auto choice, auto) { config.*choice = values.front(); });
  return config;
}

bool KernelFamily::has_choice(std::string_view name) const {
  return has(choices, name);
}

std::vector<Operation> operations_on(const Target& target) {
  std::vector<Operation> operations;
  for (const KernelFamily* family : families)
    if (family->serves(target)) operations.push_back(family->op);
  std::sort(operations.begin(), operations.end());
  operations.erase(std::unique(operations.begin(), operations.end()), operations.end());
  return operations;
}

const KernelFamily& family_of(Operation op, const Target& target) {
  if (const KernelFamily* family = find_family(op, target)) return *family;
  throw Error(ErrorCode::unsupported, absent(op, target));
}

std::string why_unsupported(const AttentionSpec& spec, const Target& target,
                            std::span<const SpecField> table) {
  const KernelFamily* const family = find_family(spec.op, target);
  if (!family) return absent(spec.op, target);
  for (const HeadDim& field : head_dim_fields) {
    const int value = spec.*field.value ? spec.*field.value : spec.head_dim;
    const Range& range = family->*field.range;
    if (value <= range.last) continue;
    const std::string others =
        targets_where(spec.op, [&](const KernelFamily& f) { return value <= (f.*field.range).last; });
    return too_large(field, spec, range.last) + " for " + target.str() + "; " + std::to_string(range.last) +
           (has_latent_heads(spec)
                ? " would work there, heads of MLA's up-projected K and V (head_dim 192, head_dim_v 128)"
                : " would work there") +
           (others.empty() ? "" : ", and " + text_of(field, spec) + " on " + others);
  }
  for (const Feature& feature : features_of(spec, table)) {
    const auto names_it = [&](const KernelFamily& f) { return has(f.*feature.names, feature.name); };
    if (names_it(*family)) continue;
    const std::string others = targets_where(spec.op, names_it);
    return feature.text + " is not supported on " + target.str() + "; " + alternatives(feature, *family) +
           " would work there" + (others.empty() ? "" : ", and " + feature.text + " on " + others);
  }
  return family->refusal(spec, target);
}

void check_head_dims(const AttentionSpec& spec) {
  for (const HeadDim& field : head_dim_fields) {
    Range range = head_dims;
    int largest = 0;
    for (const KernelFamily* family : families)
      if (family->op == spec.op) largest = std::max(largest, (family->*field.range).last);
    if (largest) range.last = largest;
    const int value = spec.*field.value;
    if (value > range.last && head_dims.has(value))
      throw Error(ErrorCode::unsupported,
                  too_large(field, spec, range.last) + "; " + std::to_string(range.last) + " would work");
    check_value(field.name, value, range);
  }
}

void check_supported(const AttentionSpec& spec, std::span<const SpecField> table) {
  std::vector<const KernelFamily*> of_op;
  std::copy_if(std::begin(families), std::end(families), std::back_inserter(of_op),
               [&](const KernelFamily* family) { return family->op == spec.op; });
  if (of_op.empty()) {
    throw Error(ErrorCode::unsupported, std::string("op ") + to_string(spec.op) +
                                            " is not supported by this version; " +
                                            operations_with_families() + " would work");
  }
  for (const Feature& feature : features_of(spec, table)) {
    const bool named = std::any_of(of_op.begin(), of_op.end(), [&](const KernelFamily* family) {
      return has(family->*feature.names, feature.name);
    });
    if (!named) {
      throw Error(ErrorCode::unsupported, feature.text + " is not supported by op " + to_string(spec.op) +
                                              "; " + alternatives(feature, *of_op.front()) + " would work");
    }
  }
}

bool computes_field(Operation op, std::string_view field) {
  return std::any_of(std::begin(families), std::end(families), [&](const KernelFamily* family) {
    return family->op == op && has(family->fields, field);
  });
}

std::string targets_with_choice(Operation op, std::string_view choice) {
  return targets_where(op, [&](const KernelFamily& family) { return family.has_choice(choice); });
}

}  // namespace flashjit
