// Decode with mma.sync and cp.async: a few query rows of each batch entry against a long cache
// (FlashDecoding, Dao et al. 2023). Memory bounds it, so the grid's blocks take equal shares of all keys
// (shared/decode_schedule.h), and in each block some warps do nothing but keep copies in flight, across
// tiles. The others compute: query heads of a key/value head are rows of one tile, and groups of warps take
// turns at the tile's keys, each with a softmax of its own. At a tile's end their sums meet in shared memory,
// and all of them write. A second kernel merges tiles that several blocks have worked on.
#pragma once

#include "cuda/decode_sums.cuh"
#include "cuda/online_softmax.cuh"

namespace flashjit::device {

// Scores and sums of 8-bit keys and values.
template <class Spec>
class QuantisedProducts;  // cuda/decode_quantised.cuh

template <class Spec_, class Config>
struct Decode {
  using Spec = Spec_;
  using Element = typename Spec::Element;
  using OElement = typename OutputElement<typename Spec::o_dtype, Element>::type;
  using Mask = typename Spec::Mask;
  using Score = typename Spec::Score;
  using Sinks = typename Spec::Sinks;
  static constexpr int block_m = Config::block_m, block_n = Config::block_n;
  using KvElement = typename OutputElement<typename Spec::kv_dtype, Element>::type;
  static constexpr bool quantised = is_quantised<KvElement>;
  using Products = QuantisedProducts<Spec>;
  using Weight = typename Choose<quantised, fp16, Element>::type;  // of products with V
  static constexpr bool own_scales = quantised && Spec::kv_scale == KvScale::token_head;
  static constexpr CudaDecodeLayout layout{Spec::head_dim,
                                           Spec::head_dim_v,
                                           block_m,
                                           block_n,
                                           Config::num_stages,
                                           Config::num_warps,
                                           {quantised, own_scales, Spec::v_in_k}};
  static constexpr int streams =
      Spec::batch_invariant ? decode_streams(Spec::head_dim_v, quantised) : layout.groups;
  static_assert(streams % layout.groups == 0);
  static constexpr int step_keys = block_n * streams;
  static constexpr int key_columns = Spec::head_dim;  // as they are stored
  using Entry = DecodeEntry<Spec, step_keys, streams / layout.groups>;
  using Producer = DecodeProducer<Decode>;
  using Shared = DecodeShared<Decode>;
  using Sums = DecodeSums<Decode>;
  static constexpr int m_tiles = layout.m_tiles;
  static constexpr int n_tiles = block_n / 8;  // 8-key tiles of a block
  static constexpr int k_steps = ceil_div(Spec::head_dim, 16);
  // A warp takes so many chunks of a row of V, and 8-column tiles of the output.
  static constexpr int v_chunks = ceil_div(layout.v_columns * static_cast<int>(sizeof(KvElement)), 16);
  static constexpr int o_tiles = quantised ? v_chunks * 2 : v_chunks;
  static constexpr bool all_columns = layout.column_warps == 1, shares_scores = layout.score_bytes > 0;
  static_assert(layout.consumers % layout.warps_of_group() == 0);
  using Softmax = OnlineSoftmax<m_tiles, true>;

  using QTile = SharedTile<block_m, k_steps * 2>;
  using KTile = SharedTile<block_n, quantised ? round_up(k_steps, 2) : k_steps * 2>;
  using VTile =
      typename Choose<layout.shares_k, KTile, SharedTile<block_n, v_chunks * layout.column_warps>>::type;

  FLASHJIT_FN static void run(const CudaDecodeParams& p, u32 shared_base) {
    const Shared shared{shared_base};
    const int thread = static_cast<int>(tid_x());
    if (thread == 0) shared.init_barriers();
    __syncthreads();
    const int lane = thread % 32, warp = thread / 32;
    if (warp >= layout.consumers)
      Producer(p, shared, warp - layout.consumers, lane).run();
    else
      Consumer(p, shared, warp, lane).run();
  }

  template <class Own>
  struct QuantisedRows {
    float score_factor[m_tiles][2];
    typename Own::template Units<m_tiles> units;  // of values with own scales
  };
  struct PlainRows {};

  class Consumer : Choose<quantised, QuantisedRows<Products>, PlainRows>::type {
   public:
    FLASHJIT_FN Consumer(const CudaDecodeParams& p, const Shared& shared, int warp, int lane)
        : p_(p),
          shared_(shared),
          lane_(lane),
          group_(warp / layout.warps_of_group()),
          row_warp_(warp % layout.row_warps),
          softmax_(Score::scale_log2(p)) {}

