// How a launch on a GPU is divided into tiles.
#pragma once

#include "codegen/spec/config.hpp"
#include "codegen/spec/spec.hpp"
#include "runtime/executable.hpp"
#include "templates/shared/forward_sm80_params.h"
#include "templates/shared/forward_sm90a_params.h"
#include "templates/shared/gathered.h"

namespace flashjit::cuda {

// How many query heads of one key/value head share a tile with pack_gqa
// (templates/cuda/tile_rows.cuh): the smallest divisor of heads_per_kv_head that gives about the
// fewest tiles, and so the fewest reads of keys, for seqlen_q rows a head. Up to a sixteenth
// more tiles are accepted, so that long sequences stay unpacked. All arguments are positive.
int packed_heads(int heads_per_kv_head, int seqlen_q, int block_m);

// Puts padding before the gathered keys, so that they end with a block, and counts it among the launch's
// keys.
device::GatheredKeys pad_gathered(const KernelConfig& config, device::GatheredKeys gathered,
                                  device::ForwardParams& params);

// Returns the blocks of the grid, and sets in `params` what the device needs
// to know about tiles. Throws invalid_argument if there are too many tiles.
Grid plan_tiles(const AttentionSpec& spec, const KernelConfig& config, int multiprocessors,
                device::Sm80ForwardParams& params);
// workspace: of PartsWorkspace::bytes; null: no tile's keys are divided. parts: of each tile's keys, at
// most multiprocessors / tiles; 0: as many as an estimate of the time chooses. With fixed parts any other
// number than 0 divides all of them. early_rows: the first rows, whose tiles come before all others.
Grid plan_tiles(const AttentionSpec& spec, const KernelConfig& config, int multiprocessors, void* workspace,
                device::Sm90aForwardParams& params, int parts = 0, int early_rows = 0);
// The grid of the step that merges parts, for `params` as plan_tiles() has set them.
Grid merge_grid(const AttentionSpec& spec, const KernelConfig& config, int multiprocessors,
                const device::Sm90aForwardParams& params);

// Whether parts of keys are fixed (templates/shared/forward_sm90a_params.h).
bool divides_fixed_parts(const AttentionSpec& spec);

// Memory for parts of tiles on sm_90a: outputs and states of rows, in floats, and in all. It serves every
// shape; with fixed parts the given one and smaller ones.
struct PartsWorkspace {
  std::size_t outputs, states, bytes;
  PartsWorkspace(const AttentionSpec& spec, const KernelConfig& config, int multiprocessors,
                 const Shape& shape);
};

}  // namespace flashjit::cuda
