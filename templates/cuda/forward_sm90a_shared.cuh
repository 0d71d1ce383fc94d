// What the producer and the consumers of sm_90a's forward share: rings of buffers, where they and their
// mbarriers lie, and the messages that go with them.
#pragma once

#include "cuda/tile_index.cuh"
#include "shared/dropout.h"
#include "shared/layout.h"

namespace flashjit::device {

// The stages of K and V as one side sees them: block after block, whichever tile it belongs to.
template <int stages>
struct Sm90aRing {
  int stage = 0;
  u32 parity = 0;
  FLASHJIT_FN void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  FLASHJIT_FN void retreat(int by) {
    stage -= by;
    if (stage < 0) {
      stage += stages;
      parity ^= 1;
    }
  }
};

// What the producer passes on with a block's K. It and announcements are read as ordinary memory: of an asm
// the compiler does not know that all threads get the same, and computes descriptors in every one of them.
struct PassedBlock {
  int word;  // its index, whether it is whole, and whether it is the tile's last
  int found;
  FLASHJIT_FN int index() const { return word >> 2; }
  FLASHJIT_FN bool whole() const { return word & 2; }
  FLASHJIT_FN bool last() const { return word & 1; }
};

// The announcement of the producer: a tile; a tile in which no row keeps any key; no more tiles.
enum class Announced : int { tile, empty_tile, end };
struct Announcement {
  TileIndex tile;
  Announced what;
};
static_assert(sizeof(Announcement) == Sm90aLayout::announcement_bytes);

// Addresses in shared memory. Each buffer has an mbarrier for "full", one arrival and the bytes copied, and
// one for "empty", an arrival from every consumer warp.
template <class Spec, class Config>
struct Sm90aShared {
  static constexpr int stages = Config::num_stages;
  static constexpr Sm90aLayout layout{Spec::head_dim,  Spec::head_dim_v, Config::block_m,
                                      Config::block_n, stages,           Spec::dropout};
  using Ring = Sm90aRing<stages>;

  const char* memory;
  u32 start;
  FLASHJIT_FN u32 q() const { return start + layout.q; }
  FLASHJIT_FN u32 k(int stage) const { return start + layout.k + stage * layout.k_bytes; }
  FLASHJIT_FN u32 v(int stage) const { return start + layout.v + stage * layout.v_bytes; }
  FLASHJIT_FN u32 announced() const { return start + layout.announced; }
  FLASHJIT_FN u32 q_full() const { return start + layout.barriers; }
  FLASHJIT_FN u32 q_empty() const { return start + layout.barriers + 8; }
  FLASHJIT_FN u32 k_full(int stage) const { return start + layout.barriers + 16 + 32 * stage; }
  FLASHJIT_FN u32 k_empty(int stage) const { return k_full(stage) + 8; }
  FLASHJIT_FN u32 v_full(int stage) const { return k_full(stage) + 16; }
  FLASHJIT_FN u32 v_empty(int stage) const { return k_full(stage) + 24; }
  FLASHJIT_FN u32 passed(int stage) const { return start + layout.passed + 8 * stage; }
  FLASHJIT_FN PassedBlock passed_block(int stage) const {
    return reinterpret_cast<const PassedBlock*>(memory + layout.passed)[stage];
  }
  // With dropout: which block's words the producer wants, an mbarrier that says so, and the words.
  FLASHJIT_FN u32 asked(int stage) const { return start + layout.dropout_asked + 16 * stage; }
  FLASHJIT_FN u32 words_asked(int stage) const { return asked(stage) + 8; }
  FLASHJIT_FN u32 column_words(const Ring& ring) const {
    return start + layout.dropout_words + (ring.parity * stages + ring.stage) * (Config::block_n * 4);
  }
  FLASHJIT_FN Words dropout_key() const {
    return *reinterpret_cast<const Words*>(memory + layout.dropout_key);
  }
};

}  // namespace flashjit::device
