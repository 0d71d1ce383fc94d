#include "codegen/base/target.hpp"

#include <algorithm>
#include <array>

#include "codegen/base/suggest.hpp"

namespace flashjit {
namespace {

struct KnownTarget {
  std::string_view name;
  Target target;
  // cuda: the most that one block may opt in to (CUDA programming guide, technical specifications).
  int shared_memory_kb;
  Instructions own = Instructions::common;  // beyond the common ones
};

using enum Target::Family;
constexpr KnownTarget known_targets[] = {
    {"sm_80", {cuda, 80}, 163},
    {"sm_86", {cuda, 86}, 99},
    {"sm_89", {cuda, 89}, 99},
    {"sm_90", {cuda, 90}, 227},
    {"sm_90a", {cuda, 90, true}, 227, Instructions::wgmma},
    {"sm_100", {cuda, 100}, 227},
    {"sm_120", {cuda, 120}, 99},
    {"x86-64-v3", {cpu, 3}, 0},
    {"x86-64-v4", {cpu, 4}, 0},
    {"x86-64-v4+bf16", {cpu, 4, false, false, true}, 0},
    {"x86-64-v4+amx", {cpu, 4, false, true}, 0},
};

constexpr auto known_names = [] {
  std::array<std::string_view, std::size(known_targets)> names;
  std::transform(std::begin(known_targets), std::end(known_targets), names.begin(),
                 [](const KnownTarget& known) { return known.name; });
  return names;
}();

// Names of real targets that this version has no kernels for, and what to ask for instead.
struct UnsupportedTarget {
  std::string_view name, why, instead;
};
constexpr UnsupportedTarget unsupported_targets[] = {
    {"x86-64-v2", "CPUs without AVX2", "x86-64-v3"},
    {"x86-64", "CPUs without AVX2", "x86-64-v3"},
};

const KnownTarget* find(const Target& target) {
  const auto it = std::find_if(std::begin(known_targets), std::end(known_targets),
                               [&](const KnownTarget& known) { return known.target == target; });
  return it == std::end(known_targets) ? nullptr : it;
}

// The best known cuda target whose code runs on a device of this capability.
const KnownTarget* find_compatible(int capability) {
  const KnownTarget* best = nullptr;
  for (const KnownTarget& known : known_targets) {
    if (known.target.runs_on(capability / 10, capability % 10)) best = &known;
  }
  return best;
}

// The NN of "sm_NN" with an optional one-letter suffix; -1 for any other text.
int capability_of(std::string_view text) {
  if (!text.starts_with("sm_")) return -1;
  text.remove_prefix(3);
  if (!text.empty() && text.back() >= 'a' && text.back() <= 'z') text.remove_suffix(1);
  if (text.size() < 2 || text.size() > 3) return -1;
  int value = 0;
  for (char c : text) {
    if (c < '0' || c > '9') return -1;
    value = value * 10 + (c - '0');
  }
  return value;
}

}  // namespace

Target Target::parse(std::string_view text) {
  if (text == "native") return native();
  for (const KnownTarget& known : known_targets) {
    if (known.name == text) return known.target;
  }
  for (const UnsupportedTarget& unsupported : unsupported_targets) {
    if (unsupported.name == text) {
      throw Error(ErrorCode::unsupported, "target " + in_quotes(text) + ": this version has no kernels for " +
                                              std::string(unsupported.why) + "; " +
                                              std::string(unsupported.instead) + " would work");
    }
  }
  std::string_view near = closest(text, known_names);
  if (const KnownTarget* compatible = find_compatible(capability_of(text))) near = compatible->name;
  throw Error(ErrorCode::invalid_argument,
              "target " + in_quotes(text) + " is not one of native, " + listed(known_names) +
                  (near.empty() ? "" : "; did you mean " + std::string(near) + "?"));
}

Target Target::native() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("x86-64-v4")) {
    const bool amx = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16");
    // Intel's processors multiply pairs of bf16 at half the rate of float32 (measured), AMD's at twice that
    // rate.
    const bool pairs = !amx && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_is("amd");
    return {cpu, 4, false, amx, pairs};
  }
  if (__builtin_cpu_supports("x86-64-v3")) return {cpu, 3};
#endif
  throw Error(
      ErrorCode::target_unavailable,
      "target \"native\": this CPU lacks AVX2, FMA or another instruction of x86-64-v3, the least that CPU "
      "kernels need; kernels for other machines can still be compiled, e.g. for x86-64-v3 or sm_90");
}

Target Target::for_compute_capability(int major, int minor) {
  const int capability = major * 10 + std::clamp(minor, 0, 9);
  if (const KnownTarget* known = find_compatible(capability)) return known->target;
  const std::string version = std::to_string(major) + "." + std::to_string(minor);
  throw Error(ErrorCode::target_unavailable,
              "no target runs on a GPU of compute capability " + version +
                  (capability < 80 ? ", which is older than 8.0 (Ampere)" : "") +
                  "; there are kernels for 8.x, 9.x, 10.x and 12.x, and for this machine's CPU");
}

// Binary code is compatible within a major version, from lower minor versions to higher ones.
bool Target::runs_on(int major, int minor) const {
  const int capability = major * 10 + minor;
  return is_cuda() && level / 10 == major && (arch_specific ? level == capability : level <= capability);
}

const std::vector<Target>& Target::all() {
  static const std::vector<Target> targets = [] {
    std::vector<Target> list;
    for (const KnownTarget& known : known_targets) list.push_back(known.target);
    return list;
  }();
  return targets;
}

std::string Target::str() const {
  if (const KnownTarget* known = find(*this)) return std::string(known->name);
  return (is_cuda() ? "sm_" : "x86-64-v") + std::to_string(level) + (arch_specific ? "a" : "") +
         (amx ? "+amx" : "") + (avx512_bf16 ? "+bf16" : "");
}

bool Target::has(Instructions instructions) const {
  if (instructions == Instructions::common) return true;
  const KnownTarget* known = find(*this);
  return known != nullptr && known->own == instructions;
}

std::vector<Target> Target::lesser() const {
  std::vector<Target> targets;
  for (const KnownTarget& known : known_targets) {
    const Target& other = known.target;
    if (other < *this && (is_cuda() ? other.runs_on(level / 10, level % 10) : runs(other)))
      targets.push_back(other);
  }
  std::sort(targets.rbegin(), targets.rend());
  return targets;
}

int Target::max_shared_memory() const {
  const KnownTarget* known = find(*this);
  return known == nullptr ? 0 : known->shared_memory_kb * 1024;
}

}  // namespace flashjit
