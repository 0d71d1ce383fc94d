// A decode's parameters: a few query rows of each batch entry against a long cache of keys and values.
#pragma once

#include "shared/params.h"

namespace flashjit::device {

// Where a cache's rows lie. Contiguous: of batch entry b from b * batch_stride on. Paged: row r of entry b is row
// r % page_size of page table[b * table_stride + r / page_size].
struct PageTable {
  const int* table;  // null: contiguous
  i64 table_stride;
  int page_size, num_pages;  // page ids are clamped to [0, num_pages)
};

struct DecodeParams : ProblemParams {
  float scale_log2;  // softmax_scale * log2(e)
  TensorView q, o;
  TensorView lse;   // float32; data null where the spec has no lse
  TensorView k, v;  // batch_stride: from one batch entry to the next, or from one page
  PageTable pages;
};

// On CPUs. An item is one of `parts` of the keys of one (batch entry, key/value head), for all query heads of that
// group. Whoever ends a tile's last part merges them.
struct CpuDecodeParams : DecodeParams {
  int parts;
  float* partials;  // [batch * num_heads_kv, parts, rows of a group * (head_dim_v + 2)], 64-byte aligned
  u32* arrived;     // [batch * num_heads_kv]
};

}  // namespace flashjit::device
