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

// On CPUs. An item is one of `parts` of the keys of one batch entry and heads_at_once key/value heads, for
// all query heads of their groups. The thread that ends a tile's last part merges all its parts.
struct CpuDecodeParams : DecodeParams {
  int parts;
  // Key/value heads and query positions that share a walk of the keys: heads_at_once *
  // round_up(positions_at_once * query heads of a key/value head, decode_rows_at_once) is at most block_m.
  int heads_at_once, positions_at_once;
  float* partials;  // [batch, head tiles, parts, heads_at_once, seqlen_q * group * (head_dim_v + 2)], 64-byte
                    // aligned
  u32* arrived;     // [batch, head tiles]
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
