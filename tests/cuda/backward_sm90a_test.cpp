// The sm_90a backward's own code on the host, thread by thread (emulator/emulator.hpp), against the float64
// oracle: rows, heads, lengths, masks and dropout without a GPU.
#include <cstring>
#include <limits>
#include <tuple>

#include "codegen/families/backward_kernels.hpp"
#include "codegen/formulas/formula_traits.hpp"
#include "cuda/backward_sm90a.cuh"
#include "cuda/backward_sm90a_dq.cuh"
#include "shared/backward_cpu_params.h"
#include "tests/cuda/emulated_backward.hpp"
#include "tests/support/documents.hpp"
#include "tools/verify/random_tensor.hpp"

namespace flashjit::testing_support {
namespace {

template <class Element, int head_dim, int head_dim_v, bool varlen_, class... Masks>
struct SpecOf : AttentionOf<device::BackwardCudaSpec, Element, head_dim, head_dim_v, Masks...> {
  static constexpr bool varlen = varlen_;
};
template <class Spec>
struct WithFloatGradients : Spec {
  using grad_dtype = float;
};
template <int block_m, int num_stages>
using ConfigOf = TilesOf<block_m, 128, num_stages, 12>;
using FewKeys = TilesOf<64, 64, 2, 8>;
template <class Spec, class Config>
constexpr device::Sm90aBackwardLayout layout_of(bool separate_dq, int num_stages = Config::num_stages,
                                                device::BackwardSums sums = device::BackwardSums::both) {
  return {Spec::head_dim,
          Spec::head_dim_v,
          Config::block_m,
          Config::block_n,
          num_stages,
          Spec::dropout,
          separate_dq,
          device::ScoreGradient<typename Spec::Score>::changes,
          sums};
}
// As CudaBackwardKernels has it.
template <class Spec, class Config>
constexpr bool separates_dq() {
  const auto layout = layout_of<Spec, Config>(false);
  const bool persistent = !device::backward_divides_sums(Spec::head_dim, Spec::head_dim_v);
  return Spec::deterministic && (device::has_row_bits<typename Spec::Mask> || learns<Spec> ||
                                 (persistent && (!layout.stages_dq || layout.tile_rows < Config::block_m)));
}
template <class Spec, class Config>
struct Emulated : Config {
  using Products = device::EmulatedBackwardProducts<Spec, Config, false>;
};
template <class Spec, class Config>
  requires(separates_dq<Spec, Config>())
struct Emulated<Spec, Config> : Config {
  using Products = device::EmulatedBackwardProducts<Spec, Config, true>;
  using DqProducts = device::EmulatedDqProducts<Spec>;
};

struct Sm90aKernels {
  template <class Spec, class Config>
  static void launch(const Case& given, AttentionArgs args) {
    using device::BackwardSums;
    constexpr bool divides_sums = device::backward_divides_sums(Spec::head_dim, Spec::head_dim_v);
    constexpr bool separate_dq = separates_dq<Spec, Config>();
    const auto shared_memory = [](int num_stages, BackwardSums sums) {
      return layout_of<Spec, Config>(separate_dq, num_stages, sums).end;
    };
    const KernelConfig config{Config::block_m, Config::block_n, Config::num_stages, Config::num_warps};
    EXPECT_EQ(CudaBackwardKernels(given.spec, config, true).separate_dq, separate_dq);
    BackwardParamsOf<Spec> p{};
    check(given, args, p);
    if (p.batch == 0) return;
    std::vector<i64> sums;
    if constexpr (learns<Spec>) {
      for (device::GradientTable& gradient : p.gradients.tables) gradient.sums = nullptr;
      i64 count = 0;
      for (const device::GradientTable& gradient : p.gradients.tables) count += gradient.count;
      sums.assign(static_cast<std::size_t>(count) * device::exact_sum_words, -1);
      i64* next = sums.data();
      for (device::GradientTable& gradient : p.gradients.tables) {
        if (Spec::deterministic) gradient.sums = next;
        next += gradient.count * device::exact_sum_words;
      }
    }
    p.rows = device::backward_rows(p.batch, p.seqlen_q, Spec::varlen ? p.total_q : -1);
    const int row = device::cuda_backward_row(Spec::head_dim);
    const auto stats = static_cast<std::size_t>(p.num_heads_q * p.rows);
    p.section = 2;
    // Both ways, whatever fills a GPU; into halves where a group is even.
    const int group = p.num_heads_q / std::max(p.num_heads_kv, 1);
    const bool divides_groups = !divides_sums && !Spec::deterministic && group > 1 && given.seed % 2 == 0;
    p.place_group = !divides_groups ? std::max(group, 1) : group % 2 == 0 ? group / 2 : 1;
    p.place_heads = p.num_heads_q / p.place_group;
    const bool divides_rows = !divides_sums && !Spec::deterministic &&
                              !device::has_row_bits<typename Spec::Mask> && p.place_group == 1 &&
                              given.seed % 4 == 0;
    p.part_rows = divides_rows ? device::backward_row_unit
                               : device::round_up(std::max(p.seqlen_q, 1), device::backward_row_unit);
    p.row_parts = std::max(device::ceil_div(p.seqlen_q, p.part_rows), 1);
    const bool has_key_sums = divides_groups || p.row_parts > 1;
    p.key_rows = device::backward_rows(p.batch, p.seqlen_k, Spec::varlen ? p.total_k : -1);
    const auto keys = static_cast<std::size_t>(has_key_sums ? p.num_heads_kv * p.key_rows : 0);
    const int row_v = device::cuda_backward_row(Spec::head_dim_v);
    // It may hold anything.
    std::vector<float> memory(
        stats * static_cast<std::size_t>(3 + row) + keys * static_cast<std::size_t>(row + row_v) + 16,
        std::numeric_limits<float>::quiet_NaN());
    float* const floats =
        reinterpret_cast<float*>((reinterpret_cast<std::uintptr_t>(memory.data()) + 15) / 16 * 16);
    if (Spec::dropout) p.place_dropout_scale(!device::ScoreGradient<typename Spec::Score>::changes);
    p.lse_log2 = floats;
    p.delta = p.lse_log2 + stats;
    p.far_max = p.delta + stats;
    // They are read in words.
    struct alignas(4) Marks {
      unsigned char of_rows[16];
    };
    std::vector<Marks> far_marks(stats / 64);
    std::memset(far_marks.data(), 0xff, stats / 4);
    p.far_marks = far_marks[0].of_rows;
    p.dq_sums = separate_dq ? nullptr : p.far_max + stats;
    if (has_key_sums) {
      p.dk_sums = p.dq_sums + stats * static_cast<std::size_t>(row);
      p.dv_sums = p.dk_sums + keys * static_cast<std::size_t>(row);
    }
    p.row_block = Config::block_m;
    p.row_words = device::ceil_div(p.seqlen_q, 32 * Config::block_m);
    std::vector<device::RowBits> row_bits(
        static_cast<std::size_t>(p.num_heads_q * (p.key_rows / device::backward_row_unit) * p.row_words),
        device::RowBits{~0u, ~0u});
    p.row_bits = row_bits.data();
    std::vector<device::u32> counters(1 + std::size_t{p.schedule_heads()}, 0xffffffff);
    if (!divides_sums || (Spec::deterministic && !separate_dq)) {
      p.next_turn = counters.data();
      p.places_done = p.next_turn + 1;
    }
    std::vector<device::u32> blocks_added(
        static_cast<std::size_t>(device::backward_ordered_blocks(p.num_heads_q * p.rows)), 0xffffffff);
    if (Spec::deterministic && !separate_dq) p.dq_blocks_added = blocks_added.data();
    const i64 row_units =
        i64{p.batch} * p.num_heads_q * device::ceil_div(p.seqlen_q, device::backward_row_unit);
    run_grid(row_units * (device::backward_row_unit / device::backward_rows_of_block),
             device::backward_threads, 0, [&] { device::backward_prepare<Spec, true>(p); });
    const cuda::BackwardMapShapes shapes = cuda::backward_map_shapes(given.spec, p);
    device::BackwardMaps maps;
    const auto describe = [](const device::TensorView& tensor, const cuda::TensorMapShape& shape,
                             device::TensorMap& map) {
      const emulator::TensorMap described{tensor.data, &shape, 2};
      std::memcpy(&map, &described, sizeof described);
    };
    describe(p.q, shapes.q, maps.q);
    describe(p.k, shapes.k, maps.k);
    describe(p.v, shapes.v, maps.v);
    describe(p.d_o, shapes.d_o, maps.d_o);
    const i64 places = i64{p.schedule_heads()} * device::ceil_div(p.seqlen_k, Config::block_n);
    const auto main_step = [&] { device::backward_sm90a<Spec, Emulated<Spec, Config>>(p, maps); };
    constexpr int threads = Config::num_warps * 32;
    if (divides_sums) {
      run_grid(2 * places, threads,
               std::max(shared_memory(Config::num_stages, BackwardSums::dk),
                        shared_memory(device::backward_dv_stages, BackwardSums::dv)),
               main_step);
    } else if (places > 0) {
      // A persistent grid of few blocks. The first one takes all turns.
      run_grid(std::min<i64>(places, 2), threads, shared_memory(Config::num_stages, BackwardSums::both),
               main_step);
    }
    if constexpr (separate_dq)
      run_grid(i64{p.batch} * p.num_heads_q * device::ceil_div(p.seqlen_q, device::Sm90aDqLayout::rows),
               device::Sm90aDqLayout::threads,
               device::Sm90aDqLayout(Spec::head_dim, Spec::head_dim_v, Spec::dropout).end,
               [&] { device::backward_dq_sm90a<Spec, Emulated<Spec, Config>>(p, maps); });
    else
      run_grid((divides_sums ? row_units : 0) + (Spec::Sinks::exist ? p.num_heads_q : 0) +
                   (has_key_sums ? i64{p.batch} * p.num_heads_kv *
                                       device::ceil_div(p.seqlen_k, device::backward_row_unit)
                                 : 0),
               device::backward_threads, device::backward_sinks_shared,
               [&] { device::backward_finish<Spec, !divides_sums>(p); });
    if constexpr (learns<Spec> && Spec::deterministic) {
      i64 blocks = p.num_heads_q;
      for (int table = 0; table < device::most_formula_tables; ++table)
        blocks += (p.gradients.tables[table].count + device::backward_elements_of_block - 1) /
                  device::backward_elements_of_block;
      run_grid(blocks, device::backward_threads, device::backward_sinks_shared,
               [&] { device::backward_tables<Spec>(p); });
    }
  }

