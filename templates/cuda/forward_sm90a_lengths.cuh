// Shares of keys by length, for outputs or keys of more than 256 columns in sm_90a's forward, where only the
// device knows how long sequences are. All blocks of keys of all batch entries are divided into equal,
// contiguous shares (shared/equal_shares.h). So a share has parts of several entries: the end of one that an
// earlier share began, whole ones, and the beginning of one that a later share ends. As many blocks of the
// grid as an entry has tiles have a share together, each its own tile of these entries: tiles of an entry
// read the same keys at the same time.
#pragma once

#include "cuda/entry_units.cuh"
#include "cuda/ptx_sm90a.cuh"
#include "cuda/tile_index.cuh"
#include "shared/forward_sm90a_params.h"
#include "shared/mask.h"
#include "shared/paged_forward_params.h"
#include "shared/params.h"
#include "shared/problem.h"

namespace flashjit::device {

// From a block of keys of one batch entry to a block of another, which the share does not have.
struct Sm90aShare {
  int batch, block, end_batch, end_block;

  FLASHJIT_FN bool has(int of_batch) const {
    return of_batch < end_batch || (of_batch == end_batch && end_block > 0);
  }
  // Whether it has the first block, and the last one, of an entry that it has blocks of.
  FLASHJIT_FN bool begins(int of_batch) const { return of_batch > batch || block == 0; }
  FLASHJIT_FN bool ends(int of_batch) const { return of_batch < end_batch; }
  FLASHJIT_FN Span keys(int of_batch, int block_n) const {
    return {begins(of_batch) ? 0 : block * block_n, ends(of_batch) ? 0x7fffffff : end_block * block_n};
  }
};

template <class Kernel>
class Sm90aLengths {
  using Spec = typename Kernel::Spec;
  using Mask = typename Kernel::Mask;
  using Rows = typename Kernel::Rows;

 public:
  // A tile costs as much as so many blocks beyond its own: its rows come and go.
  static constexpr int tile_cost = 1;

  // For a warp, before a launch's first tile: finds the share of this block of the grid and writes it
  // to shared memory.
  FLASHJIT_FN static void divide(const Sm90aForwardParams& p, u32 to, int lane) {
    const auto units_of = [&](int batch) {
      return batch < p.batch ? static_cast<u32>(tile_cost + hull_blocks(p, batch).size()) : 0;
    };
    const u32 tiles = tiles_of_entry(p), share = blockIdx.x / tiles;
    const EqualShares shares(sum_of_units(p.batch, lane, units_of), p.shares, p.part_blocks + tile_cost);
    Sm90aShare own{0, 0, 0, 0};
    int begun[] = {-1, 0};
    if (share < shares.used) {
      const u32 end = shares.begin(share + 1);
      const UnitPlace first = find_unit(shares.begin(share), lane, units_of);
      const UnitPlace last = end < shares.total ? find_unit(end, lane, units_of) : UnitPlace{p.batch, 0};
      own = {first.batch, block_at(p, first), last.batch, block_at(p, last)};
      if (own.end_block > 0 && own.begins(last.batch)) {
        const u32 last_unit = end - last.skipped + units_of(last.batch) - 1;
        begun[0] = last.batch;
        begun[1] = static_cast<int>(shares.block_of(last_unit) - share) + 1;
      }
    }
    if (lane != 0) return;
    if constexpr (Spec::paged) {
      const PageTable& pages = with_pages(p).pages;
      prefetch_global(pages.table + own.batch * pages.table_stride +
                      pages.page_of(own.block * Kernel::block_n));
    }
    st_shared_v4(to, own.batch, own.block, own.end_batch, own.end_block);
    if (blockIdx.x % tiles != 0) return;
    const u32 words[] = {static_cast<u32>(begun[0]), static_cast<u32>(begun[1])};
    st_global_v2(static_cast<u32*>(p.begun) + 2 * share, words);
  }

  // The tile of this block of the grid in that entry.
  FLASHJIT_FN static TileIndex tile(const Sm90aForwardParams& p, int batch) {
    return tile(p, batch, static_cast<int>(blockIdx.x) % tiles_of_entry(p));
  }
  FLASHJIT_FN static TileIndex tile(const Sm90aForwardParams& p, int batch, int of_entry) {
    const int m_blocks = ceil_div(p.seqlen_q, Rows(p).tokens);
    return {batch, of_entry / m_blocks * Rows(p).heads, of_entry % m_blocks};
  }

  // The place of a part in the workspace. A block of the grid has two: for the entry that it ends, and for
  // the one that it begins.
  FLASHJIT_FN static int place(int block, bool begins) { return 2 * block + (begins ? 1 : 0); }

  // For the merge: the entry that a share begins and another one ends, or -1, and how many parts it has.
  struct Begun {
    int batch, parts;
  };
  FLASHJIT_FN static Begun begun(const Sm90aForwardParams& p, int share) {
    u32 words[2];
    ld_global_cg_v2(words, static_cast<const float*>(p.begun) + 2 * share);
    return {static_cast<int>(words[0]), static_cast<int>(words[1])};
  }

  FLASHJIT_FN static int tiles_of_entry(const Sm90aForwardParams& p) {
    return p.num_heads_q / Rows(p).heads * ceil_div(p.seqlen_q, Rows(p).tokens);
  }

 private:
  // The blocks of keys that any row of an entry may see, by its first head.
  FLASHJIT_FN static Span hull_blocks(const Sm90aForwardParams& p, int batch) {
    const Problem problem = make_problem<Spec::varlen, Mask::padding, Spec::paged>(p, batch, 0);
    const Span rows = {0, problem.seqlen_q}, hull = Mask(p, problem).hull(Keys{}, rows);
    if (rows.empty() || hull.empty()) return {0, 0};
    return {hull.begin / Kernel::block_n, (hull.end - 1) / Kernel::block_n + 1};
  }
  // The first blocks of an entry are one share's, whatever tiles see of them.
  FLASHJIT_FN static int block_at(const Sm90aForwardParams& p, const UnitPlace& place) {
    if (place.skipped <= tile_cost) return 0;
    return hull_blocks(p, place.batch).begin + place.skipped - tile_cost;
  }
};

}  // namespace flashjit::device
