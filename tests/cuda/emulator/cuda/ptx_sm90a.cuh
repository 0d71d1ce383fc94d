// templates/cuda/ptx_sm90a.cuh on the host.
#pragma once

#include "cuda/ptx_sync.cuh"
#include "shared/layout.h"

namespace flashjit::device {

inline void mbarrier_arrive_if(int condition, u32 bar) {
  if (condition) mbarrier_arrive(bar);
  // Whoever waits for a buffer may write to it before this warp goes on.
  emulator::block().pause();
}
inline void mbarrier_expect_tx(u32 bar, u32 bytes) {
  emulator::block().expect(bar, bytes);
}
inline void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
  emulator::block().arrive(bar, bytes);
}
inline void bar_arrive(int id, int threads) {
  emulator::block().named_arrive(id, threads);
}
inline void bar_sync_arrive_if(int condition, int id, int next, int threads) {
  if (!condition) return;
  emulator::block().named_sync(id, threads);
  emulator::block().named_arrive(next, threads);
}
inline bool bar_red_or(int id, int threads, bool x) {
  return emulator::block().named_sync(id, threads, x);
}
inline void fence_mbarrier_init() {}
inline void fence_proxy_async() {}
inline void fence_proxy_async_global() {}
template <int registers>
void setmaxnreg_inc() {}
template <int registers>
void setmaxnreg_dec() {}
inline void prefetch_tensormap(const TensorMap&) {}
inline void prefetch_global(const void*) {}

inline void cp_async_bulk_tensor_4d(u32 to, const TensorMap& opaque, u32 bar, int c0, int c1, int c2,
                                    int c3) {
  emulator::TensorMap map;
  std::memcpy(&map, &opaque, sizeof map);
  const auto& [sizes, strides, box] = *map.shape;
  const int start[] = {c0, c1, c2, c3};
  u32 row = 0;
  for (unsigned i3 = 0; i3 < box[3]; ++i3)
    for (unsigned i2 = 0; i2 < box[2]; ++i2)
      for (unsigned i1 = 0; i1 < box[1]; ++i1, ++row) {
        const i64 at[] = {i64{start[1]} + i1, i64{start[2]} + i2, i64{start[3]} + i3};
        bool inside = true;
        i64 offset = 0;
        for (std::size_t d = 0; d < 3; ++d) {
          inside &= at[d] >= 0 && at[d] < static_cast<i64>(sizes[d + 1]);
          offset += at[d] * static_cast<i64>(strides[d]);
        }
        const auto copy = [&]<class Element>(Element element, auto place) {
          for (unsigned i0 = 0; i0 < box[0]; ++i0) {
            element = 0;
            if (inside && c0 + i0 < sizes[0])
              std::memcpy(&element, static_cast<const char*>(map.data) + offset + sizeof element * (c0 + i0),
                          sizeof element);
            emulator::block().store(place(i0), element);
          }
        };
        if (map.element_bytes == 2)
          copy(std::uint16_t{}, [&](u32 i) { return emulator::Block::swizzled(to + row * 128 + i * 2); });
        else if (map.element_bytes == 4)
          copy(std::uint32_t{}, [&](u32 i) { return to + (row * box[0] + i) * 4; });
        else
          copy(std::uint8_t{}, [&](u32 i) { return to + row * box[0] + i; });
      }
  emulator::block().complete(bar, i64{row} * box[0] * map.element_bytes);
}

inline void wgmma_fence() {}
inline void wgmma_commit_group() {}
template <int pending>
void wgmma_wait_group() {
  emulator::block().warp_sync();  // all lanes have read the operands that are released now
}
inline u64 wgmma_descriptor(u32 address, u32 leading) {
  return u64{leading} << 32 | address;
}

// Element (row, column) of an operand of 16 columns; with N contiguous, of 16 rows in panels of 64 columns.
template <class T>
float operand_element(u32 base, u32 row, u32 column) {
  return emulator::to_float(
      T{}, emulator::block().load<std::uint16_t>(emulator::Block::swizzled(base + row * 128 + column * 2)));
}
template <class T, bool n_major>
float operand_b(u64 descriptor, int k, int n) {
  const u32 base = static_cast<u32>(descriptor), leading = static_cast<u32>(descriptor >> 32);
  const auto uk = static_cast<u32>(k), un = static_cast<u32>(n);
  return n_major ? operand_element<T>(base + un / 64 * leading, uk, un % 64)
                 : operand_element<T>(base, un, uk);
}

