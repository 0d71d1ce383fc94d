// A kernel family: the kernels of one operation on one family of targets. It
// says what the kernels compute, which configs they have, and renders their
// text. Each family is one file, whose name is the family's.
#pragma once

#include <span>
#include <string>
#include <string_view>
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
  std::vector<int> block_m, block_n, num_stages, num_warps;
  std::vector<bool> q_in_registers = {false}, ping_pong = {false};
  std::vector<TileOrder> tile_order = {TileOrder::heads};
  std::vector<bool> pack_gqa = {false};
};

// Whether tiles of one query head each would be so empty that
// packing heads pays: an eighth of their rows is empty at 500 rows.
inline bool packing_pays(const Shape& shape) {
  return shape.num_heads_q > shape.num_heads_kv && shape.seqlen_q <= 512;
}

struct KernelFamily {
  using Names = std::span<const std::string_view>;

  Operation op;
  bool (*serves)(const Target&);

  // The features that the kernels compute, by name. A spec that
  // asks for another is refused, so no field is ever ignored.
  Names dtypes;
  Names fields;  // names from spec_fields
  Names masks;   // kinds of masks

  // The choices of a KernelConfig that these kernels have; the others stay at their defaults.
  Names choices;

  // Why the config cannot run, with the numbers; empty if it can.
  std::string (*misfit)(const AttentionSpec&, const Target&, const KernelConfig&);
  ConfigAxes (*axes)(const AttentionSpec&, const Target&);
  // Why a config that can run would never win; empty if it might. Pins override it.
  std::string (*futility)(const AttentionSpec&, const Target&, const KernelConfig&);
  // The untuned choice if nothing is pinned. It fits, is worth trying, and its values are on the axes.
  KernelConfig (*preferred)(const AttentionSpec&, const Target&, const Shape&);

  // Adds the kernel's text, steps and options to a source whose target and config are set.
  void (*render)(const AttentionSpec&, KernelSource&);

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

// Throws unsupported if no target's family computes a feature of the spec.
void check_supported(const AttentionSpec& spec, std::span<const SpecField> table = spec_fields);

// The targets whose kernels for the operation have the choice: "sm_90a and x86-64-v4".
std::string targets_with_choice(Operation op, std::string_view choice);

}  // namespace flashjit
