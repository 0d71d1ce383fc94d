// The GPU backward's own code on the host, thread by thread (emulator/emulator.hpp), against the float64
// oracle: tiles, masks, heads of a group, packed sequences, dropout, dQ by sums and by its own kernel.
#include "codegen/families/search_space.hpp"
#include "codegen/formulas/formula_traits.hpp"
#include "cuda/backward_dq_sm80.cuh"
#include "cuda/backward_sm80.cuh"
#include "tests/cuda/emulated_backward.hpp"
#include "tests/support/documents.hpp"

namespace flashjit::testing_support {
namespace {

template <class Element, int head_dim, int head_dim_v, class... Masks>
using SpecOf = AttentionOf<device::BackwardCudaSpec, Element, head_dim, head_dim_v, Masks...>;
template <class Spec>
struct Packed : Spec {
  static constexpr bool varlen = true;
};
template <class Spec>
struct WithFloats : WithFloatOutput<Spec> {
  using grad_dtype = float;
};
template <int block_m, int block_n, int num_stages, int num_warps>
using ConfigOf = TilesOf<block_m, block_n, num_stages, num_warps>;

struct Sm80Kernels {
  template <class Spec>
  static BackwardParamsOf<Spec> params_of(const AttentionSpec& spec, const StepLaunch& step) {
    if (!learns<Spec> || has_gradients(spec)) return params_for<BackwardParamsOf<Spec>>(step);
    BackwardParamsOf<Spec> p{};
    if constexpr (learns<Spec>)
      static_cast<device::WithFormulas<device::CudaBackwardParams>&>(p) =
          params_for<device::WithFormulas<device::CudaBackwardParams>>(step);
    return p;
  }
  template <class Spec, class Config>
  static void launch(const Case& given, AttentionArgs args) {
    const KernelConfig config{Config::block_m, Config::block_n, Config::num_stages, Config::num_warps};
    const Target target = Target::parse("sm_90");
    ASSERT_EQ(misfit(given.spec, target, config), "");
    const PlannedWithoutCode planned(given.spec, target, config, 4);
    const PlannedKernel& kernel = planned.kernel();
    const OperationRuntime& operation = runtime_of(Operation::backward);
    DirtyWorkspace workspace(operation.workspace_bytes(kernel, given.shape()));
    args.workspace = workspace.view();
    Launch launch;
    operation.plan(kernel, args, launch);
    if (launch.size() == 0) return;
    ASSERT_EQ(launch.size(), learns<Spec> && Spec::deterministic ? 4u : 3u);
    const auto p = params_of<Spec>(given.spec, launch[0]);
    constexpr int threads = Config::num_warps * 32;
    run_grid(launch[0].grid, device::backward_threads, 0, [&] { device::backward_prepare<Spec, false>(p); });
    constexpr device::CudaBackwardLayout layout{Spec::head_dim,     Spec::head_dim_v,   Config::block_m,
                                                Config::block_n,    Config::num_stages, Spec::dropout,
                                                Spec::deterministic};
    run_grid(launch[1].grid, threads, layout.end, [&] { device::backward_sm80<Spec, Config>(p); });
    if constexpr (Spec::deterministic) {
      constexpr device::CudaBackwardDqLayout dq{Spec::head_dim,
                                                Spec::head_dim_v,
                                                device::backward_dq_rows(Config::num_warps),
                                                device::backward_dq_keys(Spec::head_dim, Spec::head_dim_v),
                                                2,
                                                Spec::dropout};
      run_grid(launch[2].grid, threads, dq.end, [&] { device::backward_dq_sm80<Spec, Config>(p); });
      if constexpr (learns<Spec>)
        run_grid(launch[3].grid, device::backward_threads, device::backward_sinks_shared,
                 [&] { device::backward_tables<Spec>(p); });
    } else {
      run_grid(launch[2].grid, device::backward_threads, device::backward_sinks_shared,
               [&] { device::backward_finish<Spec, false>(p); });
    }
  }
};
using BackwardOnGpu = EmulatedBackward<Sm80Kernels>;

TEST_F(BackwardOnGpu, LengthsAroundTileEdges) {
  std::uint64_t seed = 0;
  for (const auto& [rows, keys] :
       {std::pair{1, 1}, {17, 65}, {64, 64}, {70, 130}, {150, 40}, {0, 5}, {5, 0}}) {
    const Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = rows, .seqlen_k = keys, .seed = ++seed};
    expect<SpecOf<Bf16, 24, 40, BottomRight>, ConfigOf<32, 64, 2, 4>>(c, {CausalMask{}});
    expect<SpecOf<Fp16, 40, 24>, ConfigOf<16, 64, 1, 4>>(c, {});
    expect<Deterministic<SpecOf<Fp16, 24, 24, BottomRight>>, ConfigOf<32, 64, 2, 4>>(c, {CausalMask{}});
  }
}

TEST_F(BackwardOnGpu, Tiles) {
  const Case c{
      .heads_q = 2, .heads_kv = 2, .seqlen_q = 150, .seqlen_k = 140, .layout = MemoryLayout::odd, .seed = 20};
  expect<SpecOf<Bf16, 64, 64, BottomRight>, ConfigOf<32, 128, 2, 4>>(c, {CausalMask{}});
  expect<SpecOf<Bf16, 64, 64, BottomRight>, ConfigOf<64, 128, 2, 8>>(c, {CausalMask{}});
  expect<SpecOf<Bf16, 16, 16, BottomRight>, ConfigOf<128, 256, 1, 8>>(c, {CausalMask{}});
  expect<SpecOf<Bf16, 192, 128, BottomRight>, ConfigOf<32, 64, 2, 8>>(c, {CausalMask{}});
  expect<SpecOf<Fp16, 200, 256>, ConfigOf<32, 64, 1, 8>>(c, {});
  expect<Deterministic<WithDropout<SpecOf<Bf16, 256, 256, device::Padding, device::Tree>>>,
         ConfigOf<32, 32, 1, 4>>(c, {PaddingMask{}, TreeMask{}});
  expect<Deterministic<SpecOf<Fp16, 256, 200>>, ConfigOf<32, 64, 1, 8>>(c, {});
}

// Four warps have the same keys, and each a quarter of the columns, of which the last one may have none.
TEST_F(BackwardOnGpu, WideHeads) {
  Case c{.batch = 2,
         .heads_q = 4,
         .heads_kv = 2,
         .seqlen_q = 90,
         .seqlen_k = 70,
         .layout = MemoryLayout::odd,
         .seed = 30};
  using Config = ConfigOf<64, 32, 1, 8>;
  using device::BlockSparse;
  const std::vector<Mask> causal = {CausalMask{}};
  expect<SpecOf<Bf16, 264, 264, BottomRight>, Config>(c, causal);
  expect<WithDropout<SpecOf<Fp16, 320, 40, device::Padding, BottomRight>>, ConfigOf<64, 32, 2, 8>>(
      c, {CausalMask{}, PaddingMask{}});
  expect<SpecOf<Bf16, 512, 512>, Config>(c, {});
  expect<WithDropout<SpecOf<Bf16, 24, 328, device::Tree>>, ConfigOf<128, 32, 1, 8>>(c, {TreeMask{}});
  expect<SpecOf<Fp16, 272, 16, device::Padding, BlockSparse<32, 64, true>>, Config>(
      c, {PaddingMask{}, BlockSparseMask{.block_m = 32, .block_n = 64, .per_head = true}});
  expect<SpecOf<Bf16, 264, 16, BottomRight, BlockSparse<32, 16, false>>, Config>(
      c, {CausalMask{}, BlockSparseMask{32, 16}}, true);
  expect<WithLearned<SpecOf<Bf16, 16, 264>, true, true>, Config>(c, {});
  expect<WithShift<WithDropout<SpecOf<Fp16, 264, 24, device::Padding>>>, Config>(c, {PaddingMask{}});
  c.lengths_q = {1, 0, 90}, c.lengths_k = {70, 5, 33}, c.batch = 1;
  expect<WithFloats<Packed<SpecOf<Fp16, 288, 264, BottomRight>>>, Config>(c, causal);
}

TEST_F(BackwardOnGpu, MasksAndDropout) {
  std::uint64_t seed = 40;
  for (const Poison poison : {Poison::nan, Poison::infinity}) {
    const Case c{.batch = 2,
                 .heads_q = 4,
                 .heads_kv = 2,
                 .seqlen_q = 90,
                 .seqlen_k = 150,
                 .poison = poison,
                 .seed = ++seed};
    using Config = ConfigOf<32, 64, 2, 4>;
    expect<WithDropout<SpecOf<Bf16, 16, 24, device::Padding, BottomRight>>, Config>(
        c, {CausalMask{}, PaddingMask{}});
    expect<SpecOf<Bf16, 16, 16, WindowWithSinks>, Config>(c, {SlidingWindowMask{.sinks = true}});
    expect<SpecOf<Fp16, 16, 16, device::Padding>, Config>(c, {PaddingMask{}});
    expect<SpecOf<Fp16, 16, 16, device::Padding, device::BlockSparse<32, 64, true>>, ConfigOf<32, 128, 2, 4>>(
        c, {PaddingMask{}, BlockSparseMask{.block_m = 32, .block_n = 64, .per_head = true}});
    expect<Deterministic<WithDropout<SpecOf<Bf16, 16, 16, device::Padding, device::Tree>>>, Config>(
        c, {PaddingMask{}, TreeMask{}});
  }
}

TEST_F(BackwardOnGpu, DropoutOfMostWeightsAndOfAll) {
  Case c{.heads_q = 2, .heads_kv = 1, .seqlen_q = 100, .seqlen_k = 200};
  for (const double p : {0.99, 1.0}) {
    c.dropout_p = p;
    expect<WithDropout<SpecOf<Bf16, 64, 64, BottomRight>>, ConfigOf<64, 128, 2, 4>>(c, {CausalMask{}});
    expect<WithDropout<SpecOf<Fp16, 64, 64, BottomRight>>, ConfigOf<64, 128, 2, 4>>(c, {CausalMask{}});
  }
}

// Formulas with and without derivatives, what they learn, and masks that are tested or intervals: beside the
// heads of a group, dropout, packed sequences, block lists, and with dQ by its own kernel.
TEST_F(BackwardOnGpu, Formulas) {
  Case c{.batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 50, .seqlen_k = 90, .seed = 80};
  using Plain = SpecOf<Bf16, 16, 24>;
  using Config = ConfigOf<32, 64, 2, 4>;
  expect<WithLearned<Plain, true, true>, Config>(c, {});
  ++c.seed;
  expect<WithLearned<Deterministic<WithDropout<SpecOf<Fp16, 16, 16, BottomRight>>>, false, true>, Config>(
      c, {CausalMask{}});
  ++c.seed;
  expect<WithShift<WithDropout<SpecOf<Fp16, 24, 16, device::Padding>>>, Config>(c, {PaddingMask{}});
  ++c.seed;
  expect<WithLearned<SpecOf<Fp16, 72, 16, device::BlockSparse<32, 64, true>>, false, false>,
         ConfigOf<32, 64, 2, 8>>(c, {BlockSparseMask{.block_m = 32, .block_n = 64, .per_head = true}});
  expect<WithLearned<Deterministic<Plain>, true, false>, Config>({.batch = 0, .heads_q = 2, .heads_kv = 1},
                                                                 {});
  const Case packed{.heads_q = 2,
                    .heads_kv = 1,
                    .lengths_q = {30, 1, 0, 70},
                    .lengths_k = {30, 80, 5, 20},
                    .spare_rows = 7,
                    .seed = 90};
  expect<WithLearned<Packed<Plain>, true, true>, Config>(packed, {});
  expect<WithLearned<Deterministic<Packed<Plain>>, true, true>, Config>(packed, {});
}

// Some rows have an lse beyond what float32 holds to a weight's precision, beside rows that have none, in
// each way to make weights.
TEST_F(BackwardOnGpu, FarScores) {
  Case c{.batch = 1,
         .heads_q = 2,
         .heads_kv = 1,
         .seqlen_q = 50,
         .seqlen_k = 90,
         .data = Data::plain,
         .seed = 50};
  using Config = ConfigOf<32, 64, 2, 4>;
  const std::vector<Mask> causal = {CausalMask{}};
  c.softmax_scale = 3000;
  expect<SpecOf<Bf16, 24, 40, BottomRight>, Config>(c, causal);
  c.softmax_scale = 400;
  expect<SpecOf<Fp16, 24, 24>, Config>(c, {}, double_keys);
  expect<WithDropout<SpecOf<Fp16, 40, 24, device::BlockSparse<16, 32, true>>>, ConfigOf<64, 128, 2, 8>>(
      c, {BlockSparseMask{16, 32, true}});
  c.softmax_scale = 1e5f;
  expect<Deterministic<SpecOf<Fp16, 24, 24, BottomRight>>, Config>(c, causal);
  expect<WithLearned<SpecOf<Bf16, 16, 24>, true, false>, Config>(c, {});
  expect<WithShift<Deterministic<SpecOf<Fp16, 24, 16>>>, Config>(c, {});
  const Case packed{.heads_q = 2,
                    .heads_kv = 1,
                    .lengths_q = {30, 1, 0, 70},
                    .lengths_k = {30, 80, 5, 20},
                    .data = Data::plain,
                    .softmax_scale = 1e4f,
                    .seed = 51};
  expect<Packed<SpecOf<Bf16, 72, 24, BottomRight>>, ConfigOf<32, 64, 1, 8>>(packed, causal);
}

// Rows without a gradient give none, whatever their lse is; rows and keys behind a sequence's end give none
// where a formula is not finite at a score of 0.
TEST_F(BackwardOnGpu, RowsWithoutGradients) {
  const Case c{.batch = 1,
               .heads_q = 1,
               .heads_kv = 1,
               .seqlen_q = 50,
               .seqlen_k = 90,
               .data = Data::plain,
               .seed = 60};
  using Config = ConfigOf<32, 64, 2, 4>;
  const auto stop = [](Workload& workload) { stop_gradients(workload, true); };
  expect<SpecOf<Bf16, 24, 40, BottomRight>, Config>(c, {CausalMask{}}, stop);
  expect<WithInverse<SpecOf<Bf16, 24, 16>>, Config>(c, {}, stop);
  expect<WithInverse<Deterministic<SpecOf<Bf16, 16, 16, BottomRight>>>, Config>(c, {CausalMask{}});
}

// These weights are subnormal in half precision: dropout's scale must not multiply what they lost.
TEST_F(BackwardOnGpu, DropoutOfTinyWeights) {
  const Case c{.heads_q = 2,
               .heads_kv = 2,
               .seqlen_q = 3,
               .seqlen_k = 300,
               .softmax_scale = 1.0f,
               .dropout_p = 0.95,
               .seed = 61};
  expect<WithLearned<WithDropout<SpecOf<Fp16, 16, 16>>, true, false>, ConfigOf<32, 64, 2, 4>>(c, {});
}

// Some blocks have bitmasks, the masks test others; a warp's keys are within a listed block or have parts of
// two.
TEST_F(BackwardOnGpu, ListsOfItsMasks) {
  Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 150, .seqlen_k = 150, .seed = 21};
  c.named = documents_of(40, 2, 150);
  using Spec = SpecOf<Bf16, 40, 24>;
  expect_listed<ListedDocuments<Spec, 128, 128>, ConfigOf<32, 128, 2, 4>>(c);
  expect_listed<ListedDocuments<Spec, 64, 16>, ConfigOf<32, 128, 2, 4>>(c);
  expect_listed<ListedDocuments<Spec, 48, 80>, ConfigOf<32, 64, 1, 4>>(c);
}

