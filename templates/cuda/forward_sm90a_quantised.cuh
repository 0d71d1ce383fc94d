// 8-bit K and V that lie in pages, for sm_90a's forward: the producer's first warp copies blocks as they are
// stored into slots, and its other warps convert them into the tiles that wgmma reads.
//
// A key's scale multiplies its scores. A value's scale multiplies the output; if each token and head has its
// own, the value, which is then rounded.
#pragma once

#include "cuda/forward_sm90a_pages.cuh"
#include "cuda/kv_convert.cuh"
#include "shared/kv_scale_params.h"

namespace flashjit::device {

// The factor of all numbers of a head. 1 if each row has its own.
template <class Kernel>
FLASHJIT_FN float scale_of_head(const KvScales& scales, int head) {
  if constexpr (Kernel::Shared::converts == Converts::scaled_rows) return 1;
  return ld_global_nc(scales.data + scales.offset(0, 0, head));
}

// For consumers: the factors of a tile's scores, of the thread's two rows and, if they have their own, of
// keys.
template <class Kernel>
class Sm90aScoreScales {
  using Shared = typename Kernel::Shared;
  using Ring = typename Kernel::Ring;
  using Score = typename Kernel::Score;
  static constexpr Sm90aLayout layout = Shared::layout;
  static constexpr bool of_keys = Shared::converts == Converts::scaled_rows;
  static constexpr bool halves_q = !is_fp16<typename Kernel::Element>;
  // Formulas take scores times all factors. Without them rows' factors are part of the exponents, which cost
  // no instruction.
  static constexpr bool folds_rows = !Score::changes;

 public:
  // The factor of all outputs of a head.
  FLASHJIT_FN static float of_outputs(const Sm90aForwardParams& p, int head) {
    return scale_of_head<Kernel>(with_kv_scales(with_pages(p)).v_scale, head);
  }

  // For a tile of that head. Makes a bf16 Q fp16, in place: each row times a power of two. rows: the warp's
  // 16 rows of Q in shared memory.
  FLASHJIT_FN void take(const Sm90aForwardParams& p, int head, u32 rows, int lane) {
    const float of_head = scale_of_head<Kernel>(with_kv_scales(with_pages(p)).k_scale, head);
    // Exponents want factors above 0: Q takes the sign, and the least number stands for 0.
    const u32 sign = folds_rows && of_head < 0 ? 0x80008000 : 0;
    of_rows_[0] = of_rows_[1] = folds_rows ? fabsf(of_head) * Score::scale_log2(p) : of_head;
    if constexpr (halves_q) {
      const float inverse = halve(rows, static_cast<u32>(lane), sign);
#pragma unroll
      for (int r = 0; r < 2; ++r) of_rows_[r] *= __shfl_sync(0xffffffff, inverse, (lane / 4 + 8 * r) * 2);
    } else if (sign) {
      each_chunk(rows, static_cast<u32>(lane), [&](u32 place, u32(&words)[4]) {
        st_shared_v4(place, words[0] ^ sign, words[1] ^ sign, words[2] ^ sign, words[3] ^ sign);
      });
    }
    if constexpr (folds_rows)
#pragma unroll
      for (float& factor : of_rows_) factor = fmaxf(factor, 0x1p-126f);
  }

  template <int registers>
  FLASHJIT_FN void apply(float (&scores)[registers], const Shared& shared, const Ring& ring, int lane) const {
    [[maybe_unused]] u32 from;
    if constexpr (of_keys) from = shared.k_scales(ring) + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < registers; i += 4) {
      float scales[2] = {1, 1};
      if constexpr (of_keys) ld_shared_v2(scales[0], scales[1], from + i * 8);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (of_keys) scores[i + j] *= scales[j % 2];
        if (!folds_rows && (!of_keys || halves_q)) scores[i + j] *= of_rows_[j / 2];
      }
    }
  }

  // How scores become exponents, for OnlineSoftmax.
  struct Exponents {
    static constexpr bool by_thread = true;
    float scale[2];
    FLASHJIT_FN float exponent(int r, float score) const { return __fmul_rn(score, scale[r]); }
    FLASHJIT_FN float relative(int r, float score, float, float reference) const {
      return __fmaf_rn(score, scale[r], -reference);
    }
  };
  FLASHJIT_FN Exponents exponents() const { return {{of_rows_[0], of_rows_[1]}}; }

 private:
  // Two lanes have a row and take turns at its chunks.
  template <class Body>
  FLASHJIT_FN static void each_chunk(u32 rows, u32 lane, Body body) {
    const u32 row = lane / 2;
#pragma unroll 2
    for (u32 chunk = lane % 2; chunk < layout.qk_steps * 2; chunk += 2) {
      const u32 place = rows + chunk / 8 * layout.q_panel + row * 128 + (chunk ^ row) % 8 * 16;
      u32 words[4];
      ld_shared_v4(words, place);
      body(place, words);
    }
  }
  // Returns 1 / the factor of the lane's row.
  FLASHJIT_FN static float halve(u32 rows, u32 lane, u32 sign) {
    u32 largest = 0;
    each_chunk(rows, lane, [&](u32, const u32(&words)[4]) {
#pragma unroll
      for (const u32 word : words) largest = max(largest, largest_bits(word));
    });
    largest = max(largest, __shfl_xor_sync(0xffffffff, largest, 1));
    const HalvedRow halved(largest);
    each_chunk(rows, lane, [&](u32 place, u32(&words)[4]) {
#pragma unroll
      for (u32& word : words) word = halved(word) ^ sign;
      st_shared_v4(place, words[0], words[1], words[2], words[3]);
    });
    return halved.inverse();
  }

  float of_rows_[2];
};

