// The oracle of make_block_lists. Every block's pairs are looked at one by one; results are exact. Elements
// that no list holds, and bitmasks of no block, are not visited.
#pragma once

#include "tools/verify/oracle.hpp"

namespace flashjit::verify {

// Outputs: block_offsets, block_indices, block_bitmask_of and, if it is given, block_bitmasks.
Oracle make_block_lists_oracle(const AttentionSpec& spec, const AttentionArgs& args,
                               const OracleOptions& options);

// Writes what the oracle of make_block_lists expects, for a spec of any operation that takes the lists: into
// args.block_offsets, block_indices, block_bitmask_of and, if it is given, block_bitmasks, whose sizes are
// those that make_block_lists asks for.
void fill_block_lists(const AttentionSpec& spec, const AttentionArgs& args);

}  // namespace flashjit::verify
