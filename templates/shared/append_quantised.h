// How append_kv writes 8-bit caches.
#pragma once

#include "shared/append_layout.h"
#include "shared/kv_scale_params.h"

namespace flashjit::device {

// largest: the largest finite value; -128 of int8 has no positive counterpart. aligner: its unit in the last
// place is the least subnormal.
template <class KvElement>
struct KvFormat;
template <>
struct KvFormat<int8> {
  static constexpr float largest = 127, aligner = 0x1.8p23f;
};
template <>
struct KvFormat<fp8_e4m3> {
  static constexpr int mantissa_bits = 3, bias = 7;
  static constexpr float largest = 448, least_normal = 0x1p-6f, aligner = 0x1p14f;
};
template <>
struct KvFormat<fp8_e5m2> {
  static constexpr int mantissa_bits = 2, bias = 15;
  static constexpr float largest = 57344, least_normal = 0x1p-14f, aligner = 0x1p7f;
};

constexpr float least_scale = 0x1p-126f, largest_finite = 0x1.fffffep127f;

// The scale of a row whose largest magnitude is given.
template <class KvElement>
FLASHJIT_FN float scale_of_row(float largest) {
  const float bounded = largest < largest_finite ? largest : largest_finite;
  const float scale = bounded * (1 / KvFormat<KvElement>::largest);
  return scale > least_scale ? scale : least_scale;
}

// Two factors of a new value, one after the other, that divide it by a scale. Both are normal numbers. A
// scale below least_scale in size counts as 0: what is finite becomes a number that every dtype rounds to 0,
// and infinity stays infinite.
struct ScaleFactors {
  float first, second;

  // reciprocal(x) is 1 / x.
  template <class Reciprocal>
  FLASHJIT_FN ScaleFactors(float scale, const Reciprocal& reciprocal) {
    const float size = scale < 0 ? -scale : scale;
    first = second = least_scale;
    if (size < least_scale) return;
    first = size > 0x1p125f ? 0.25f : 1.f;
    second = reciprocal(scale * first);
  }
};

// How the threads of a GPU share rows of K and V. Where they compute scales, `lanes` neighbouring threads of
// a warp have a row of K or V. Otherwise a thread has one item, as in other caches.
struct QuantisedRows {
  bool computes_scales;
  int lanes;  // a power of two

  FLASHJIT_FN constexpr QuantisedRows(bool computes, const RowItems& k, const RowItems& v)
      : computes_scales(computes), lanes(1) {
    while (computes && lanes < 32 && lanes < max(k.items, v.items)) lanes *= 2;
  }
  FLASHJIT_FN constexpr int threads(const RowItems& row) const {
    return computes_scales && row.items > 0 ? lanes : row.items;
  }
  FLASHJIT_FN constexpr int items_of_thread(const RowItems& row) const {
    return computes_scales ? ceil_div(row.items, lanes) : 1;
  }
};

}  // namespace flashjit::device
