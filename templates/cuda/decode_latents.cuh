// Decode of 8-bit latent caches, whose values are the first columns of their keys, on sm_90a: at most 16
// query rows a tile. Shares of CTAs, copies, merges are those of decode.cuh. The products are wgmma's whose
// 64 rows are keys for scores, S^T = K Q^T, and columns of V for sums, O^T = V^T P^T; their 16 columns are
// query rows. So no row is padding, and operand A comes from registers: the warps load stored bytes in its
// order, and convert them there. Nothing converted is written to shared memory.
//
// A group is a warpgroup, which has blocks of 64 keys to itself. Each of its warps computes all scores of 16
// keys, so that there are no sums to exchange. It passes them through shared memory to have a query row in
// four lanes, as masks and softmax want it. The group agrees on each row's maximum and puts its weights
// together in shared memory, operand B of the second product. For this one each warp has 16 of 64 columns.
#pragma once

#include "cuda/decode_merge.cuh"
#include "cuda/decode_quantised.cuh"
#include "cuda/ptx_wgmma_narrow.cuh"
#include "shared/ds_mla.h"

namespace flashjit::device {

template <class Spec_, class Config>
struct DecodeLatents {
  using Spec = Spec_;
  using Element = typename Spec::Element;
  using OElement = typename OutputElement<typename Spec::o_dtype, Element>::type;
  using Mask = typename Spec::Mask;
  using Score = typename Spec::Score;
  using Sinks = typename Spec::Sinks;
  using KvElement = typename Spec::kv_dtype;
  using Products = QuantisedProducts<Spec>;
  static constexpr bool has_row_scales = is_ds_mla<KvElement>, own_scales = false;
  static constexpr int block_m = Config::block_m, block_n = Config::block_n;
  static_assert(block_m == 16 && block_n == 64 && Spec::v_in_k && Spec::kv_scale != KvScale::token_head);
  static_assert(Spec::head_dim % 64 == 0 && Spec::head_dim_v % 64 == 0);
  static constexpr int key_columns = has_row_scales ? DsMla::bytes : Spec::head_dim;  // as they are stored
  static constexpr CudaDecodeLayout layout{Spec::head_dim,
                                           Spec::head_dim_v,
                                           block_m,
                                           block_n,
                                           Config::num_stages,
                                           Config::num_warps,
                                           {true, false, true, has_row_scales ? DsMla::bytes : 0}};
  static constexpr int step_keys = block_n * layout.groups, buffer_keys = layout.buffer_keys;
  static constexpr int buffers = block_n / buffer_keys;  // of a block
  static_assert(layout.warps_of_group() == 4 && buffers == 2);
  using Entry = DecodeEntry<Spec, step_keys>;
  using Producer = DecodeProducer<DecodeLatents>;
  using Shared = DecodeShared<DecodeLatents>;
  using Sums = DecodeSums<DecodeLatents>;
  using Softmax = OnlineSoftmax<1, true>;

  // Products are in fp16, in which all stored numbers are exact. Values that scales of their rows multiply
  // are in bf16, and so is what a key keeps in it.
  using Stored = typename Choose<has_row_scales, fp8_e4m3, KvElement>::type;
  using Convert = ConvertKeys<fp16, Stored>;
  using Weight = typename Choose<has_row_scales, bf16, fp16>::type;
  static constexpr int panels = Spec::head_dim / 64;  // of 64 columns
  static constexpr int stored_panels = has_row_scales ? DsMla::columns / 64 : panels;
  static constexpr int tiles = Spec::head_dim_v / 64;  // of the output's columns
  // Scores that have different factors are summed up apart: columns that share a scale.
  static constexpr int sums_of_scores = has_row_scales ? DsMla::groups : 1;

  using KTile = SharedTile<buffer_keys, layout.k_bytes / buffer_keys / 16>;
  using VTile = KTile;
  // Q in panels, as wgmma's operand B: rows of 128 bytes, swizzled.
  template <int chunks_>
  struct Panels {
    static constexpr u32 chunks = chunks_, panel_bytes = block_m * 128;
    FLASHJIT_FN static u32 offset(u32 row, u32 chunk) {
      return chunk / 8 * panel_bytes + row * 128 + (chunk ^ row) % 8 * 16;
    }
  };
  using QTile = Panels<panels * 8>;

