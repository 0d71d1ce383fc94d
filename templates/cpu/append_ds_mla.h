// Writes new rows into a cache of fp8_ds_mla (shared/ds_mla.h), with rotary embedding of K and Q, on a CPU.
#pragma once

#include "cpu/append_quantised.h"
#include "shared/ds_mla.h"

namespace flashjit::device {

// Own: parameters besides those of rotary embedding.
template <class Spec, class Own = AppendParams>
struct AppendDsMla : Append<Spec, Own> {
  using Base = Append<Spec, Own>;
  using Base::p;

  FLASHJIT_FN void run(i64 begin, i64 end) const {
    const auto write_head = [&](const TokenPlace& at, u32 head,
                                const typename Base::Angles& angles) __attribute__((always_inline)) {
      float row[Spec::head_dim];
      Base::write(Base::row_of(p.k_new, at, head), row, angles);
      store(row, static_cast<unsigned char*>(p.k.data) + p.k.offset(at.page, at.page_row, head));
    };
    Base::write_tokens(begin, end, write_head);
  }

 private:
  FLASHJIT_FN static void store(const float* row, unsigned char* to) {
    for (int c = 0; c < DsMla::columns; c += DsMla::group) {
      const float scale = scale_of_row<fp8_e4m3>(largest_of<DsMla::group>(row + c));
      __builtin_memcpy(to + DsMla::scales + c / DsMla::group * 4, &scale, sizeof scale);
      const ScaleFactors by(scale, [](float x) { return 1 / x; });
      for (int i = c; i < c + DsMla::group; i += Base::vector)
        store_rounded(reinterpret_cast<fp8_e4m3*>(to + i), load8(row + i) * by.first * by.second);
    }
    for (int i = 0; i < DsMla::rotary_columns; i += Base::vector)
      store8(reinterpret_cast<bf16*>(to + DsMla::rotary + i * 2), load8(row + DsMla::columns + i));
  }
};

template <class Spec>
FLASHJIT_FN void append_ds_mla(const typename AppendDsMla<Spec>::Params& params, i64 begin, i64 end) {
  AppendDsMla<Spec>{{params}}.run(begin, end);
}

}  // namespace flashjit::device
