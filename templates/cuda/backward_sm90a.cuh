// The backward for sm_90a, in FlashAttention-3's form (Shah et al., 2024). A block of the grid owns block_n
// keys of a key/value head: it walks the query blocks of all query heads of that head, so dK and dV are sums
// in registers. Scores are transposed,
//   S^T = K Q^T        dP^T = V dO^T
// so that P^T and dS^T, in registers, are the first operands of
//   dV += P^T dO       dK += dS^T Q
// Each consumer warpgroup owns 64 keys. dS goes through shared memory for dQ = dS K, which the copy engine
// adds to sums in global memory, in the order in which accumulators hold it. A later turn of a block puts it
// in order (backward_sm90a_turns.cuh). With wide heads no thread has the registers for dK and dV. There a
// block of the grid makes either of them, and another kernel puts dQ in order.
#pragma once

#include "cuda/backward_sm90a_consumer.cuh"
#include "cuda/backward_sm90a_parts.cuh"
#include "cuda/backward_sm90a_producer.cuh"
#include "cuda/backward_sm90a_shared.cuh"
#include "cuda/backward_sm90a_turns.cuh"
#include "shared/backward_cuda_params.h"

namespace flashjit::device {

// A block of the grid where each makes either dK or dV. The two kinds take turns: only dK adds to dQ, and
// memory takes less at once than all blocks would add. Blocks that make dK take longer. So at the end of the
// grid those that make dV come after them, and no multiprocessor is without work for long.
struct DividedBlock {
  static constexpr u32 last = 192;  // half again as many as multiprocessors
  bool makes_dk;
  u32 place;
  FLASHJIT_FN DividedBlock() {
    const u32 places = gridDim.x / 2, in_end = min(places, last), in_turns = places - in_end;
    if (blockIdx.x < 2 * in_turns) {
      makes_dk = blockIdx.x % 2 == 0;
      place = blockIdx.x / 2;
    } else {
      const u32 at = blockIdx.x - 2 * in_turns;
      makes_dk = at < in_end;
      place = in_turns + (makes_dk ? at : at - in_end);
    }
  }
};

template <class Spec_, class Config_, BackwardSums sums_>
struct BackwardSm90a {
  using Spec = Spec_;
  using Config = Config_;
  static constexpr BackwardSums sums = sums_;
  using Element = typename Spec::Element;
  using Gradient = typename OutputElement<typename Spec::grad_dtype, Element>::type;
  using Mask = typename Spec::Mask;
  using Score = typename Spec::Score;
  using ScoreGradient = device::ScoreGradient<Score>;
  using Products = typename Config::Products;

  static constexpr int block_m = Config::block_m, block_n = Config::block_n;
  static constexpr bool makes_dk = sums != BackwardSums::dv, makes_dv = sums != BackwardSums::dk;
  // A kernel of its own may make dQ (backward_sm90a_dq.cuh). Else a deterministic one adds it in a fixed
  // order.
  static constexpr bool separate_dq = has_dq_kernel<Config>, ordered = Spec::deterministic && !separate_dq;
  static constexpr bool makes_dq = makes_dk && !separate_dq, orders_dq = makes_dq && ordered;
  // Weights and dS are made at once, where formulas have derivatives. Blocks of the grid that make dV alone
  // need none.
  static constexpr bool differentiates = ScoreGradient::changes && makes_dk;
  static constexpr Sm90aBackwardLayout layout{Spec::head_dim,
                                              Spec::head_dim_v,
                                              block_m,
                                              block_n,
                                              makes_dk ? Config::num_stages : backward_dv_stages,
                                              Spec::dropout,
                                              separate_dq,
                                              ScoreGradient::changes,
                                              sums};
  static constexpr int stages = layout.stages;
  // Whether a block of the grid may have several places, and then writes dQ as well.
  static constexpr bool has_places = sums == BackwardSums::both, finishes_dq = has_places && makes_dq;
  using Turns = BackwardTurns<Spec, block_n, finishes_dq, ordered>;
  static_assert(!orders_dq || (key_intervals<Mask> && (layout.stages_dq || !has_places)));
  using Ring = Sm90aRing<stages>;
  static constexpr int consumers = layout.consumers, consumer_warps = 4 * consumers;
  static constexpr int k_panels = ceil_div(Spec::head_dim, layout.panel);
  static constexpr int v_panels = ceil_div(Spec::head_dim_v, layout.panel);
  // Weights and dS of a block's rows are made in tiles, which are all of them unless dK and dV leave too few
  // registers.
  static constexpr int tile_rows = layout.tile_rows, tiles = block_m / tile_rows;
  using Scores = float[tile_rows / 2];  // of a thread, or dP, of a tile