  // Registers of a thread: of those that a launch bound of 384 threads leaves, copying ones need few.
  static constexpr int consumer_registers = 208, producer_registers = 88;

  FLASHJIT_FN static void run(const CudaDecodeParams& p, u32 shared_base) {
    const Shared shared{shared_base};
    const int thread = static_cast<int>(tid_x());
    if (thread == 0) shared.init_barriers();
    __syncthreads();
    const int lane = thread % 32, warp = __shfl_sync(0xffffffff, thread / 32, 0);
    if (warp >= layout.consumers) {
      setmaxnreg_dec<producer_registers>();
      Producer(p, shared, warp - layout.consumers, lane).run();
    } else {
      setmaxnreg_inc<consumer_registers>();
      Consumer(p, shared, warp, lane).run();
    }
  }

  class Consumer {
   public:
    FLASHJIT_FN Consumer(const CudaDecodeParams& p, const Shared& shared, int warp, int lane)
        : p_(p),
          shared_(shared),
          lane_(lane),
          group_(warp / 4),
          warp_(warp % 4),
          softmax_(Score::scale_log2(p)) {}

    FLASHJIT_FN void run() {
      for (int count = 0;; ++count) {
        mbarrier_wait(shared_.q_full(count % 2), count / 2 & 1);
        const DecodeMessage message = DecodeMessage::receive(shared_.message(count % 2));
        if (message.batch < 0) break;
        const DecodeSegment& segment = message.segment;
        const Entry entry(p_, message.batch);
        const DecodeTile tile(p_, entry, segment.tile);
        prepare_q(shared_.q(count % 2));
        begin_rows(tile);
        add_keys(entry, tile, segment, shared_.q(count % 2));
        release(shared_.q_empty(count % 2));
        float sums[2];
        sums_of_group(sums);
        Sums(p_, shared_).write(entry, tile, segment, message.batch, [&](int first, u32 rows) {
          give_sums(first, rows, sums);
        });
      }
    }

   private:
    static constexpr u32 all_lanes = 0xffffffff;

    FLASHJIT_FN void release(u32 barrier) const {
      __syncwarp();
      if (lane_ == 0) mbarrier_arrive(barrier);
    }
    FLASHJIT_FN void sync_group() const { bar_sync(Sums::free_barrier + group_, 128); }
    FLASHJIT_FN u32 weights() const { return shared_.base + layout.exchange + group_ * layout.weight_bytes; }
    FLASHJIT_FN u32 scores() const {
      return shared_.base + layout.exchange + layout.groups * layout.weight_bytes +
             group_ * layout.group_score_bytes;
    }
    // The query rows of a thread: two while four lanes have one; four where they are columns of products.
    FLASHJIT_FN u32 row_of(int half) const { return lane_ / 4 + 8 * half; }
    FLASHJIT_FN u32 row_of_column(int i) const { return i / 2 * 8 + lane_ % 4 * 2 + i % 2; }

    FLASHJIT_FN void prepare_q(u32 q) const {
      using Converted = Panels<stored_panels * 8>;
      for (u32 row = tid_x() / 32; row < block_m; row += layout.consumers)
        Products::template prepare_q<Converted>(q, row, shared_.inverse(row), lane_);
      fence_proxy_async();
      Sums::sync_consumers();
    }
    FLASHJIT_FN void begin_rows(const DecodeTile& tile) {
      float scale = 1;
      if constexpr (!has_row_scales) scale = Sums::scale_of(with_kv_scales(p_).k_scale, tile);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        factors_[i] =
            Products::converts_q ? scale * Products::inverse(shared_.inverse(row_of_column(i))) : scale;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        position_[half] = tile.first_position + static_cast<int>(row_of(half) * p_.heads_inverse >> 16);
      softmax_.reset();
#pragma unroll
      for (int i = 0; i < tiles; ++i)
#pragma unroll
        for (float& o : o_[i]) o = 0;
    }