// NaN and infinity reach no gradient through a pair that a mask with block lists drops, in blocks that are
// smaller than tiles and in parts of them.
TEST_F(BackwardOnGpu, DroppedPairsHideNotANumber) {
  Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 150, .seqlen_k = 200, .seed = 70};
  using device::BlockSparse;
  using Lists = SpecOf<Fp16, 16, 24, BlockSparse<16, 32, true>>;
  const std::vector<Mask> lists = {BlockSparseMask{16, 32, true}};
  expect<Lists, ConfigOf<64, 128, 2, 8>>(c, lists, true);
  ++c.seed;
  expect<Deterministic<Lists>, ConfigOf<32, 64, 1, 4>>(c, lists, true);
  ++c.seed;
  expect<SpecOf<Bf16, 72, 16, BottomRight, BlockSparse<32, 16, false>>, ConfigOf<32, 64, 2, 8>>(
      c, {CausalMask{}, BlockSparseMask{32, 16}}, true);
  ++c.seed;
  expect<WithDropout<SpecOf<Bf16, 24, 16, device::Padding, BlockSparse<64, 64, false>>>,
         ConfigOf<32, 64, 2, 4>>(c, {PaddingMask{}, BlockSparseMask{64, 64}}, true);
}

// The formula of runtime/semantics.md.
TEST(BackwardOnGpuWorkspace, IsLinearInTheRows) {
  const Target target = Target::parse("sm_90");
  for (const int head_dim : {64, 72})
    for (const bool varlen : {false, true})
      for (const bool deterministic : {false, true}) {
        AttentionSpec spec{.op = Operation::backward, .head_dim = head_dim};
        spec.varlen = varlen;
        spec.deterministic = deterministic;
        spec = spec.validated();
        const Shape shape{.batch = 3,
                          .seqlen_q = 130,
                          .seqlen_k = 1000,
                          .num_heads_q = 4,
                          .num_heads_kv = 2,
                          .total_q = varlen ? 300 : 0};
        const PlannedKernel kernel{
            spec, target, heuristic_config(spec, target, shape), {Device::Kind::cpu, 0}, 4, nullptr};
        const std::size_t rows = varlen ? 128 * (300 / 128 + 3) : 3 * 256;
        const std::size_t columns = deterministic ? 0 : head_dim == 64 ? 64 : 80;
        EXPECT_EQ(runtime_of(Operation::backward).workspace_bytes(kernel, shape),
                  4 * rows * (4 * (3 + columns)) + 4 * (rows / 4) + 4)
            << spec.to_json();
      }
}

