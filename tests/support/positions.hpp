// Data that follow from a sequence's name and positions in it alone, so that a row can be compared between
// launches of different batches, page sizes and numbers of new tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/support/workload.hpp"

namespace flashjit::testing_support {

enum class Values {
  bell_shaped,
  // The same but for the first columns. Every row gives some keys far more weight than the others, and V is 0
  // there. Where other keys have weights, they make it a number too small for float32: the output is 0 or -0.
  weightless_column,
};

// Fills q, k and v, and of a backward o, lse, do and dlse. Batch entry b is the sequence names[b]; its last
// row is at its last key's position. lse is about that of a few hundred keys.
void fill_by_position(Workload& workload, const std::vector<std::uint64_t>& names,
                      Values values = Values::bell_shaped);

// The bits of o and lse, of a backward those of dq, of all heads of a row, after fetch().
std::vector<std::byte> bits_of_row(const Workload& workload, int batch, int row);
// The bits of dk and dv of all heads of a key.
std::vector<std::byte> bits_of_key(const Workload& workload, int batch, int key);

}  // namespace flashjit::testing_support
