#include "codegen/families/kernel_family.hpp"

#include <algorithm>

#include "codegen/base/suggest.hpp"

namespace flashjit {

// The build writes families.inc: FLASHJIT_FAMILY(NAME) for each file NAME.cpp of this folder that has one.
#define FLASHJIT_FAMILY(name) extern const KernelFamily name;
#include "families.inc"
#undef FLASHJIT_FAMILY

namespace {

constexpr const KernelFamily* families[] = {
#define FLASHJIT_FAMILY(name) &name,
#include "families.inc"
#undef FLASHJIT_FAMILY
};

const KernelFamily* find_family(Operation op, const Target& target) {
  for (const KernelFamily* family : families)
    if (family->op == op && family->serves(target)) return family;
  return nullptr;
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

bool KernelFamily::has_choice(std::string_view name) const {
  return has(choices, name);
}

std::vector<Operation> operations_on(const Target& target) {
  std::vector<Operation> operations;
  for (const KernelFamily* family : families)
    if (family->serves(target)) operations.push_back(family->op);
  std::sort(operations.begin(), operations.end());
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
  for (const Feature& feature : features_of(spec, table)) {
    const auto names_it = [&](const KernelFamily& f) { return has(f.*feature.names, feature.name); };
    if (names_it(*family)) continue;
    const std::string others = targets_where(spec.op, names_it);
    return feature.text + " is not supported on " + target.str() + "; " + alternatives(feature, *family) +
           " would work there" + (others.empty() ? "" : ", and " + feature.text + " on " + others);
  }
  return {};
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

std::string targets_with_choice(Operation op, std::string_view choice) {
  return targets_where(op, [&](const KernelFamily& family) { return family.has_choice(choice); });
}

}  // namespace flashjit
