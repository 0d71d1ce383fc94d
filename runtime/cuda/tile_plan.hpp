// How a launch is cut into tiles.
#pragma once

#include "codegen/config.hpp"
#include "codegen/spec.hpp"
#include "runtime/executable.hpp"
#include "templates/shared/forward_sm80_params.h"
#include "templates/shared/forward_sm90a_params.h"

namespace flashjit::cuda {

// pack_gqa (templates/cuda/tile_rows.cuh): how many of a group's query heads share a tile. Of the divisors of
// the group the smallest with which block_m rows a tile make about the fewest tiles, and so the fewest reads
// of keys, for seqlen_q rows a head: a sixteenth more are as good, so that long sequences stay as they are.
// All are positive.
int packed_heads(int group, int seqlen_q, int block_m);

// The blocks of the grid. Sets in params what the device needs to know about tiles. Throws invalid_argument
// if there are too many.
Grid plan_tiles(const AttentionSpec& spec, const KernelConfig& config, int multiprocessors,
                device::Sm80ForwardParams& params);
Grid plan_tiles(const AttentionSpec& spec, const KernelConfig& config, int multiprocessors,
                device::Sm90aForwardParams& params);

}  // namespace flashjit::cuda
