// Shared by the producer and the consumers of sm_90a's forward: rings of buffers, the addresses of buffers
// and mbarriers, and messages.
#pragma once

#include "cuda/dropout.cuh"
#include "cuda/forward_sm90a_lengths.cuh"
#include "cuda/ptx_sm90a.cuh"
#include "cuda/tile_index.cuh"
#include "shared/dropout.h"
#include "shared/kv_scale_params.h"
#include "shared/layout.h"

namespace flashjit::device {

// The position of one side, producer or consumer, in the stages of K and V. It advances by a block at a time,
// through all tiles.
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
  FLASHJIT_FN void advance_if(int advances) {
    stage += advances;
    parity ^= stage == stages;
    stage = stage == stages ? 0 : stage;
  }
  FLASHJIT_FN void retreat(int by) {
    stage -= by;
    while (stage < 0) {
      stage += stages;
      parity ^= 1;
    }
  }
};

// The producer's message about a block, sent with its K. Consumers read messages and announcements as
// ordinary memory. If inline assembly read them, the compiler would not know that all threads get the same
// value, and would compute descriptors in each thread.
struct PassedBlock {
  int word;  // index << 2 | whole << 1 | last of the tile
  int found;
  FLASHJIT_FN int index() const { return word >> 2; }
  FLASHJIT_FN bool whole() const { return word & 2; }
  FLASHJIT_FN bool last() const { return word & 1; }
};

// The announcement of the producer: a tile, or a part of one; the same without a key that any row keeps; no
// more tiles.
enum class Announced : int { tile, empty_tile, end };
struct Announcement {
  TileIndex tile;
  int word;  // place << 17 | part << 2 | what
  FLASHJIT_FN Announced what() const { return static_cast<Announced>(word & 3); }
  // As the schedule has them.
  FLASHJIT_FN int part() const { return word >> 2 & 0x7fff; }
  FLASHJIT_FN int place() const { return word >> 17; }
};
static_assert(sizeof(Announcement) == Sm90aLayout::announcement_bytes);

// Addresses in shared memory. Each buffer has two mbarriers: "full" expects one arrival and the copied bytes,
// "empty" an arrival from every consumer warp.
template <class Spec, class Config>
struct Sm90aShared {
  static constexpr int stages = Config::num_stages;
  static constexpr Converts converts = is_ds_mla<typename Spec::kv_dtype>       ? Converts::ds_mla
                                       : !is_quantised<typename Spec::kv_dtype> ? Converts::nothing
                                       : Spec::kv_scale == KvScale::token_head  ? Converts::scaled_rows
                                                                                : Converts::numbers;
  // Whether the kernel has arguments of scales.
  static constexpr bool has_kv_scales = converts == Converts::numbers || converts == Converts::scaled_rows;
  // The types of the two products. 8-bit numbers become fp16 in a quarter of the instructions that bf16
  // takes. Values times a scale of their own may leave fp16's range.
  using Element = typename Spec::Element;
  using QkElement = typename Choose<has_kv_scales, fp16, Element>::type;
  using PvElement = typename Choose<converts == Converts::numbers, fp16, Element>::type;
  static constexpr Sm90aLayout layout{Spec::head_dim,
                                      Spec::head_dim_v,
                                      Config::block_m,
                                      Config::block_n,
                                      stages,
                                      Spec::dropout,
                                      converts,
                                      Spec::v_in_k,
                                      Config::ping_pong&& Sm90aLayout::column_groups(Spec::head_dim_v) > 1};
  using Ring = Sm90aRing<stages>;

  const char* memory;
  u32 start;
  FLASHJIT_FN u32 q() const { return start + layout.q; }
  FLASHJIT_FN u32 k(int stage) const { return start + layout.k + stage * layout.k_bytes; }
  FLASHJIT_FN u32 v(int stage) const {
    return start + layout.v + stage * (Spec::v_in_k ? layout.k_bytes : layout.v_bytes);
  }
  FLASHJIT_FN u32 announced() const { return start + layout.announced; }
  FLASHJIT_FN u32 q_full() const { return start + layout.barriers; }
  FLASHJIT_FN u32 q_empty() const { return start + layout.barriers + 8; }
  FLASHJIT_FN u32 k_full(int stage) const { return start + layout.barriers + 16 + 32 * stage; }
  FLASHJIT_FN u32 k_empty(int stage) const { return k_full(stage) + 8; }
  FLASHJIT_FN u32 v_full(int stage) const { return k_full(stage) + 16; }
  FLASHJIT_FN u32 v_empty(int stage) const { return k_full(stage) + 24; }
  FLASHJIT_FN u32 passed(int stage) const { return start + layout.passed + 8 * stage; }
  FLASHJIT_FN Sm90aShare share() const {
    return *reinterpret_cast<const Sm90aShare*>(memory + layout.own_part);
  }
  FLASHJIT_FN PassedBlock passed_block(int stage) const {
    return reinterpret_cast<const PassedBlock*>(memory + layout.passed)[stage];
  }
  // With dropout: the producer's request for a block's words, the mbarrier of requests, and the words.
  FLASHJIT_FN u32 asked(int stage) const { return start + layout.dropout_asked + 16 * stage; }
  FLASHJIT_FN u32 words_asked(int stage) const { return asked(stage) + 8; }
  FLASHJIT_FN u32 column_words(const Ring& ring) const {
    return start + layout.dropout_words + (ring.parity * stages + ring.stage) * (Config::block_n * 4);
  }
  // With conversion: a slot of 8-bit K or V as they arrive, its mbarriers, and the scales of its rows; the
  // scales of a block's keys.
  FLASHJIT_FN u32 stored(int slot) const { return start + layout.stored + slot * layout.stored_bytes; }
  FLASHJIT_FN u32 stored_full(int slot) const { return start + layout.stored_barriers + slot * 32; }
  FLASHJIT_FN u32 stored_empty(int slot) const { return stored_full(slot) + 8; }
  FLASHJIT_FN u32 stored_block(int slot) const { return stored_full(slot) + 16; }  // the producer's message
  FLASHJIT_FN u32 stored_scales(int slot) const {
    return start + layout.stored_scales + slot * Config::block_n * 4;
  }
  FLASHJIT_FN u32 k_scales(const Ring& ring) const {
    return start + layout.k_scales + (ring.parity * stages + ring.stage) * (Config::block_n * 4);
  }
  FLASHJIT_FN Words dropout_key() const {
    return *reinterpret_cast<const Words*>(memory + layout.dropout_key);
  }

  // The work of a warp with dropout: it makes the words of a block's columns while its K arrives; K is full
  // only with them. Words have twice as many slots as K: weights are dropped after K's release.
  template <class Params>
  FLASHJIT_FN void make_column_words(const Params& p) const {
    constexpr int parts = Config::block_n / 4;  // of four columns
    const int lane = threadIdx.x % 32;
    for (Ring ring;; ring.advance()) {
      mbarrier_wait(words_asked(ring.stage), ring.parity);
      int index, sequence;
      ld_shared_v2(index, sequence, asked(ring.stage));
      if (index < 0) return;
      const Words key = dropout_key();  // read each time: its ten rounds would fill registers
      for (int part = lane; part < parts; part += 32)
        st_column_words(column_words(ring), part,
                        column_words_at<typename Spec::Offsets>(p, key, index * parts + part, sequence));
      __syncwarp();
      if (lane == 0) mbarrier_arrive(k_full(ring.stage));
    }
  }
};

}  // namespace flashjit::device
