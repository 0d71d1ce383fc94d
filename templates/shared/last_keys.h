// Where a decode's new rows go: they are the last keys of their batch entries.
#pragma once

#include "shared/token_place.h"

namespace flashjit::device {

// Warps of a GPU's block where append_kv is a step of a decode.
constexpr int append_step_warps = 4;

template <class Params>
struct LastKeys : Params {
  const int* seqlens_k;  // [batch], new keys included; null: seqlen_k
  int seqlen_k;          // at most so many
};

// The rest of a token's place.
template <bool varlen, class Params>
FLASHJIT_FN void find_in_cache(const LastKeys<Params>& p, int token, TokenPlace& at) {
  i64 entry = at.entry, row = at.row, rows = static_cast<i64>(p.seqlen.size);
  at.in_batch = true;
  if constexpr (varlen) {
    entry = entry_of(p.cu_seqlens, p.batch, token);
    row = token - p.cu_seqlens[entry];
    rows = p.cu_seqlens[entry + 1] - p.cu_seqlens[entry];
    at.in_batch = p.batch > 0 && row >= 0 && row < rows;
    if (!at.in_batch) return;
  }
  const int length = p.seqlens_k ? min(p.seqlens_k[entry], p.seqlen_k) : p.seqlen_k;
  find_at_position(p, entry, i64{length} - rows + row, at);
}

}  // namespace flashjit::device
