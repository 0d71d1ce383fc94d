// Parts of keys by length, for outputs or keys of more than 256 columns in sm_90a's forward, where only the
// device knows how long sequences are: each tile has parts of equally many blocks, the fewest blocks with
// which all parts have a block of the grid of their own. A long sequence among short ones then takes most of
// the grid.
#pragma once

#include "cuda/ptx.cuh"
#include "cuda/tile_index.cuh"
#include "shared/forward_sm90a_params.h"
#include "shared/params.h"
#include "shared/problem.h"

namespace flashjit::device {

// Of a block of the grid, where the device divides keys by their lengths: the batch entry, or -1, the part of
// its keys, and the blocks of a part and the number of parts.
struct Sm90aOwnPart {
  int batch, part, blocks, count;
};

template <class Kernel>
class Sm90aLengths {
  using Spec = typename Kernel::Spec;
  using Mask = typename Kernel::Mask;
  using Rows = typename Kernel::Rows;

 public:
  // For the first warp, before a launch's first tile: finds the part of this block of the grid and writes it
  // to shared memory. The block of a sequence's first part tells the merge where its parts lie.
  FLASHJIT_FN static void divide(const Sm90aForwardParams& p, u32 to, int lane) {
    const int tiles = tiles_of_entry(p), place = static_cast<int>(blockIdx.x) / tiles;
    int all = 0;
    for (int batch = lane; batch < p.batch; batch += 32) all += blocks_of(p, batch);
    int blocks = max(p.part_blocks, ceil_div(sum_of(all), p.part_slots)), too_few = blocks - 1;
    while (count_all(p, blocks, lane) > p.part_slots) {
      too_few = blocks;
      blocks += max(blocks / 8, 1);
    }
    while (blocks - too_few > 1) {
      const int middle = (too_few + blocks) / 2;
      (count_all(p, middle, lane) > p.part_slots ? too_few : blocks) = middle;
    }
    Sm90aOwnPart own{-1, 0, blocks, 0};
    int first = 0;
    for (int begin = 0; begin < p.batch && own.batch < 0; begin += 32) {
      const int batch = begin + lane, count = batch < p.batch ? count_of(p, batch, blocks) : 0;
      int before = first, after = first;  // parts of entries before this lane's, and of all 32 and before
      for (int i = 0; i < 32; ++i) {
        const int other = __shfl_sync(0xffffffff, count, i);
        if (i < lane) before += other;
        after += other;
      }
      for (int i = 0; i < 32; ++i) {
        const int other = __shfl_sync(0xffffffff, before, i), size = __shfl_sync(0xffffffff, count, i);
        if (place >= other && place < other + size) own = {begin + i, place - other, blocks, size};
      }
      first = after;
    }
    if (lane != 0) return;
    st_shared_v4(to, own.batch, own.part, own.blocks, own.count);
    if (own.batch < 0 || own.part > 0 || static_cast<int>(blockIdx.x) % tiles != 0) return;
    const u32 parts[] = {static_cast<u32>(place), static_cast<u32>(own.count)};
    st_global_v2(reinterpret_cast<u32*>(p.parts_of_entries) + 2 * own.batch, parts);
  }

  // The tile of this block of the grid in that entry.
  FLASHJIT_FN static TileIndex tile(const Sm90aForwardParams& p, int batch) {
    const int of_entry = static_cast<int>(blockIdx.x) % tiles_of_entry(p), m_blocks = tiles_of_head(p);
    return {batch, of_entry / m_blocks * Rows(p).heads, of_entry % m_blocks};
  }

  // For the merge: the number of a tile's first part among all parts, the number from a part to the next, and
  // how many there are.
  struct Parts {
    int first, step, count;
    FLASHJIT_FN Parts(const Sm90aForwardParams& p, int head, int m_block) : step(tiles_of_entry(p)) {
      const int heads = p.num_heads_q / Rows(p).heads;
      u32 words[2];
      ld_global_cg_v2(words, reinterpret_cast<const float*>(p.parts_of_entries) + 2 * (head / heads));
      first = (static_cast<int>(words[0]) * heads + head % heads) * tiles_of_head(p) + m_block;
      count = static_cast<int>(words[1]);
    }
  };

 private:
  FLASHJIT_FN static int tiles_of_head(const Sm90aForwardParams& p) {
    return ceil_div(p.seqlen_q, Rows(p).tokens);
  }
  FLASHJIT_FN static int tiles_of_entry(const Sm90aForwardParams& p) {
    return p.num_heads_q / Rows(p).heads * tiles_of_head(p);
  }
  FLASHJIT_FN static int blocks_of(const Sm90aForwardParams& p, int batch) {
    return ceil_div(make_problem<Spec::varlen, Mask::padding, Spec::paged>(p, batch, 0).seqlen_k,
                    Kernel::block_n);
  }
  // An entry without keys has a part, too: its rows are written.
  FLASHJIT_FN static int count_of(const Sm90aForwardParams& p, int batch, int blocks) {
    return max(ceil_div(blocks_of(p, batch), blocks), 1);
  }
  FLASHJIT_FN static int count_all(const Sm90aForwardParams& p, int blocks, int lane) {
    int count = 0;
    for (int batch = lane; batch < p.batch; batch += 32) count += count_of(p, batch, blocks);
    return sum_of(count);
  }
  FLASHJIT_FN static int sum_of(int x) {
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffff, x, mask);
    return x;
  }
};

}  // namespace flashjit::device
