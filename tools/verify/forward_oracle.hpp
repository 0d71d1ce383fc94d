// The oracle of forward and decode: attention, row by row.
#pragma once

#include "tools/verify/oracle.hpp"

namespace flashjit::verify {

// Outputs: o, and lse if the spec has it. Inputs: q, k, v, the tables of the masks, with varlen
// cu_seqlens, with paged page_table.
Oracle forward_oracle(const AttentionSpec& spec, const AttentionArgs& args, const OracleOptions& options);

}  // namespace flashjit::verify
