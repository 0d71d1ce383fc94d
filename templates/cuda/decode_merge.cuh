// Decode's second kernel: merges the tiles that several blocks of the first one have worked on.
#pragma once

#include "cuda/decode.cuh"
#include "cuda/merge_parts.cuh"

namespace flashjit::device {

// Merges the parts of tiles. Block x of the grid merges the tile that block x of the first kernel began and a
// later one ended; with batch_invariant, block x merges tile x % most_tiles of batch entry x / most_tiles.
template <class Spec, class Config>
struct DecodeMerge {
  using D = Decode<Spec, Config>;
  using Entry = typename D::Entry;
  using Row = MergedRow<fp32, 4, FreshParts, Entry::fixed_parts>;
  static constexpr int threads = 128;
  static constexpr int row_threads = Spec::head_dim_v / Row::columns, block_rows = threads / row_threads;

  FLASHJIT_FN static void run(const CudaDecodeParams& p) {
    griddepcontrol_wait();
    const int x = static_cast<int>(ctaid_x());
    if constexpr (Entry::fixed_parts) {
      const int batch = x / p.most_tiles, tile = x % p.most_tiles;
      const Entry entry(p, batch);
      const int parts = entry.units.count;
      if (tile >= entry.tiles || parts < 2) return;
      merge_tile(p, entry, tile, parts, [&](int i) { return p.fixed_slot(batch, tile, entry.units.at(i)); });
    } else {
      const volatile SplitTile& split = p.split[x];
      const int parts = split.parts, tile = split.tile;
      if (parts == 0) return;
      merge_tile(p, Entry(p, split.batch), tile, parts, [&](int i) { return p.shared_slot(x, i); });
    }
  }

 private:
  template <class Slot>
  FLASHJIT_FN static void merge_tile(const CudaDecodeParams& p, const Entry& entry, int index, int parts,
                                     const Slot& slot) {
    const DecodeTile tile(p, entry, index);
    const int thread = static_cast<int>(tid_x()), column = thread % row_threads * Row::columns;
    const int rows = tile.positions * p.tile_heads;
    for (int row = static_cast<int>(ctaid_y()) * block_rows + thread / row_threads; row < rows;
         row += static_cast<int>(nctaid_y()) * block_rows) {
      const int position = static_cast<int>(row * p.heads_inverse >> 16),
                head = row - position * p.tile_heads;
      if (thread >= block_rows * row_threads || head >= tile.heads) continue;
      const auto place = [&](int i) { return slot(i) * p.tile_rows() + row; };
      const Row merged(
          parts, [&](int i) { return p.parts_o + place(i) * Spec::head_dim_v + column; },
          [&](int i) { return p.parts_lse + place(i); });
      const auto offset = [&](const TensorView& t) {
        return entry.problem.q_offset(t) + (tile.first_position + position) * t.row_stride +
               (tile.first_head + head) * t.head_stride;
      };
      merged.store(static_cast<typename D::OElement*>(p.o.data) + offset(p.o) + column);
      if (Spec::lse && column == 0) static_cast<float*>(p.lse.data)[offset(p.lse)] = merged.lse;
    }
  }
};

template <class Spec, class Config>
FLASHJIT_FN void decode_merge(const CudaDecodeParams& params) {
  DecodeMerge<Spec, Config>::run(params);
}

}  // namespace flashjit::device