TEST_F(BackwardOnGpu, PackedSequencesAndFloats) {
  const Case c{.heads_q = 6,
               .heads_kv = 2,
               .lengths_q = {30, 1, 0, 170},
               .lengths_k = {30, 180, 5, 20},
               .spare_rows = 7,
               .seed = 60};
  using Config = ConfigOf<32, 64, 2, 4>;
  expect<Packed<SpecOf<Bf16, 16, 24, BottomRight>>, Config>(c, {CausalMask{}});
  expect<WithFloats<Packed<SpecOf<Fp16, 24, 16, BottomRight>>>, Config>(c, {CausalMask{}});
  expect<WithFloats<Deterministic<WithDropout<Packed<SpecOf<Fp16, 16, 16>>>>>, Config>(c, {});
}

TEST_F(BackwardOnGpu, Shards) {
  using Params = device::CudaBackwardParams;
  Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 90, .seqlen_k = 130};
  using Base = WithDropout<SpecOf<Bf16, 24, 40>>;
  c.seed = 800 + sample_seed() % 50;
  using Causal = device::Causal<Align::top_left>;
  expect<WithShard<Base, Params, Causal>, ConfigOf<32, 64, 2, 4>>(c, {CausalMask{}});
  expect<WithShard<Deterministic<Base>, Params, Causal>, ConfigOf<32, 64, 2, 4>>(c, {CausalMask{}});
  expect<WithShard<SpecOf<Bf16, 24, 40>, Params, device::Tree>, ConfigOf<32, 64, 2, 4>>(c, {TreeMask{}});
}

}  // namespace
}  // namespace flashjit::testing_support
