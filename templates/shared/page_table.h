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
  u32 inverse;               // key / page_size is key * inverse >> shift, for keys below 2^31
  int shift;

  // key / page_size, without the time and the registers that a division takes.
  FLASHJIT_FN int page_of(int key) const {
    return static_cast<int>(static_cast<u64>(static_cast<u32>(key)) * inverse >> shift);
  }
  FLASHJIT_FN int clamped(int id) const { return min(max(id, 0), num_pages - 1); }
};

}  // namespace flashjit::device
