// 8-bit K and V that lie in pages, for the producer of sm_90a's forward: TMA copies blocks as they are stored
// into two slots, and the producer's four warps convert them into the tiles that wgmma reads.
//
// A key's scale multiplies its scores. A value's scale multiplies the output; if each token and head has its
// own, the value, which is then rounded.
#pragma once

#include "cuda/forward_sm90a_pages.cuh"
#include "cuda/kv_convert.cuh"
#include "shared/kv_scale_params.h"

namespace flashjit::device {

template <class Kernel>
class Sm90aQuantisedPages {
  using Spec = typename Kernel::Spec;
  using Config = typename Kernel::Config;
  using Element = typename Spec::Element;
  using KvElement = typename Spec::kv_dtype;
  using Shared = typename Kernel::Shared;
  using Ring = typename Kernel::Ring;
  using Found = typename Sm90aPages<Spec, Config, true>::Found;
  static constexpr Sm90aLayout layout = Shared::layout;
  static constexpr int block_n = Config::block_n, threads = 128;
  static constexpr bool own_scales = Shared::converts == Converts::scaled_rows;

 public:
  // A block of K, or of V, and the ring's place that it goes to.
  struct Item {
    Ring ring;
    int index;  // -1: none
    bool values;
    int seqlen_k;         // values of keys from here on become zeros
    PassedBlock message;  // of a block of K, for consumers that cannot look it up
  };

  FLASHJIT_FN Sm90aQuantisedPages(const Sm90aForwardParams& p, const ForwardMaps& maps, const Shared& shared)
      : p_(p), maps_(maps), shared_(shared), pages_(p) {}

  FLASHJIT_FN static void init_barriers(const Shared& shared) {
    for (int slot = 0; slot < Sm90aLayout::stored_slots; ++slot)
      mbarrier_init(shared.stored_full(slot), own_scales ? threads + 1 : 1);
  }

  // For consumers: the factor of all scores of a head, of all its outputs; the scaling of a block's scores.
  FLASHJIT_FN static float of_scores(const Sm90aForwardParams& p, int head) {
    return scale_of(with_kv_scales(with_pages(p)).k_scale, head);
  }
  FLASHJIT_FN static float of_outputs(const Sm90aForwardParams& p, int head) {
    return scale_of(with_kv_scales(with_pages(p)).v_scale, head);
  }
  template <int registers>
  FLASHJIT_FN static void scale_scores(float (&scores)[registers], float scale, const Shared& shared,
                                       const Ring& ring, int lane) {
    [[maybe_unused]] u32 from;
    if constexpr (own_scales) from = shared.k_scales(ring) + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < registers; i += 4) {
      float of[2] = {scale, scale};
      if constexpr (own_scales) ld_shared_v2(of[0], of[1], from + i * 8);
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[i + j] *= of[j % 2];
    }
  }

  // A new tile.
  template <class Mask>
  FLASHJIT_FN void begin(const Problem& problem, const Mask& mask, Span rows) {
    pages_.begin(problem, mask, rows);
  }

  // Starts an item's copies. Meanwhile converts the item before it.
  FLASHJIT_FN void submit(const Item& item) {
    bar_sync(Kernel::converter_barrier, threads);  // all have read the slot that is used again
    copy(item);
    flush();
    pending_ = item;
    ++count_;
  }
  // Converts the last item, unless that is done.
  FLASHJIT_FN void flush() {
    if (pending_.index >= 0) convert(count_ - 1);
    pending_.index = -1;
  }

 private:
  FLASHJIT_FN static float scale_of(const KvScales& scales, int head) {
    return own_scales ? 1 : ld_global_nc(scales.data + scales.offset(0, 0, head));
  }

  FLASHJIT_FN static constexpr int slot_of(u32 count) {
    return static_cast<int>(count % Sm90aLayout::stored_slots);
  }