  // The checked arguments, by a launch on a CPU; none if there is nothing to compute.
  template <class Params>
  static void check(const Case& given, AttentionArgs args, Params& p) {
    const Target target = Target::parse("x86-64-v3");
    const KernelConfig config{.block_n = 128, .num_stages = 1, .num_warps = 1};
    const PlannedWithoutCode planned(given.spec, target, config, 1);
    const PlannedKernel& kernel = planned.kernel();
    const OperationRuntime& operation = runtime_of(Operation::backward);
    DirtyWorkspace workspace(operation.workspace_bytes(kernel, given.shape()));
    args.workspace = workspace.view();
    Launch launch;
    operation.plan(kernel, args, launch);
    if (launch.size() == 0) return;
    auto& first = const_cast<StepLaunch&>(launch[0]);
    static_cast<device::BackwardParams&>(p) = first.params_as<device::CpuBackwardParams>();
    if constexpr (requires { p.position_offsets; })
      p.position_offsets = first.params_as<device::WithOffsets<device::CpuBackwardParams>>().position_offsets;
    if constexpr (std::is_same_v<Params, LearnedParams>) {
      p.formulas = first.params_as<device::WithFormulas<device::CpuBackwardParams>>().formulas;
      if (has_gradients(given.spec))
        p.gradients = first.params_as<device::WithGradients<device::CpuBackwardParams>>().gradients;
    }
  }
};
using BackwardSm90a = EmulatedBackward<Sm90aKernels>;

// Formulas with and without derivatives, what they learn, and masks that are tested or intervals: beside the
// heads of a group, dropout, packed sequences, block lists, and with dQ by its own kernel.
TEST_F(BackwardSm90a, Formulas) {
  Case c{.batch = 1, .heads_q = 4, .heads_kv = 2, .seqlen_q = 70, .seqlen_k = 150, .seed = 80};
  using Plain = SpecOf<Bf16, 64, 64, false>;
  expect<WithLearned<Plain, true, true>, ConfigOf<64, 2>>(c, {});
  ++c.seed;
  c.heads_q = 2;
  expect<WithLearned<Deterministic<WithDropout<SpecOf<Fp16, 64, 64, false, BottomRight>>>, false, true>,
         ConfigOf<64, 2>>(c, {CausalMask{}});
  ++c.seed;
  expect<WithShift<WithDropout<SpecOf<Fp16, 64, 64, false, device::Padding>>>, ConfigOf<128, 2>>(
      c, {PaddingMask{}});
  ++c.seed;
  expect<WithLearned<SpecOf<Fp16, 64, 64, false, device::BlockSparse<64, 64, true>>, true, false>,
         ConfigOf<128, 2>>(c, {BlockSparseMask{.block_m = 64, .block_n = 64, .per_head = true}});
  const Case packed{.heads_q = 1,
                    .heads_kv = 1,
                    .lengths_q = {30, 1, 0, 70},
                    .lengths_k = {30, 80, 5, 20},
                    .spare_rows = 7,
                    .seed = 90};
  expect<WithLearned<SpecOf<Bf16, 64, 64, true>, true, true>, ConfigOf<64, 2>>(packed, {});
}

// Lengths around the edges of blocks of rows and of keys, in each form of dQ's product.
TEST_F(BackwardSm90a, LengthsAroundEdges) {
  std::uint64_t seed = 0;
  for (const int rows : {1, 63, 64, 65, 128, 129, 200})
    for (const int keys : {1, 64, 127, 128, 130, 257}) {
      const Case c{.heads_q = 2,
                   .heads_kv = 2,
                   .seqlen_q = rows,
                   .seqlen_k = keys,
                   .layout = static_cast<MemoryLayout>(seed % 5),
                   .layout_kv = static_cast<MemoryLayout>(seed / 2 % 5),
                   .seed = seed + 1};
      switch (seed++ % 4) {
        case 0:
          expect<SpecOf<Bf16, 64, 64, false>, ConfigOf<128, 2>>(c, {});
          break;
        case 1:
          expect<SpecOf<Fp16, 128, 128, false, BottomRight>, ConfigOf<64, 2>>(c, {CausalMask{}});
          break;
        case 2:
          expect<SpecOf<Fp16, 64, 40, false, TopLeft>, ConfigOf<64, 2>>(c, {CausalMask{top_left}});
          break;
        case 3:
          expect<Deterministic<SpecOf<Bf16, 72, 64, false, BottomRight>>, ConfigOf<64, 2>>(c, {CausalMask{}});
          break;
      }
    }
}

TEST_F(BackwardSm90a, HeadDims) {
  const Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 70, .seqlen_k = 140};
  expect<SpecOf<Bf16, 8, 8, false, BottomRight>, ConfigOf<128, 2>>(c, {CausalMask{}});
  expect<SpecOf<Fp16, 40, 24, false, BottomRight>, ConfigOf<64, 2>>(c, {CausalMask{}});
  expect<SpecOf<Fp16, 8, 128, false, BottomRight>, ConfigOf<64, 2>>(c, {CausalMask{}});
  expect<SpecOf<Bf16, 72, 128, false, BottomRight>, ConfigOf<64, 2>>(c, {CausalMask{}});
  expect<SpecOf<Bf16, 96, 80, false, BottomRight>, ConfigOf<64, 2>>(c, {CausalMask{}});
  expect<Deterministic<SpecOf<Bf16, 120, 120, false, BottomRight>>, ConfigOf<64, 2>>(c, {CausalMask{}});
}
// One consumer computes all of dQ.
TEST_F(BackwardSm90a, FewKeys) {
  for (const auto& [rows, keys] : {std::pair{49, 49}, {150, 64}, {70, 140}, {1, 1}}) {
    const Case c{.batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = rows, .seqlen_k = keys, .seed = 11};
    expect<SpecOf<Bf16, 32, 32, false>, FewKeys>(c, {});
    expect<SpecOf<Fp16, 64, 40, false, BottomRight>, FewKeys>(c, {CausalMask{}});
    expect<Deterministic<SpecOf<Bf16, 64, 64, false, BottomRight>>, FewKeys>(c, {CausalMask{}});
    expect<WithDropout<SpecOf<Bf16, 8, 64, false, BottomRight, device::Padding>>, FewKeys>(
        c, {CausalMask{}, PaddingMask{}});
    expect<SpecOf<Bf16, 64, 64, false, device::BlockSparse<16, 32, true>>, FewKeys>(
        c, {BlockSparseMask{16, 32, true}}, true);
    expect<WithLearned<WithDropout<SpecOf<Bf16, 64, 64, false>>, true, true>, FewKeys>(c, {});
  }
  const Case packed{.heads_q = 2,
                    .heads_kv = 1,
                    .lengths_q = {30, 1, 0, 70, 5},
                    .lengths_k = {30, 64, 5, 20, 0},
                    .spare_rows = 7,
                    .seed = 12};
  expect<SpecOf<Bf16, 64, 64, true, BottomRight>, FewKeys>(packed, {CausalMask{}});
}
// A consumer's dQ has two parts.
TEST_F(BackwardSm90a, WideKeysAndNarrowValues) {
  const Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 150, .seqlen_k = 140};
  expect<SpecOf<Fp16, 176, 72, false, BottomRight>, ConfigOf<64, 2>>(c, {CausalMask{}});
  expect<SpecOf<Bf16, 248, 8, false>, ConfigOf<64, 2>>(c, {});
}
// Blocks of the grid make either dK or dV, or both in two tiles of rows.
TEST_F(BackwardSm90a, WideHeads) {
  // An even seed divides groups where a block makes both sums.
  const Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 70, .seqlen_k = 140, .seed = 2};
  expect<SpecOf<Bf16, 256, 256, false, BottomRight>, ConfigOf<64, 1>>(c, {CausalMask{}});
  expect<SpecOf<Fp16, 192, 128, false, BottomRight>, ConfigOf<64, 2>>(c, {CausalMask{}});
  expect<SpecOf<Bf16, 136, 160, false>, ConfigOf<64, 1>>(c, {});
  expect<SpecOf<Bf16, 40, 224, false, BottomRight, device::Padding>, ConfigOf<64, 2>>(
      c, {CausalMask{}, PaddingMask{}});
  expect<Deterministic<SpecOf<Fp16, 200, 72, false, BottomRight>>, ConfigOf<64, 2>>(c, {CausalMask{}});
  expect<WithDropout<SpecOf<Bf16, 160, 256, false, BottomRight>>, ConfigOf<64, 1>>(c, {CausalMask{}});
  const Case packed{
      .heads_q = 4, .heads_kv = 2, .lengths_q = {30, 1, 0, 130}, .lengths_k = {30, 140, 5, 20}, .seed = 4};
  expect<SpecOf<Bf16, 256, 72, true, BottomRight>, ConfigOf<64, 1>>(packed, {CausalMask{}});
  // Block lists look at the rows of several blocks, each of which takes the place of an earlier one.
  const Case longer{.heads_q = 1, .heads_kv = 1, .seqlen_q = 330, .seqlen_k = 40, .seed = 5};
  const std::vector<Mask> lists = {BlockSparseMask{16, 32, true}};
  expect<SpecOf<Fp16, 184, 104, false, device::BlockSparse<16, 32, true>>, ConfigOf<64, 2>>(longer, lists,
                                                                                            true);
  const Case padded{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 300, .seqlen_k = 150, .seed = 6};
  expect<Deterministic<
             SpecOf<Bf16, 248, 40, false, Window, device::Padding, device::BlockSparse<80, 112, true>>>,
         ConfigOf<64, 2>>(padded, {SlidingWindowMask{}, PaddingMask{}, BlockSparseMask{80, 112, true}}, true);
}

