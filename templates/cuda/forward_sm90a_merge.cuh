// The second kernel of sm_90a's forward, where tiles' keys are divided into parts.
#pragma once

#include "cuda/forward_sm90a_lengths.cuh"
#include "cuda/merge_parts.cuh"
#include "cuda/ptx_sync.cuh"
#include "cuda/scaled.cuh"
#include "cuda/tile_index.cuh"
#include "shared/forward_sm90a_params.h"

namespace flashjit::device {

// One row of a tile, at `position` of its sequence.
template <class Kernel>
struct Sm90aMergedTile {
  using Spec = typename Kernel::Spec;
  using Mask = typename Kernel::Mask;
  using Sinks = typename Kernel::Sinks;
  using Softmax = typename Kernel::Softmax;

  const Sm90aForwardParams& p;
  const typename Kernel::Work work;
  const int position, head_of_row;

  FLASHJIT_FN Sm90aMergedTile(const Sm90aForwardParams& params, const TileIndex& tile,
                              const typename Kernel::Rows& rows, int row)
      : p(params),
        work(params, tile),
        position(rows.positions(work.rows.begin, row)(0)),
        head_of_row(rows.head(row)) {}
  FLASHJIT_FN bool exists() const { return position < work.rows_end; }

  // Writes what the parts of the row have together, from `column` on, as a consumer does that has all of a
  // row's keys.
  template <class Row>
  FLASHJIT_FN void write(Row& merged, int column) const {
    const float reference = fmaxf(merged.maximum, Softmax::lowest);
    const float sum = Softmax::checked(merged.sum, reference);
    float lse = Softmax::log_sum_exp(sum, reference), factor = sum == 0 ? 0.f : 1.f / sum;
    if constexpr (Sinks::exist)
      factor = Softmax::normalizer(sum, reference, Sinks::log2(p, work.problem.head_q + head_of_row), lse);
    factor *= Kernel::output_factor(p, work.problem.head_kv);
    if (Mask::padding && position >= work.rows.end) factor = 0, lse = minus_infinity;
#pragma unroll
    for (float& x : merged.o) x = factor == 0 ? 0.f : scaled<Spec::batch_invariant>(x, factor);
    const auto offset = [&](const TensorView& t) {
      return work.problem.q_offset(t) + position * t.row_stride + head_of_row * t.head_stride;
    };
    store_columns(static_cast<typename Kernel::OElement*>(p.o.data) + offset(p.o) + column, merged.o);
    if (Spec::lse && column == 0) static_cast<float*>(p.lse.data)[offset(p.lse)] = lse;
  }
};

// Block (x, y, z) of the grid has some rows of tile y of head z, packed heads as one. A team of threads has a
// row, four columns each.
template <class Kernel>
struct Sm90aPartsMerge {
  using Spec = typename Kernel::Spec;
  using Row = MergedRow<fp32, 2, FreshParts, Kernel::fixed_parts>;
  static constexpr u32 threads_of_row = Spec::head_dim_v / Row::columns;
  static constexpr int rows_at_once = forward_merge_rows(Spec::head_dim_v);

  FLASHJIT_FN static void run(const Sm90aForwardParams& p) {
    const u32 thread = tid_x();
    const int team = thread / threads_of_row, column = thread % threads_of_row * Row::columns;
    const int row = static_cast<int>(ctaid_x()) * rows_at_once + team;
    const typename Kernel::Rows rows(p);
    const u32 heads = static_cast<u32>(p.num_heads_q) / static_cast<u32>(rows.heads), head = ctaid_z();
    const TileIndex tile{static_cast<int>(head / heads), static_cast<int>(head % heads) * rows.heads,
                         static_cast<int>(ctaid_y())};
    int stride = static_cast<int>(nctaid_y()) * Kernel::block_m;  // rows from a part to the next
    int first =
        static_cast<int>(head) * p.parts * stride + static_cast<int>(ctaid_y()) * Kernel::block_m + row;
    const Sm90aMergedTile<Kernel> of(p, tile, rows, row);
    griddepcontrol_wait();
    if (team >= rows_at_once || row >= rows.tokens * rows.heads || !of.exists()) return;

    Row merged;
    if constexpr (Kernel::fixed_parts) {
      first += (p.parts - 1) * stride;
      stride = -stride;
    }
    const float* const o = p.parts_o + first * Spec::head_dim_v + column;
    const float* const states = p.parts_state + 2 * first;
#pragma unroll 1  // for the time of a compile
    for (int part = 0; part < p.parts; part += 2)
      merged.add_some(
          part, p.parts, 1, [&](int i) { return o + (i * stride) * Spec::head_dim_v; },
          [&](int i) { return states + 2 * (i * stride); });
    of.write(merged, column);
  }
};

// Where the device divides keys by their lengths. An entry that several shares have may have two parts, or as
// many as there are multiprocessors. So teams of threads have 64 columns of a row each, and the more parts it
// has the more teams, its members, share them. The grid has no more blocks than multiprocessors hold at once:
// block after block would wait to begin. A block takes a set of as many rows' columns as its teams merge at
// once, then every gridDim.x-th one after that.
template <class Kernel>
class Sm90aLengthsMerge {
  using Spec = typename Kernel::Spec;
  using Lengths = Sm90aLengths<Kernel>;
  static constexpr int parts_at_once = 6;
  using Row = MergedRow<fp32, parts_at_once, FreshParts>;
  static constexpr int threads = forward_merge_threads, warps = threads / 32;
  static constexpr int team_threads = forward_merge_columns / Row::columns, teams = threads / team_threads;
  static constexpr int log_teams = 4;
  static_assert(teams == 1 << log_teams);
  static constexpr int pieces_of_row = ceil_div(Spec::head_dim_v, forward_merge_columns);
  static_assert(most_forward_shares <= threads);

