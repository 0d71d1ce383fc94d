// The definition of every mask, element by element. It is the second of two definitions and shares nothing
// with templates/.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "runtime/flashjit.hpp"

namespace flashjit::verify {

// One batch entry.
struct Sequence {
  int batch;
  int seqlen_q, seqlen_k;         // its own lengths
  int rows;                       // rows of the output; rows from seqlen_q on are padding
  std::int64_t q_begin, k_begin;  // its first row and key in packed tensors, else 0
  // With offsets: its rows and keys are a part of a whole, in which they begin here.
  bool is_shard = false;
  int row_offset = 0, key_offset = 0;
};

// The place among the keys of a row that counts from the start of its sequence, or of the whole.
inline int position_of(const Sequence& s, int row) {
  return s.is_shard ? row : row + s.seqlen_k - s.seqlen_q;
}

// Integer tables of `args` are in host memory; only the shapes of q and k count. Throws invalid_argument if a
// table is missing.
std::vector<Sequence> sequences_of(const AttentionSpec& spec, const AttentionArgs& args);

class Formulas;

// Which keys a query head's row sees, by all masks of the spec. Rows and keys count from their sequence's
// start.
class SeenKeys {
 public:
  // Both must outlive the object.
  SeenKeys(const AttentionSpec& spec, const AttentionArgs& args);
  // Formulas are computed fastest for a row at once: seen[j] is set to 1 if the row sees key first_key + j,
  // else to 0.
  void row(const Sequence& sequence, int head, int row, int first_key, std::span<char> seen) const;
  bool operator()(const Sequence& sequence, int head, int row, int key) const;
  const Formulas* formulas() const { return formulas_.get(); }  // null: the masks have none

 private:
  const AttentionSpec& spec_;
  const AttentionArgs& args_;
  std::shared_ptr<const Formulas> formulas_;
};

// The same for one pair.
bool sees(const AttentionSpec& spec, const AttentionArgs& args, const Sequence& sequence, int head, int row,
          int key);

// How many pairs of a query row and a key a launch keeps, over all query heads.
double kept_pairs(const AttentionSpec& spec, const AttentionArgs& args);

// How many keys some row sees, over all key/value heads. For masks that are alike in all heads.
double read_keys(const AttentionSpec& spec, const AttentionArgs& args);

}  // namespace flashjit::verify