// Dropout beside derivatives of scores, where blocks make either dK or dV, or both in two tiles of rows: the
// ways to make a weight, and to know that it is dropped, differ.
TEST_F(BackwardSm90a, WideHeadsDropBesideDerivatives) {
  const Case c{.batch = 1, .heads_q = 1, .heads_kv = 1, .seqlen_q = 65, .seqlen_k = 70, .seed = 30};
  const Case packed{
      .heads_q = 1, .heads_kv = 1, .lengths_q = {5, 0, 66}, .lengths_k = {30, 5, 70}, .seed = 31};
  const std::vector<Mask> causal = {CausalMask{}};
  expect<WithLearned<WithDropout<SpecOf<Bf16, 136, 136, false>>, true, true>, ConfigOf<64, 1>>(c, {});
  expect<WithLearned<WithDropout<SpecOf<Fp16, 192, 128, false, BottomRight>>, true, true>, ConfigOf<64, 2>>(
      c, causal);
  expect<WithLearned<WithDropout<SpecOf<Fp16, 200, 80, true, BottomRight>>, false, true>, ConfigOf<64, 1>>(
      packed, causal);
  expect<WithLearned<Deterministic<WithDropout<SpecOf<Bf16, 64, 256, false>>>, false, true>, ConfigOf<64, 2>>(
      c, {});
  expect<WithLearned<WithDropout<SpecOf<Fp16, 256, 64, false, device::Padding>>, true, true>,
         ConfigOf<64, 1>>(c, {PaddingMask{}});
  expect<
      WithLearned<WithDropout<SpecOf<Bf16, 256, 256, false, device::BlockSparse<64, 64, true>>>, true, true>,
      ConfigOf<64, 1>>(c, {BlockSparseMask{64, 64, true}});
  expect<WithLearned<Deterministic<WithDropout<SpecOf<Bf16, 192, 128, false, Window>>>, false, true>,
         ConfigOf<64, 2>>(c, {SlidingWindowMask{}});
}

