// templates/cuda/ptx_sm90a_bulk.cuh on the host.
#pragma once

#include "cuda/ptx_sm90a.cuh"
#include "shared/backward_sm90a_layout.h"
#include "shared/backward_sm90a_wide_layout.h"

namespace flashjit::device {

inline void cp_async_bulk(u32 to, const void* from, u32 bytes, u32 bar) {
  if (to % 16 || reinterpret_cast<std::uintptr_t>(from) % 16 || bytes % 16)
    throw std::runtime_error("a bulk copy of no multiple of 16");
  std::memcpy(emulator::block().shared(to, static_cast<int>(bytes)), from, bytes);
  emulator::block().complete(bar, bytes);
}
inline void cp_reduce_async_bulk_add(float* to, u32 from, u32 bytes) {
  if (from % 16 || reinterpret_cast<std::uintptr_t>(to) % 16 || bytes % 16)
    throw std::runtime_error("a bulk reduction of no multiple of 16");
  for (u32 i = 0; i < bytes / 4; ++i) to[i] += emulator::block().load<float>(from + 4 * i);
}
inline void cp_async_bulk_commit_group() {}
inline void cp_async_bulk_wait_group_read() {}
inline void cp_async_bulk_wait_group() {}

// A lane holds rows 2 (lane % 4) and the next one of column lane / 4 of each matrix.
inline void stmatrix_x4_trans(u32 to, const u32 (&r)[4]) {
  const auto rows = emulator::block().all_lanes(to);
  const u32 lane = threadIdx.x % 32;
  for (u32 j = 0; j < 4; ++j)
    for (u32 c = 0; c < 2; ++c)
      emulator::block().store(rows[8 * j + lane % 4 * 2 + c] + lane / 4 * 2,
                              static_cast<std::uint16_t>(r[j] >> 16 * c));
}
inline void ld_shared_v2(float& a, float& b, u32 from) {
  a = emulator::block().load<float>(from);
  b = emulator::block().load<float>(from + 4);
}

// The products that codegen/families/wgmma_products.hpp renders, emulated: d (+)= a b for `steps` of 16.
template <class T, int N, bool b_n_major, class AStep, class BStep>
void emulated_ss(float (&d)[N / 2], u64 a, u64 b, int steps, AStep a_step, BStep b_step) {
  for (int i = 0; i < steps; ++i)
    wgmma_ss<T, N, b_n_major>(d, a + static_cast<u32>(a_step(i)), b + static_cast<u32>(b_step(i)), i > 0);
}
template <class T, int N, int steps>
void emulated_rs(float (&d)[N / 2], const u32 (&a)[steps][4], u64 b, int accumulate) {
  for (int i = 0; i < steps; ++i)
    wgmma_rs<T, N, true>(d, a[i], b + static_cast<u32>(Sm90aBackwardLayout::row_step(i)),
                         i > 0 || accumulate);
}

template <class Spec, class Config, bool separate_dq>
struct EmulatedBackwardProducts {
  using Element = typename Spec::Element;
  static constexpr int block_m = Config::block_m;
  static constexpr Sm90aBackwardLayout layout{
      Spec::head_dim,
      Spec::head_dim_v,
      block_m,
      Config::block_n,
      Config::num_stages,
      Spec::dropout,
      separate_dq,
      ScoreGradient<typename Spec::Score>::changes,
      backward_divides_sums(Spec::head_dim, Spec::head_dim_v) ? BackwardSums::dk : BackwardSums::both};
  static constexpr int tile_rows = layout.tile_rows, score_rows = layout.score_rows;
  static constexpr auto q_step = [](int i) { return layout.q_step(i); };
  static constexpr auto k_step = [](int i) { return layout.k_step(i); };
  static constexpr auto row_step = [](int i) { return layout.row_step(i); };