  // setmaxnreg: consumers, which hold tiles, get most of a multiprocessor's 64 Ki registers. Where they need
  // all that there are, the thread that copies tiles spills some, which costs nothing: it waits most of the
  // time.
  static constexpr bool needs_most = tiles > 1 || (isolates_dropped<Mask> && block_m <= 64 &&
                                                   Spec::head_dim + Spec::head_dim_v > 224);
  static constexpr int resident_blocks = layout.resident_blocks(block_n);
  static constexpr int producer_registers = needs_most ? 24 : 40, consumer_registers = resident_blocks > 1
                                                                                           ? 216
                                                                                       : needs_most ? 240
                                                                                                    : 232;
  // A block has what its threads begin with. Waiting for more would never end.
  static_assert(producer_registers + consumers * consumer_registers <=
                (consumers + 1) * (65536 / (resident_blocks * (consumers + 1) * 128) / 8 * 8));

  static constexpr bool isolates = isolates_dropped<Mask>;

  using DsRing = Sm90aRing<layout.ds_buffers>;
  static constexpr int dq_parts = layout.dq_parts;  // a consumer's dQ leaves in at most two, a product each
  // Whether dV's product begins before dS is made: P is then held twice, in 16 bits and in 32.
  static constexpr bool early_dv =
      sums == BackwardSums::both && block_m <= 64 && tiles == 1 && !Spec::dropout && !ScoreGradient::changes;
  // Else weights are packed as soon as their dS is made, so that their registers are free.
  static constexpr bool packs_late = sums == BackwardSums::both && !early_dv && !ScoreGradient::changes;

  using Shared = Sm90aBackwardShared<BackwardSm90a>;

  // A place is block_n keys of a key/value head. Where one kernel makes all sums, the grid has a block for
  // each multiprocessor, which takes the next turn that is left, whose copies begin while the one before
  // ends. Else a block has one place. It takes that as a turn, too, where it waits for places before.
  static constexpr bool takes_turns = has_places || orders_dq;
  FLASHJIT_FN static u32 first_turn(const Shared& shared) {
    return takes_turns ? shared.read_first_turn() : DividedBlock().place;
  }
  // The step before makes the counter 0.
  FLASHJIT_FN static u32 take_turn(const CudaBackwardParams& p) {
    const u32 turn = atom_add(p.next_turn, 1);
    return turn < Turns(p).turns() ? turn : no_turn;
  }
  FLASHJIT_FN static bool has_place(const CudaBackwardParams& p, u32 turn) {
    return !has_places || turn < Turns(p).places;
  }

  // The first query head of a head of the schedule.
  template <bool padding>
  FLASHJIT_FN static Problem problem_of(const CudaBackwardParams& p, u32 head) {
    const u32 heads_of_entry = static_cast<u32>(p.place_heads);
    if (has_places) head /= static_cast<u32>(p.row_parts);
    asm volatile("" : "+r"(head));  // hoisted divisions would fill the registers of the thread that copies
    return make_problem<Spec::varlen, padding>(p, static_cast<int>(head / heads_of_entry),
                                               static_cast<int>(head % heads_of_entry) * p.place_group);
  }