TEST_F(BackwardSm90a, GroupedHeadsAndPackedSequences) {
  for (const auto& [heads_q, heads_kv] : {std::pair{3, 3}, {6, 2}, {5, 1}}) {
    const Case fixed{
        .batch = 2, .heads_q = heads_q, .heads_kv = heads_kv, .seqlen_q = 140, .seqlen_k = 140, .seed = 3};
    const Case packed{.heads_q = heads_q,
                      .heads_kv = heads_kv,
                      .lengths_q = {30, 1, 0, 170, 5},
                      .lengths_k = {30, 180, 5, 20, 0},
                      .spare_rows = 7,
                      .seed = 4};
    expect<SpecOf<Bf16, 24, 40, false, BottomRight>, ConfigOf<128, 2>>(fixed, {CausalMask{}});
    expect<SpecOf<Bf16, 24, 40, true, BottomRight>, ConfigOf<128, 2>>(packed, {CausalMask{}});
    expect<SpecOf<Fp16, 72, 24, true>, ConfigOf<64, 2>>(packed, {});
    expect<Deterministic<SpecOf<Fp16, 72, 24, true, BottomRight>>, ConfigOf<64, 2>>(packed, {CausalMask{}});
  }
}

// Every mask, without and with dropout. The three forms of dQ take turns: its rows are divided among
// consumers, its columns are, or a kernel of its own computes it.
template <int turn, class... Masks>
struct InTurn {
  using Columns = SpecOf<Fp16, 72, 24, false, Masks...>;
  using Rows = SpecOf<Bf16, 24, 40, false, Masks...>;
  using Plain = std::tuple_element_t<turn % 3, std::tuple<Rows, Columns, Deterministic<Rows>>>;
  using Dropping =
      WithDropout<std::tuple_element_t<turn % 3, std::tuple<Columns, Deterministic<Columns>, Rows>>>;
  template <class Spec>
  using ConfigFor = ConfigOf<Spec::head_dim == 24 ? 128 : 64, 2>;
};
TEST_F(BackwardSm90a, MasksAndDropout) {
  Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 150, .seqlen_k = 200};
  const auto test = [&]<int turn, class... Masks>(const std::vector<Mask>& masks) {
    using In = InTurn<turn, Masks...>;
    using Plain = typename In::Plain;
    using Dropping = typename In::Dropping;
    for (const Poison poison : {Poison::nan, Poison::infinity}) {
      ++c.seed;
      c.poison = poison;
      expect<Plain, typename In::template ConfigFor<Plain>>(c, masks);
    }
    expect<Dropping, typename In::template ConfigFor<Dropping>>(c, masks);
  };
  using device::BlockSparse;
  using device::Padding;
  test.operator()<0, Window>({SlidingWindowMask{}});
  test.operator()<1, device::SlidingWindowWithSinks<Align::bottom_right>>(
      {SlidingWindowMask{bottom_right, true}});
  test.operator()<2, Padding>({PaddingMask{}});
  test.operator()<0, BottomRight, Padding>({CausalMask{}, PaddingMask{}});
  test.operator()<1, BlockSparse<64, 64, false>>({BlockSparseMask{64, 64}});
  test.operator()<2, BlockSparse<32, 128, true>>({BlockSparseMask{32, 128, true}});
  test.operator()<0, BlockSparse<128, 128, false>>({BlockSparseMask{128, 128}});
  test.operator()<1, Window, Padding, BlockSparse<16, 32, false>>(
      {SlidingWindowMask{}, PaddingMask{}, BlockSparseMask{16, 32}});
  test.operator()<2, device::Tree>({TreeMask{}});
}
// Some blocks have bitmasks, the masks test others; tiles are within a listed block or have parts of several.
TEST_F(BackwardSm90a, ListsOfItsMasks) {
  Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 300, .seqlen_k = 300, .seed = 21};
  c.named = documents_of(70, 2, 300);
  using Spec = SpecOf<Bf16, 40, 24, false>;
  expect_listed<ListedDocuments<Spec, 128, 128>, ConfigOf<64, 2>>(c);
  expect_listed<ListedDocuments<Spec, 128, 128>, ConfigOf<128, 2>>(c);
  expect_listed<ListedDocuments<Spec, 64, 32>, FewKeys>(c);
  expect_listed<ListedDocuments<Spec, 64, 16>, ConfigOf<128, 2>>(c);
  expect_listed<ListedDocuments<Spec, 48, 80>, ConfigOf<64, 2>>(c);
}
// NaN and infinity reach no gradient through a pair that a mask with block lists drops, in blocks that are
// smaller than tiles and in parts of them.
TEST_F(BackwardSm90a, DroppedPairsHideNotANumber) {
  Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 150, .seqlen_k = 200, .seed = 70};
  using device::BlockSparse;
  using Lists = SpecOf<Fp16, 24, 40, false, BlockSparse<16, 32, true>>;
  const std::vector<Mask> lists = {BlockSparseMask{16, 32, true}};
  expect<Lists, ConfigOf<128, 2>>(c, lists, true);
  ++c.seed;
  expect<Deterministic<Lists>, ConfigOf<64, 2>>(c, lists, true);
  ++c.seed;
  expect<SpecOf<Bf16, 72, 24, false, BottomRight, device::Padding, BlockSparse<64, 64, false>>,
         ConfigOf<64, 2>>(c, {CausalMask{}, PaddingMask{}, BlockSparseMask{64, 64}}, true);
  c = {.heads_q = 2, .heads_kv = 2, .lengths_q = {100, 60}, .lengths_k = {90, 130}, .seed = 80};
  expect<WithDropout<SpecOf<Bf16, 24, 24, true, BlockSparse<32, 64, false>>>, ConfigOf<128, 2>>(
      c, {BlockSparseMask{32, 64}}, true);
}
TEST_F(BackwardSm90a, DropoutOfPackedSequences) {
  const Case c{.heads_q = 6,
               .heads_kv = 2,
               .lengths_q = {30, 1, 0, 170},
               .lengths_k = {30, 180, 5, 20},
               .spare_rows = 7,
               .seed = 4};
  expect<WithDropout<SpecOf<Bf16, 64, 64, true, BottomRight>>, ConfigOf<128, 2>>(c, {CausalMask{}});
  // All weights drop, and dlse still has gradients.
  Case certain = c;
  certain.dropout_p = 1;
  expect<WithDropout<SpecOf<Bf16, 64, 64, true, BottomRight>>, ConfigOf<128, 2>>(certain, {CausalMask{}});
  expect<Deterministic<WithDropout<SpecOf<Bf16, 64, 64, true, BottomRight>>>, ConfigOf<64, 2>>(
      c, {CausalMask{}});
}

