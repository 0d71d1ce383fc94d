// One row of one sequence in batches that differ in everything else.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "tests/support/positions.hpp"
#include "tests/support/workload.hpp"

namespace flashjit::testing_support {

struct Batch {
  std::vector<int> rows;  // of each sequence; unless they are packed, the first one's of all
  int later;              // rows and keys of the first sequence after the compared ones
  std::vector<int> keys;  // of the other sequences, likewise
  int page_size;
  int heads_kv = 1;  // of three query heads each
};

// The compared row is at key `position` of the first sequence.
inline Case case_of(const AttentionSpec& spec, const Batch& batch, int position) {
  const bool own_lengths = spec.varlen || counts_keys(spec);
  std::vector<int> keys = {position + 1 + batch.later};
  for (const int others : batch.keys) keys.push_back(own_lengths ? others : keys[0]);
  Case made{.spec = spec,
            .batch = static_cast<int>(keys.size()),
            .heads_q = 3 * batch.heads_kv,
            .heads_kv = batch.heads_kv,
            .seqlen_q = spec.varlen ? std::ranges::max(batch.rows) : batch.rows[0],
            .seqlen_k = std::ranges::max(keys),
            .masks = verify::MaskDataOptions{}};
  if (spec.varlen) made.lengths_q = batch.rows, made.max_seqlen_q = made.seqlen_q;
  if (own_lengths) made.lengths_k = keys;
  if (counts_keys(spec)) made.masks->lengths_k = keys;
  if (spec.paged) made.page_size = batch.page_size;
  return made;
}

inline void fill(Workload& workload, const Batch& batch, Values values = Values::bell_shaped) {
  std::vector<std::uint64_t> names = {1000};
  for (std::size_t b = 0; b < batch.keys.size(); ++b) names.push_back(b);
  fill_by_position(workload, names, values);
}

// The compared row's bits, after fetch(), of the first three heads.
inline std::vector<std::byte> bits_of_row(const Workload& workload, const Batch& batch) {
  std::vector<std::byte> bits = bits_of_row(workload, 0, batch.rows[0] - 1 - batch.later);
  bits.resize(bits.size() / static_cast<std::size_t>(batch.heads_kv));
  return bits;
}

// Whether the batch has all rows of the compared sequence, on which gradients of its keys depend.
inline bool has_whole_sequence(const Batch& batch, int position) {
  return batch.rows[0] == position + 1 && batch.later == 0;
}
// The bits of gradients of a key of that sequence, likewise.
inline std::vector<std::byte> bits_of_key(const Workload& workload, const Batch& batch, int key) {
  std::vector<std::byte> bits = bits_of_key(workload, 0, key);
  bits.resize(bits.size() / static_cast<std::size_t>(batch.heads_kv));
  return bits;
}

}  // namespace flashjit::testing_support
