// What all kernels of a GPU decode have: their shared memory, and the way of a tile's sums to memory.
#pragma once

#include "cuda/decode_producer.cuh"
#include "cuda/merge_parts.cuh"
#include "shared/score.h"

namespace flashjit::device {

// Defaults of a rendered Spec.
struct DecodeCudaSpec {
  using Mask = Intersect<Bounds>;
  using Score = PlainScore;
  using Sinks = NoSinks;
  using Offsets = NoOffsets;
  using o_dtype = void;
  using kv_dtype = void;
  static constexpr KvScale kv_scale = KvScale::tensor;
  static constexpr bool lse = true, varlen = false, paged = false, v_in_k = false, batch_invariant = false;
};

// Addresses in shared memory, by buffer.
template <class Kernel>
struct DecodeShared {
  static constexpr CudaDecodeLayout layout = Kernel::layout;
  u32 base;
  FLASHJIT_FN u32 q(int buffer) const { return base + layout.q + buffer * layout.q_bytes; }
  FLASHJIT_FN u32 k(int slot) const { return base + layout.ring + slot * layout.slot_bytes(); }
  FLASHJIT_FN u32 v(int slot) const { return k(slot) + (layout.shares_k ? 0 : layout.k_bytes); }
  FLASHJIT_FN u32 k_scales(int slot) const { return k(slot) + layout.k_bytes + layout.v_bytes; }
  FLASHJIT_FN u32 v_scales(int slot) const { return k_scales(slot) + layout.buffer_keys * 4; }
  FLASHJIT_FN u32 scores(int slot) const { return k_scales(slot) + layout.scale_bytes; }
  // A row of a group's sums, and of its softmax.
  FLASHJIT_FN u32 sums(int group, u32 row) const {
    return base + layout.exchange + (group * Kernel::block_m + row) * (layout.exchange_stride * 4);
  }
  FLASHJIT_FN u32 state(int group, u32 row) const {
    return base + layout.states + (group * Kernel::block_m + row) * 8;
  }
  FLASHJIT_FN u32 message(int buffer) const { return base + layout.messages + buffer * layout.message_bytes; }
  FLASHJIT_FN u32 inverse(u32 row) const { return base + layout.inverses + row * 4; }
  FLASHJIT_FN u32 q_full(int buffer) const { return base + layout.q_full + buffer * 8; }
  FLASHJIT_FN u32 q_empty(int buffer) const { return base + layout.q_empty + buffer * 8; }
  FLASHJIT_FN u32 full(int slot) const { return base + layout.ring_full + slot * 8; }
  FLASHJIT_FN u32 empty(int slot) const { return base + layout.ring_empty + slot * 8; }

  FLASHJIT_FN void init_barriers() const {
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(q_full(i), 33);
      mbarrier_init(q_empty(i), layout.consumers);
    }
    for (int i = 0; i < layout.slots; ++i) {
      mbarrier_init(full(i), 32);
      mbarrier_init(empty(i), layout.warps_of_group());
    }
  }
};

// For the computing warps: merges the sums that groups of them have left in shared memory.
template <class Kernel>
class DecodeSums {
  using Spec = typename Kernel::Spec;
  using OElement = typename Kernel::OElement;
  using Sinks = typename Kernel::Sinks;
  using Softmax = typename Kernel::Softmax;
  using Entry = typename Kernel::Entry;
  using Shared = typename Kernel::Shared;
  static constexpr CudaDecodeLayout layout = Kernel::layout;
  static constexpr bool quantised = is_quantised<typename Kernel::KvElement>, own_scales = Kernel::own_scales;
  static constexpr int named_barrier = 1;
  using Row = MergedRow<fp32, 1, FreshParts>;

 public:
  static constexpr int free_barrier = 2;  // the first named barrier that nobody has

  FLASHJIT_FN DecodeSums(const CudaDecodeParams& p, const Shared& shared) : p_(p), shared_(shared) {}

  FLASHJIT_FN static void sync_consumers() { bar_sync(named_barrier, layout.consumers * 32); }

  // The scale of a tile's keys or values, if they share one.
  FLASHJIT_FN static float scale_of(const KvScales& scales, const DecodeTile& tile) {
    return own_scales ? 1.f : scales.data[tile.head_kv * scales.head_stride];
  }

  // Writes a tile's output, or a part of it. give(first, rows): a group leaves its columns from `first` on,
  // layout.exchange_columns of them, and its softmax's state if `first` is 0.
  template <class Give>
  FLASHJIT_FN void write(const Entry& entry, const DecodeTile& tile, const DecodeSegment& segment, int batch,
                         const Give& give) const {
    if constexpr (Entry::fixed_parts)
      exchange(tile, give, [&](int first, u32 rows) { add_round(entry, tile, segment, batch, first, rows); });
    else if (segment.starts && segment.finishes)
      merge_groups<true>(tile, give, [&](u32 row, int column, const float(&o)[4], float lse) {
        write(entry.problem, tile, row, column, o, lse);
      });
    else
      merge_groups<false>(tile, give,
                          [&, slot = 2 * i64{ctaid_x()} + segment.starts](
                              u32 row, int column, const float(&o)[4], const PartState& state) {
                            write_part(slot, row, column, o, state);
                          });
  }

