// Forward attention on a CPU: flash attention (Dao et al. 2022: online softmax over key blocks). Rows are cut
// into tiles. A head of few rows reads its keys in place (few_rows.h), others pack them (forward_tile.h). If
// there are too few tiles for the threads, the keys of each tile are divided into parts. The thread that
// finishes a tile's last part adds up all of them (as in Flash-Decoding, Dao et al. 2023).
//
// With batch_invariant the keys, the row and the target alone decide the arithmetic of a row of finite
// numbers. Blocks and steps of keys begin at fixed keys, and lanes never mix. Every tile packs its keys, and
// nobody divides them. A block that a row does not see changes nothing in it, but that it may make 0 of -0:
// the output has 0 for both.
#pragma once

#include "cpu/few_rows.h"

namespace flashjit::device {

// Computes items [begin, end) of batch * heads * tiles of a head * key_parts. Packed heads count as one head.
// Heads are outermost, so that their K and V stay in shared caches. Within a head the last rows come first:
// causal masks make their tiles the longest.
template <class Spec, class Config>
FLASHJIT_FN void forward(const CpuForwardParams& params, i64 begin, i64 end, void* scratch) {
  const DenormalsAreZeros mode;
  using Tile = FewRowsTile<Spec, Config>;
  const Tile tile(scratch);
  const int heads = params.num_heads_q / params.packed_heads;
  const int tiles = ceil_div(params.seqlen_q * params.packed_heads, params.tile_rows);
  for (i64 item = begin; item < end; ++item) {
    const int part = static_cast<int>(item % params.key_parts);
    const i64 index = item / params.key_parts;
    const int head = static_cast<int>(index / tiles % heads) * params.packed_heads;
    const int batch = static_cast<int>(index / tiles / heads);
    const int row = static_cast<int>(tiles - 1 - index % tiles) * params.tile_rows;
    const Problem problem = make_problem<Spec::varlen, Spec::Mask::padding, Spec::paged>(params, batch, head);
    const Span rows = {row, min(row + params.tile_rows, problem.rows * params.packed_heads)};
    if (rows.empty()) continue;
    const bool few_rows = tile.suits(params, problem);
    int together = 1;
    if (few_rows) {
      const bool one_item = params.key_parts == 1 && tiles == 1;  // a head
      const i64 left = one_item ? min(end - item, i64{(params.num_heads_q - head) / params.packed_heads}) : 1;
      together = tile.heads_at_once(rows, static_cast<int>(left));
      tile.run(params, problem, rows, part, together);
    } else {
      tile.Tile::Base::run(params, problem, rows, part);
    }
    Tile one = tile;
    Problem of = problem;
    for (int i = 0; i < together; ++i, one.to_next_head(params, of)) {
      if (few_rows) one.end(params, of, rows);
      if (params.key_parts == 1 || one.collect(params, rows, index, part)) one.write_rows(params, of, rows);
    }
    item += together - 1;
  }
}

}  // namespace flashjit::device