  FLASHJIT_FN void copy(const Item& item) const {
    const int slot = slot_of(count_), row_bytes = Sm90aLayout::stored_row(head_dim(item));
    const u32 full = shared_.stored_full(slot);
    if (pages_.copies()) {
      const Found found = pages_.find(item.index);
      if (threadIdx.x == 0) mbarrier_arrive_expect_tx(full, block_n * row_bytes);
      pages_.copy(shared_.stored(slot), item.values ? maps_.v : maps_.k, full, 1, item.index, found,
                  row_bytes);
    }
    if constexpr (own_scales) {
      const auto& p = with_kv_scales(with_pages(p_));
      const KvScales& scales = item.values ? p.v_scale : p.k_scale;
      for (int i = static_cast<int>(threadIdx.x); i < block_n; i += threads) {
        const Found place = pages_.place(item.index * block_n + i);
        const bool exists = place.page >= 0;
        cp_async_ca_4(shared_.stored_scales(slot) + i * 4,
                      scales.data + (exists ? scales.offset(place.page, place.row, pages_.head()) : 0),
                      exists ? 4 : 0);
      }
      cp_async_mbarrier_arrive_noinc(full);
    }
  }
  FLASHJIT_FN static int head_dim(const Item& item) {
    return item.values ? Spec::head_dim_v : Spec::head_dim;
  }

  // Converts pending_, item `number` of all.
  FLASHJIT_FN void convert(u32 number) const {
    const int slot = slot_of(number);
    const Ring& ring = pending_.ring;
    mbarrier_wait(shared_.stored_full(slot), number / Sm90aLayout::stored_slots & 1);
    if (pending_.values) {
      mbarrier_wait(shared_.v_empty(ring.stage), ring.parity ^ 1);
      convert_rows<Spec::head_dim_v, true>(slot, shared_.v(ring.stage),
                                           pending_.seqlen_k - pending_.index * block_n);
    } else {
      mbarrier_wait(shared_.k_empty(ring.stage), ring.parity ^ 1);
      convert_rows<Spec::head_dim, false>(slot, shared_.k(ring.stage), block_n);
      if constexpr (own_scales)
        for (int i = static_cast<int>(threadIdx.x); i < block_n; i += threads)
          st_shared(shared_.k_scales(ring) + i * 4,
                    __float_as_uint(ld_shared(shared_.stored_scales(slot) + i * 4)));
      if (Kernel::passes_blocks && threadIdx.x == 0)
        st_shared_v2(shared_.passed(ring.stage), pending_.message.word, pending_.message.found);
    }
    fence_proxy_async();
    __syncwarp();
    mbarrier_arrive_if(threadIdx.x % 32 == 0,
                       pending_.values ? shared_.v_full(ring.stage) : shared_.k_full(ring.stage));
  }

  // A thread converts 16 columns of a row at a time: two chunks of 16 bytes in a panel whose rows are
  // swizzled. Rows from `end` on become zeros.
  template <int columns, bool values>
  FLASHJIT_FN void convert_rows(int slot, u32 to, int end) const {
    constexpr u32 chunks = ceil_div(columns, 16), count = block_n * chunks;
    constexpr u32 row_bytes = Sm90aLayout::stored_row(columns);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < count; i += threads) {
      u32 row = i / chunks, chunk = i % chunks;
      // Eight lanes read and write all banks once: halves of 8 chunks, of two rows in turn.
      if constexpr (chunks % 8 == 0) {
        const u32 quarter = i / 4 % 4, half = (quarter ^ quarter >> 1) & 1;
        row = i / (2 * chunks) * 2 + quarter % 2;
        chunk = i / 16 % (chunks / 8) * 8 + half * 4 + i % 4;
      }
      u32 stored[4], x[8];
      ld_shared_v4(stored, shared_.stored(slot) + row * row_bytes + chunk * 16);
      if constexpr (values && own_scales)
        convert_chunk<Element, KvElement>(stored, x, ld_shared(shared_.stored_scales(slot) + row * 4));
      else
        convert_chunk<Element, KvElement>(stored, x);
      if (values && static_cast<int>(row) >= end)
#pragma unroll
        for (u32& word : x) word = 0;
      const u32 panel = to + chunk / 4 * layout.kv_panel + row * 128, first = chunk % 4 * 2;
      st_shared_v4(panel + (first ^ row % 8) * 16, x[0], x[1], x[2], x[3]);
      st_shared_v4(panel + ((first + 1) ^ row % 8) * 16, x[4], x[5], x[6], x[7]);
    }
  }

  const Sm90aForwardParams& p_;
  const ForwardMaps& maps_;
  const Shared& shared_;
  Sm90aPages<Spec, Config, true> pages_;
  u32 count_ = 0;  // of items so far
  Item pending_{{}, -1, false, 0, {}};
};

}  // namespace flashjit::device
