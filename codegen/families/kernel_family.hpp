// A kernel family: the kernels of one operation on one family of targets. It
// says what the kernels compute, which configs they have, and renders their
// text. Each family is one file, whose name is the family's.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "codegen/base/shape.hpp"
#include "codegen/base/target.hpp"
#include "codegen/families/kernel_source.hpp"
#include "codegen/spec/config.hpp"
#include "codegen/spec/spec.hpp"
#include "codegen/spec/spec_fields.hpp"

namespace flashjit {

// Values of each choice, ascending. The search space is their product
// without the configs that do not fit or are not worth trying.
struct ConfigAxes {
  std::vector<int> block_m = {0}, block_n = {0}, num_stages = {1}, num_warps = {1};
  std::vector<bool> q_in_registers = {false}, ping_pong = {false};
  std::vector<TileOrder> tile_order = {TileOrder::heads};
  std::vector<bool> pack_gqa = {false};

  // Calls visit(name, values, member of KernelConfig, member of PinnedConfig) for each choice.
  template <class Visit>
  void for_each(Visit&& visit) const {
    visit("block_m", block_m, &KernelConfig::block_m, &PinnedConfig::block_m);
    visit("block_n", block_n, &KernelConfig::block_n, &PinnedConfig::block_n);
    visit("num_stages", num_stages, &KernelConfig::num_stages, &PinnedConfig::num_stages);
    visit("num_warps", num_warps, &KernelConfig::num_warps, &PinnedConfig::num_warps);
    visit("q_in_registers", q_in_registers, &KernelConfig::q_in_registers, &PinnedConfig::q_in_registers);
    visit("ping_pong", ping_pong, &KernelConfig::ping_pong, &PinnedConfig::ping_pong);
    visit("tile_order", tile_order, &KernelConfig::tile_order, &PinnedConfig::tile_order);
    visit("pack_gqa", pack_gqa, &KernelConfig::pack_gqa, &PinnedConfig::pack_gqa);
  }
};

// Whether tiles of one query head each would be so empty that
// packing heads pays: an eighth of their rows is empty at 500 rows.
inline bool packing_pays(const Shape& shape) {
  return shape.num_heads_q > shape.num_heads_kv && shape.seqlen_q <= 512;
}

// The kinds of all masks: kernels take the functor of any. A family that does without some names the others.
inline constexpr auto all_masks = []<std::size_t... i>(std::index_sequence<i...>) {
  return std::array<std::string_view, sizeof...(i)>{std::variant_alternative_t<i, Mask>::kind...};
}(std::make_index_sequence<std::variant_size_v<Mask>>());
template <class... Without>
constexpr auto masks_without = [] {
  std::array<std::string_view, all_masks.size() - sizeof...(Without)> kinds;
  std::copy_if(all_masks.begin(), all_masks.end(), kinds.begin(),
               [](std::string_view kind) { return ((kind != Without::kind) && ...); });
  return kinds;
}();

// A family that does not decide these things takes: no refusal; one value of each choice; the choices'
// values that are on the axes; every config that can run; the first value of each axis.
std::string nothing_refused(const AttentionSpec&, const Target&);
ConfigAxes one_config(const AttentionSpec&, const Target&);
std::string not_on_axes(const AttentionSpec&, const Target&, const KernelConfig&);
std::string never_futile(const AttentionSpec&, const Target&, const KernelConfig&);
KernelConfig first_on_axes(const AttentionSpec&, const Target&, const Shape&);

// Lists that several families have: features, and head dimensions.
inline constexpr std::string_view two_byte_dtypes[] = {"bf16", "fp16"};
inline constexpr std::string_view all_dtypes[] = {"bf16", "fp16", "fp32"};
inline constexpr Range heads_to_256 = {.first = head_dims.first, .last = 256, .step = head_dims.step},
                       heads_to_512 = {.first = head_dims.first, .last = 512, .step = head_dims.step},
                       heads_to_576 = {.first = head_dims.first, .last = 576, .step = head_dims.step},
                       heads_to_1024 = {.first = head_dims.first, .last = 1024, .step = head_dims.step};

struct KernelFamily {
  using Names = std::span<const std::string_view>;

  Operation op;
  Target::Family on;
  // Instructions beyond those of every target of `on`. Of the families that serve a target it takes the one
  // that needs more.
  Instructions needs = Instructions::common;

  // The head dimensions that the kernels compute, of Q and K and of V and O.
  Range head_dim, head_dim_v = head_dim;

  // The features that the kernels compute, by name. A spec that
  // asks for another is refused, so no field is ever ignored.
  Names dtypes;
  Names fields;      // names from spec_fields
  Names masks = {};  // kinds of masks

  // Why the kernels do not compute a spec whose features and head dimensions they have: what does not go
  // together, or has no room on the target, and what would work; empty if they do.
  std::string (*refusal)(const AttentionSpec&, const Target&) = nothing_refused;

  // The choices of a KernelConfig that these kernels have; the others stay at their defaults.
  Names choices = {};

  // Why the config cannot run, with the numbers; empty if it can.
  std::string (*misfit)(const AttentionSpec&, const Target&, const KernelConfig&) = not_on_axes;
  ConfigAxes (*axes)(const AttentionSpec&, const Target&) = one_config;
  // Why a config that can run would never win; empty if it might. Pins override it.
  std::string (*futility)(const AttentionSpec&, const Target&, const KernelConfig&) = never_futile;
  // The untuned choice if nothing is pinned. It fits, is worth trying, and its values are on the axes.
  KernelConfig (*preferred)(const AttentionSpec&, const Target&, const Shape&) = first_on_axes;

  // Adds the kernel's text, steps and options to a source whose target and config are set.
  void (*render)(const AttentionSpec&, KernelSource&);

  bool serves(const Target& target) const { return target.family == on && target.has(needs); }
  bool has_choice(std::string_view name) const;
};

// The operations that have kernels for the target.
std::vector<Operation> operations_on(const Target& target);

// Throws unsupported if the target has no kernels for the operation.
const KernelFamily& family_of(Operation op, const Target& target);

// Why the target has no kernel that computes the spec;
// empty if it has one. `table` holds all optional fields.
std::string why_unsupported(const AttentionSpec& spec, const Target& target,
                            std::span<const SpecField> table = spec_fields);

// Throws invalid_spec if a head dimension is none that any kernel could have; unsupported if it is larger
// than those of the operation's families.
void check_head_dims(const AttentionSpec& spec);

// Throws unsupported if no target's family computes a feature of the spec.
void check_supported(const AttentionSpec& spec, std::span<const SpecField> table = spec_fields);

// Whether some target's family for the operation computes the field of a spec.
bool computes_field(Operation op, std::string_view field);

// The targets whose kernels for the operation have the choice: "sm_90a and x86-64-v4".
std::string targets_with_choice(Operation op, std::string_view choice);

}  // namespace flashjit
