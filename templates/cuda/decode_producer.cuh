// The copying warps of decode: they keep copies of Q, K and V in flight, across tiles.
#pragma once

#include "cuda/decode_units.cuh"
#include "cuda/ptx_sync.cuh"
#include "cuda/tile.cuh"
#include "shared/decode_cuda_layout.h"
#include "shared/kv_scale_params.h"

namespace flashjit::device {

// A segment, as producer 0 announces it to the consumers with the tile's Q.
struct DecodeMessage {
  int batch;  // negative: there are no more segments
  DecodeSegment segment;

  FLASHJIT_FN void send(u32 to) const {
    st_shared_v4(to, batch, segment.tile, segment.begin, segment.end);
    st_shared_v4(to + 16, segment.starts, segment.finishes, segment.whole_tile, segment.round);
  }
  FLASHJIT_FN static DecodeMessage receive(u32 from) {
    u32 a[4], b[4];
    ld_shared_v4(a, from);
    ld_shared_v4(b, from + 16);
    return {static_cast<int>(a[0]),
            {static_cast<int>(a[1]), static_cast<int>(a[2]), static_cast<int>(a[3]), b[0] != 0, b[1] != 0,
             b[2] != 0, static_cast<int>(b[3])}};
  }
};

// One warp. Producer 0 also announces segments.
template <class Kernel>
class DecodeProducer {
  using Spec = typename Kernel::Spec;
  using Element = typename Kernel::Element;
  using KvElement = typename Kernel::KvElement;
  using Entry = typename Kernel::Entry;
  using Shared = typename Kernel::Shared;
  using QTile = typename Kernel::QTile;
  using KTile = typename Kernel::KTile;
  using VTile = typename Kernel::VTile;
  using Products = typename Kernel::Products;
  static constexpr CudaDecodeLayout layout = Kernel::layout;
  static constexpr int block_m = Kernel::block_m, block_n = layout.buffer_keys, step_keys = Kernel::step_keys;
  static constexpr int buffers = step_keys / block_n / Entry::rounds;  // of a round of a step
  static constexpr bool own_scales = Kernel::own_scales;
  static constexpr u32 all_lanes = 0xffffffff;

 public:
  static constexpr u32 least_units = Entry::fixed_parts ? 1 : 2;  // of a block of the grid

  FLASHJIT_FN DecodeProducer(const CudaDecodeParams& p, const Shared& shared, int index, int lane)
      : p_(p),
        shared_(shared),
        index_(index),
        lane_(lane),
        // Other tiles read the same keys if the rows of a key/value head need several.
        policy_(p.most_tiles > p.num_heads_kv ? l2_evict_normal() : l2_evict_first()) {}

  FLASHJIT_FN void run() {
    if (index_ >= layout.copiers) return;
    const DecodeUnits<Spec, Entry> units(p_, lane_);
    const EqualShares shares(units.total(), nctaid_x(), least_units);
    const u32 block = ctaid_x(), begin = shares.begin(min(block, shares.used)),
              end = shares.begin(min(block + 1, shares.used));
    DecodeWalk<Entry> walk(p_, begin < end ? units.find(begin) : UnitPlace{}, end - begin);
    DecodeSegment segment;
    int count = 0;
    for (; walk.next(segment); ++count) {
      const Entry& entry = walk.entry();
      const DecodeTile tile(p_, entry, segment.tile);
      if (index_ == 0) {
        wait_for_consumers(count);
        send(count, {entry.problem.batch, segment});
        copy_q(entry, tile, count);
        cp_async_mbarrier_arrive_noinc(shared_.q_full(count % 2));
      }
      copy_keys(entry, tile, segment);
    }
    if (index_ == 0) {
      wait_for_consumers(count);
      send(count, {-1, {}});
      mbarrier_arrive(shared_.q_full(count % 2));
    }
    // Not earlier: the second kernel's blocks would take from what this one needs.
    griddepcontrol_launch_dependents();
    cp_async_commit_group();
    cp_async_wait_group<0>();
  }

