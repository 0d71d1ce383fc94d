// The oracle of copy_kv: a copied row has the values of its source. Results are exact. Only rows that a
// launch writes are visited; a place to which several rows go is left out.
#pragma once

#include "tools/verify/oracle.hpp"

namespace flashjit::verify {

// Outputs: k and v, with scales of tokens k_scale and v_scale. The sources in `args` are those before the
// launch.
Oracle copy_kv_oracle(const AttentionSpec& spec, const AttentionArgs& args, const OracleOptions& options);

}  // namespace flashjit::verify
