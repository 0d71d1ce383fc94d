// Cuts a decode on a CPU into items for its threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codegen/spec/config.hpp"
#include "codegen/spec/spec.hpp"
#include "runtime/executable.hpp"
#include "runtime/step_params.hpp"
#include "templates/shared/decode_cpu_params.h"

namespace flashjit {

struct DecodePartition {
  int heads_at_once, tile_rows, part_keys, whole_keys;  // as CpuDecodeParams has them
  std::int64_t tiles, items;                            // equal where no tile has several parts
  std::int64_t pieces;                                  // for the threads: of the items
  std::size_t part_bytes;                               // of a slot
  std::int64_t slots;                                   // to lend memory for; 0: no tile has several parts
};

// Requires query rows. Reads the lengths: no item is much longer than a thread's share of all keys. The
// result depends only on sizes, lengths, spec, config and the number of threads.
DecodePartition decode_partition(const device::DecodeParams& params, const AttentionSpec& spec,
                                 const KernelConfig& config, int num_threads);

// Makes the params and items of a step with this partition.
void set_decode_items(StepLaunch& step, const device::DecodeParams& params, const AddedParams& added,
                      const DecodePartition& partition, const AttentionSpec& spec);

}  // namespace flashjit
