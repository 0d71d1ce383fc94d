// Keys in two pairs of tensors: gathered keys, such as other ranks have sent, come before those of k and v.
// A kernel of a spec with gathered includes this header.
#pragma once

#include "shared/mask.h"

namespace flashjit::device {

struct GatheredKeys {
  TensorView k, v;
  int keys;  // in them
  // The launch's keys begin with so many that no row sees, so that no block has keys of both pairs.
  int pad;
  // The first early_rows rows do not see the first late_keys gathered keys.
  int early_rows, late_keys;
  // sm_90a: a word for each piece of so many keys, not 0 once they are there; null: all are.
  const u32* arrived;
  int piece_keys;
};

// The first rows that see no gathered keys, if some do. Their tiles come first, while the keys arrive.
FLASHJIT_FN int rows_without(const GatheredKeys& gathered) {
  return gathered.late_keys == gathered.keys ? gathered.early_rows : 0;
}

template <class Params>
struct WithGathered : Params {
  GatheredKeys gathered;
};

// The parameters of a kernel whose Spec has gathered keys.
template <class Params>
FLASHJIT_FN const GatheredKeys& gathered_keys(const Params& p) {
  return static_cast<const WithGathered<Params>&>(p).gathered;
}

// Rows see the gathered keys that are there for them, by the members of GatheredKeys.
template <class Params>
struct LateKeys : Interval<LateKeys<Params>> {
  int first, late, early_rows;  // keys before `first` are seen by none, before `late` by no early row

  template <class Base>
  FLASHJIT_FN LateKeys(const Base& p, const Problem&) {
    const GatheredKeys& gathered = static_cast<const Params&>(p).gathered;
    first = gathered.pad;
    late = gathered.pad + gathered.late_keys;
    early_rows = gathered.early_rows;
  }

  FLASHJIT_FN Span hull(Keys, Span rows) const { return {rows.end <= early_rows ? late : first, 0x7fffffff}; }
  FLASHJIT_FN Span hull(Queries, Span keys) const {
    return {keys.end <= late ? early_rows : 0, keys.end <= first ? 0 : 0x7fffffff};
  }
  FLASHJIT_FN bool whole(Span rows, Span keys, int = not_found) const {
    return keys.begin >= (rows.begin < early_rows ? late : first);
  }
  FLASHJIT_FN bool keep(int row, int key) const { return key >= (row < early_rows ? late : first); }
};

}  // namespace flashjit::device
