// A decode's parameters: a few query rows of each batch entry against a long cache of keys and values.
#pragma once

#include "shared/page_table.h"
#include "shared/problem.h"

namespace flashjit::device {

struct DecodeParams : ProblemParams {
  float scale_log2;  // softmax_scale * log2(e)
  TensorView q, o;
  TensorView lse;   // float32; data null where the spec has no lse
  TensorView k, v;  // batch_stride: from one batch entry to the next, or from one page
  PageTable pages;
};

// seqlens_k, where given, counts all keys that a batch entry has; with varlen q is packed by cu_seqlens_q.
template <bool varlen, class Params>
FLASHJIT_FN Problem decode_problem(const Params& p, int batch, int head_q) {
  Problem r;
  r.batch = batch;
  r.head_q = head_q;
  r.head_kv = static_cast<int>(static_cast<u32>(head_q) /
                               (static_cast<u32>(p.num_heads_q) / static_cast<u32>(p.num_heads_kv)));
  r.seqlen_q = p.seqlen_q;
  r.first_q = r.first_k = 0;
  if constexpr (varlen) {
    const PackedRange q = packed_range(p.cu_seqlens_q, batch, p.total_q, p.seqlen_q);
    r.first_q = q.begin;
    r.seqlen_q = q.length;
  }
  r.rows = r.seqlen_q;
  r.seqlen_k = padded_length(p.seqlens_k, batch, p.seqlen_k);
  return r;
}

}  // namespace flashjit::device
