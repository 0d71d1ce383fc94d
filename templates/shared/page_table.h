// The place of a paged cache's rows.
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

// A contiguous cache has the rows of batch entry b from b * batch_stride on. In a paged one row r of entry b
// is row r % page_size of page table[b * table_stride + r / page_size].
struct PageTable {
  const int* table;  // null: contiguous
  i64 table_stride;
  int page_size, num_pages;  // page ids are clamped to [0, num_pages)
};

}  // namespace flashjit::device