  // Adds what there is beside the row's keys, and normalises its output. Returns its lse.
  template <class Merged>
  FLASHJIT_FN static float finish(const CudaDecodeParams& p, Merged& row, int head) {
    row.sum = Softmax::checked(row.sum, row.maximum);
    if constexpr (Sinks::exist) row.add_logit(Sinks::log2(p, head));
    return row.normalize();
  }

 private:
  // Passes the groups' sums through shared memory: take(first, rows) for columns from `first` on.
  template <class Give, class Take>
  FLASHJIT_FN void exchange(const DecodeTile& tile, const Give& give, const Take& take) const {
    const u32 rows = static_cast<u32>(tile.positions * p_.tile_heads);
#pragma unroll
    for (int first = 0; first < Spec::head_dim_v; first += layout.exchange_columns) {
      sync_consumers();  // the columns before these have been read
      give(first, rows);
      sync_consumers();
      take(first, rows);
    }
  }
  FLASHJIT_FN static u32 vectors_of(int first) {
    return static_cast<u32>(min(layout.exchange_columns, Spec::head_dim_v - first)) / 4;
  }

  // With batch_invariant. Adds the groups' sums, which are of a round's streams, one by one to those of the
  // part's rounds before. After the last round it adds the part to its lane, or leaves it to the second
  // kernel.
  FLASHJIT_FN void add_round(const Entry& entry, const DecodeTile& tile, const DecodeSegment& segment,
                             int batch, int first, u32 rows) const {
    constexpr int lanes = decode_lanes(Spec::head_dim_v), last_round = Entry::rounds - 1;
    const KeyUnits& units = entry.units;
    const bool to_lane = segment.whole_tile && segment.round == last_round;
    const int part = units.at(segment.begin), lane = part % lanes;
    const int before = to_lane ? units.last(part - 1, lane, lanes) : -1;
    const i64 tile_slot = p_.fixed_slot(batch, segment.tile, 0);
    const u32 vectors = vectors_of(first);
#pragma unroll 1
    for (u32 i = tid_x(); i < rows * vectors; i += layout.consumers * 32) {
      const u32 row = i / vectors, exchanged = i % vectors * 4;
      const int column = first + static_cast<int>(exchanged);
      const auto sums_at = [&](int slot) {
        return p_.parts_o + ((tile_slot + slot) * p_.tile_rows() + row) * Spec::head_dim_v + column;
      };
      const auto state_at = [&](int slot, int of_round) {
        return p_.parts_state + (((tile_slot + slot) * Entry::rounds + of_round) * p_.tile_rows() + row) * 2;
      };
      const auto load = [&](int sums_slot, int state_slot, int of_round) {
        const PartState state = FreshParts::load(state_at(state_slot, of_round));
        u32 words[4];
        FreshParts::load(words, sums_at(sums_slot));
        return row_of(words, 1, state);
      };
      const auto store = [&](const Row& sums, int slot) {
        store_columns(sums_at(slot), sums.o);
        const u32 words[2] = {__float_as_uint(sums.maximum), __float_as_uint(sums.sum)};
        if (column == 0) st_global_v2(state_at(part, segment.round), words);
      };
      Row sums, in_lane;
      if (before >= 0) in_lane = load(lane, before, last_round);
      if (segment.round > 0) sums = load(part, part, segment.round - 1);
#pragma unroll
      for (int g = 0; g < layout.groups; ++g) sums.add(group_sums(tile, g, row, exchanged));
      if (!to_lane) {
        store(sums, part);
        continue;
      }
      in_lane.add(sums);
      if (!segment.finishes) {
        store(in_lane, lane);
        continue;
      }
      Row all;
#pragma unroll 1
      for (int l = 0; l < lanes; ++l) {
        const int last = units.last(part, l, lanes);
        if (last >= 0) all.add(l == lane ? in_lane : load(l, last, last_round));
      }
      const int head = static_cast<int>(row) - static_cast<int>(row * p_.heads_inverse >> 16) * p_.tile_heads;
      // Rows beyond the last head are not written.
      const float lse = finish(p_, all, tile.first_head + min(head, tile.heads - 1));
      write(entry.problem, tile, row, column, all.o, lse);
    }
  }
  FLASHJIT_FN Row group_sums(const DecodeTile& tile, int group, u32 row, u32 exchanged) const {
    int state[2];
    ld_shared_v2(state[0], state[1], shared_.state(group, row));
    const float reference = __uint_as_float(static_cast<u32>(state[0]));
    u32 words[4];
    ld_shared_v4(words, shared_.sums(group, row) + exchanged * 4);
    float scale = 1;
    if constexpr (quantised) scale = scale_of(with_kv_scales(p_).v_scale, tile);
    return row_of(words, scale, part_state<Softmax>(reference, __uint_as_float(static_cast<u32>(state[1]))));
  }
  FLASHJIT_FN static Row row_of(const u32 (&words)[4], float scale, const PartState& state) {
    Row row;
#pragma unroll
    for (int e = 0; e < 4; ++e) row.o[e] = __uint_as_float(words[e]) * scale;
    row.maximum = state.maximum;
    row.sum = state.sum;
    return row;
  }

