// Formulas on the rows and keys of a shard (shared/offsets.h): they count as in the whole.
#pragma once

#include "shared/formula_interval.h"
#include "shared/offsets.h"

namespace flashjit::device {

template <class Params>
struct OffsetFormulaProblem : FormulaProblem {
  int row_offset, key_offset;

  template <class Base>
  FLASHJIT_FN OffsetFormulaProblem(const Base& p, const FormulaParams& formulas, const Problem& of)
      : FormulaProblem(p, formulas, of),
        row_offset(PositionOffsets<Params>::of_rows(p, of.batch)),
        key_offset(PositionOffsets<Params>::of_keys(p, of.batch)) {}

  // A row of the whole is its own position.
  FLASHJIT_FN static int shift() { return 0; }
  template <class R>
  FLASHJIT_FN R row(R row) const {
    return (Integer<R>(row) + Integer<int>(row_offset)).v;
  }
  template <class K>
  FLASHJIT_FN K key(K key) const {
    return (Integer<K>(key) + Integer<int>(key_offset)).v;
  }
  FLASHJIT_FN int rows_end() const { return seqlen_q + row_offset; }
  FLASHJIT_FN int keys_end() const { return seqlen_k + key_offset; }
  FLASHJIT_FN int own_key(int key) const { return bounded_minus(key, key_offset); }
  FLASHJIT_FN Span own_keys(Span keys) const { return {own_key(keys.begin), own_key(keys.end)}; }
};

template <class Params>
struct FormulaProblemOf<WithOffsets<Params>> {
  using type = OffsetFormulaProblem<WithOffsets<Params>>;
};

}  // namespace flashjit::device