 private:
  FLASHJIT_FN void wait_for_consumers(int count) const {
    mbarrier_wait(shared_.q_empty(count % 2), (count / 2 & 1) ^ 1);
  }
  FLASHJIT_FN void send(int count, const DecodeMessage& message) const {
    if (lane_ != 0) return;
    message.send(shared_.message(count % 2));
    mbarrier_arrive(shared_.q_full(count % 2));
  }
  FLASHJIT_FN void copy_q(const Entry& entry, const DecodeTile& tile, int count) const {
    const Element* const q = static_cast<const Element*>(p_.q.data) + entry.problem.q_offset(p_.q) +
                             tile.first_position * p_.q.row_stride + tile.first_head * p_.q.head_stride;
    for (u32 i = lane_; i < block_m * QTile::chunks; i += 32) {
      const u32 row = i / QTile::chunks, chunk = i % QTile::chunks;
      const int position = static_cast<int>(row * p_.heads_inverse >> 16);
      const int head = static_cast<int>(row) - position * p_.tile_heads;
      const bool valid =
          position < tile.positions && head < tile.heads && (all_of_q || chunk * 8 < Spec::head_dim);
      cp_async_cg(shared_.q(count % 2) + QTile::offset(row, chunk),
                  q + position * p_.q.row_stride + head * p_.q.head_stride + chunk * 8, valid ? 16 : 0);
    }
  }
  static constexpr bool all_of_q = QTile::chunks * 8 == Spec::head_dim;

  // Where the scales of a key and its value lie; of none that does not exist.
  struct Scales {
    bool exist;
    const float *k, *v;
  };
  struct NoScales {};
  using RowScales = typename Choose<own_scales, Scales, NoScales>::type;
  // Where the rows of a block begin. together: in each part of `part_keys` rows the others follow the first.
  // k, v and scales are of row `lane`; one that does not exist is zeros.
  struct Rows {
    bool together, exists;
    const KvElement *k, *v;
    RowScales scales;
  };

  FLASHJIT_FN void copy_keys(const Entry& entry, const DecodeTile& tile, const DecodeSegment& segment) {
    const i64 batch = Spec::paged ? 0 : entry.problem.batch;
    const KvElement* const k = static_cast<const KvElement*>(p_.k.data) + p_.k.offset(batch, 0, tile.head_kv);
    const KvElement* const v = static_cast<const KvElement*>(p_.v.data) + p_.v.offset(batch, 0, tile.head_kv);
    const RowScales scales = scales_of_head(batch, tile.head_kv);
    const int blocks = entry.steps(segment.begin, segment.end) * buffers;
    // Producers take turns through all segments. Page ids are looked up one block ahead.
    const int first = static_cast<int>((index_ + layout.copiers - count_ % layout.copiers) % layout.copiers);
    int next_page = first < blocks ? page_of(entry, segment, first) : 0;
    for (int i = first; i < blocks; i += layout.copiers) {
      const int page = next_page;
      if (i + layout.copiers < blocks) next_page = page_of(entry, segment, i + layout.copiers);
      const Rows rows = rows_of(entry, block_of(entry, segment, i), page, k, v, scales);
      const u32 count = count_ + i, slot = count % layout.slots;
      mbarrier_wait(shared_.empty(slot), (count / layout.slots & 1) ^ 1);
      const u32 k_tile = shared_.k(slot), v_tile = shared_.v(slot);
      if (rows.together) {
        copy_together<KTile, Kernel::key_columns>(k_tile, rows.k, p_.k.row_stride);
        if (!layout.shares_k) copy_together<VTile, Spec::head_dim_v>(v_tile, rows.v, p_.v.row_stride);
      } else {
        const u32 existing = __ballot_sync(all_lanes, rows.exists);
        copy_apart<KTile, Kernel::key_columns>(k_tile, rows.k, existing);
        if (!layout.shares_k) copy_apart<VTile, Spec::head_dim_v>(v_tile, rows.v, existing);
      }
      if constexpr (own_scales) {
        if (lane_ < block_n) {
          Products::copy_scale(shared_.k_scales(slot) + lane_ * 4, rows.scales.k, rows.scales.exist);
          Products::copy_scale(shared_.v_scales(slot) + lane_ * 4, rows.scales.v, rows.scales.exist);
        }
      }
      cp_async_mbarrier_arrive_noinc(shared_.full(slot));
    }
    count_ += blocks;
  }