    FLASHJIT_FN void add_keys(const Entry& entry, const DecodeTile& tile, const DecodeSegment& segment,
                              u32 q) {
      Mask mask(p_, entry.problem);
      see_heads(mask, {tile.first_head, tile.first_head + tile.heads});
      Problem problem = entry.problem;
      problem.head_q = tile.first_head;
      const Score score(p_, problem);
      const Span positions = {tile.first_position, tile.first_position + tile.positions};
      const int steps = entry.steps(segment.begin, segment.end);
      for (int i = 0; i < steps; ++i, ++count_) {
        const int slot = (static_cast<int>(count_ % Config::num_stages) * layout.groups + group_) * buffers;
        const u32 parity = count_ / Config::num_stages & 1;
        const int index = entry.step(segment.begin, i) * layout.groups + group_;
        const Span keys = block_span(index, block_n);
        // Masks see the warp's 16 keys.
        const Block block{
            .index = index * 4 + warp_, .whole = mask.whole(positions, keys), .found = not_found};
        mbarrier_wait(shared_.full(slot), parity);
        mbarrier_wait(shared_.full(slot + 1), parity);
        if (!intersect(keys, entry.keys).empty()) {
          take_scores(shared_.k(slot), q);
          modify_and_mask(mask, score, tile, block);
          take_weights();
          add_values(shared_.k(slot));
        }
        release(shared_.empty(slot));
        if (lane_ == 0) mbarrier_arrive(shared_.empty(slot + 1));
      }
    }

    // Products of converted keys: of batches of four steps of 16 columns or keys, one is under way while the
    // next is converted.
    template <int batches, class Load, class ConvertBatch, class Multiply>
    FLASHJIT_FN static void multiply(const Load& load, const ConvertBatch& convert, const Multiply& product) {
      u32 words[8];
      u32 operands[2][4][4];
      load(words, 0);
#pragma unroll
      for (int i = 0; i < batches; ++i) {
        wgmma_wait_group<1>();
        convert(operands[i % 2], words, i);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) product(operands[i % 2][step], i, step);
        wgmma_commit_group();
        if (i + 1 < batches) load(words, i + 1);
      }
      wgmma_wait_group<0>();
    }