    FLASHJIT_FN void run() {
      for (int count = 0;; ++count) {
        mbarrier_wait(shared_.q_full(count % 2), count / 2 & 1);
        const DecodeMessage message = DecodeMessage::receive(shared_.message(count % 2));
        if (message.batch < 0) break;
        const DecodeSegment& segment = message.segment;
        const Entry entry(p_, message.batch);
        const DecodeTile tile(p_, entry, segment.tile);
        if constexpr (quantised) begin_quantised(tile, shared_.q(count % 2));
        begin_rows(tile, count);
        add_keys(entry, tile, segment);
        if (!q_in_registers) release(shared_.q_empty(count % 2));
        Sums(p_, shared_).write(entry, tile, segment, message.batch, [&](int first, u32 rows) {
          give_sums(first, rows);
        });
      }
    }

   private:
    static constexpr bool q_in_registers = layout.q_registers(Spec::head_dim) == m_tiles * 4 * k_steps;
    FLASHJIT_FN static int column_warp() {
      return all_columns ? 0 : static_cast<int>(tid_x()) / 32 / layout.row_warps % layout.column_warps;
    }
    // The row, within the tile, of elements 2 * half and 2 * half + 1 of accumulator tile i.
    FLASHJIT_FN u32 row_of(int i, int half) const {
      return row_warp_ * m_tiles * 16 + i * 16 + half * 8 + lane_ / 4;
    }
    FLASHJIT_FN void release(u32 barrier) const {
      __syncwarp();
      if (lane_ == 0) mbarrier_arrive(barrier);
    }