  FLASHJIT_FN Span block_of(const Entry& entry, const DecodeSegment& segment, int i) const {
    const int first =
        entry.step_in_rounds(segment, i / buffers) * (buffers * block_n) + i % buffers * block_n;
    return {first, first + block_n};
  }
  FLASHJIT_FN bool has_key(const Entry& entry, int key) const {
    return lane_ < block_n && entry.keys.contains(key) && !entry.gap.contains(key);
  }
  // The id of the page that has the lane's row of block i.
  FLASHJIT_FN int page_of(const Entry& entry, const DecodeSegment& segment, int i) const {
    if constexpr (!Spec::paged) return 0;
    const int key = block_of(entry, segment, i).begin + lane_;
    if (!has_key(entry, key)) return 0;
    return p_.pages.table[entry.problem.batch * p_.pages.table_stride + p_.pages.page_of(key)];
  }
  FLASHJIT_FN Rows rows_of(const Entry& entry, Span block, int page_id, const KvElement* k,
                           const KvElement* v, const RowScales& scales) const {
    const bool all_seen = entry.keys.contains(block) && intersect(block, entry.gap).empty();
    const int key = block.begin + lane_;
    if constexpr (!Spec::paged) {
      if (all_seen)
        return {true, true, k + block.begin * p_.k.row_stride, v + block.begin * p_.v.row_stride,
                scales_of(scales, lane_ < block_n, 0, key)};
      if (!has_key(entry, key)) return {false, false, k, v, scales_of(scales, false, 0, 0)};
      return {false, true, k + key * p_.k.row_stride, v + key * p_.v.row_stride,
              scales_of(scales, true, 0, key)};
    }
    const bool together = all_seen && static_cast<u32>(p_.pages.page_size) % part_keys == 0;
    if (!has_key(entry, key)) return {together, false, k, v, scales_of(scales, false, 0, 0)};
    const i64 page = p_.pages.clamped(page_id);
    const int place = key - p_.pages.page_of(key) * p_.pages.page_size;
    return {together, true, k + p_.k.offset(page, place, 0), v + p_.v.offset(page, place, 0),
            scales_of(scales, true, page, place)};
  }
  // Those of a head's first row, and of another row.
  FLASHJIT_FN RowScales scales_of_head(i64 batch, int head) const {
    if constexpr (own_scales) {
      const auto& q = with_kv_scales(p_);
      return {true, q.k_scale.data + q.k_scale.offset(batch, 0, head),
              q.v_scale.data + q.v_scale.offset(batch, 0, head)};
    } else {
      return {};
    }
  }
  FLASHJIT_FN RowScales scales_of(const RowScales& of_head, bool exist, i64 batch, int row) const {
    if constexpr (own_scales) {
      if (!exist) return {false, of_head.k, of_head.v};
      const auto& q = with_kv_scales(p_);
      return {true, of_head.k + q.k_scale.offset(batch, row, 0), of_head.v + q.v_scale.offset(batch, row, 0)};
    } else {
      return {};
    }
  }
  FLASHJIT_FN static const KvElement* of_lane(const KvElement* own, u32 lane) {
    return reinterpret_cast<const KvElement*>(
        __shfl_sync(all_lanes, reinterpret_cast<unsigned long long>(own), lane));
  }

