#include "codegen/families/refusals.hpp"

#include <algorithm>
#include <string_view>
#include <type_traits>
#include <vector>

#include "codegen/base/suggest.hpp"

namespace flashjit {
namespace {

// Calls visit(name, value) for the choices of that name, which are numbers.
template <class Visit>
void for_each_of(const KernelConfig& config, std::initializer_list<const char*> choices, Visit visit) {
  for_each_choice([&](const char* name, auto choice, auto) {
    if constexpr (std::is_same_v<decltype(choice), int KernelConfig::*>)
      if (std::any_of(choices.begin(), choices.end(),
                      [&](const char* one) { return std::string_view(one) == name; }))
        visit(name, config.*choice);
  });
}

// "block_m 64 and block_n 128 need 300000 bytes of scratch, more than the 2097152 of a thread on x86-64-v3"
std::string too_much(const KernelConfig& config, std::initializer_list<const char*> choices, int bytes,
                     const char* memory, int limit, const char* owner, const Target& target) {
  if (bytes <= limit) return {};
  std::vector<std::string> texts;
  for_each_of(config, choices,
              [&](const char* name, int value) { texts.push_back(name + (" " + std::to_string(value))); });
  return listed(std::vector<std::string_view>(texts.begin(), texts.end())) +
         (texts.size() == 1 ? " needs " : " need ") + std::to_string(bytes) + " bytes of " + memory +
         ", more than the " + std::to_string(limit) + " of a " + owner + " on " + target.str();
}

}  // namespace

std::string wrong(const char* choice, int value, const std::string& rule) {
  return std::string(choice) + " " + std::to_string(value) + " " + rule;
}

std::string no_ds_mla_by_mma(const AttentionSpec& spec, const Target&) {
  if (spec.kv_dtype != DType::fp8_ds_mla) return {};
  return "kv_dtype fp8_ds_mla has decode kernels on CPUs and, with pages and without batch_invariant, on "
         "sm_90a; kv_dtype fp8_e4m3 would work";
}

std::string too_much_shared_memory(const KernelConfig& config, std::initializer_list<const char*> choices,
                                   int bytes, const Target& target) {
  return too_much(config, choices, bytes, "shared memory", target.max_shared_memory(), "block", target);
}

std::string too_many_sums(int held) {
  if (held <= most_sums) return {};
  return "a thread would hold " + std::to_string(held) + " sums in its 255 registers; more than " +
         std::to_string(most_sums) + " leave too few registers for everything else";
}

std::string too_much_scratch(const KernelConfig& config, std::initializer_list<const char*> choices,
                             int bytes, const Target& target) {
  return too_much(config, choices, bytes, "scratch", largest_scratch, "thread", target);
}

std::string not_of_cpus(const KernelConfig& config, std::initializer_list<const char*> choices, int step) {
  std::string why;
  for_each_of(config, {"num_warps", "num_stages"}, [&](const char* name, int value) {
    if (value != 1) why = wrong(name, value, "is not 1, as it must be on a CPU");
  });
  for_each_of(config, choices, [&](const char* name, int value) {
    if (why.empty() && (value <= 0 || value % step != 0 || value > 1024))
      why = wrong(name, value, "is not a multiple of " + std::to_string(step) + " up to 1024");
  });
  return why;
}

}  // namespace flashjit