  static void s(float (&d)[score_rows / 2], u64 k, u64 q) {
    emulated_ss<Element, score_rows, false>(d, k, q, ceil_div(Spec::head_dim, 16), k_step, q_step);
  }
  static void dp(float (&d)[tile_rows / 2], u64 v, u64 d_o) {
    emulated_ss<Element, tile_rows, false>(d, v, d_o, ceil_div(Spec::head_dim_v, 16), k_step, q_step);
  }
  static void dv(float (&d)[Spec::head_dim_v / 2], const u32 (&p)[tile_rows / 16][4], u64 d_o,
                 int accumulate) {
    emulated_rs<Element, Spec::head_dim_v>(d, p, d_o, accumulate);
  }
  static void dk(float (&d)[Spec::head_dim / 2], const u32 (&ds)[tile_rows / 16][4], u64 q, int accumulate) {
    emulated_rs<Element, Spec::head_dim>(d, ds, q, accumulate);
  }
  static void dq(float (&d)[layout.dq_columns / 2], u64 ds, u64 k) {
    emulated_ss<Element, layout.dq_columns, true>(d, ds, k, Config::block_n / 16, q_step, row_step);
  }
  static void dq_last(float (&d)[layout.dq_last_columns / 2], u64 ds, u64 k) {
    emulated_ss<Element, layout.dq_last_columns, true>(d, ds, k, Config::block_n / 16, q_step, row_step);
  }
};

template <class Spec>
struct EmulatedDqProducts {
  using Element = typename Spec::Element;
  static constexpr Sm90aDqLayout layout{Spec::head_dim, Spec::head_dim_v, Spec::dropout};
  static constexpr int keys = layout.keys;
  static constexpr auto q_step = [](int i) { return layout.q_step(i); };
  static constexpr auto k_step = [](int i) { return layout.k_step(i); };

  static void s(float (&d)[keys / 2], u64 q, u64 k) {
    emulated_ss<Element, keys, false>(d, q, k, ceil_div(Spec::head_dim, 16), q_step, k_step);
  }
  static void dp(float (&d)[keys / 2], u64 d_o, u64 v) {
    emulated_ss<Element, keys, false>(d, d_o, v, ceil_div(Spec::head_dim_v, 16), q_step, k_step);
  }
  static void dq(float (&d)[Spec::head_dim / 2], const u32 (&ds)[keys / 16][4], u64 k, int accumulate) {
    emulated_rs<Element, Spec::head_dim>(d, ds, k, accumulate);
  }
};

template <class Spec>
struct EmulatedWideProducts {
  using Element = typename Spec::Element;
  using Layout = Sm90aWideLayout;
  static constexpr int rows = Layout::product_rows, whole = Layout::chunk_columns / 16;
  using Product = float[rows / 2];

  template <int size>
  static void multiply(float (&d)[size], u64 a, u64 b, int steps, int accumulate) {
    for (int i = 0; i < steps; ++i)
      wgmma_ss<Element, 2 * size, false>(d, a + static_cast<u32>(Layout::own_step(i)),
                                         b + static_cast<u32>(Layout::streamed_step(i)), i > 0 || accumulate);
  }
  static void s(Product& d, u64 a, u64 b, int accumulate) { multiply(d, a, b, whole, accumulate); }
  static void s_own(Product& d, const u32 (&a)[whole][4], u64 b, int accumulate) {
    for (int i = 0; i < whole; ++i)
      wgmma_rs<Element, rows, false>(d, a[i], b + static_cast<u32>(Layout::streamed_step(i)),
                                     i > 0 || accumulate);
  }
  static void s_rest(Product& d, u64 a, u64 b, int accumulate) {
    multiply(d, a, b, ceil_div(Spec::head_dim, 16) % whole, accumulate);
  }
  static void dp_rest(Product& d, u64 a, u64 b, int accumulate) {
    multiply(d, a, b, ceil_div(Spec::head_dim_v, 16) % whole, accumulate);
  }
  template <int size, int steps>
  static void add(float (&d)[size], const u32 (&a)[steps][4], u64 b, int accumulate) {
    for (int i = 0; i < steps; ++i)
      wgmma_rs<Element, 2 * size, true>(d, a[i], b + static_cast<u32>(Layout::row_step(i)),
                                        i > 0 || accumulate);
  }
  template <int size>
  static void dk(float (&d)[size], const u32 (&a)[2][4], u64 b, int accumulate) {
    add(d, a, b, accumulate);
  }
  template <int size>
  static void dk_rest(float (&d)[size], const u32 (&a)[2][4], u64 b, int accumulate) {
    add(d, a, b, accumulate);
  }
  template <int size>
  static void dv(float (&d)[size], const u32 (&a)[4][4], u64 b, int accumulate) {
    add(d, a, b, accumulate);
  }
  template <int size>
  static void dv_rest(float (&d)[size], const u32 (&a)[4][4], u64 b, int accumulate) {
    add(d, a, b, accumulate);
  }
};

}  // namespace flashjit::device
