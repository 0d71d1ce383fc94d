// One (batch entry, query head) of a launch: its true lengths and the first of its rows.
#pragma once

#include "shared/params.h"

namespace flashjit::device {

struct Problem {
  int batch, head_q, head_kv;
  int seqlen_q, seqlen_k;
  int rows;              // of q and o; rows from seqlen_q on are padding: output 0, lse -inf
  int first_q, first_k;  // the problem's first row in packed tensors; else 0

  // Elements from a tensor's data to the problem's first row: q_offset() for q, o and lse, k_offset() for k
  // and v.
  FLASHJIT_FN i64 q_offset(const TensorView& t) const {
    return batch * t.batch_stride + first_q * t.row_stride + head_q * t.head_stride;
  }
  FLASHJIT_FN i64 k_offset(const TensorView& t) const {
    return batch * t.batch_stride + first_k * t.row_stride + head_kv * t.head_stride;
  }
};

// A range of packed sequences, clamped to the tensor. Wrong cu_seqlens give wrong numbers, but a kernel never
// reads or writes out of bounds.
struct PackedRange {
  int begin, length;
};
FLASHJIT_FN PackedRange packed_range(const int* cu_seqlens, int batch, int total, int longest) {
  const int begin = min(max(cu_seqlens[batch], 0), total);
  const int end = min(max(cu_seqlens[batch + 1], begin), total);
  return {begin, min(end - begin, longest)};
}

// A length of a padding mask, clamped likewise.
FLASHJIT_FN int padded_length(const int* lengths, int batch, int longest) {
  return lengths ? min(max(lengths[batch], 0), longest) : longest;
}

// With pages, which each batch entry has of its own, seqlens_k counts its keys; null: all that its row of the
// page table has room for.
template <bool varlen, bool padding = false, bool paged = false, class Params>
FLASHJIT_FN Problem make_problem(const Params& p, int batch, int head_q) {
  Problem r;
  r.batch = batch;
  r.head_q = head_q;
  // Unsigned division needs no registers for signs.
  r.head_kv = static_cast<int>(static_cast<u32>(head_q) /
                               (static_cast<u32>(p.num_heads_q) / static_cast<u32>(p.num_heads_kv)));
  r.seqlen_q = p.seqlen_q;
  r.seqlen_k = p.seqlen_k;
  r.first_q = r.first_k = 0;
  if constexpr (varlen) {
    const PackedRange q = packed_range(p.cu_seqlens_q, batch, p.total_q, p.seqlen_q);
    r.first_q = q.begin;
    r.seqlen_q = q.length;
    if constexpr (!paged) {
      const PackedRange k = packed_range(p.cu_seqlens_k, batch, p.total_k, p.seqlen_k);
      r.first_k = k.begin;
      r.seqlen_k = k.length;
    }
  }
  r.rows = r.seqlen_q;
  if constexpr (padding) r.seqlen_q = padded_length(p.seqlens_q, batch, r.seqlen_q);
  if constexpr (padding || paged) r.seqlen_k = padded_length(p.seqlens_k, batch, r.seqlen_k);
  return r;
}

}  // namespace flashjit::device
