// A decode's parameters on CPUs, and its items.
#pragma once

#include "shared/decode_params.h"
#include "shared/mask.h"

namespace flashjit::device {

// With batch_invariant: keys of a part. Parts begin at its multiples.
constexpr int cpu_fixed_part_keys = 1024;

// Where a batch entry's items begin, and the slots of their results.
struct CpuDecodeEntry {
  i64 item, slot;
};

// A tile is heads_at_once key/value heads of a batch entry, with all query heads of their groups. An item is
// a tile's part of the keys: part_keys of them, or all. The thread that ends a tile's last part merges all
// its parts.
struct CpuDecodeParams : DecodeParams {
  // heads_at_once key/value heads share a walk of the keys. tile_rows: rows of each of them that do, where a
  // group's rows are [position, query head]. heads_at_once * round_up(tile_rows, decode_rows_at_once) is at
  // most block_m.
  int heads_at_once, tile_rows;
  int part_keys;                  // with batch_invariant cpu_fixed_part_keys
  int whole_keys;                 // for the host: tiles of at most so many keys are one item
  const CpuDecodeEntry* entries;  // [batch + 1]; null: each tile is one item
  i64 head_floats;                // of a part's results: seqlen_q * group * (head_dim_v + 2)
  float* partials;                // [slots, heads_at_once, head_floats], 64-byte aligned
  u32* arrived;                   // parts that have ended, [batch, head tiles]

  FLASHJIT_FN int head_tiles() const { return ceil_div(num_heads_kv, heads_at_once); }
  FLASHJIT_FN i64 slot_floats() const { return heads_at_once * head_floats; }
};

struct CpuDecodeItem {
  int batch, head_tile, part, parts;
  i64 slot;  // of the tile's first part

  // The tiles of a batch entry come one after the other, the parts of a tile likewise.
  FLASHJIT_FN CpuDecodeItem(const CpuDecodeParams& p, i64 item) {
    const int head_tiles = p.head_tiles();
    if (!p.entries) {
      batch = static_cast<int>(item / head_tiles);
      head_tile = static_cast<int>(item % head_tiles);
      part = 0;
      parts = 1;
      slot = 0;
      return;
    }
    batch = 0;
    for (int end = p.batch; end - batch > 1;) {
      const int middle = batch + (end - batch) / 2;
      (p.entries[middle].item <= item ? batch : end) = middle;
    }
    const CpuDecodeEntry& entry = p.entries[batch];
    const int index = static_cast<int>(item - entry.item);
    parts = static_cast<int>(p.entries[batch + 1].item - entry.item) / head_tiles;
    head_tile = index / parts;
    part = index % parts;
    slot = entry.slot + i64{head_tile} * parts;
  }

  FLASHJIT_FN Span keys(const CpuDecodeParams& p, int seqlen_k) const {
    if (parts == 1) return {0, seqlen_k};
    const int begin = part * p.part_keys;
    return {begin, begin + min(p.part_keys, seqlen_k - begin)};
  }
};

}  // namespace flashjit::device