// What the producer tells the converting warps about a slot: the block and where its tile goes.
struct StoredBlock {
  enum Kind { keys, values, end };  // end: there are no more blocks
  int kind, stage, parity;          // the ring's place
  int seqlen;                       // values from this row of the block on become zeros
  PassedBlock message;              // of keys, for consumers that cannot look the block up

  FLASHJIT_FN void send(u32 to) const {
    st_shared_v4(to, kind | stage << 2 | parity << 8, seqlen, message.word, message.found);
  }
  FLASHJIT_FN static StoredBlock receive(u32 from) {
    u32 x[4];
    ld_shared_v4(x, from);
    return {static_cast<int>(x[0] & 3),
            static_cast<int>(x[0] >> 2 & 63),
            static_cast<int>(x[0] >> 8),
            static_cast<int>(x[1]),
            {static_cast<int>(x[2]), static_cast<int>(x[3])}};
  }
};

// For the producer: one warp, which stays together.
template <class Kernel>
class Sm90aQuantisedPages {
  using Spec = typename Kernel::Spec;
  using Config = typename Kernel::Config;
  using Shared = typename Kernel::Shared;
  using Ring = typename Kernel::Ring;
  using Found = typename Sm90aPages<Spec, Config, false>::Found;
  static constexpr Sm90aLayout layout = Shared::layout;
  static constexpr int block_n = Config::block_n;
  static constexpr bool own_scales = Shared::converts == Converts::scaled_rows;

 public:
  FLASHJIT_FN Sm90aQuantisedPages(const Sm90aForwardParams& p, const ForwardMaps& maps, const Shared& shared)
      : p_(p), maps_(maps), shared_(shared), pages_(p) {}

  // A new tile.
  template <class Mask>
  FLASHJIT_FN void begin(const Problem& problem, const Mask& mask, Span rows) {
    pages_.begin(problem, mask, rows);
    seqlen_k_ = problem.seqlen_k;
  }

  FLASHJIT_FN void load_k(const Ring& ring, int index, const PassedBlock& message) {
    copy<false>(maps_.k, index,
                {StoredBlock::keys, ring.stage, static_cast<int>(ring.parity),
                 Spec::v_in_k ? seqlen_k_ - index * block_n : block_n, message});
  }
  FLASHJIT_FN void load_v(const Ring& ring, int index) {
    copy<true>(
        maps_.v, index,
        {StoredBlock::values, ring.stage, static_cast<int>(ring.parity), seqlen_k_ - index * block_n, {}});
  }
  FLASHJIT_FN void end() {
    wait_for_slot();
    send({StoredBlock::end, 0, 0, 0, {}}, 0);
    if constexpr (own_scales) mbarrier_arrive(shared_.stored_full(slots_.stage));
  }

 private:
  FLASHJIT_FN void wait_for_slot() const {
    mbarrier_wait(shared_.stored_empty(slots_.stage), slots_.parity ^ 1);
  }
  FLASHJIT_FN void send(const StoredBlock& block, int bytes) const {
    if (threadIdx.x != 0) return;
    block.send(shared_.stored_block(slots_.stage));
    mbarrier_arrive_expect_tx(shared_.stored_full(slots_.stage), bytes);
  }
  template <bool values>
  FLASHJIT_FN void copy(const TensorMap& map, int index, const StoredBlock& block) {
    constexpr int row_bytes = values ? Sm90aLayout::stored_row(Spec::head_dim_v) : layout.stored_k_row;
    const int slot = slots_.stage;
    const Found found = pages_.find(index);
    const ScalePlaces<values> places(*this, index);
    wait_for_slot();
    send(block, block_n * row_bytes);
    pages_.copy(shared_.stored(slot), map, shared_.stored_full(slot), {0, 1}, index, found, row_bytes);
    if constexpr (own_scales) {
      places.copy(shared_.stored_scales(slot), scales<values>());
      cp_async_mbarrier_arrive_noinc(shared_.stored_full(slot));
    }
    slots_.advance();
  }

