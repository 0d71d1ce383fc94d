// Parameters of append_kv.
#pragma once

#include "shared/divisor.h"
#include "shared/tensor_view.h"

namespace flashjit::device {

// A contiguous cache is one of `batch` pages of seqlen_k rows each.
struct AppendParams {
  TensorView k_new, v_new;      // [batch, seqlen, heads], packed: batch stride 0
  TensorView k, v;              // [page, row of the page, heads]
  const i64* slots;             // [tokens]; null: append_positions
  const int* append_positions;  // [batch]
  const int* cu_seqlens;        // [batch + 1]; null: not packed, or slots are given
  const int* page_table;        // [batch, max_pages] by table_stride; null: batch entry b has page b
  i64 table_stride;
  i64 num_slots;   // rows of all pages
  i64 entry_rows;  // rows that a batch entry may have: of its pages, or seqlen_k
  Divisor seqlen;  // not packed: tokens of a batch entry
  Divisor page_size;
  int tokens, batch, num_pages;
  u32 heads_kv;
};

// Parameters of append_kv on GPUs. A block has all items of tokens_of_block tokens, or a part of those of one
// token. An item is two pieces of a row.
struct CudaAppendParams : AppendParams {
  u32 items;  // of a token, Q's too
  u32 tokens_of_block;
  u32 items_inverse;  // i / items is i * items_inverse >> 16 for items of a block, if it has several tokens
};

}  // namespace flashjit::device
