// What the kernels of one operation on one family of targets compute, which configs they have, and their
// text: one file each, and a line of the table in kernel_family.cpp.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "codegen/config.hpp"
#include "codegen/kernel_source.hpp"
#include "codegen/shape.hpp"
#include "codegen/spec.hpp"
#include "codegen/spec_fields.hpp"
#include "codegen/target.hpp"

namespace flashjit {

// Values of each choice, ascending; the space is their product, less what does not fit or is not worth
// trying.
struct ConfigAxes {
  std::vector<int> block_m, block_n, num_stages, num_warps;
  std::vector<bool> q_in_registers = {false}, ping_pong = {false};
  std::vector<TileOrder> tile_order = {TileOrder::heads};
  std::vector<bool> pack_gqa = {false};
};

// Whether query heads of a group, each with its own tiles, would leave much of them empty: an eighth at 500
// rows.
inline bool packing_pays(const Shape& shape) {
  return shape.num_heads_q > shape.num_heads_kv && shape.seqlen_q <= 512;
}

struct KernelFamily {
  using Names = std::span<const std::string_view>;

  Operation op;
  bool (*serves)(const Target&);

  // The features, by name. A spec that asks for another is refused: nothing is ignored.
  Names dtypes;
  Names fields;  // of spec_fields
  Names masks;   // kinds

  // The choices of a KernelConfig that its kernels have; others stay at their defaults.
  Names choices;

  // Why that config cannot run, with the numbers; empty if it can.
  std::string (*misfit)(const AttentionSpec&, const Target&, const KernelConfig&);
  ConfigAxes (*axes)(const AttentionSpec&, const Target&);
  // Why that config, which can run, never wins; empty if it may. Pins override it.
  std::string (*futility)(const AttentionSpec&, const Target&, const KernelConfig&);
  // The untuned choice if nothing is pinned: fits, is worth trying and made of values of the axes.
  KernelConfig (*preferred)(const AttentionSpec&, const Target&, const Shape&);

  // Adds its text, steps and options to a source whose target and config are set.
  void (*render)(const AttentionSpec&, KernelSource&);

  bool has_choice(std::string_view name) const;
};

// Throws unsupported where the target has no kernels for the operation.
const KernelFamily& family_of(Operation op, const Target& target);

// Why the target has no kernel that computes the spec; empty if it has one. `table`: the fields that there
// are.
std::string refusal(const AttentionSpec& spec, const Target& target,
                    std::span<const SpecField> table = spec_fields);

// Throws unsupported where no target's families name what the spec asks for.
void check_supported(const AttentionSpec& spec, std::span<const SpecField> table = spec_fields);

// The targets whose kernels for the operation have that choice.
std::string targets_with_choice(Operation op, std::string_view choice);

}  // namespace flashjit
