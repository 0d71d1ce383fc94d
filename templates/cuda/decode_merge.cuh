// Decode's second kernel: merges the tiles that several blocks of the first one have worked on.
#pragma once

#include "cuda/decode.cuh"
#include "cuda/merge_parts.cuh"

namespace flashjit::device {

// Merges the parts of tiles. Where the first kernel has fewer blocks than there may be tiles, block x of the
// grid merges the tile that block x of the first kernel began and a later one ended. Else, and with
// batch_invariant, it merges tile x % most_tiles of batch entry x / most_tiles, if several blocks have it.
//
// A team of threads reads a row's columns, or some of them, four each. Several teams, the members, share the
// parts of a row and meet in shared memory.
template <class D>
struct DecodeMerge {
  using Spec = typename D::Spec;
  using Entry = typename D::Entry;
  using Row = MergedRow<fp32, Entry::fixed_parts ? 4 : 2, FreshParts, Entry::fixed_parts>;
  static constexpr int columns = decode_merge_columns(Spec::head_dim_v, Entry::fixed_parts);
  static constexpr int column_parts = Spec::head_dim_v / columns;
  static constexpr int threads = decode_merge_threads, team_threads = columns / Row::columns;
  static constexpr int teams = threads / team_threads;
  // With batch_invariant each has a lane.
  static constexpr int most_members = decode_merge_members(columns);
  static_assert(teams >= most_members);

  // A tile, and its parts [begin, end).
  struct Work {
    int batch = 0, tile = 0, begin = 0, end = 0;
    u32 first = 0;  // the block of the first kernel that began the tile
  };

  FLASHJIT_FN static void run(const CudaDecodeParams& p, u32 shared) {
    const Work work = work_of(p, ctaid_x());
    if (work.end - work.begin < 2)
      return griddepcontrol_wait();  // a kernel must not end before the one that it follows
    const Entry entry(p, work.batch);
    const DecodeTile tile(p, entry, work.tile);
    griddepcontrol_wait();
    const SharedRows<Row, threads> given{shared};
    int members = most_members;
    if (!Entry::fixed_parts)
      while (members >= 2 * work.end) members /= 2;
    const int team = static_cast<int>(tid_x()) / team_threads, member = team % members;
    const int rows = tile.positions * p.tile_heads, rows_at_once = teams / members;
    for (int first = static_cast<int>(ctaid_y()) * rows_at_once; first < rows * column_parts;
         first += static_cast<int>(nctaid_y()) * rows_at_once) {
      const int row = (first + team / members) / column_parts;
      const int column = (first + team / members) % column_parts * columns +
                         static_cast<int>(tid_x()) % team_threads * Row::columns;
      const int position = static_cast<int>(static_cast<u32>(row) * p.heads_inverse >> 16);
      const int head = row - position * p.tile_heads;
      const bool exists = team < rows_at_once * members && row < rows && head < tile.heads;
      Row merged;
      if (exists) add_own_parts(merged, p, work, entry, row, column, member, members);
      __syncthreads();  // the members of the rows before have been read
      given.give(merged);
      __syncthreads();
      if (!exists || member != 0) continue;
#pragma unroll 1
      for (int other = 1; other < members; ++other)
        merged.add(given.take(tid_x() + static_cast<u32>(other * team_threads)));
      const float lse = D::Sums::finish(p, merged, tile.first_head + head);
      const auto offset = [&](const TensorView& t) {
        return entry.problem.q_offset(t) + (tile.first_position + position) * t.row_stride +
               (tile.first_head + head) * t.head_stride;
      };
      store_columns(static_cast<typename D::OElement*>(p.o.data) + offset(p.o) + column, merged.o);
      if (Spec::lse && column == 0) static_cast<float*>(p.lse.data)[offset(p.lse)] = lse;
    }
  }

 private:
  // Parts whose numbers are equal modulo `members` are one member's.
  FLASHJIT_FN static void add_own_parts(Row& to, const CudaDecodeParams& p, const Work& work,
                                        const Entry& entry, int row, int column, int member, int members) {
    const auto place = [&](int part) { return slot(p, work, part) * p.tile_rows() + row; };
    const auto add = [&](int begin, int end) {
      to.add_parts(
          begin + ((member - begin) & (members - 1)), end, members,
          [&](int part) { return p.parts_o + place(part) * Spec::head_dim_v + column; },
          [&](int part) {
            const i64 row_of_state =
                ((slot(p, work, part) + 1) * Entry::rounds - 1) * p.tile_rows() + row;  // of the last round
            return p.parts_state + 2 * row_of_state;
          });
    };
    if constexpr (Entry::fixed_parts) {
      const KeyUnits& units = entry.units;
      add(work.begin, min(units.gap_begin, work.end));
      add(units.gap_begin + units.gap, work.end);
    } else {
      add(work.begin, work.end);
    }
  }

  FLASHJIT_FN static i64 slot(const CudaDecodeParams& p, const Work& work, int part) {
    if constexpr (Entry::fixed_parts) return p.fixed_slot(work.batch, work.tile, part);
    return p.shared_slot(work.first, part);
  }

  // Needs no results of the first kernel.
  FLASHJIT_FN static Work work_of(const CudaDecodeParams& p, u32 x) {
    const DecodeUnits<Spec, Entry> units(p, static_cast<int>(tid_x() % 32));
    const EqualShares shares(units.total(), static_cast<u32>(p.blocks), D::Producer::least_units);
    if (Entry::fixed_parts || p.batch * p.most_tiles <= p.blocks) {
      const int batch = static_cast<int>(x) / p.most_tiles, tile = static_cast<int>(x) % p.most_tiles;
      const Entry entry(p, batch);
      if (tile >= entry.tiles) return {};
      const u32 begin = units.before(batch) + static_cast<u32>(tile * entry.tile_units());
      const Work work = parts_of(shares, batch, tile, begin, begin + static_cast<u32>(entry.tile_units()));
      if (!Entry::fixed_parts || work.end < 2) return work;
      return {batch, tile, entry.units.at(0), entry.units.at(entry.units.count - 1) + 1};
    }
    if (x + 1 >= shares.used) return {};
    const u32 last = shares.begin(x + 1) - 1;  // unit of block x
    const UnitPlace place = units.find(last);
    const int tile_units = Entry(p, place.batch).tile_units(), tile = place.skipped / tile_units;
    const u32 begin = last - static_cast<u32>(place.skipped - tile * tile_units), end = begin + tile_units;
    if (end == last + 1 || begin < shares.begin(x)) return {};
    return parts_of(shares, place.batch, tile, begin, end);
  }
  // A tile of units [begin, end).
  FLASHJIT_FN static Work parts_of(const EqualShares& shares, int batch, int tile, u32 begin, u32 end) {
    const u32 first = shares.block_of(begin);
    return {batch, tile, 0, static_cast<int>(shares.block_of(end - 1) - first) + 1, first};
  }
};

template <class Spec, class Config>
FLASHJIT_FN void decode_merge(const CudaDecodeParams& params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  DecodeMerge<Decode<Spec, Config>>::run(params, shared_address(dynamic_shared));
}

}  // namespace flashjit::device
