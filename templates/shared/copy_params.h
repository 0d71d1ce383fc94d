// Parameters of copy_kv.
#pragma once

#include "shared/divisor.h"
#include "shared/kv_scale_params.h"
#include "shared/tensor_view.h"

namespace flashjit::device {

// Rows of keys and values with their scales, which are unset where scales do not belong to rows: of caches,
// or of the workspace, in the order in which they are copied.
struct CopiedRows {
  TensorView k, v;  // [page, row of the page, heads]
  KvScales k_scale, v_scale;
  const i64* slots;  // [rows]
  i64 num_slots;     // rows of all pages
  Divisor page_size;
  bool in_workspace;  // row i of the launch is row i here
};

struct RowPlace {
  i64 page, row;
};

// Parameters of a step. Where a step reads or writes the workspace, slots are still the caches'.
struct CopyParams {
  CopiedRows from, to;
  int rows;
  u32 heads;
};

// Parameters of a step on GPUs. A thread copies an item: a piece of a row of K and the same of V.
struct CudaCopyParams : CopyParams {
  Divisor items;  // of a row, all heads
};

// Whatever slots are, nothing outside the caches is read or written.
FLASHJIT_FN bool has_slot(const CopiedRows& rows, i64 slot) {
  return slot >= 0 && slot < rows.num_slots;
}
FLASHJIT_FN RowPlace place_of(const CopiedRows& rows, i64 index, i64 slot) {
  if (rows.in_workspace) return {0, index};
  const auto page = static_cast<i64>(rows.page_size.quotient(static_cast<u64>(slot)));
  return {page, slot - page * static_cast<i64>(rows.page_size.size)};
}

}  // namespace flashjit::device