  // Both copy a block's rows, chunk by chunk: lane l copies chunks l, l + 32, ...
  // `from`: the block's first row. With pages row l begins at `from` of lane l.
  template <class Tile, int head_dim>
  FLASHJIT_FN void copy_together(u32 to, const KvElement* from, i64 row_stride) const {
    const Chunk<Tile> own(lane_, 0);
    const KvElement* part = from;
    const KvElement* source = from;
    each_chunk<Tile>([&](u32 first) {
      const u32 row = first / Tile::chunks;
      const bool begins = first == 0 || (Spec::paged && part_keys < block_n && row % part_keys == 0);
      if (begins && Spec::paged) part = of_lane(from, row);
      const Chunk<Tile> chunk(lane_of_chunk<Tile, head_dim>(), first);
      if (begins || !Chunk<Tile>::in_columns)
        source = part + (Chunk<Tile>::in_columns ? own.row : chunk.row) * row_stride +
                 chunk.column * chunk_columns;
      if (chunk.exists())
        copy_chunk<head_dim>(to + chunk.offset(), source, chunk.column,
                             chunk.template within<head_dim>() ? 16 : 0);
      source += Chunk<Tile>::step * row_stride;
    });
  }
  // Row l begins at `own` of lane l, and bit l of `existing` says whether it exists.
  template <class Tile, int head_dim>
  FLASHJIT_FN void copy_apart(u32 to, const KvElement* own, u32 existing) const {
    const auto copy = [&](u32 first, bool all_exist) {
      const Chunk<Tile> chunk(lane_of_chunk<Tile, head_dim>(), first);
      const KvElement* const source = of_lane(own, chunk.row) + chunk.column * chunk_columns;
      const bool valid = (all_exist || existing >> chunk.row & 1) && chunk.template within<head_dim>();
      if (chunk.exists()) copy_chunk<head_dim>(to + chunk.offset(), source, chunk.column, valid ? 16 : 0);
    };
    constexpr u32 all_rows = all_lanes >> (32 - block_n);
    if (Spec::paged && existing == all_rows) {
      each_chunk<Tile>([&](u32 first) { copy(first, true); });
    } else {
#pragma unroll 1
      for (u32 first = 0; first < Chunk<Tile>::count; first += 32) copy(first, false);
    }
  }
  // Wide rows have too many chunks for the registers of a whole block's addresses.
  template <class Tile, class Copy>
  FLASHJIT_FN static void each_chunk(const Copy& copy) {
    if constexpr (Tile::chunks <= 32 && !layout.keys_as_rows) {
#pragma unroll
      for (u32 first = 0; first < Chunk<Tile>::count; first += 32) copy(first);
    } else {
#pragma unroll 16
      for (u32 first = 0; first < Chunk<Tile>::count; first += 32) copy(first);
    }
  }
  // The lane. Where some chunks lie beyond the row's end, what follows from it is not kept from block to
  // block: registers are short.
  template <class Tile, int head_dim>
  FLASHJIT_FN int lane_of_chunk() const {
    int lane = lane_;
    if constexpr (Tile::chunks * chunk_columns != head_dim) asm volatile("" : "+r"(lane));
    return lane;
  }
  // A row of an odd number of eight 8-bit columns ends with half a chunk.
  template <int head_dim>
  FLASHJIT_FN void copy_chunk(u32 to, const KvElement* from, u32 column, int bytes) const {
    if constexpr (head_dim % chunk_columns != 0)
      if ((column + 1) * chunk_columns > head_dim) bytes = min(bytes, 8);
    cp_async_cg(to, from, bytes, policy_);
  }
  static constexpr int chunk_columns = 16 / static_cast<int>(sizeof(KvElement));
  // Chunk first + lane of a block.
  template <class Tile>
  struct Chunk {
    static constexpr u32 count = block_n * Tile::chunks;
    // With rows of 2, 4, ... 32 chunks a lane's chunks lie in one column, `step` rows apart.
    static constexpr bool in_columns = 32 % Tile::chunks == 0;
    static constexpr u32 step = in_columns ? 32 / Tile::chunks : 1;
    static constexpr bool in_parts = in_columns && 16 % step == 0;
    u32 index, row, column;

    FLASHJIT_FN Chunk(u32 lane, u32 first) : index(first + lane) {
      const u32 of_lane = in_columns ? lane : min(index, count - 1);
      row = of_lane / Tile::chunks + (in_columns ? first / 32 * step : 0);
      column = of_lane % Tile::chunks;
    }
    FLASHJIT_FN bool exists() const { return count % 32 == 0 || index < count; }
    FLASHJIT_FN u32 offset() const { return Tile::offset(row, column); }
    template <int head_dim>
    FLASHJIT_FN bool within() const {
      return Tile::chunks * chunk_columns == head_dim || column * chunk_columns < head_dim;
    }
  };

  // Rows that must lie in one page to be copied together.
  static constexpr int part_keys = Chunk<KTile>::in_parts && Chunk<VTile>::in_parts ? 16 : block_n;

  const CudaDecodeParams& p_;
  const Shared shared_;
  const int index_, lane_;
  const u64 policy_;
  u32 count_ = 0;  // blocks of all segments before this one
};

}  // namespace flashjit::device
