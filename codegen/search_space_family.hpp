// What a target family contributes to the search space: one file each, search_space_cuda.cpp,
// search_space_sm90a.cpp and search_space_cpu.cpp.
#pragma once

#include <string>
#include <vector>

#include "config.hpp"
#include "shape.hpp"
#include "spec.hpp"
#include "target.hpp"

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

struct SearchSpaceFamily {
  // Why no config at all would do; empty if the target has kernels for the spec.
  std::string (*refusal)(const AttentionSpec&, const Target&);
  // Why that config cannot run, with the numbers; empty if it can.
  std::string (*misfit)(const AttentionSpec&, const Target&, const KernelConfig&);
  ConfigAxes (*axes)(const AttentionSpec&, const Target&);
  // Why that config, which can run, never wins; empty if it may. Pins override it.
  std::string (*futility)(const AttentionSpec&, const Target&, const KernelConfig&);
  // The untuned choice if nothing is pinned: fits, is worth trying and made of values of the axes.
  KernelConfig (*preferred)(const AttentionSpec&, const Target&, const Shape&);
};

extern const SearchSpaceFamily cuda_search_space;
extern const SearchSpaceFamily sm90a_search_space;
extern const SearchSpaceFamily cpu_search_space;

}  // namespace flashjit
