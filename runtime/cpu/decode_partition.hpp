// How a decode on a CPU is cut into items for the threads that there are.
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

// There are query rows, and block_m has room for a group's heads. Reads the lengths: parts are so many that
// no item is much longer than a thread's share of all keys. Depends on sizes, lengths, spec, config and the
// number of threads alone.
DecodePartition decode_partition(const device::DecodeParams& params, const AttentionSpec& spec,
                                 const KernelConfig& config, int num_threads);

}  // namespace flashjit
