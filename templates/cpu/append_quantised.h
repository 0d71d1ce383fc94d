// Writes new rows of K and V into 8-bit caches, with rotary embedding of K and Q, on a CPU. Scales are given,
// or computed for each token and head.
#pragma once

#include "cpu/append.h"
#include "shared/append_quantised.h"

namespace flashjit::device {

// Rounds to nearest even, saturating. NaN becomes NaN, of int8 0.
using Bytes8 = unsigned char __attribute__((vector_size(8)));
FLASHJIT_FN void store_bytes(void* p, Int8 bytes) {
  const Bytes8 narrow = __builtin_convertvector(bytes, Bytes8);
  __builtin_memcpy(p, &narrow, sizeof narrow);
}
FLASHJIT_FN void store_rounded(int8* p, Vec8 v) {
  const Vec8 number = v == v ? v : Vec8{};
  const Vec8 above = number > -128.0f ? number : Vec8{} - 128.0f;
  const Vec8 bounded = above < 127.0f ? above : Vec8{} + 127.0f;
  store_bytes(p, reinterpret_cast<Int8>(bounded + KvFormat<int8>::aligner) & 0xff);
}
template <class KvElement>
FLASHJIT_FN void store_rounded(KvElement* p, Vec8 v) {
  using Format = KvFormat<KvElement>;
  constexpr int dropped = 23 - Format::mantissa_bits;
  const Int8 sign = reinterpret_cast<Int8>(v) >> 24 & 0x80;
  const Vec8 magnitude = reinterpret_cast<Vec8>(reinterpret_cast<Int8>(v) & 0x7fffffffu),
             size = magnitude < Format::largest ? magnitude : Vec8{} + Format::largest;
  const Int8 bits = reinterpret_cast<Int8>(size);
  const Int8 normal = ((bits + (1u << (dropped - 1)) - 1 + (bits >> dropped & 1)) >> dropped) -
                      ((127 - Format::bias) << Format::mantissa_bits);
  const Int8 subnormal =
      reinterpret_cast<Int8>(size + Format::aligner) - __builtin_bit_cast(u32, Format::aligner);
  const Int8 rounded = size < Format::least_normal ? subnormal : normal;
  store_bytes(p, (v == v ? rounded : Int8{} + 0x7f) | sign);
}

// The largest magnitude of a row. NaN counts as nothing.
template <int columns>
FLASHJIT_FN float largest_of(const float* row) {
  Vec8 largest{};
  for (int c = 0; c < columns; c += 8) {
    const Vec8 size = reinterpret_cast<Vec8>(reinterpret_cast<Int8>(load8(row + c)) & 0x7fffffffu);
    largest = size > largest ? size : largest;
  }
  float result = 0;
  for (int i = 0; i < 8; ++i) result = largest[i] > result ? largest[i] : result;
  return result;
}

// Defaults of a rendered Spec.
struct AppendQuantisedCpuSpec : AppendCpuSpec {
  static constexpr KvScale kv_scale = KvScale::tensor;
};

// Own: parameters besides those of scales and rotary embedding.
template <class Spec, class Own = AppendParams>
struct AppendQuantised : Append<Spec, Quantised<Own>> {
  using Base = Append<Spec, Quantised<Own>>;
  using KvElement = typename Spec::kv_dtype;
  using Base::p;
  static constexpr int vector = Base::vector;

  FLASHJIT_FN void run(i64 begin, i64 end) const {
    const auto write_head = [&](const TokenPlace& at, u32 head,
                                const typename Base::Angles& angles) __attribute__((always_inline)) {
      float row[max(Spec::head_dim, Spec::head_dim_v)];
      Base::write(Base::row_of(p.k_new, at, head), row, angles);
      store<Spec::head_dim>(row, at, head, p.k, p.k_scale);
      if constexpr (Spec::v_in_k) return;
      Base::template copy<0, Spec::head_dim_v>(Base::row_of(p.v_new, at, head), row);
      store<Spec::head_dim_v>(row, at, head, p.v, p.v_scale);
    };
    Base::write_tokens(begin, end, write_head);
  }

 private:
  template <int columns>
  FLASHJIT_FN static void store(const float* row, const TokenPlace& at, u32 head, const TensorView& cache,
                                const KvScales& scales) {
    const float* const place = scales.data + at.page * scales.batch_stride + at.page_row * scales.row_stride +
                               head * scales.head_stride;
    float scale;
    if constexpr (Spec::kv_scale == KvScale::token_head) {
      scale = scale_of_row<KvElement>(largest_of<columns>(row));
      *const_cast<float*>(place) = scale;
    } else {
      scale = *place;
    }
    const ScaleFactors by(scale, [](float x) { return 1 / x; });
    KvElement* const to = static_cast<KvElement*>(cache.data) + cache.offset(at.page, at.page_row, head);
    for (int c = 0; c < columns; c += vector) store_rounded(to + c, load8(row + c) * by.first * by.second);
  }
};

template <class Spec>
FLASHJIT_FN void append_quantised(const typename AppendQuantised<Spec>::Params& params, i64 begin, i64 end) {
  AppendQuantised<Spec>{{params}}.run(begin, end);
}

}  // namespace flashjit::device
