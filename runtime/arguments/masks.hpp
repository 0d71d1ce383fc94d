// Checks the arguments of a spec's masks as far as the host sees them, and converts them to params.
#pragma once

#include "runtime/flashjit.hpp"
#include "templates/shared/offsets.h"
#include "templates/shared/page_table.h"
#include "templates/shared/params.h"

namespace flashjit {

// Fills the masks' part of `params`, whose sizes are set already. Throws invalid_argument for an argument
// that is missing, does not fit, or belongs to a mask that the spec does not have. Reads no tensor memory.
void check_mask_arguments(const AttentionSpec& spec, Device device, const AttentionArgs& args,
                          device::ProblemParams& params);

// The bitmasks of block lists that were given. Throws invalid_argument if their shape does not fit.
const Tensor& require_bitmasks(const AttentionSpec& spec, const BlockSparseMask& mask,
                               const AttentionArgs& args, Device device);

// Checks that a cu_seqlens holds running totals of at most `total` rows. Throws invalid_argument otherwise.
// The pointer is to host memory, with _on to a GPU's: that waits for the GPU.
void check_running_totals(const char* name, const int* cu_seqlens, int batch, int total);
void check_running_totals_on(Device device, const char* name, const int* cu_seqlens, int batch, int total);

// Checks the contents of the tensors of lengths, lists, prefixes and, with paged, page ids; with offsets,
// else null, where the launch begins in the whole. Throws invalid_argument for the first wrong number, with
// its place. All pointers are to host memory.
void check_tables(const AttentionSpec& spec, const device::ProblemParams& params,
                  const device::PageTable& pages, const device::OffsetParams* offsets);

// check_tables() for pointers to GPU memory: waits for the GPU and copies the tables.
void check_tables_on(Device device, const AttentionSpec& spec, const device::ProblemParams& params,
                     const device::PageTable& pages, const device::OffsetParams* offsets);

}  // namespace flashjit
