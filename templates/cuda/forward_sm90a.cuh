// FlashAttention-3's forward for sm_90a (Shah et al., 2024). One producer warp keeps TMA copies of K and V in
// flight. Each consumer warpgroup owns 64 query rows: it runs softmax on a block's scores while the tensor
// cores multiply the previous block's weights with V. Blocks of the grid are persistent: the next tile's Q, K
// and V arrive while this tile's output is being written. Of an output of more than 256 columns two
// warpgroups have one half each.
#pragma once

#include "cuda/dropout.cuh"
#include "cuda/forward_sm90a_alternating.cuh"
#include "cuda/forward_sm90a_consumer.cuh"
#include "cuda/forward_sm90a_merge.cuh"
#include "cuda/forward_sm90a_parts.cuh"
#include "cuda/forward_sm90a_producer.cuh"
#include "cuda/forward_sm90a_shared.cuh"
#include "cuda/online_softmax.cuh"
#include "cuda/ptx_sm90a.cuh"
#include "cuda/tile_rows.cuh"
#include "cuda/tile_schedule.cuh"
#include "shared/forward_sm90a_params.h"
#include "shared/layout.h"
#include "shared/mask.h"
#include "shared/score.h"

namespace flashjit::device {

// Defaults of a rendered Spec.
struct ForwardSm90aSpec {
  using Mask = Intersect<Bounds>;
  using Score = PlainScore;
  using Sinks = NoSinks;
  using Offsets = NoOffsets;
  using o_dtype = void;
  using kv_dtype = void;
  static constexpr KvScale kv_scale = KvScale::tensor;
  static constexpr bool lse = true, varlen = false, paged = false, v_in_k = false, dropout = false;
  static constexpr bool batch_invariant = false, gathered = false;
};

template <class Spec_, class Config_>
struct ForwardSm90a {
  using Spec = Spec_;
  using Config = Config_;
  using Element = typename Spec::Element;
  using OElement = typename OutputElement<typename Spec::o_dtype, Element>::type;
  using Mask = typename Spec::Mask;
  using Score = typename Spec::Score;
  using Sinks = typename Spec::Sinks;
  using Rows = TileRows<Config::block_m, Config::pack_gqa>;
  using Positions = typename Rows::Positions;
  // The shortest tiles may come first, which see no gathered keys: these arrive meanwhile.
  using Direction = typename Choose<Spec::gathered, EitherWay, Forwards>::type;
  using Schedule = TileSchedule<Config::tile_order, Rows, Direction>;
  using Softmax = OnlineSoftmax<1, false, Spec::batch_invariant>;
  static_assert(!Config::pack_gqa || !Mask::per_head, "one walk for all heads of a tile");

  using Shared = Sm90aShared<Spec, Config>;
  static constexpr int block_m = Config::block_m, block_n = Config::block_n, stages = Config::num_stages;
  static constexpr bool q_in_registers = Config::q_in_registers, ping_pong = Config::ping_pong;
  static constexpr int column_groups = Sm90aLayout::column_groups(Spec::head_dim_v);
  static constexpr int row_groups = block_m / Sm90aLayout::warpgroup_rows;
  static constexpr int consumers = row_groups * column_groups;  // warpgroups
  static_assert(column_groups == 1 || row_groups == 1);
  // Whether the two take turns at blocks of keys: else the first one makes all weights.
  static constexpr bool alternates = ping_pong && column_groups > 1;
  template <ColumnGroup group>
  using Consumer = typename Choose<alternates, Sm90aAlternatingConsumer<ForwardSm90a, group>,
                                   Sm90aConsumer<ForwardSm90a, group>>::type;
  // Whether one text serves both column groups. Measured: that saves a seventh of the compile time of 512
  // columns, and costs 1% of the speed. With different numbers of columns, Q in registers or registers given
  // away ptxas would serialise wgmma.
  static constexpr bool both_by_one = column_groups > 1 && !alternates && !q_in_registers &&
                                      Config::given_registers == 0 &&
                                      2 * Sm90aLayout::first_columns(Spec::head_dim_v) == Spec::head_dim_v;
  static constexpr int consumer_warps = consumers * 4, weighing_warps = row_groups * 4;
  static constexpr int qk_panels = ceil_div(Spec::head_dim, Sm90aLayout::panel);
  static constexpr int v_panels = ceil_div(Spec::head_dim_v, Sm90aLayout::panel);
  using Producer = Sm90aProducer<ForwardSm90a>;
  using Ring = typename Shared::Ring;
  static constexpr Sm90aLayout layout = Shared::layout;
  static constexpr int o_bytes = sizeof(OElement);