 public:
  FLASHJIT_FN static void run(const Sm90aForwardParams& p, u32 shared) {
    const u32 found = shared + forward_merge_rows_bytes, sums = found + 16;
    const int thread = static_cast<int>(tid_x()), warp = thread / 32, lane = thread % 32;
    const typename Kernel::Rows rows(p);
    const int tiles = Lengths::tiles_of_entry(p), tile_rows = min(p.seqlen_q, rows.tokens) * rows.heads;
    const int stride = 2 * tiles * Kernel::block_m;  // rows from a part to the next
    const int pieces = tiles * tile_rows * pieces_of_row;
    const SharedRows<Row, threads> given{shared};
    typename Lengths::Begun begun{-1, 0};
    griddepcontrol_wait();
    if (thread < p.shares) begun = Lengths::begun(p, thread);
    // A thread counts the sets of one share, and all sets before them.
    const int own = begun.batch < 0 ? 0 : ceil_div_by(pieces, log_teams - log_members(begun.parts));
    int before = own;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const int lower = __shfl_sync(0xffffffff, before, (lane - lanes) & 31);
      if (lane >= lanes) before += lower;
    }
    if (lane == 31) st_shared(sums + warp * 4, static_cast<u32>(before));
    before -= own;
    __syncthreads();
    u32 words[4];
    int all = 0;
#pragma unroll
    for (int i = 0; i < warps; ++i) {
      if (i % 4 == 0) ld_shared_v4(words, sums + i * 4);
      if (i == warp) before += all;
      all += static_cast<int>(words[i % 4]);
    }
#pragma unroll 1
    for (int set = static_cast<int>(ctaid_x()); set < all; set += static_cast<int>(nctaid_x())) {
      if (before <= set && set < before + own)
        st_shared_v4(found, thread, begun.batch, begun.parts, set - before);
      __syncthreads();
      ld_shared_v4(words, found);
      const int share = words[0], batch = words[1], parts = words[2];
      const int log = log_members(parts), members = 1 << log;
      const int team = thread / team_threads, member = team & (members - 1);
      const int piece = (static_cast<int>(words[3]) << (log_teams - log)) + (team >> log);
      const int of_entry = piece / pieces_of_row, tile = of_entry / tile_rows,
                row = of_entry - tile * tile_rows;
      const int column = piece % pieces_of_row * forward_merge_columns + thread % team_threads * Row::columns;
      const bool has_place = piece < pieces && column < Spec::head_dim_v;
      const Sm90aMergedTile<Kernel> of(p, Lengths::tile(p, batch, has_place ? tile : 0), rows, row);
      const int first = Lengths::place(share * tiles + tile, false) * Kernel::block_m + row;
      const auto rows_to = [&](int part) {
        return first + part * stride + (part == 0 ? Kernel::block_m : 0);
      };
      Row merged;
      merged.add_parts(
          member, has_place ? parts : 0, members,
          [&](int part) { return p.parts_o + rows_to(part) * Spec::head_dim_v + column; },
          [&](int part) { return p.parts_state + 2 * rows_to(part); });
#pragma unroll 1
      for (int half = members / 2; half > 0; half /= 2) {
        if (member >= half && member < 2 * half) given.give(merged);
        __syncthreads();
        if (member < half) merged.add(given.take(static_cast<u32>(thread + half * team_threads)));
      }
      if (member == 0 && has_place && of.exists()) of.write(merged, column);
      __syncthreads();  // all have read `found`
    }
  }

 private:
  // So many members that each waits once for parts, if there are as many teams.
  FLASHJIT_FN static int log_members(int parts) {
    int log = 0;
    while (log < log_teams && parts_at_once << log < parts) ++log;
    return log;
  }
  FLASHJIT_FN static int ceil_div_by(int x, int log) { return (x + (1 << log) - 1) >> log; }
};

}  // namespace flashjit::device
