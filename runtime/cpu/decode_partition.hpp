// Cuts a decode on a CPU into items for its threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codegen/config.hpp"
#include "codegen/spec.hpp"
#include "templates/shared/decode_params.h"

namespace flashjit {

struct DecodePartition {
  int heads_at_once, positions_at_once;  // as CpuDecodeParams has them
  int parts;                             // of each sequence's keys
  std::int64_t tiles;                    // batch entries x groups of heads_at_once key/value heads
  std::int64_t pieces;                   // for the threads: of tiles x parts items
  std::size_t part_bytes;                // of a part's results
};

// Requires query rows, and room for a group's heads in block_m. Reads the lengths: no item is much longer
// than a thread's share of all keys. The result depends only on sizes, lengths, spec, config and the number
// of threads.
DecodePartition decode_partition(const device::DecodeParams& params, const AttentionSpec& spec,
                                 const KernelConfig& config, int num_threads);

}  // namespace flashjit
