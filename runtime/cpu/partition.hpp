// How a launch on a CPU is cut into pieces of work for the threads that there are.
#pragma once

#include <cstdint>

#include "codegen/config.hpp"
#include "codegen/spec.hpp"
#include "codegen/target.hpp"
#include "templates/shared/forward_cpu_params.h"

namespace flashjit {

// For packed blocks beyond a scratch's first one, bytes of each thread: what is never written takes no
// memory.
constexpr int packed_room = 8 << 20;

// (tile, part) items of a launch whose tiles have several parts, at most.
constexpr std::int64_t most_items_in_parts(std::int64_t num_threads) {
  return 2 * num_threads;
}

struct Partition {
  int packed_heads;     // query heads of one key/value head whose rows share tiles
  int tile_rows;        // at most the config's block_m
  int key_parts;        // that each tile's keys are worked on in
  int packed_blocks;    // of a head's K and V that a thread keeps for its next tiles
  std::int64_t tiles;   // of the launch
  std::int64_t pieces;  // to hand to threads: consecutive (tile, part) items, as evenly many as can be
};

// There are query rows. Depends on the sizes in `params`, the spec, the target, the config and the number of
// threads alone: a row's bits follow from key_parts, and from nothing else here.
Partition partition(const device::ForwardParams& params, const AttentionSpec& spec, const Target& target,
                    const KernelConfig& config, int num_threads);

}  // namespace flashjit