  // Each consumer walks a mask of intervals itself: an interval is a few numbers. Other masks need look-ups,
  // for which consumers have no registers. The producer makes them and passes each block on with its K.
  static constexpr bool passes_blocks = !Mask::row_intervals;

  static constexpr bool converts = Shared::converts != Converts::nothing;
  // Whether several warps copy pages. With dropout the other warps have other work. Where masks are looked
  // up, or consumers take turns, registers are short.
  static constexpr bool several_warps =
      Spec::paged && !converts && !Spec::dropout && !passes_blocks && (!ping_pong || alternates);
  using Converter = Sm90aConverter<ForwardSm90a>;
  // Of a warpgroup beside the others all warps convert.
  static constexpr bool converts_more = Config::num_warps > 4 * (consumers + 1);
  static constexpr int converters = converts_more ? 7 : 3;  // warps

  // setmaxnreg: consumers, which hold tiles, get most of a multiprocessor's 64 Ki registers. Beside an only
  // consumer the producer's warpgroup can have more, where it copies pages, or looks up and makes words.
  static constexpr int consumer_registers = (consumers == 3   ? 160
                                             : consumers == 2 ? 240
                                                              : 256) -
                                            Config::given_registers;
  static constexpr int producer_registers = converts_more
                                                ? 256 - consumer_registers
                                                : (consumers == 3                                    ? 32
                                                   : consumers == 2                                  ? 24
                                                   : Spec::paged || (Spec::dropout && passes_blocks) ? 96
                                                                                                     : 56) +
                                                      consumers * Config::given_registers;

  // Whether the device divides keys by their lengths, which it alone knows.
  static constexpr bool by_length = max(Spec::head_dim, Spec::head_dim_v) > 256 &&
                                    (Spec::paged || Mask::padding);
  // Whether parts begin at fixed keys, and how many blocks one has.
  static constexpr bool fixed_parts =
      forward_has_fixed_parts(Spec::batch_invariant, Spec::head_dim, Spec::head_dim_v);
  static constexpr int fixed_blocks = forward_part_blocks(block_n);
  // A tile's positions in its sequence.
  struct Work {
    Problem problem;
    int m_block;
    Span rows;     // without padding
    int rows_end;  // with padding
    FLASHJIT_FN Work(const Sm90aForwardParams& p, const TileIndex& t)
        : Work(p, make_problem<Spec::varlen, Mask::padding, Spec::paged>(p, t.batch, t.head_q), t.m_block) {}
    FLASHJIT_FN Work(const Sm90aForwardParams& p, const Problem& of, int block)
        : problem(of),
          m_block(block),
          rows{block * Rows(p).tokens, min((block + 1) * Rows(p).tokens, problem.seqlen_q)},
          rows_end(min((block + 1) * Rows(p).tokens, problem.rows)) {}
  };

  // The blocks of a tile, or of a part of it.
  static FLASHJIT_FN BlockWalk<Keys, Mask> walk(const Sm90aForwardParams& p,
                                                [[maybe_unused]] const Shared& shared, const Mask& mask,
                                                const Work& work, int part) {
    Span within = {0, 0x7fffffff};
    if constexpr (by_length)
      if (p.parts > 1) within = shared.share().keys(work.problem.batch, block_n);
    BlockWalk<Keys, Mask> blocks(mask, work.rows, block_n, within);
    if (!by_length && p.parts > 1)
      blocks.take_part(part, fixed_parts ? fixed_blocks : p.part_blocks, part == p.parts - 1, fixed_parts);
    return blocks;
  }
  // Outputs are multiplied with this beside their normalizers.
  static FLASHJIT_FN float output_factor(const Sm90aForwardParams& p, [[maybe_unused]] int head_kv) {
    float factor = Spec::dropout ? p.dropout.scale : 1;
    if constexpr (Shared::has_kv_scales) factor *= Sm90aScoreScales<ForwardSm90a>::of_outputs(p, head_kv);
    return factor;
  }

