// How a launch on a CPU is divided into pieces of work for its threads.
#pragma once

#include <cstdint>

#include "codegen/base/target.hpp"
#include "codegen/spec/config.hpp"
#include "codegen/spec/spec.hpp"
#include "templates/shared/forward_cpu_params.h"

namespace flashjit {

// Bytes of K and V that some 10 us read. A thread with less
// work of that kind would take longer to wake than to work.
constexpr double worthwhile_bytes = 1 << 17;

// Bytes of each thread's scratch for packed blocks beyond
// the first. Pages that are never written take no memory.
constexpr int packed_room = 8 << 20;

// The most (tile, part) items of a launch whose tiles have several parts.
constexpr std::int64_t most_items_in_parts(std::int64_t num_threads) {
  return 2 * num_threads;
}

struct Partition {
  int packed_heads;    // query heads of one key/value head whose rows share tiles
  int tile_rows;       // at most the config's block_m
  int key_parts;       // parts into which each tile's keys are divided
  int packed_blocks;   // blocks of a head's K and V that a thread keeps for its next tiles
  std::int64_t tiles;  // number of tiles of the launch
  // Pieces for the threads: consecutive (tile, part) items, as evenly divided as possible.
  std::int64_t pieces;
};

// Requires at least one query row. Depends only on the sizes in `params`, the spec, the target,
// the config and the number of threads. A row's bits depend on key_parts and on nothing else here.
Partition partition(const device::ForwardParams& params, const AttentionSpec& spec, const Target& target,
                    const KernelConfig& config, int num_threads);

}  // namespace flashjit
