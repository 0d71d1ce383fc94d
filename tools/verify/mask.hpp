// What every mask means, element by element: the second of two definitions, which shares nothing with
// templates/.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/flashjit.hpp"

namespace flashjit::verify {

// One batch entry.
struct Sequence {
  int batch;
  int seqlen_q, seqlen_k;         // its true lengths
  int rows;                       // of the output: those from seqlen_q on are padding
  std::int64_t q_begin, k_begin;  // where its rows start in packed tensors, else 0
};

// Integer tables of `args` are in host memory; q and k count by their shapes only. Throws invalid_argument
// for tables that are missing.
std::vector<Sequence> sequences_of(const AttentionSpec& spec, const AttentionArgs& args);

// Whether the row of a query head sees the key, both counted from their sequence's start.
bool sees(const AttentionSpec& spec, const AttentionArgs& args, const Sequence& sequence, int head, int row,
          int key);

// Pairs of a query row and a key that a launch keeps, over all query heads.
double kept_pairs(const AttentionSpec& spec, const AttentionArgs& args);

}  // namespace flashjit::verify