// d = a * b, or d += a * b, over 16 columns of a and b, or 16 rows of b.
template <class T, int N, bool b_n_major = false>
void wgmma_ss(float (&d)[N / 2], u64 a, u64 b, int accumulate) {
  emulator::Operand rows[2];
  for (u32 r = 0; r < 2; ++r)
    for (u32 k = 0; k < 16; ++k)
      rows[r][k] = operand_element<T>(static_cast<u32>(a),
                                      threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * r, k);
  emulator::multiply<N>(d, rows, [&](int k, int n) { return operand_b<T, b_n_major>(b, k, n); }, accumulate);
}
template <class T, int N, bool b_n_major>
void wgmma_rs(float (&d)[N / 2], const u32 (&a)[4], u64 b, int accumulate) {
  const auto lanes = emulator::block().all_lanes(std::array{a[0], a[1], a[2], a[3]});
  emulator::Operand rows[2];
  for (u32 r = 0; r < 2; ++r)
    for (u32 k = 0; k < 16; ++k)
      rows[r][k] = emulator::to_float(
          T{}, lanes[threadIdx.x % 32 / 4 * 4 + k % 8 / 2][k / 8 * 2 + r] >> k % 2 * 16 & 0xffff);
  emulator::multiply<N>(d, rows, [&](int k, int n) { return operand_b<T, b_n_major>(b, k, n); }, accumulate);
}

template <class Spec, class Config>
struct Sm90aShared;

// The products that codegen/families/wgmma_products.hpp renders, emulated.
template <class Spec, class Config>
struct EmulatedProducts {
  using QkElement = typename Sm90aShared<Spec, Config>::QkElement;
  using PvElement = typename Sm90aShared<Spec, Config>::PvElement;
  static constexpr int block_n = Config::block_n;
  static constexpr Sm90aLayout layout = Sm90aShared<Spec, Config>::layout;

  static void qk(float (&d)[block_n / 2], const u32 (&q)[layout.qk_steps][4], u64 k) {
    for (int i = 0; i < layout.qk_steps; ++i)
      wgmma_rs<QkElement, block_n, false>(d, q[i], k + static_cast<u32>(layout.k_step(i)), i > 0);
  }
  static void qk(float (&d)[block_n / 2], u64 q, u64 k) {
    if constexpr (layout.second_piece == 0)
      for (int i = 0; i < layout.qk_steps; ++i) qk_step(d, q, k, i, i > 0);
    else
      qk(d, q, k, 0);
  }
  static void qk(float (&d)[block_n / 2], u64 q, u64 k, int accumulate) {
    for (int i = 0; i < layout.qk_steps; ++i)
      if (!layout.in_second_piece(Spec::head_dim_v, i)) qk_step(d, q, k, i, i > 0 || accumulate);
  }
  static void qk_rest(float (&d)[block_n / 2], u64 q, u64 k, int accumulate = 1) {
    bool first = !accumulate;
    for (int i = 0; i < layout.qk_steps; ++i)
      if (layout.in_second_piece(Spec::head_dim_v, i)) {
        qk_step(d, q, k, i, !first);
        first = false;
      }
  }
  static void qk_step(float (&d)[block_n / 2], u64 q, u64 k, int i, int accumulate) {
    wgmma_ss<QkElement, block_n>(d, q + static_cast<u32>(layout.q_step(i)),
                                 k + static_cast<u32>(layout.k_step(i)), accumulate);
  }
  template <int columns>
  static void pv(float (&d)[columns], const u32 (&weights)[layout.pv_steps][4], u64 v, int accumulate) {
    for (int i = 0; i < layout.pv_steps; ++i)
      wgmma_rs<PvElement, 2 * columns, true>(d, weights[i], v + static_cast<u32>(layout.v_step(i)),
                                             i > 0 || accumulate);
  }
  template <int columns>
  static void pv_given(float (&d)[columns], u64 weights, u64 v, int accumulate) {
    for (int i = 0; i < layout.pv_steps; ++i)
      wgmma_ss<PvElement, 2 * columns, true>(d, weights + static_cast<u32>(layout.q_step(i)),
                                             v + static_cast<u32>(layout.v_step(i)), i > 0 || accumulate);
  }
  template <int columns>
  static void pv_rest_given(float (&d)[columns], u64 weights, u64 v, int accumulate) {
    pv_given(d, weights, v, accumulate);
  }
  template <int columns>
  static void pv_rest(float (&d)[columns], const u32 (&weights)[layout.pv_steps][4], u64 v, int accumulate) {
    pv(d, weights, v, accumulate);
  }
};

}  // namespace flashjit::device
