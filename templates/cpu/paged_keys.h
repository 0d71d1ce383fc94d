// Rows of K and V in pages, for the forward on a CPU.
#pragma once

#include "cpu/forward.h"
#include "shared/paged_forward_params.h"
#include "shared/read_keys.h"

namespace flashjit::device {

template <class Spec>
struct PagedKeys {
  using Element = typename Spec::Element;
  using Mask = typename Spec::Mask;
  static constexpr Element zeros[256] = {};

  const CpuForwardParams& params;
  const PageTable& pages;
  const Problem& problem;
  // The keys of all rows, since packed blocks serve other tiles, too.
  const ReadKeys reads;

  FLASHJIT_FN PagedKeys(const CpuForwardParams& p, const Problem& of)
      : params(p), pages(with_pages(p).pages), problem(of), reads(read_keys(Mask(p, of), {0, of.seqlen_q})) {}

  // The rows of a group of keys. Keys that are not to be read are zeros.
  struct Group {
    struct Pointers {
      const Element* row[packed_group + packed_rows_ahead];
      FLASHJIT_FN const Element* operator[](int i) const { return row[i]; }
    } k, v;
  };
  FLASHJIT_FN Group group(int first, int count) const {
    Group found;
    const int* const table = pages.table + problem.batch * pages.table_stride;
    const int size = pages.page_size;
    for (int i = 0; i < count;) {
      const int index = (first + i) / size, end = min(count, (index + 1) * size - first);
      const bool read = reads({first + i, first + end});
      const i64 page = read ? pages.clamped(table[index]) : 0;
      for (; i < end; ++i) {
        const int row = first + i - index * size;
        found.k.row[i] = read ? row_of(params.k, page, row) : zeros;
        found.v.row[i] = read ? row_of(params.v, page, row) : zeros;
      }
    }
    for (int i = count; i < packed_group + packed_rows_ahead; ++i)
      found.k.row[i] = found.k.row[count - 1], found.v.row[i] = found.v.row[count - 1];
    return found;
  }

 private:
  FLASHJIT_FN const Element* row_of(const TensorView& t, i64 page, int row) const {
    return static_cast<const Element*>(t.data) + t.offset(page, row, problem.head_kv);
  }
};

}  // namespace flashjit::device