// Some rows have an lse beyond what float32 holds to a weight's precision, beside rows that have none, in
// each way to make weights.
TEST_F(BackwardSm90a, FarScores) {
  Case c{.batch = 1,
         .heads_q = 2,
         .heads_kv = 1,
         .seqlen_q = 70,
         .seqlen_k = 140,
         .data = Data::plain,
         .seed = 50};
  const std::vector<Mask> causal = {CausalMask{}};
  c.softmax_scale = 2000;
  expect<SpecOf<Bf16, 64, 64, false, BottomRight>, ConfigOf<128, 2>>(c, causal);
  c.softmax_scale = 300;
  expect<SpecOf<Fp16, 72, 24, false, device::BlockSparse<16, 32, true>>, ConfigOf<64, 2>>(
      c, {BlockSparseMask{16, 32, true}});
  c.softmax_scale = 1e5f;
  expect<Deterministic<WithDropout<SpecOf<Bf16, 24, 40, false, BottomRight>>>, ConfigOf<64, 2>>(c, causal);
  expect<WithLearned<SpecOf<Bf16, 64, 64, false>, true, false>, ConfigOf<64, 2>>(c, {});
  expect<SpecOf<Fp16, 192, 128, false, BottomRight>, ConfigOf<64, 2>>(c, causal);
  expect<WithDropout<SpecOf<Bf16, 256, 72, false>>, ConfigOf<64, 1>>(c, {});
  expect<WithShift<Deterministic<SpecOf<Fp16, 64, 64, false>>>, ConfigOf<64, 2>>(c, {});
  Case packed{
      .heads_q = 2, .heads_kv = 1, .lengths_q = {30, 1, 0, 70}, .lengths_k = {30, 80, 5, 20}, .seed = 51};
  packed.softmax_scale = 1e4f;
  expect<SpecOf<Bf16, 64, 64, true, BottomRight>, ConfigOf<64, 2>>(packed, causal);
}

