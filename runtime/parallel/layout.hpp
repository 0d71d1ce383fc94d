// How a sequence is divided among ranks, and which of its chunks see each other.
#pragma once

#include <string>

#include "runtime/parallel.hpp"

namespace flashjit {

// The layout that `asked` stands for, and why. Throws invalid_argument if the whole cannot be divided so,
// unsupported if the layout does not compute the spec.
struct ChosenLayout {
  SequenceLayout layout;
  std::string reason;
};
ChosenLayout choose_layout(const AttentionSpec& spec, const Shape& whole, SequenceLayout asked, int size);

// Why a head computed alone would not be as among all; empty if it would.
std::string why_heads_differ(const AttentionSpec& spec);

// Whether a row of the chunk may see a key of the other, by masks of which the host knows it. Rows are their
// own positions.
bool may_see(const AttentionSpec& spec, const AttentionArgs& args, const SequenceChunk& rows,
             const SequenceChunk& keys);

}  // namespace flashjit
