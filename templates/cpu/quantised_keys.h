// Rows of 8-bit K and V in pages, for the forward on a CPU.
//
// Conversion keeps numbers as they are stored: all of them are exact in bf16 and fp16. A key's scale
// multiplies its scores. A value's scale multiplies the output, or, if each token and head has its own, the
// value, which is then rounded.
#pragma once

#include "cpu/paged_keys.h"
#include "cpu/row_loads.h"
#include "shared/kv_scale_params.h"

namespace flashjit::device {

template <class Spec>
struct QuantisedKeys {
  using Element = typename Spec::Element;
  using KvElement = typename Spec::kv_dtype;
  static constexpr bool own_scales = Spec::kv_scale == KvScale::token_head;

  const CpuForwardParams& params;
  const Problem& problem;
  const PagedPlaces<Spec> places;

  FLASHJIT_FN QuantisedKeys(const CpuForwardParams& p, const Problem& of)
      : params(p), problem(of), places(p, of) {}

  // The rows of a group of keys, converted into `room`. Keys that are not to be read are zeros.
  struct Group {
    const QuantisedKeys& keys;
    Span span;
    FLASHJIT_FN StridedRows<Element> k(float* room) const {
      return keys.template converted<Spec::head_dim>(keys.params.k, span, room,
                                                     [](i64, int) { return 1.0f; });
    }
    FLASHJIT_FN StridedRows<Element> v(float* room) const {
      return keys.template converted<Spec::head_dim_v>(keys.params.v, span, room, [&](i64 page, int row) {
        return own_scales ? keys.scale_of(keys.scales().v_scale, page, row) : 1.0f;
      });
    }
  };
  FLASHJIT_FN Group group(int first, int count) const { return {*this, {first, first + count}}; }
  // As PagedKeys has it.
  template <int most>
  FLASHJIT_FN auto stored(Span keys, int end) const {
    RowsInPages<Spec, KvElement, most, rows_ahead> found;
    found.find(params, problem, places, {keys.begin, min(keys.end + rows_ahead, end)});
    return found;
  }

  // Multiplies scores by the scales of their keys. s: [key][unit_rows] for `keys`.
  FLASHJIT_FN void scale_scores(int unit_rows, float* s, Span keys) const {
    scale_by_key<false>(scales().k_scale, unit_rows, s, keys);
  }
  // The same for weights and values that are multiplied as they are stored.
  FLASHJIT_FN void scale_weights(int unit_rows, float* p, Span keys) const {
    if constexpr (own_scales) scale_by_key<true>(scales().v_scale, unit_rows, p, keys);
  }
  // The factor of all outputs.
  FLASHJIT_FN float of_outputs() const { return own_scales ? 1 : scale_of(scales().v_scale, 0, 0); }

 private:
  FLASHJIT_FN const auto& scales() const { return with_kv_scales(with_pages(params)); }
  FLASHJIT_FN float scale_of(const KvScales& scales, i64 page, int row) const {
    return scales.data[scales.offset(page, row, problem.head_kv)];
  }
  // A weight of 0 stays 0: its key need not be seen, and the scale may be NaN.
  template <bool weights>
  __attribute__((noinline)) void scale_by_key(const KvScales& scales, int unit_rows, float* s,
                                              Span keys) const {
    const auto scale_key = [&](int i, i64 page, int row) {
      if (page < 0) return;
      const Vec scale = splat(scale_of(scales, page, row));
      for (float* p = s + i * unit_rows; p < s + (i + 1) * unit_rows; p += lanes) {
        const Vec values = load(p), scaled = values * scale;
        store(p, weights ? select(values == 0.0f, values, scaled) : scaled);
      }
    };
    if constexpr (own_scales) {
      places.each(keys, scale_key);
    } else {
      for (int i = 0; i < keys.size(); ++i) scale_key(i, 0, 0);
    }
  }
  template <int columns, class Scale>
  FLASHJIT_FN StridedRows<Element> converted(const TensorView& t, Span keys, float* room,
                                             Scale scale_of_row) const {
    static_assert(packed_group * columns * sizeof(Element) <= cpu_room(columns, 0) * sizeof(float));
    Element* const rows = reinterpret_cast<Element*>(room);
    places.each(keys, [&](int i, i64 page, int row) {
      Element* const to = rows + i * columns;
      if (page < 0) {
        __builtin_memset(to, 0, columns * sizeof(Element));
        return;
      }
      const KvElement* const from =
          static_cast<const KvElement*>(t.data) + t.offset(page, row, problem.head_kv);
      const float scale = scale_of_row(page, row);
      for (int c = 0; c < columns; c += 8) store8(to + c, load8(from + c) * scale);
    });
    return {rows, columns};
  }
};

}  // namespace flashjit::device
