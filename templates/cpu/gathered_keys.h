// Rows of K and V in two pairs of tensors, for the forward on a CPU.
#pragma once

#include "cpu/forward.h"
#include "shared/gathered.h"

namespace flashjit::device {

// The rows of some keys, and of `ahead` later keys for fetching.
template <class Element, int most>
struct RowsOfPairs {
  struct Pointers {
    const Element* row[most];
    FLASHJIT_FN const Element* operator[](int i) const { return row[i]; }
  } of_k, of_v;
  FLASHJIT_FN const auto& k(float* /*room*/) const { return of_k; }
  FLASHJIT_FN const auto& v(float* /*room*/) const { return of_v; }
};

template <class Spec>
struct PairsOfKeys {
  using Element = typename Spec::Element;

  const CpuForwardParams& params;
  const Problem& problem;

  FLASHJIT_FN PairsOfKeys(const CpuForwardParams& p, const Problem& of) : params(p), problem(of) {}

  // The rows of a group of keys.
  FLASHJIT_FN auto group(int first, int count) const {
    return find<packed_group + packed_rows_ahead>({first, first + count});
  }
  // The rows of at most `most` keys, and of later ones before `end`, as they are stored.
  template <int most>
  FLASHJIT_FN auto stored(Span keys, int end) const {
    return find<most + rows_ahead>({keys.begin, min(keys.end + rows_ahead, end)});
  }

 private:
  // The last of `keys` stands in for all after it.
  template <int most>
  FLASHJIT_FN RowsOfPairs<Element, most> find(Span keys) const {
    const GatheredKeys& gathered = gathered_keys(params);
    RowsOfPairs<Element, most> found;
    for (int i = 0; i < most; ++i) {
      const int key = min(keys.begin + i, keys.end - 1);
      const bool first = key < gathered.keys;
      const auto row_of = [&](const TensorView& own,
                              const TensorView& of_gathered) __attribute__((always_inline)) {
        const TensorView& t = first ? of_gathered : own;
        return static_cast<const Element*>(t.data) +
               t.offset(problem.batch, first ? key : key - gathered.keys, problem.head_kv);
      };
      found.of_k.row[i] = row_of(params.k, gathered.k);
      found.of_v.row[i] = row_of(params.v, gathered.v);
    }
    return found;
  }
};

}  // namespace flashjit::device