    FLASHJIT_FN void begin_rows(const DecodeTile& tile, int count) {
#pragma unroll
      for (int i = 0; i < m_tiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          position_[i][half] =
              tile.first_position + static_cast<int>(row_of(i, half) * p_.heads_inverse >> 16);
      softmax_.reset();
#pragma unroll
      for (int i = 0; i < m_tiles; ++i)
#pragma unroll
        for (int c = 0; c < o_tiles; ++c)
#pragma unroll
          for (int e = 0; e < 4; ++e) o_[i][c][e] = 0;
      q_address_ =
          shared_.q(count % 2) + row_warp_ * m_tiles * 16 * QTile::row_bytes + QTile::lane_offset(lane_);
      if constexpr (q_in_registers) {
#pragma unroll
        for (int step = 0; step < k_steps; ++step) load_q(q_[step], step);
        release(shared_.q_empty(count % 2));
      }
    }
    FLASHJIT_FN void load_q(u32 (&q)[m_tiles][4], int step) const {
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) ldmatrix_x4(q[i], QTile::at(q_address_, i * 16, step * 2));
    }
    FLASHJIT_FN void begin_quantised(const DecodeTile& tile, u32 q_tile) {
      for (u32 row = tid_x() / 32; row < block_m; row += layout.consumers)
        Products::template prepare_q<QTile>(q_tile, row, shared_.inverse(row), lane_);
      Sums::sync_consumers();
      const float scale = Sums::scale_of(with_kv_scales(p_).k_scale, tile);
#pragma unroll
      for (int i = 0; i < m_tiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          this->score_factor[i][half] =
              Products::converts_q ? scale * Products::inverse(shared_.inverse(row_of(i, half))) : scale;
      this->units.reset();
    }
    FLASHJIT_FN void add_keys(const Entry& entry, const DecodeTile& tile, const DecodeSegment& segment) {
      Mask mask(p_, entry.problem);
      see_heads(mask, {tile.first_head, tile.first_head + tile.heads});
      Problem problem = entry.problem;
      problem.head_q = tile.first_head;
      const Score score(p_, problem);
      const Span positions = {tile.first_position, tile.first_position + tile.positions};
      const int steps = entry.steps(segment.begin, segment.end);
      for (int i = 0; i < steps; ++i) {
        const int slot = stage_ * layout.groups + group_;
        Block block;
        block.index = entry.step_in_rounds(segment, i) * layout.groups + group_;
        const Span keys = block_span(block.index, block_n);
        block.whole = mask.whole(positions, keys);
        block.found = not_found;
        mbarrier_wait(shared_.full(slot), parity_);
        if (!intersect(keys, entry.keys).empty()) {
          take_scores(shared_.k(slot), shared_.scores(slot));
          if constexpr (quantised)
            Products::scale_scores(s_, this->score_factor, shared_.k_scales(slot), lane_);
          modify_and_mask(mask, score, tile, block);
          accumulate(shared_.v(slot), shared_.v_scales(slot));
        }
        release(shared_.empty(slot));
        if (++stage_ == Config::num_stages) stage_ = 0, parity_ ^= 1;
      }
    }

    // s = q k^T
    FLASHJIT_FN void take_scores(u32 k_tile, [[maybe_unused]] u32 exchange) {
#pragma unroll
      for (int i = 0; i < m_tiles; ++i)
#pragma unroll
        for (int n = 0; n < n_tiles; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) s_[i][n][e] = 0;
      if constexpr (quantised) {
        // Where warps share the sums, each has a part of the columns.
        constexpr int pairs = ceil_div(k_steps, 2), parts = shares_scores ? layout.column_warps : 1;
#pragma unroll
        for (int part = 0; part < parts; ++part)
          if (parts == 1 || column_warp() == part)
            add_quantised(k_tile + KTile::lane_offset(lane_), part * pairs / parts * 2,
                          (part + 1) * pairs / parts * 2);
        if constexpr (shares_scores) add_parts(exchange);
      } else {
        add_scores(k_tile + KTile::lane_offset_b(lane_));
      }
    }
    // Steps [begin, end), two at a time.
    FLASHJIT_FN void add_quantised(u32 k_address, int begin, int end) {
#pragma unroll
      for (int step = begin; step < end; step += 2) {
        const int first = q_in_registers ? step : 0, second = min(step + 1, k_steps - 1);
        if (!q_in_registers) {
          load_q(q_[0], step);
          load_q(q_[1], second);
        }
        Products::template add_scores<KTile>(s_, q_[first], q_[q_in_registers ? second : 1], k_address, step,
                                             step + 1 < k_steps);
      }
    }
    FLASHJIT_FN void add_scores(u32 k_address) {
#pragma unroll
      for (int step = 0; step < k_steps; ++step) {
        auto& q = q_[q_in_registers ? step : step % 2];
        if (!q_in_registers) load_q(q, step);
#pragma unroll
        for (int n = 0; n < n_tiles; n += 2) {
          u32 k[4];
          ldmatrix_x4(k, KTile::at(k_address, n * 8, step * 2));
#pragma unroll
          for (int i = 0; i < m_tiles; ++i) {
            mma_m16n8k16(Element{}, s_[i][n], q[i], k[0], k[1]);
            mma_m16n8k16(Element{}, s_[i][n + 1], q[i], k[2], k[3]);
          }
        }
      }
    }
    // Adds up what the warps of the same rows have of the scores, in one order, so that all get the same
    // bits. Nobody writes to the buffer again before all have released its keys.
    FLASHJIT_FN void add_parts(u32 exchange) {
      const auto place = [&](int column_warp, int tile) {
        const int warp = column_warp * layout.row_warps + row_warp_;
        return exchange + static_cast<u32>((warp * m_tiles * n_tiles + tile) * 32 + lane_) * 16;
      };
#pragma unroll
      for (int tile = 0; tile < m_tiles * n_tiles; ++tile) {
        const float(&s)[4] = s_[tile / n_tiles][tile % n_tiles];
        st_shared_v4(place(column_warp(), tile), __float_as_uint(s[0]), __float_as_uint(s[1]),
                     __float_as_uint(s[2]), __float_as_uint(s[3]));
      }
      bar_sync(Sums::free_barrier + group_ * layout.row_warps + row_warp_, layout.column_warps * 32);
#pragma unroll
      for (int tile = 0; tile < m_tiles * n_tiles; ++tile) {
        float(&s)[4] = s_[tile / n_tiles][tile % n_tiles];
#pragma unroll
        for (int warp = 0; warp < layout.column_warps; ++warp) {
          u32 words[4];
          ld_shared_v4(words, place(warp, tile));
#pragma unroll
          for (int e = 0; e < 4; ++e) s[e] = (warp == 0 ? 0 : s[e]) + __uint_as_float(words[e]);
        }
      }
    }

    FLASHJIT_FN void modify_and_mask(const Mask& mask, const Score& score, const DecodeTile& tile,
                                     const Block& block) {
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) {
        const auto rows = [&](int row) { return position_[i][row / 8]; };
        const auto heads = [&](int row) {
          return tile.first_head + static_cast<int>(row_of(i, row / 8)) -
                 (rows(row) - tile.first_position) * p_.tile_heads;
        };
        score.template modify<block_n>(s_[i][0], score.of_rows(rows, heads), rows, heads,
                                       block.index * block_n, lane_);
        if (!block.whole) mask_elements<unknown_size, block_n>(s_[i][0], mask, rows, heads, block, lane_);
      }
    }