  // Merges all groups' sums. If they are over all keys, `is_row`, it calls write(row of the tile, column,
  // output, lse), else write(row of the tile, column, sums, their state).
  template <bool is_row, class Give, class Write>
  FLASHJIT_FN void merge_groups(const DecodeTile& tile, const Give& give, const Write& write) const {
    exchange(tile, give, [&](int first, u32 rows) { take_sums<is_row>(tile, first, rows, write); });
  }

  template <bool is_row, class Write>
  FLASHJIT_FN void take_sums([[maybe_unused]] const DecodeTile& tile, int first, u32 rows,
                             const Write& write) const {
    const u32 vectors = vectors_of(first);
#pragma unroll 1
    for (u32 i = tid_x(); i < rows * vectors; i += layout.consumers * 32) {
      const u32 row = i / vectors, column = i % vectors * 4;
      float reference[layout.groups], sum[layout.groups];
#pragma unroll
      for (int g = 0; g < layout.groups; ++g) {
        int words[2];
        ld_shared_v2(words[0], words[1], shared_.state(g, row));
        reference[g] = __uint_as_float(static_cast<u32>(words[0]));
        sum[g] = __uint_as_float(static_cast<u32>(words[1]));
      }
      float top = reference[0];
#pragma unroll
      for (int g = 1; g < layout.groups; ++g) top = fmaxf(top, reference[g]);
      float all = 0, o[4] = {};
#pragma unroll
      for (int g = 0; g < layout.groups; ++g) {
        const float weight = ex2_approx(reference[g] - top);
        all = __fmaf_rn(sum[g], weight, all);
        u32 words[4];
        ld_shared_v4(words, shared_.sums(g, row) + column * 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) o[e] = __fmaf_rn(__uint_as_float(words[e]), weight, o[e]);
      }
      float factor = 1, lse = 0;
      if constexpr (is_row) {
        all = Softmax::checked(all, top);
        factor = all == 0 ? 0.f : 1.f / all;
        lse = Softmax::log_sum_exp(all, top);
        if constexpr (Sinks::exist) {
          const int head =
              static_cast<int>(row) - static_cast<int>(row * p_.heads_inverse >> 16) * p_.tile_heads;
          const int last = tile.heads - 1;  // rows beyond it are not written
          factor = Softmax::normalizer(all, top, Sinks::log2(p_, tile.first_head + min(head, last)), lse);
        }
      }
      if constexpr (quantised) factor *= scale_of(with_kv_scales(p_).v_scale, tile);
#pragma unroll
      for (int e = 0; e < 4; ++e) o[e] = all == 0 ? 0.f : o[e] * factor;  // 0 times infinity would be NaN
      const int at = first + static_cast<int>(column);
      if constexpr (is_row)
        write(row, at, o, lse);
      else
        write(row, at, o, part_state<Softmax>(top, all));
    }
  }

  FLASHJIT_FN void write(const Problem& problem, const DecodeTile& tile, u32 row, int column,
                         const float (&o)[4], float lse) const {
    const int position = static_cast<int>(row * p_.heads_inverse >> 16);
    const int head = static_cast<int>(row) - position * p_.tile_heads;
    if (head >= tile.heads) return;
    const auto offset = [&](const TensorView& t) {
      return problem.q_offset(t) + (tile.first_position + position) * t.row_stride +
             (tile.first_head + head) * t.head_stride;
    };
    store_columns(static_cast<OElement*>(p_.o.data) + offset(p_.o) + column, o);
    if (Spec::lse && column == 0) static_cast<float*>(p_.lse.data)[offset(p_.lse)] = lse;
  }
  FLASHJIT_FN void write_part(i64 slot, u32 row, int column, const float (&o)[4],
                              const PartState& state) const {
    const i64 place = slot * p_.tile_rows() + row;
    store_columns(p_.parts_o + place * Spec::head_dim_v + column, o);
    const u32 words[2] = {__float_as_uint(state.maximum), __float_as_uint(state.sum)};
    if (column == 0) st_global_v2(p_.parts_state + place * 2, words);
  }

  const CudaDecodeParams& p_;
  const Shared shared_;
};

}  // namespace flashjit::device