    // s_ = q k^T for the warp's keys, times factors
    FLASHJIT_FN void take_scores(u32 k, u32 q) {
      const u32 own_keys = k + warp_ * 16 * KTile::row_bytes, address = own_keys + KTile::lane_offset(lane_);
      float sums[sums_of_scores][8], plain[8];
      const auto operand_b = [&](int panel, int step) {
        return wgmma_descriptor(q + panel * QTile::panel_bytes + step * 32, 0);
      };
      multiply<stored_panels>(
          [&](u32(&words)[8], int panel) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              u32 some[4];
              ldmatrix_x4(some, KTile::at(address, 0, panel * 4 + half * 2));
#pragma unroll
              for (int j = 0; j < 4; ++j) words[half * 4 + j] = some[j];
            }
          },
          [&](u32(&a)[4][4], const u32(&words)[8], int) {
#pragma unroll
            for (int step = 0; step < 4; ++step) {
              Convert::in_order(words[2 * step], a[step][0], a[step][2]);
              Convert::in_order(words[2 * step + 1], a[step][1], a[step][3]);
            }
          },
          [&](const u32(&a)[4], int panel, int step) {
            constexpr int panels_of_sum = stored_panels / sums_of_scores;
            float(&sum)[8] = sums[panel / panels_of_sum];
            if (panel % panels_of_sum == 0 && step == 0)
              wgmma_m64n16k16<false>(fp16{}, sum, a, operand_b(panel, step));
            else
              wgmma_m64n16k16<true>(fp16{}, sum, a, operand_b(panel, step));
          });
#pragma unroll
      for (auto& sum : sums) wgmma_results(sum);
      if constexpr (has_row_scales) {
        multiply_rotary(plain, address, operand_b);
        u32 scales[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half)
          ld_shared_v4(scales[half], own_keys + row_of(half) * KTile::row_bytes + DsMla::scales);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
#pragma unroll
          for (int i = 0; i < sums_of_scores; ++i)
            plain[e] = __fmaf_rn(sums[i][e] * factors_[e / 4 * 2 + e % 2],
                                 __uint_as_float(scales[e % 4 / 2][i]), plain[e]);
          sums[0][e] = plain[e];
        }
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) sums[0][e] *= factors_[e / 4 * 2 + e % 2];
      }
      transpose(sums[0]);
    }
    // The columns that a key keeps in bf16.
    template <class OperandB>
    FLASHJIT_FN static void multiply_rotary(float (&sum)[8], u32 address, const OperandB& operand_b) {
      u32 a[4][4];
#pragma unroll
      for (int step = 0; step < 4; ++step)
        ldmatrix_x4(a[step], KTile::at(address, 0, DsMla::rotary / 16 + step * 2));
      wgmma_fence();
      wgmma_m64n16k16<false>(bf16{}, sum, a[0], operand_b(stored_panels, 0));
#pragma unroll
      for (int step = 1; step < 4; ++step)
        wgmma_m64n16k16<true>(bf16{}, sum, a[step], operand_b(stored_panels, step));
      wgmma_commit_group();
      wgmma_wait_group<0>();
      wgmma_results(sum);
    }
    // From keys as rows to query rows as rows.
    FLASHJIT_FN void transpose(const float (&s)[8]) {
      const u32 scratch = scores() + warp_ * layout.warp_score_bytes;
      constexpr u32 stride = layout.score_stride * 4;
#pragma unroll
      for (int e = 0; e < 8; ++e)
        st_shared(scratch + row_of_column(e / 4 * 2 + e % 2) * stride + row_of(e % 4 / 2) * 4,
                  __float_as_uint(s[e]));
      __syncwarp();
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          ld_shared_v2(s_[4 * n + 2 * half], s_[4 * n + 2 * half + 1],
                       scratch + row_of(half) * stride + (n * 8 + lane_ % 4 * 2) * 4);
      __syncwarp();
    }

    FLASHJIT_FN void modify_and_mask(const Mask& mask, const Score& score, const DecodeTile& tile,
                                     const Block& block) {
      const auto rows = [&](int row) { return position_[row / 8]; };
      const auto heads = [&](int row) {
        return tile.first_head + static_cast<int>(row_of(row / 8)) -
               (rows(row) - tile.first_position) * p_.tile_heads;
      };
      score.template modify<16>(s_, score.of_rows(rows, heads), rows, heads, block.index * 16, lane_);
      if (!block.whole) mask_elements<unknown_size, 16>(s_, mask, rows, heads, block, lane_);
    }

    // Numbers of the group's warps for each row, next to each other.
    FLASHJIT_FN u32 of_warps(u32 row) const { return scores() + 4 * layout.warp_score_bytes + row * 16; }
    // Leaves the warp's numbers, and returns the group's for a thread's two rows.
    FLASHJIT_FN void share(const float (&own)[2], float (&of_group)[2][4]) const {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (lane_ % 4 == 0) st_shared(of_warps(row_of(half)) + warp_ * 4, __float_as_uint(own[half]));
      sync_group();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 words[4];
        ld_shared_v4(words, of_warps(row_of(half)));
#pragma unroll
        for (int i = 0; i < 4; ++i) of_group[half][i] = __uint_as_float(words[i]);
      }
    }

    // Online softmax of s_. All warps of the group have the same references.
    FLASHJIT_FN void take_weights() {
      float own[2], all[2][4], top[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        own[half] = fmaxf(fmaxf(s_[2 * half], s_[2 * half + 1]), fmaxf(s_[4 + 2 * half], s_[5 + 2 * half]));
        own[half] = fmaxf(own[half], __shfl_xor_sync(all_lanes, own[half], 1));
        own[half] = fmaxf(own[half], __shfl_xor_sync(all_lanes, own[half], 2));
      }
      share(own, all);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        top[2 * half] = top[2 * half + 1] =
            fmaxf(fmaxf(all[half][0], all[half][1]), fmaxf(all[half][2], all[half][3]));
      if (softmax_.template take_max<4>(top)) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 lane = row_of_column(i) % 8 * 4;
          const float correction = __shfl_sync(all_lanes, softmax_.correction(i / 2), lane);
#pragma unroll
          for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) o_[tile][i / 2 * 4 + half * 2 + i % 2] *= correction;
        }
      }
      softmax_.template exponentiate<8>(s_);
      const u32 weights = this->weights();
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          st_shared(weights + row_of(half) * 128 + ((warp_ * 2 + n) ^ lane_ / 4) * 16 + lane_ % 4 * 4,
                    cvt_rn_x2(Weight{}, s_[4 * n + 2 * half], s_[4 * n + 2 * half + 1]));
      fence_proxy_async();
      sync_group();
    }

    // o_ += (p v)^T. Of each tile of 64 columns a warp has a chunk: the even ones of its 16 columns are rows
    // 0 to 7 of its fragments, the odd ones rows 8 to 15.
    FLASHJIT_FN void add_values(u32 k) {
      const u32 address = k + KTile::offset(lane_, warp_);
      const u32 weights = this->weights();
      [[maybe_unused]] float scales[4][4];  // of the thread's keys
      multiply<tiles>(
          [&](u32(&words)[8], int tile) {
#pragma unroll
            for (int buffer = 0; buffer < 2; ++buffer) {
              u32 some[4];
              ldmatrix_x4_trans(some, KTile::at(address, buffer * buffer_keys, tile * 4));
#pragma unroll
              for (int j = 0; j < 4; ++j) words[buffer * 4 + j] = some[j];
            }
          },
          [&](u32(&a)[4][4], const u32(&words)[8], int tile) {
            if constexpr (has_row_scales)
              if (tile * 64 % DsMla::group == 0) load_scales(scales, k, tile * 64 / DsMla::group);
#pragma unroll
            for (int step = 0; step < 4; ++step)
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                u32(&even)[4] = a[step];
                Convert::parted(words[2 * step + half], even[2 * half], even[2 * half + 1]);
                if constexpr (has_row_scales)
#pragma unroll
                  for (int odd = 0; odd < 2; ++odd)
                    even[2 * half + odd] =
                        scaled(even[2 * half + odd], scales[step][2 * half], scales[step][2 * half + 1]);
              }
          },
          [&](const u32(&a)[4], int tile, int step) {
            wgmma_m64n16k16<true>(Weight{}, o_[tile], a, wgmma_descriptor(weights + step * 32, 0));
          });