  template <bool values>
  FLASHJIT_FN const KvScales& scales() const {
    return values ? with_kv_scales(with_pages(p_)).v_scale : with_kv_scales(with_pages(p_)).k_scale;
  }

  // Where the scales of a lane's rows lie.
  template <bool values>
  struct ScalePlaces {
    static constexpr int rows = own_scales ? ceil_div(block_n, 32) : 0;
    const float* place[max(rows, 1)];  // null: the row is not to be read
    FLASHJIT_FN ScalePlaces([[maybe_unused]] const Sm90aQuantisedPages& of, [[maybe_unused]] int index) {
      if constexpr (own_scales) {
        const KvScales& scales = of.scales<values>();
#pragma unroll
        for (int i = 0; i < rows; ++i) {
          const Found found = of.pages_.place(index * block_n + static_cast<int>(threadIdx.x) + 32 * i);
          place[i] =
              found.page < 0 ? nullptr : scales.data + scales.offset(found.page, found.row, of.pages_.head());
        }
      }
    }
    FLASHJIT_FN void copy(u32 to, const KvScales& scales) const {
      const int lane = static_cast<int>(threadIdx.x);
#pragma unroll
      for (int i = 0; i < rows; ++i)
        if (block_n % 32 == 0 || lane + 32 * i < block_n)
          cp_async_ca_4(to + (lane + 32 * i) * 4, place[i] ? place[i] : scales.data, place[i] ? 4 : 0);
    }
  };

  const Sm90aForwardParams& p_;
  const ForwardMaps& maps_;
  const Shared& shared_;
  Sm90aPages<Spec, Config, false> pages_;
  Sm90aRing<layout.stored_slots> slots_;
  int seqlen_k_ = 0;
};

template <class Kernel>
class Sm90aLatents;  // cuda/forward_sm90a_latents.cuh

// The producer's other warps.
template <class Kernel>
class Sm90aConverter {
  using Spec = typename Kernel::Spec;
  using Shared = typename Kernel::Shared;
  using KvElement = typename Spec::kv_dtype;
  static constexpr Sm90aLayout layout = Shared::layout;
  static constexpr int block_n = Kernel::block_n;
  static constexpr bool own_scales = Shared::converts == Converts::scaled_rows;

 public:
  static constexpr int warps = Kernel::converters;

  FLASHJIT_FN static void init_barriers(const Shared& shared) {
    for (int slot = 0; slot < layout.stored_slots; ++slot) {
      mbarrier_init(shared.stored_full(slot), own_scales ? 33 : 1);
      mbarrier_init(shared.stored_empty(slot), warps);
    }
  }

  FLASHJIT_FN explicit Sm90aConverter(const Shared& shared) : shared_(shared) {}

