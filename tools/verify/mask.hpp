// The definition of every mask, element by element. It is the second of two definitions and shares nothing
// with templates/.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/flashjit.hpp"

namespace flashjit::verify {

// One batch entry.
struct Sequence {
  int batch;
  int seqlen_q, seqlen_k;         // its own lengths
  int rows;                       // rows of the output; rows from seqlen_q on are padding
  std::int64_t q_begin, k_begin;  // its first row and key in packed tensors, else 0
};

// Integer tables of `args` are in host memory; only the shapes of q and k count. Throws invalid_argument if a
// table is missing.
std::vector<Sequence> sequences_of(const AttentionSpec& spec, const AttentionArgs& args);

// Whether a query head's row sees the key. Row and key count from their sequence's start.
bool sees(const AttentionSpec& spec, const AttentionArgs& args, const Sequence& sequence, int head, int row,
          int key);

// How many pairs of a query row and a key a launch keeps, over all query heads.
double kept_pairs(const AttentionSpec& spec, const AttentionArgs& args);

// How many keys some row sees, over all key/value heads. For masks that are alike in all heads.
double read_keys(const AttentionSpec& spec, const AttentionArgs& args);

}  // namespace flashjit::verify