#pragma unroll
      for (auto& o : o_) wgmma_results(o);
    }
    FLASHJIT_FN static u32 scaled(u32 halves, float of_low, float of_high) {
      float low, high;
      cvt_f32_f16x2(low, high, halves);
      return cvt_rn_x2(bf16{}, low * of_low, high * of_high);
    }
    // Of keys 16 step + 2 t, the next one, and those 8 further on.
    FLASHJIT_FN void load_scales(float (&scales)[4][4], u32 k, int columns) const {
      const u32 from = k + lane_ % 4 * 2 * KTile::row_bytes + DsMla::scales + columns * 4;
#pragma unroll
      for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          scales[step][i] = ld_shared(from + (step * 16 + i / 2 * 8 + i % 2) * KTile::row_bytes);
    }

    // Sums of weights over the keys of all warps.
    FLASHJIT_FN void sums_of_group(float (&sums)[2]) const {
      float all[2][4];
      share({softmax_.relative_sum(0), softmax_.relative_sum(1)}, all);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        sums[half] = all[half][0] + all[half][1] + (all[half][2] + all[half][3]);
    }
    FLASHJIT_FN void give_sums(int first, u32 rows, const float (&sums)[2]) const {
      if (first == 0 && warp_ == 0 && lane_ % 4 == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (row_of(half) < rows)
            st_shared_v2(shared_.state(group_, row_of(half)), __float_as_uint(softmax_.reference(half)),
                         __float_as_uint(sums[half]));
      }
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
        const int column = tile * 64 + warp_ * 16 + lane_ / 4 * 2;
        if (tile * 64 < first || tile * 64 >= first + layout.exchange_columns) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 row = row_of_column(i);
          const int e = i / 2 * 4 + i % 2;
          if (row < rows)
            st_shared_v2(shared_.sums(group_, row) + (column - first) * 4, __float_as_uint(o_[tile][e]),
                         __float_as_uint(o_[tile][e + 2]));
        }
      }
    }

    const CudaDecodeParams& p_;
    const Shared shared_;
    const int lane_, group_, warp_;
    u32 count_ = 0;  // steps of all segments
    int position_[2];
    float factors_[4];  // of scores
    float s_[8], o_[tiles][8];
    Softmax softmax_;
  };
};

template <class Spec, class Config>
FLASHJIT_FN void decode_latents(const CudaDecodeParams& params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  DecodeLatents<Spec, Config>::run(params, shared_address(dynamic_shared));
}
template <class Spec, class Config>
FLASHJIT_FN void decode_latents_merge(const CudaDecodeParams& params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  DecodeMerge<DecodeLatents<Spec, Config>>::run(params, shared_address(dynamic_shared));
}

}  // namespace flashjit::device
