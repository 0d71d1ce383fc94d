// The producer of sm_90a's forward: it keeps TMA copies of Q, K and V in flight.
#pragma once

#include "cuda/forward_sm90a_lengths.cuh"
#include "cuda/forward_sm90a_parts.cuh"
#include "cuda/forward_sm90a_shared.cuh"
#include "cuda/ptx_sm90a.cuh"
#include "shared/forward_sm90a_params.h"
#include "shared/mask.h"

namespace flashjit::device {

// Where the keys of a contiguous cache lie needs no look-up.
struct NoPages {
  struct Found {};
  FLASHJIT_FN explicit NoPages(const Sm90aForwardParams&) {}
  template <class Mask>
  FLASHJIT_FN void begin(const Problem&, const Mask&, Span) const {}
  FLASHJIT_FN Found find(int) const { return {}; }
  FLASHJIT_FN int warps() const { return 1; }
};
template <class Spec, class Config, bool several_warps>
class Sm90aPages;  // cuda/forward_sm90a_pages.cuh
template <int block_n>
class Sm90aGathered;  // cuda/forward_sm90a_gathered.cuh
struct GatheredMaps;  // shared/gathered_maps.h
template <class Kernel>
class Sm90aQuantisedPages;  // cuda/forward_sm90a_quantised.cuh
template <class Kernel>
class Sm90aConverter;  // the same
template <class Kernel>
class Sm90aScoreScales;  // the same

// Copies everything that comes from global memory. It is one thread; with pages some warps, whose lanes look
// up and copy a block's pages. The first warp announces tiles, and its first lane does all else. With 8-bit
// pages it is one warp, as the other warps convert what it copies.
template <class Kernel>
class Sm90aProducer {
  using Spec = typename Kernel::Spec;
  using Config = typename Kernel::Config;
  using Mask = typename Kernel::Mask;
  using Rows = typename Kernel::Rows;
  using Work = typename Kernel::Work;
  using Shared = typename Kernel::Shared;
  using Ring = typename Kernel::Ring;
  static constexpr bool converts = Shared::converts != Converts::nothing;
  static constexpr bool several_warps = Kernel::several_warps;
  using Pages =
      typename Choose<converts, Sm90aQuantisedPages<Kernel>,
                      typename Choose<Spec::paged, Sm90aPages<Spec, Config, several_warps>,
                                      typename Choose<Spec::gathered, Sm90aGathered<Config::block_n>,
                                                      NoPages>::type>::type>::type;
  using Maps = typename Choose<Spec::gathered, GatheredMaps, ForwardMaps>::type;
  static constexpr Sm90aLayout layout = Shared::layout;
  static constexpr int block_n = Config::block_n;
  static constexpr int qk_panels = Kernel::qk_panels, v_panels = Kernel::v_panels;
  static constexpr int second_panel = Sm90aLayout::first_columns(Spec::head_dim_v) / Sm90aLayout::panel;

 public:
  static constexpr int threads = several_warps ? 128 : Spec::paged ? 32 : 1;

  FLASHJIT_FN Sm90aProducer(const Sm90aForwardParams& p, const ForwardMaps& maps, const Shared& shared)
      : p_(p), maps_(maps), shared_(shared), pages_(pages(p, maps, shared)) {}

  FLASHJIT_FN void run() {
    if constexpr (several_warps)
      if (static_cast<int>(threadIdx.x) >= 32 * pages_.warps()) return;
    typename Kernel::Schedule schedule(p_, direction());
    for (TileIndex tile; next_tile(schedule, tile);) {
      const Work work(p_, tile);
      const Mask mask(p_, work.problem);
      BlockWalk<Keys, Mask> walk = Kernel::walk(p_, shared_, mask, work, part_ & 0x7fff);
      // The look-ups come before load_last_v(), which waits for a free buffer.
      PassedBlock block, next;
      const bool empty = !look_up(walk, block);
      bool more = look_up(walk, next);
      load_last_v();
      if (empty) {
        announce(tile, Announced::empty_tile, 0);
        continue;
      }
      locate(work, tile);
      pages_.begin(work.problem, mask, work.rows);
      load_k(block, !more);
      load_q(tile);
      // K is loaded a block ahead of V: consumers use them in that order.
#pragma unroll 1
      while (more) {
        const int index = block.index();
        block = next;
        more = look_up(walk, next);
        load_k(block, !more);
        load_v(index, 2);
      }
      last_v_ = block.index();
    }
    load_last_v();
    if constexpr (converts) pages_.end();
    announce({}, Announced::end, 0);
    if constexpr (Spec::dropout) {
      mbarrier_wait(shared_.k_empty(ring_.stage), ring_.parity ^ 1);
      if (leads()) ask_for_words(-1);
    }
  }

