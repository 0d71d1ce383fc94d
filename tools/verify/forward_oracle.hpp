// Attention, row by row.
#pragma once

#include "tools/verify/oracle.hpp"

namespace flashjit::verify {

// Outputs: o and, where the spec has it, lse. Inputs: q, k, v and, with varlen, cu_seqlens.
Oracle forward_oracle(const AttentionSpec& spec, const AttentionArgs& args, const OracleOptions& options);

}  // namespace flashjit::verify