    // Online softmax of s_, then o += p v.
    FLASHJIT_FN void accumulate(u32 v_tile, [[maybe_unused]] u32 v_scales) {
      const bool corrects = softmax_.template take_max<n_tiles * 4>(s_[0][0]);
      if (!own_scales && corrects) {
#pragma unroll
        for (int i = 0; i < m_tiles; ++i)
#pragma unroll
          for (int c = 0; c < o_tiles; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) o_[i][c][e] *= softmax_.correction(2 * i + e / 2);
      }
      softmax_.template exponentiate<n_tiles * 4>(s_[0][0]);
      if constexpr (own_scales) this->units.scale_weights(s_, o_, v_scales, softmax_, corrects, lane_);
      // A warp's columns begin with a whole swizzle.
      static_assert(all_columns || v_chunks % VTile::group == 0);
      const u32 v_address = v_tile + VTile::lane_offset(lane_) + column_warp() * v_chunks * 16;
#pragma unroll
      for (int n = 0; n < n_tiles; n += 2) {
        // Two score tiles of 8 keys are, element for element, one operand of 16 keys.
        u32 p[m_tiles][4];
#pragma unroll
        for (int i = 0; i < m_tiles; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            p[i][j] = cvt_rn_x2(Weight{}, s_[i][n + j / 2][j % 2 * 2], s_[i][n + j / 2][j % 2 * 2 + 1]);
        if constexpr (quantised)
          Products::template add_values<VTile>(o_, p, v_address, n * 8);
        else
          add_values(p, v_address, n * 8);
      }
    }
    FLASHJIT_FN void add_values(const u32 (&p)[m_tiles][4], u32 v_address, int key) {
#pragma unroll
      for (int c = 0; c < o_tiles; c += 2) {
        u32 v[4];
        if (c + 1 < o_tiles)
          ldmatrix_x4_trans(v, VTile::at(v_address, key, c));
        else
          ldmatrix_x2_trans(v[0], v[1], VTile::at(v_address, key, c));
#pragma unroll
        for (int i = 0; i < m_tiles; ++i) {
          mma_m16n8k16(Element{}, o_[i][c], p[i], v[0], v[1]);
          if (c + 1 < o_tiles) mma_m16n8k16(Element{}, o_[i][c + 1], p[i], v[2], v[3]);
        }
      }
    }

    FLASHJIT_FN void give_sums(int first, u32 rows) const {
#pragma unroll
      for (int i = 0; i < m_tiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 row = row_of(i, half);
          const float sum = softmax_.relative_sum(2 * i + half);
          if (row >= rows) continue;
          if (first == 0 && lane_ % 4 == 0 && column_warp() == 0)
            st_shared_v2(shared_.state(group_, row), __float_as_uint(softmax_.reference(2 * i + half)),
                         __float_as_uint(sum));
          const int end = min(first + layout.exchange_columns, Spec::head_dim_v);
          const u32 to = shared_.sums(group_, row);
          if constexpr (!all_columns)
            give_some(i, half, first, end, to);
          else if constexpr (quantised)
            Products::give(o_[i], this->units[2 * i + half], half, first / 8, end, to, lane_);
          else
            give(o_[i], half, first / 8, end / 8, to + lane_ % 4 * 8);
        }
    }
    FLASHJIT_FN static void give(const float (&o)[o_tiles][4], int half, int tile, int end, u32 to) {
#pragma unroll
      for (int c = tile; c < end; ++c)
        st_shared_v2(to + (c - tile) * 32, __float_as_uint(o[c][half * 2]),
                     __float_as_uint(o[c][half * 2 + 1]));
    }

    // Gives the warp's columns that are in [first, end).
    FLASHJIT_FN void give_some(int i, int half, int first, int end, u32 to) const {
      constexpr int columns = quantised ? 16 : 8;  // that lie together in accumulators
      const int begin = column_warp() * layout.v_columns;
#pragma unroll
      for (int c = 0; c < o_tiles; c += columns / 8) {
        const int column = begin + c * 8;
        if (column < first || column >= end) continue;
        const u32 at = to + (column - first) * 4;
        if constexpr (quantised)
          Products::give(o_[i], this->units[2 * i + half], half, c, c * 8 + 8, at, lane_);
        else
          give(o_[i], half, c, c + 1, at + lane_ % 4 * 8);
      }
    }

    const CudaDecodeParams& p_;
    const Shared shared_;
    const int lane_, group_, row_warp_;
    int stage_ = 0, parity_ = 0;
    int position_[m_tiles][2];
    u32 q_address_;
    u32 q_[q_in_registers ? k_steps : 2][m_tiles][4];
    float s_[m_tiles][n_tiles][4], o_[m_tiles][o_tiles][4];
    Softmax softmax_;
  };
};

template <class Spec, class Config>
FLASHJIT_FN void decode(const CudaDecodeParams& params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  Decode<Spec, Config>::run(params, shared_address(dynamic_shared));
}

}  // namespace flashjit::device
