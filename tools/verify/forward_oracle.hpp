// The oracle of the forward: attention, row by row.
#pragma once

#include "tools/verify/oracle.hpp"

namespace flashjit::verify {

// Outputs: o, and lse if the spec has it. Inputs: q, k, v, and cu_seqlens with varlen.
Oracle forward_oracle(const AttentionSpec& spec, const AttentionArgs& args, const OracleOptions& options);

}  // namespace flashjit::verify