// Rows without a gradient give none, whatever their lse is.
TEST_F(BackwardSm90a, RowsWithoutGradients) {
  const Case c{.batch = 1,
               .heads_q = 1,
               .heads_kv = 1,
               .seqlen_q = 70,
               .seqlen_k = 140,
               .data = Data::plain,
               .seed = 60};
  const auto stop = [](Workload& workload) { stop_gradients(workload, true); };
  expect<SpecOf<Bf16, 64, 64, false, BottomRight>, ConfigOf<64, 2>>(c, {CausalMask{}}, stop);
}

TEST_F(BackwardSm90a, FloatGradients) {
  // A work tile has two of the four heads, where a block makes both sums.
  const Case c{.batch = 2, .heads_q = 4, .heads_kv = 1, .seqlen_q = 150, .seqlen_k = 130, .seed = 2};
  expect<WithFloatGradients<SpecOf<Bf16, 24, 40, false, BottomRight, device::Padding>>, ConfigOf<128, 2>>(
      c, {CausalMask{}, PaddingMask{}});
  expect<Deterministic<WithFloatGradients<SpecOf<Fp16, 72, 24, false, BottomRight>>>, ConfigOf<64, 2>>(
      c, {CausalMask{}});
}

TEST_F(BackwardSm90a, Shards) {
  using Params = device::CudaBackwardParams;
  using Base = SpecOf<Bf16, 64, 64, false>;
  Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 150, .seqlen_k = 200};
  c.seed = 700 + sample_seed() % 50;
  using Causal = device::Causal<Align::top_left>;
  expect<WithShard<WithDropout<Base>, Params, Causal>, ConfigOf<64, 2>>(c, {CausalMask{}});
  expect<WithShard<Deterministic<WithDropout<Base>>, Params, Causal>, ConfigOf<64, 2>>(c, {CausalMask{}});
  expect<WithShard<Base, Params, device::SlidingWindowWithSinks<Align::top_left>>, ConfigOf<128, 2>>(
      c, {SlidingWindowMask{.sinks = true}});
  expect<WithShard<Base, Params, device::BlockSparse<16, 32, true>>, ConfigOf<64, 2>>(
      c, {BlockSparseMask{16, 32, true}});
}

}  // namespace
}  // namespace flashjit::testing_support