 private:
  FLASHJIT_FN typename Kernel::Direction direction() const {
    if constexpr (Spec::gathered)
      return {Pages::has_early_tiles(p_)};
    else
      return {};
  }
  FLASHJIT_FN bool next_tile(typename Kernel::Schedule& schedule, TileIndex& tile) {
    if constexpr (Kernel::by_length) {
      if (p_.parts > 1) {
        const Sm90aShare share = shared_.share();
        const int batch = max(next_batch_, share.batch);
        if (!share.has(batch)) return false;
        next_batch_ = batch + 1;
        using Lengths = Sm90aLengths<Kernel>;
        tile = Lengths::tile(p_, batch);
        const bool begins = share.begins(batch), whole = begins && share.ends(batch);
        part_ = whole ? 0 : Lengths::place(static_cast<int>(blockIdx.x), begins) << 15 | 1;
        return true;
      }
    }
    const bool found = schedule.next(tile);
    part_ = schedule.place() << 15 | schedule.part();
    return found;
  }
  static FLASHJIT_FN Pages pages(const Sm90aForwardParams& p, [[maybe_unused]] const ForwardMaps& maps,
                                 [[maybe_unused]] const Shared& shared) {
    if constexpr (converts)
      return Pages(p, maps, shared);
    else
      return Pages(p);
  }
  static FLASHJIT_FN bool leads() { return threads == 1 || threadIdx.x == 0; }
  static FLASHJIT_FN bool look_up(BlockWalk<Keys, Mask>& walk, PassedBlock& found) {
    Block block;
    if (!walk.next(block)) return false;
    found = {block.index << 2 | (block.whole ? 2 : 0), block.found};
    return true;
  }
  // Sets the tile's coordinates in the tensor maps. Packed tensors are one batch entry.
  FLASHJIT_FN void locate(const Work& work, const TileIndex& tile) {
    head_q_ = tile.head_q;
    head_kv_ = work.problem.head_kv;
    batch_ = sequence_ = tile.batch;
    q_row_ = work.rows.begin;
    k_row_ = 0;
    if constexpr (Spec::varlen) {
      batch_ = 0;
      q_row_ += work.problem.first_q;
      k_row_ = work.problem.first_k;
    }
  }
  // Announces a tile or the end, once consumers have released Q; `bytes` of Q follow.
  FLASHJIT_FN void announce(const TileIndex& tile, Announced what, int bytes) {
    if (several_warps && threadIdx.x >= 32) return;
    mbarrier_wait(shared_.q_empty(), q_parity_ ^= 1);
    if (!leads()) return;
    st_shared_v4(shared_.announced(), tile.batch, tile.head_q, tile.m_block,
                 part_ << 2 | static_cast<int>(what));
    mbarrier_arrive_expect_tx(shared_.q_full(), bytes);
  }
  FLASHJIT_FN void load_q(const TileIndex& tile) {
    if constexpr (Config::pack_gqa) {
      announce(tile, Announced::tile, qk_panels * Rows(p_).used() * 128);
      if (leads())
        copy(shared_.q(), maps_.q, shared_.q_full(), {0, qk_panels}, layout.q_panel, head_q_, q_row_);
    } else {
      announce(tile, Announced::tile, layout.q_bytes);
      if (leads())
        copy(shared_.q(), maps_.q, shared_.q_full(), {0, qk_panels}, layout.q_panel, q_row_, head_q_);
    }
  }
  FLASHJIT_FN void load_k(const PassedBlock& block, bool last) {
    if constexpr (converts) {
      pages_.load_k(ring_, block.index(), {block.word | (last ? 1 : 0), block.found});
    } else {
      copy_k(block, last);
    }
    ring_.advance();
  }
  FLASHJIT_FN void copy_k(const PassedBlock& block, bool last) {
    const auto found = pages_.find(block.index());
    const bool second_first = Kernel::alternates && ring_.stage == 1;
    if constexpr (Kernel::alternates)
      if (second_first) copy_second_piece(block.index(), found);
    mbarrier_wait(shared_.k_empty(ring_.stage), ring_.parity ^ 1);
    if (leads()) {
      if constexpr (Spec::dropout) ask_for_words(block.index());
      if constexpr (Kernel::passes_blocks)
        st_shared_v2(shared_.passed(ring_.stage), block.word | (last ? 1 : 0), block.found);
      mbarrier_arrive_expect_tx(shared_.k_full(ring_.stage), layout.k_bytes - layout.second_piece);
    }
    const u32 to = shared_.k(ring_.stage), full = shared_.k_full(ring_.stage);
    if constexpr (layout.second_piece > 0) {
      copy_keys(to, k_map(found), full, {0, second_panel}, block.index(), found);
      copy_keys(to, k_map(found), full, {v_panels, qk_panels}, block.index(), found);
      if (!second_first) copy_second_piece(block.index(), found);
    } else {
      copy_keys(to, k_map(found), full, {0, qk_panels}, block.index(), found);
    }
  }
  // A stage's second piece, V's columns of the second group. Where consumers alternate, it is the first to be
  // free in stage 1, and the last one in stage 0.
  template <class Found>
  FLASHJIT_FN void copy_second_piece(int index, const Found& found) {
    mbarrier_wait(shared_.v_empty(ring_.stage), ring_.parity ^ 1);
    if (leads()) mbarrier_arrive_expect_tx(shared_.v_full(ring_.stage), layout.second_piece);
    copy_keys(shared_.k(ring_.stage), k_map(found), shared_.v_full(ring_.stage), {second_panel, v_panels},
              index, found);
  }
  // Asks for the words of a block's columns, for the next stage of K. An index of -1 ends the requests.
  FLASHJIT_FN void ask_for_words(int index) {
    st_shared_v2(shared_.asked(ring_.stage), index, sequence_);
    mbarrier_arrive(shared_.words_asked(ring_.stage));
  }
  // Loads V into the stage of its own K, which was loaded `behind` blocks ago.
  FLASHJIT_FN void load_v(int index, int behind) {
    if constexpr (Spec::v_in_k) return;
    Ring ring = ring_;
    ring.retreat(behind);
    if constexpr (converts) {
      pages_.load_v(ring, index);
    } else {
      copy_v(ring, index);
    }
  }
  FLASHJIT_FN void copy_v(const Ring& ring, int index) {
    const auto found = pages_.find(index);
    mbarrier_wait(shared_.v_empty(ring.stage), ring.parity ^ 1);
    if (leads()) mbarrier_arrive_expect_tx(shared_.v_full(ring.stage), layout.v_bytes);
    copy_keys(shared_.v(ring.stage), v_map(found), shared_.v_full(ring.stage), {0, v_panels}, index, found);
  }
  FLASHJIT_FN void load_last_v() {
    if (last_v_ >= 0) load_v(last_v_, 1);
    last_v_ = -1;
  }
  // The maps that have a block.
  template <class Found>
  FLASHJIT_FN const TensorMap& k_map(const Found& found) const {
    if constexpr (Spec::gathered)
      return Pages::map(maps_.k, static_cast<const Maps&>(maps_).k_gathered, found);
    else
      return maps_.k;
  }
  template <class Found>
  FLASHJIT_FN const TensorMap& v_map(const Found& found) const {
    if constexpr (Spec::gathered)
      return Pages::map(maps_.v, static_cast<const Maps&>(maps_).v_gathered, found);
    else
      return maps_.v;
  }
  // Copies a block of K or V.
  template <class Found>
  FLASHJIT_FN void copy_keys(u32 to, const TensorMap& map, u32 full, Span panels, int index,
                             const Found& found) const {
    if constexpr (Spec::paged) {
      pages_.copy(to, map, full, panels, index, found);
    } else if constexpr (Spec::gathered) {
      copy(to, map, full, panels, layout.kv_panel, found.row, head_kv_);
    } else {
      copy(to, map, full, panels, layout.kv_panel, k_row_ + index * block_n, head_kv_);
    }
  }
  // Copies panels. `second` and `third`: coordinates in the map's second and third dimension.
  FLASHJIT_FN void copy(u32 to, const TensorMap& map, u32 full, Span panels, int panel_bytes, int second,
                        int third) const {
#pragma unroll
    for (int i = panels.begin; i < panels.end; ++i)
      cp_async_bulk_tensor_4d(to + i * panel_bytes, map, full, i * Sm90aLayout::panel, second, third, batch_);
  }

  const Sm90aForwardParams& p_;
  const ForwardMaps& maps_;
  const Shared& shared_;
  Pages pages_;
  Ring ring_;
  u32 q_parity_ = 0;
  int last_v_ = -1;     // the block whose V is still to be loaded; -1: none
  int part_ = 0;        // with its place, as an announcement has them
  int next_batch_ = 0;  // by_length: the batch entry after the last tile's
  int sequence_ = 0, batch_, head_q_, head_kv_, q_row_, k_row_;
};

}  // namespace flashjit::device
