// 8-bit K and V that lie in pages, for the forward of the sm_80 family: a block's copies as it is stored, and
// its conversion into the tiles that products read.
#pragma once

#include "cuda/kv_convert.cuh"
#include "cuda/paged_tile.cuh"
#include "shared/kv_scale_params.h"

namespace flashjit::device {

// A key's scale multiplies its scores. A value's scale multiplies the output; if each token and head has its
// own, the value, which is then rounded.
template <class Spec, class Config, class KTile, class VTile>
class QuantisedTiles {
  using Element = typename Spec::Element;
  using KvElement = typename Spec::kv_dtype;
  static constexpr bool own_scales = Spec::kv_scale == KvScale::token_head;
  static constexpr int threads = Config::num_warps * 32, block_n = Config::block_n;
  using StoredK = SharedTile<block_n, ceil_div(Spec::head_dim, 16)>;
  using StoredV = SharedTile<block_n, ceil_div(Spec::head_dim_v, 16)>;
  using Params = Paged<Sm80ForwardParams>;
  static_assert(StoredK::bytes + StoredV::bytes + (own_scales ? 3 * block_n * 4 : 0) ==
                cuda_stored_block(Spec::head_dim, Spec::head_dim_v, block_n, own_scales));

 public:
  // For tiles of query rows `rows`. `shared`: the room for blocks as they are stored.
  template <class Mask>
  FLASHJIT_FN QuantisedTiles(const Sm80ForwardParams& p, const Problem& problem, const Mask& mask, Span rows,
                             u32 shared)
      : p_(with_pages(p)),
        head_(problem.head_kv),
        table_(p_.pages.table + problem.batch * p_.pages.table_stride),
        reads_(read_keys(mask, rows)),
        k_(p, p.k, problem, mask, rows, threadIdx.x),
        v_(p, p.v, problem, mask, rows, threadIdx.x),
        shared_(shared) {}

  // Starts the copies of a block. Keys that are not to be read become zeros.
  FLASHJIT_FN void copy(int first) const {
    k_(shared_, first, 0);
    v_(stored_v(), first, 0);
    if constexpr (own_scales)
      for (int i = static_cast<int>(threadIdx.x); i < block_n; i += threads) {
        const int key = first + i;
        const bool exists = reads_({key, key + 1});
        const i64 page = exists ? p_.pages.clamped(table_[p_.pages.page_of(key)]) : 0;
        const int row = exists ? key - p_.pages.page_of(key) * p_.pages.page_size : 0;
        copy_scale(stored_scales(), i, with_kv_scales(p_).k_scale, page, row, exists);
        copy_scale(stored_scales() + block_n * 4, i, with_kv_scales(p_).v_scale, page, row, exists);
      }
  }

  // Converts the block that has arrived.
  FLASHJIT_FN void convert(u32 k_tile, u32 v_tile) const {
    convert_rows<StoredK, KTile, false>(shared_, k_tile);
    convert_rows<StoredV, VTile, own_scales>(stored_v(), v_tile);
    if constexpr (own_scales)
      for (u32 i = threadIdx.x * 4; i < block_n * 4; i += threads * 4)
        st_shared(k_scales() + i, __float_as_uint(ld_shared(stored_scales() + i)));
  }

  // The factor of all outputs.
  FLASHJIT_FN static float of_outputs(const Sm80ForwardParams& p, const Problem& problem) {
    if constexpr (own_scales) return 1;
    const KvScales& scales = with_kv_scales(with_pages(p)).v_scale;
    return ld_global_nc(scales.data + scales.offset(0, 0, problem.head_kv));
  }

  // s: of the block's keys from tile first_tile on, 8 keys each.
  template <int m_tiles, int n_tiles>
  FLASHJIT_FN void scale_scores(float (&s)[m_tiles][n_tiles][4], int first_tile) const {
    float of_keys[2];
    if constexpr (!own_scales) {
      const KvScales& scales = with_kv_scales(p_).k_scale;
      of_keys[0] = of_keys[1] = ld_global_nc(scales.data + scales.offset(0, 0, head_));
    }
#pragma unroll
    for (int n = 0; n < n_tiles; ++n) {
      if constexpr (own_scales)
        ld_shared_v2(of_keys[0], of_keys[1], k_scales() + ((first_tile + n) * 8 + threadIdx.x % 4 * 2) * 4);
#pragma unroll
      for (int i = 0; i < m_tiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][n][e] *= of_keys[e % 2];
    }
  }

 private:
  FLASHJIT_FN u32 stored_v() const { return shared_ + StoredK::bytes; }
  // Scales of keys, then of values, as they arrive; of the keys in use.
  FLASHJIT_FN u32 stored_scales() const { return stored_v() + StoredV::bytes; }
  FLASHJIT_FN u32 k_scales() const { return stored_scales() + 2 * block_n * 4; }

  FLASHJIT_FN void copy_scale(u32 to, int i, const KvScales& scales, i64 page, int row, bool exists) const {
    cp_async_ca_4(to + i * 4, scales.data + scales.offset(page, row, head_), exists ? 4 : 0);
  }

  // A thread converts 16 elements at a time. Those beyond an odd number of chunks of 8 do not exist.
  template <class Stored, class Tile, bool scaled>
  FLASHJIT_FN void convert_rows(u32 from, u32 to) const {
    constexpr u32 count = Stored::rows * Stored::chunks;
#pragma unroll 2
    for (u32 i = threadIdx.x; i < count; i += threads) {
      const u32 row = i / Stored::chunks, chunk = i % Stored::chunks;
      u32 stored[4], x[8];
      ld_shared_v4(stored, from + Stored::offset(row, chunk));
      if constexpr (scaled)
        convert_chunk<Element, KvElement>(stored, x, ld_shared(stored_scales() + (block_n + row) * 4));
      else
        convert_chunk<Element, KvElement>(stored, x);
      st_shared_v4(to + Tile::offset(row, 2 * chunk), x[0], x[1], x[2], x[3]);
      if (Tile::chunks % 2 == 0 || 2 * chunk + 1 < Tile::chunks)
        st_shared_v4(to + Tile::offset(row, 2 * chunk + 1), x[4], x[5], x[6], x[7]);
    }
  }

  const Paged<Sm80ForwardParams>& p_;
  const int head_;
  const int* const table_;
  const ReadKeys reads_;
  const PagedTileCopy<StoredK, Spec::head_dim, threads, 1> k_;
  const PagedTileCopy<StoredV, Spec::head_dim_v, threads, 1> v_;
  const u32 shared_;
};

}  // namespace flashjit::device