  FLASHJIT_FN void run() const {
    for (Sm90aRing<layout.stored_slots> slots;; slots.advance()) {
      const int slot = slots.stage;
      mbarrier_wait(shared_.stored_full(slot), slots.parity);
      const StoredBlock block = StoredBlock::receive(shared_.stored_block(slot));
      if (block.kind == StoredBlock::end) return;
      const bool values = !Spec::v_in_k && block.kind == StoredBlock::values;
      mbarrier_wait(values ? shared_.v_empty(block.stage) : shared_.k_empty(block.stage), block.parity ^ 1);
      if (values) {
        convert_v(slot, block);
      } else {
        convert_k(slot, block);
        if constexpr (own_scales)
          for (u32 i = thread(); i < block_n; i += threads)
            st_shared(shared_.k_scales({block.stage, static_cast<u32>(block.parity)}) + i * 4,
                      __float_as_uint(ld_shared(shared_.stored_scales(slot) + i * 4)));
        if (Kernel::passes_blocks && thread() == 0)
          st_shared_v2(shared_.passed(block.stage), block.message.word, block.message.found);
      }
      fence_proxy_async();
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        mbarrier_arrive(shared_.stored_empty(slot));
        mbarrier_arrive(values ? shared_.v_full(block.stage) : shared_.k_full(block.stage));
      }
    }
  }

 private:
  static constexpr u32 threads = warps * 32;
  FLASHJIT_FN static u32 thread() {
    return threadIdx.x - 32 - (Kernel::converts_more && threadIdx.x >= 128 ? 128 * Kernel::consumers : 0);
  }

  FLASHJIT_FN void convert_k(int slot, const StoredBlock& block) const {
    if constexpr (Spec::v_in_k)
      Sm90aLatents<Kernel>(shared_, thread() / 32).convert(slot, shared_.k(block.stage), block.seqlen);
    else
      convert_rows<Spec::head_dim, false>(slot, shared_.k(block.stage));
  }
  FLASHJIT_FN void convert_v(int slot, const StoredBlock& block) const {
    if constexpr (!Spec::v_in_k) {
      convert_rows<Spec::head_dim_v, true>(slot, shared_.v(block.stage));
      if (block.seqlen < block_n) zero_rows_from(block.seqlen, shared_.v(block.stage));
    }
  }

  // Warps take 16 rows in turn. A lane converts 16 columns of some of them: two chunks of 16 bytes, in a
  // panel whose rows are swizzled. All its addresses differ by constants.
  template <int columns, bool values>
  FLASHJIT_FN void convert_rows(int slot, u32 to) const {
    using To = typename Choose<values, typename Shared::PvElement, typename Shared::QkElement>::type;
    constexpr bool scaled = values && own_scales;
    constexpr u32 rows_at_once = 16, row_bytes = Sm90aLayout::stored_row(columns);
    constexpr u32 parts = ceil_div(columns, 16), parts_at_once = parts <= 4 ? 4 : 8;
    constexpr u32 rows_of_pass = 32 / parts_at_once, passes = rows_at_once / rows_of_pass;
    const u32 lane = threadIdx.x % 32;
    u32 row = lane / 4, part = lane % 4;
    if constexpr (parts_at_once == 8) {
      // Eight lanes read and write all banks once: of one row the first half, of the next one the second.
      const u32 quarter = lane / 4 % 4;
      row = lane / 16 * 2 + quarter % 2;
      part += ((quarter ^ quarter >> 1) & 1) * 4;
    }
    const u32 first = thread() / 32 * rows_at_once;
    u32 from = shared_.stored(slot) + (first + row) * row_bytes + part * 16;
    to += part / 4 * layout.kv_panel + (first + row) * 128 + ((part % 4 * 2) ^ row) * 16;
    [[maybe_unused]] u32 scales = shared_.stored_scales(slot) + (first + row) * 4;
#pragma unroll 1
    for (u32 begin = first; begin < block_n; begin += warps * rows_at_once) {
#pragma unroll
      for (u32 more = 0; more < parts; more += parts_at_once) {
        if (part + more >= parts) break;
        u32 stored[passes][4];
#pragma unroll
        for (u32 pass = 0; pass < passes; ++pass)
          ld_shared_v4(stored[pass], from + more * 16 + pass * rows_of_pass * row_bytes);
#pragma unroll
        for (u32 pass = 0; pass < passes; ++pass) {
          u32 x[8];
          if constexpr (scaled)
            convert_chunk<To, KvElement>(stored[pass], x, ld_shared(scales + pass * rows_of_pass * 4));
          else
            convert_chunk<To, KvElement>(stored[pass], x);
          const u32 at = (rows_of_pass == 4 ? to ^ pass % 2 * 64 : to) + more / 4 * layout.kv_panel +
                         pass * rows_of_pass * 128;
          st_shared_v4(at, x[0], x[1], x[2], x[3]);
          st_shared_v4(at ^ 16, x[4], x[5], x[6], x[7]);
        }
      }
      from += warps * rows_at_once * row_bytes;
      to += warps * rows_at_once * 128;
      scales += warps * rows_at_once * 4;
    }
  }

  // Zeros rows of a tile of V. Warps take those that they converted.
  FLASHJIT_FN void zero_rows_from(int end, u32 to) const {
    constexpr u32 chunks = Sm90aLayout::panel / 8, panels = ceil_div(Spec::head_dim_v, Sm90aLayout::panel);
    __syncwarp();
#pragma unroll 1
    for (u32 row = max(end, 0); row < block_n; ++row) {
      if (row / 16 % warps != thread() / 32) continue;
      for (u32 chunk = threadIdx.x % 32; chunk < panels * chunks; chunk += 32)
        st_shared_v4(to + chunk / chunks * layout.kv_panel + row * 128 + chunk % chunks * 16, 0, 0, 0, 0);
    }
  }

  const Shared& shared_;
};

}  // namespace flashjit::device