  // Zeros the rows of Q's buffer that no copy fills: old data there would take part in a warp's votes.
  static FLASHJIT_FN void zero_unused_rows(const Sm90aForwardParams& p, const Shared& shared) {
    for (int i = Rows(p).used() * 8 + threadIdx.x; i < block_m * 8; i += Config::num_warps * 32)
      for (int panel = 0; panel < qk_panels; ++panel)
        st_shared_v4(shared.q() + panel * layout.q_panel + i * 16, 0, 0, 0, 0);
    fence_proxy_async();
  }

  static FLASHJIT_FN void run(const Sm90aForwardParams& p, const ForwardMaps& maps) {
    extern __shared__ __align__(1024) char dynamic_shared[];
    const Shared shared{dynamic_shared, shared_address(dynamic_shared)};
    // By a warp that has nothing else to do at first.
    if constexpr (by_length)
      if (p.parts > 1 && threadIdx.x / 32 == 1)
        Sm90aLengths<ForwardSm90a>::divide(p, shared.start + layout.own_part,
                                           static_cast<int>(threadIdx.x % 32));
    if (threadIdx.x == 0) {
      griddepcontrol_launch_dependents();
      prefetch_tensormap(maps.q);
      prefetch_tensormap(maps.k);
      prefetch_tensormap(maps.v);
      mbarrier_init(shared.q_full(), 1);
      mbarrier_init(shared.q_empty(), consumer_warps);
      for (int stage = 0; stage < stages; ++stage) {
        mbarrier_init(shared.k_full(stage), converts ? converters : Spec::dropout ? 2 : 1);
        mbarrier_init(shared.k_empty(stage),
                      Spec::v_in_k && layout.second_piece == 0 ? consumer_warps : weighing_warps);
        mbarrier_init(shared.v_full(stage), converts ? converters : 1);
        mbarrier_init(shared.v_empty(stage), alternates ? weighing_warps : consumer_warps);
        if (Spec::dropout) mbarrier_init(shared.words_asked(stage), 1);
      }
      if constexpr (converts) Converter::init_barriers(shared);
      fence_mbarrier_init();
    }
    if constexpr (Config::pack_gqa) zero_unused_rows(p, shared);
    if (Spec::dropout && threadIdx.x == 32)
      *reinterpret_cast<Words*>(dynamic_shared + layout.dropout_key) = dropout_key(p.dropout);
    __syncthreads();
    if (threadIdx.x < 128) {
      setmaxnreg_dec<producer_registers>();
      if (threadIdx.x < Producer::threads) {
        Producer(p, maps, shared).run();
      } else if (Spec::dropout && threadIdx.x / 32 == 1) {
        shared.make_column_words(p);
      } else if constexpr (converts) {
        Converter(shared).run();
      }
    } else if (converts_more && threadIdx.x >= 128 * (consumers + 1)) {
      setmaxnreg_dec<producer_registers>();
      if constexpr (converts) Converter(shared).run();
    } else {
      setmaxnreg_inc<consumer_registers>();
      if constexpr (both_by_one)
        Consumer<ColumnGroup::either>(p, shared).run();
      else if (column_groups == 1 || threadIdx.x < 256)
        Consumer<ColumnGroup::first>(p, shared).run();
      else if constexpr (column_groups > 1)
        Consumer<ColumnGroup::second>(p, shared).run();
    }
  }
};

template <class Spec, class Config>
FLASHJIT_FN void forward_sm90a_merge(const Sm90aForwardParams& params) {
  using Kernel = ForwardSm90a<Spec, Config>;
  if constexpr (Kernel::by_length) {
    extern __shared__ __align__(1024) char dynamic_shared[];
    Sm90aLengthsMerge<Kernel>::run(params, shared_address(dynamic_shared));
  } else {
    Sm90aPartsMerge<Kernel>::run(params);
  }
}
template <class Spec, class Config>
FLASHJIT_FN void forward_sm90a(const Sm90aForwardParams& params, const ForwardMaps& maps) {
  ForwardSm90a<Spec, Config>::run(params, maps);
}

}  // namespace flashjit::device