  // A place's work.
  struct Work {
    Problem problem;  // with the first query head of the group
    Span keys;        // without padding
    int keys_end;     // with padding
    u32 head;         // of the schedule
    FLASHJIT_FN Work(const CudaBackwardParams& p, u32 place) {
      const typename Turns::KeyBlock of_grid = Turns(p).key_block(place);
      const int block = static_cast<int>(of_grid.block);
      head = of_grid.head;
      problem = problem_of<Mask::padding>(p, of_grid.head);
      const Problem slot = problem_of<false>(p, of_grid.head);
      keys = {block * block_n, min((block + 1) * block_n, problem.seqlen_k)};
      keys_end = min((block + 1) * block_n, slot.seqlen_k);
    }
    FLASHJIT_FN Problem of_head(int head_q) const {
      Problem r = problem;
      r.head_q = head_q;
      return r;
    }
  };
  using Producer = Sm90aBackwardProducer<BackwardSm90a>;
  using Consumer = Sm90aBackwardConsumer<BackwardSm90a>;

  static FLASHJIT_FN void run(const CudaBackwardParams& p, const BackwardMaps& maps) {
    extern __shared__ __align__(1024) char dynamic_shared[];
    const Shared shared{dynamic_shared, shared_address(dynamic_shared)};
    if (threadIdx.x == 0) {
      prefetch_tensormap(maps.q);
      prefetch_tensormap(maps.k);
      if constexpr (makes_dk) prefetch_tensormap(maps.v);
      prefetch_tensormap(maps.d_o);
      mbarrier_init(shared.k_full(), 1);
      mbarrier_init(shared.v_full(), 1);
      mbarrier_init(shared.keys_empty(), consumer_warps);
      for (int stage = 0; stage < stages; ++stage) {
        mbarrier_init(shared.q_full(stage), 1);
        mbarrier_init(shared.q_empty(stage), consumer_warps);
        mbarrier_init(shared.do_full(stage), 1);
        mbarrier_init(shared.do_empty(stage), consumer_warps);
        mbarrier_init(shared.asked(stage), 1);
        mbarrier_init(shared.numbers_full(stage), 1);
      }
      for (int consumer = 0; consumer < consumers; ++consumer) {
        mbarrier_init(shared.dq_full(consumer), 4);
        mbarrier_init(shared.dq_empty(consumer), 1);
      }
      for (int buffer = 0; buffer < layout.ds_buffers; ++buffer)
        mbarrier_init(shared.ds_full(buffer), consumer_warps);
      fence_mbarrier_init();
      if constexpr (takes_turns) {
        griddepcontrol_wait();
        st_shared(shared.first_turn(), take_turn(p));
      }
    }
    if (Spec::dropout && threadIdx.x == 32)
      *reinterpret_cast<Words*>(dynamic_shared + layout.dropout_key) = dropout_key(p.dropout);
    __syncthreads();
    if (threadIdx.x < 128) {
      setmaxnreg_dec<producer_registers>();
      if (threadIdx.x == 0) {
        Producer::copy(p, maps, shared);
      } else if (threadIdx.x / 32 == 1) {
        Producer::add_rows(p, shared);
      } else if ((layout.stages_dq || orders_dq) && threadIdx.x >= 64 && threadIdx.x % 32 == 0) {
        const int consumer = threadIdx.x / 32 - 2;
        if (consumer >= consumers) return;
        if constexpr (layout.stages_dq)
          Producer::add_dq(p, shared, consumer);
        else
          Producer::order_dq(p, shared, consumer);
      }
    } else {
      setmaxnreg_inc<consumer_registers>();
      Consumer(p, shared).run();
    }
  }
};

template <class Spec, class Config>
FLASHJIT_FN void backward_sm90a(const CudaBackwardParams& params, const BackwardMaps& maps) {
  if constexpr (!backward_divides_sums(Spec::head_dim, Spec::head_dim_v)) {
    BackwardSm90a<Spec, Config, BackwardSums::both>::run(params, maps);
  } else {
    if (DividedBlock().makes_dk)
      BackwardSm90a<Spec, Config, BackwardSums::dk>::run(params, maps);
    else
      BackwardSm90a<Spec, Config, BackwardSums::dv>::run(params, maps);
  }
}

}  // namespace flashjit::device
