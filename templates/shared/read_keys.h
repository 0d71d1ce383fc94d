// The keys in pages that a kernel reads.
#pragma once

#include "shared/key_gap.h"

namespace flashjit::device {

// Keys within a hull and outside a gap. Only these are read: slots of other keys, and page ids of whole pages
// of them, may hold anything.
struct ReadKeys {
  Span hull, gap;
  // Whether any of `keys` is to be read.
  FLASHJIT_FN bool operator()(Span keys) const {
    return !intersect(hull, keys).empty() && (gap.empty() || !gap.contains(keys));
  }
};

// An interval of keys; the rows keep none outside it, whatever the head.
template <class Mask>
FLASHJIT_FN Span hull_of_heads(const Mask& mask, Span rows) {
  return mask.hull(Keys{}, rows);
}
// Each head may have lists of its own.
template <int block_m, int block_n, bool per_head, bool of_masks>
struct BlockSparse;
template <int block_m, int block_n, bool per_head, bool of_masks>
FLASHJIT_FN Span hull_of_heads(const BlockSparse<block_m, block_n, per_head, of_masks>&, Span) {
  return {0, 0x7fffffff};
}
template <class A, class B>
FLASHJIT_FN Span hull_of_heads(const Both<A, B>& mask, Span rows) {
  return intersect(hull_of_heads(mask.a, rows), hull_of_heads(mask.b, rows));
}

template <class Mask>
FLASHJIT_FN ReadKeys read_keys(const Mask& mask, Span rows) {
  return {hull_of_heads(mask, rows), key_gap(mask, rows)};
}

}  // namespace flashjit::device
