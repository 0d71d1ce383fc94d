// Rows of K and V in pages, for the forward on a CPU.
#pragma once

#include "cpu/forward.h"
#include "shared/paged_forward_params.h"
#include "shared/read_keys.h"

namespace flashjit::device {

// The places of a batch entry's keys.
template <class Spec>
class PagedPlaces {
  using Mask = typename Spec::Mask;

 public:
  FLASHJIT_FN PagedPlaces(const CpuForwardParams& p, const Problem& of)
      : pages_(with_pages(p).pages), problem_(of), reads_(read_keys(Mask(p, of), {0, of.seqlen_q})) {}

  // body(i, page, row) for the i-th of `keys`; page is -1 for keys that are not to be read.
  template <class Body>
  FLASHJIT_FN void each(Span keys, Body body) const {
    const int* const table = pages_.table + problem_.batch * pages_.table_stride;
    const int size = pages_.page_size;
    for (int key = keys.begin; key < keys.end;) {
      const int index = key / size, end = min(keys.end, (index + 1) * size);
      const i64 page = reads_({key, end}) ? pages_.clamped(table[index]) : -1;
      for (; key < end; ++key) body(key - keys.begin, page, key - index * size);
    }
  }

 private:
  const PageTable& pages_;
  const Problem& problem_;
  // The keys of all rows, since packed blocks serve other tiles, too.
  const ReadKeys reads_;
};

// The rows of K and V of some keys in pages, and of `ahead` later keys for fetching. Keys that are not to be
// read are zeros.
template <class Spec, class Element, int most, int ahead>
struct RowsInPages {
  static constexpr Element zeros[round_up(max(Spec::head_dim, Spec::head_dim_v), 256)] = {};
  struct Pointers {
    const Element* row[most + ahead];
    FLASHJIT_FN const Element* operator[](int i) const { return row[i]; }
  } of_k, of_v;
  FLASHJIT_FN const auto& k(float* /*room*/) const { return of_k; }
  FLASHJIT_FN const auto& v(float* /*room*/) const { return of_v; }

  // The last of `keys` stands in for all after it.
  FLASHJIT_FN void find(const CpuForwardParams& params, const Problem& problem,
                        const PagedPlaces<Spec>& places, Span keys) {
    const auto row_of = [&](const TensorView& t, i64 page, int row) __attribute__((always_inline)) {
      return page < 0 ? zeros : static_cast<const Element*>(t.data) + t.offset(page, row, problem.head_kv);
    };
    places.each(keys, [&](int i, i64 page, int row) __attribute__((always_inline)) {
      of_k.row[i] = row_of(params.k, page, row);
      of_v.row[i] = row_of(params.v, page, row);
    });
    for (int i = keys.size(); i < most + ahead; ++i)
      of_k.row[i] = of_k.row[i - 1], of_v.row[i] = of_v.row[i - 1];
  }
};

template <class Spec>
struct PagedKeys {
  using Element = typename Spec::Element;

  const CpuForwardParams& params;
  const Problem& problem;
  const PagedPlaces<Spec> places;

  FLASHJIT_FN PagedKeys(const CpuForwardParams& p, const Problem& of)
      : params(p), problem(of), places(p, of) {}

  // The rows of a group of keys.
  FLASHJIT_FN auto group(int first, int count) const {
    RowsInPages<Spec, Element, packed_group, packed_rows_ahead> found;
    found.find(params, problem, places, {first, first + count});
    return found;
  }
  // The rows of at most `most` keys, and of later ones before `end`, as they are stored.
  template <int most>
  FLASHJIT_FN auto stored(Span keys, int end) const {
    RowsInPages<Spec, Element, most, rows_ahead> found;
    found.find(params, problem, places, {keys.begin, min(keys.end + rows_ahead, end)});
    return found;
  }
};

}  // namespace flashjit::device
