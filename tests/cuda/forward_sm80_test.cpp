// The forward of the sm_80 family on the host, thread by thread (emulator/emulator.hpp), against the float64
// oracle: contiguous keys and keys in pages.
#include "tests/cuda/emulator/emulator.hpp"
// The kernel's name for what the emulator calls dynamic_shared.
#define shared_memory dynamic_shared
#include "cuda/forward_sm80.cuh"
#include "cuda/quantised_tile.cuh"
#undef shared_memory

#include "codegen/families/search_space.hpp"
#include "runtime/arguments/attention.hpp"
#include "runtime/cuda/tile_plan.hpp"
#include "runtime/step_params.hpp"
#include "tests/cuda/emulated_attention.hpp"
#include "tests/cuda/formula_specs.hpp"
#include "tests/cuda/kv_specs.hpp"
#include "tests/cuda/listed_specs.hpp"
#include "tests/cuda/offset_specs.hpp"
#include "tests/support/planned_kernel.hpp"
#include "tests/support/row_in_batches.hpp"

namespace flashjit::testing_support {
namespace {

template <class Element, int head_dim, int head_dim_v, bool paged_, bool varlen_, class... Masks>
struct SpecOf : AttentionOf<device::ForwardSm80Spec, Element, head_dim, head_dim_v, Masks...> {
  static constexpr bool paged = paged_, varlen = varlen_;
};
template <int block_n, int num_stages, int block_m = 64, int num_warps = 4>
using ConfigOf = TilesOf<block_m, block_n, num_stages, num_warps>;

using FormulaParams = device::WithFormulas<device::Paged<device::Sm80ForwardParams>>;

class ForwardSm80 : public EmulatorTest {
 protected:
  template <class Spec, class Config>
  void expect(Case given, std::vector<Mask> masks) {
    if (!has_turn()) return;
    given.spec = spec_of<Spec>(Operation::forward, std::move(masks));
    given.spec = with_offsets<Spec>(with_formulas<Spec>(with_kv<Spec>(given.spec)));
    if (!Spec::paged) given.page_size = 0;
    Workload workload(host, given);
    workload.reset();
    launch<Spec, Config>(given.spec, workload.args());
    EXPECT_TRUE(workload.check());
  }

  // With lists of the spec's own masks, against attention of the masks alone.
  template <class Spec, class Config>
  void expect_listed(Case given) {
    if (!has_turn()) return;
    given.spec = with_formulas<Spec>(spec_of<Spec>(Operation::forward, {}));
    Workload workload(host, given);
    expect_attention_of_masks(workload, [&](const AttentionSpec& spec, const AttentionArgs& args) {
      launch<Spec, Config>(spec, args);
    });
  }

  // A row has the same bits in any cut of its prompt, among any neighbours, by any tile.
  template <class Spec, class... Configs>
  void expect_same_bits(const std::vector<Mask>& masks) {
    if (!has_turn()) return;
    const int position = std::max({Configs::block_n...}) + 3;
    std::vector<std::byte> expected;
    for (const Batch& batch : {Batch{{1}, 0, {}, 16}, Batch{{position + 1}, 0, {}, 64}, Batch{{16}, 8, {}, 1},
                               Batch{{40}, 11, {60}, 48}}) {
      AttentionSpec spec =
          forward_spec(DType::bf16, Spec::head_dim, masks,
                       {.head_dim_v = Spec::head_dim_v, .paged = Spec::paged, .batch_invariant = true});
      Workload workload(host, case_of(with_formulas<Spec>(with_kv<Spec>(spec)), batch, position));
      fill(workload, batch);
      const auto launch_by = [&]<class Config>(Config) {
        SCOPED_TRACE(workload.given().str() + " by tiles of " + std::to_string(Config::block_m));
        workload.reset();
        launch<Invariant<Spec>, Config>(workload.given().spec, workload.args());
        ASSERT_TRUE(workload.check());
        const std::vector<std::byte> bits = bits_of_row(workload, batch);
        if (expected.empty()) expected = bits;
        EXPECT_TRUE(bits == expected);
      };
      (launch_by(Configs{}), ...);
    }
  }

 private:
  template <class Spec>
  static constexpr bool quantised = device::is_quantised<typename Spec::kv_dtype>;

  template <class Spec, class Config>
  void launch(const AttentionSpec& spec, const AttentionArgs& args) {
    const KernelConfig config{Config::block_m, Config::block_n, Config::num_stages, Config::num_warps};
    const Target target = Target::parse("sm_80");
    ASSERT_EQ(misfit(spec, target, config), "");
    const CheckedArguments checked = check_arguments(spec, {Device::Kind::cpu, 0}, args);
    if (checked.empty) return;
    const PlannedWithoutCode planned(spec, target, config, 5);
    Launch launched;
    // Params of all kernels here have room for pages.
    auto& p = step_params::with_scales<device::Paged<device::Sm80ForwardParams>>(
        add_step(planned.kernel(), launched, "flashjit_forward"), checked.params,
        {.formulas = if_any(checked.formulas),
         .kv_scales = if_any(checked.kv_scales),
         .offsets = if_any(checked.offsets)});
    p.pages = checked.pages;
    const Grid grid = cuda::plan_tiles(spec, config, 5, p);
    constexpr int shared_bytes =
        quantised<Spec>
            ? device::cuda_quantised_forward_shared_memory(Spec::head_dim, Spec::head_dim_v, Config::block_m,
                                                           Config::block_n,
                                                           Spec::kv_scale == device::KvScale::token_head)
            : device::cuda_forward_shared_memory(Spec::head_dim, Spec::head_dim_v, Config::block_m,
                                                 Config::block_n, Config::num_stages, false);
    run_grid(Grid{grid.x}, Config::num_warps * 32, shared_bytes,
             [&] { device::forward_sm80<Spec, Config>(p); });
  }
};

TEST_F(ForwardSm80, BatchInvariantBits) {
  expect_same_bits<SpecOf<Bf16, 64, 64, false, false, BottomRight>, ConfigOf<64, 2>, ConfigOf<64, 1, 128>,
                   ConfigOf<64, 2, 128, 8>>({CausalMask{}});
  expect_same_bits<WithTilt<SpecOf<Bf16, 72, 40, true, false, BottomRight>, FormulaParams, true>,
                   ConfigOf<64, 1>, ConfigOf<64, 2, 128>>({CausalMask{}});
}

TEST_F(ForwardSm80, PageSizes) {
  std::uint64_t seed = 0;
  for (const int page_size : {1, 16, 48, 64, 256}) {
    const Case c{.batch = 3,
                 .heads_q = 2,
                 .seqlen_q = 70,
                 .seqlen_k = 260,
                 .lengths_k = {260, 0, 133},
                 .page_size = page_size,
                 .layout_kv = static_cast<MemoryLayout>(seed % 5),
                 .seed = ++seed};
    expect<SpecOf<Bf16, 24, 72, true, false, BottomRight>, ConfigOf<48, 2>>(c, {CausalMask{}});
    expect<SpecOf<Fp16, 72, 16, true, false, Window>, ConfigOf<32, 1>>(c, {SlidingWindowMask{}});
  }
}

TEST_F(ForwardSm80, PagesOfPackedRows) {
  const Case c{.heads_q = 4,
               .heads_kv = 2,
               .seqlen_k = 150,
               .lengths_q = {1, 0, 33, 90},
               .lengths_k = {150, 20, 33, 100},
               .page_size = 16,
               .spare_rows = 7};
  expect<SpecOf<Bf16, 40, 24, true, true, device::Tree>, ConfigOf<64, 2>>(c, {TreeMask{}});
  expect<SpecOf<Bf16, 40, 24, true, true, BottomRight>, ConfigOf<64, 1>>(c, {CausalMask{}});
}

TEST_F(ForwardSm80, PagesUnderSinksListsAndPadding) {
  std::uint64_t seed = 80;
  for (const int page_size : {2, 16, 80})
    for (int repeat = 0; repeat < 3; ++repeat) {
      const Case c{.batch = 2,
                   .heads_q = 2,
                   .seqlen_q = 40,
                   .seqlen_k = 300,
                   .page_size = page_size,
                   .poison = seed % 2 ? Poison::infinity : Poison::nan,
                   .seed = ++seed};
      expect<SpecOf<Bf16, 24, 40, true, false, WindowWithSinks>, ConfigOf<96, 1>>(
          c, {SlidingWindowMask{bottom_right, true}});
      expect<SpecOf<Fp16, 24, 40, true, false, device::Padding, device::BlockSparse<16, 32, false>>,
             ConfigOf<32, 2>>(c, {PaddingMask{}, BlockSparseMask{16, 32}});
    }
}

// Each dtype and sharing of scales; rows of odd numbers of chunks; lengths that end within a block.
TEST_F(ForwardSm80, EightBitKeysAndValues) {
  using enum device::KvScale;
  using device::fp8_e4m3, device::fp8_e5m2, device::int8;
  Case c{.batch = 2,
         .heads_q = 4,
         .heads_kv = 2,
         .seqlen_q = 70,
         .seqlen_k = 200,
         .lengths_k = {200, 77},
         .page_size = 16,
         .layout_kv = MemoryLayout::padded,
         .seed = 500};
  using Causal = SpecOf<Bf16, 40, 24, true, false, BottomRight>;
  expect<WithKv<Causal, fp8_e4m3, token_head>, ConfigOf<48, 2>>(c, {CausalMask{}});
  c.page_size = 2;
  expect<WithKv<Causal, int8, tensor>, ConfigOf<64, 2>>(c, {CausalMask{}});
  using Windows = SpecOf<Fp16, 32, 80, true, false, WindowWithSinks>;
  c.page_size = 48;
  expect<WithKv<Windows, fp8_e5m2, head>, ConfigOf<32, 2>>(c, {SlidingWindowMask{bottom_right, true}});
  expect<WithKv<Windows, int8, token_head>, ConfigOf<144, 2>>(c, {SlidingWindowMask{bottom_right, true}});
  c.lengths_q = {3, 70};
  expect<WithKv<SpecOf<Bf16, 128, 64, true, true, device::Tree>, fp8_e5m2, token_head>, ConfigOf<32, 2>>(
      c, {TreeMask{}});
}

TEST_F(ForwardSm80, ContiguousKeys) {
  const Case c{.batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 70, .seqlen_k = 150};
  expect<SpecOf<Bf16, 40, 24, false, false, BottomRight, device::Padding>, ConfigOf<48, 2>>(
      c, {CausalMask{}, PaddingMask{}});
}

// The bound that the oracle takes (tools/verify/formula.hpp).
TEST(FormulaFunctions, TanhIsWithinItsBound) {
  double worst = 0;
  for (int i = -120000; i <= 120000; ++i) {
    const float x = static_cast<float>(i) * 1e-4f;
    worst = std::max(worst, std::abs(double{tanh(device::Real<float>(x)).v} - std::tanh(double{x})));
  }
  EXPECT_LT(worst, 0x1p-16);
  EXPECT_GT(worst, 0x1p-18);
  for (const float x : {20.0f, 3e38f, device::infinity}) {
    EXPECT_NEAR(tanh(device::Real<float>(x)).v, 1, 0x1p-16);
    EXPECT_NEAR(tanh(device::Real<float>(-x)).v, -1, 0x1p-16);
  }
  EXPECT_NEAR(tanh(device::Real<float>(0.0f)).v, 0, 1e-6);
  EXPECT_TRUE(std::isnan(tanh(device::Real<float>(NAN)).v));
}

// Tiles within blocks, blocks within tiles, and tiles across the edges of blocks.
TEST_F(ForwardSm80, ListsOfItsMasks) {
  const Case c{.batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 150, .seqlen_k = 200};
  using Spec = SpecOf<Bf16, 40, 24, false, false>;
  expect_listed<WithLists<Spec, FormulaParams, 128, 32>, ConfigOf<32, 2>>(c);
  expect_listed<WithLists<Spec, FormulaParams, 16, 16>, ConfigOf<48, 1>>(c);
}

// Blocks of keys that are far below a row's later ones.
TEST_F(ForwardSm80, FarKeys) {
  const Case c{.heads_q = 2, .heads_kv = 1, .seqlen_q = 5, .seqlen_k = 1200};
  using Spec = SpecOf<Fp16, 16, 16, false, false>;
  expect<WithFarKeys<Spec, FormulaParams, false>, ConfigOf<64, 2>>(c, {});
  expect<WithFarKeys<Spec, FormulaParams, true>, ConfigOf<64, 2>>(c, {});
}

TEST_F(ForwardSm80, Formulas) {
  Case c{.batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 70, .seqlen_k = 150};
  using Spec = SpecOf<Bf16, 40, 24, false, false>;
  expect<WithFormulaSpec<Spec, FormulaParams, true>, ConfigOf<48, 2>>(c, {});
  c.seqlen_q = 90, c.seqlen_k = 40;  // the first rows see nothing
  c.page_size = 16;
  using Paged = SpecOf<Fp16, 24, 40, true, false>;
  expect<WithFormulaSpec<Paged, FormulaParams, false>, ConfigOf<32, 1>>(c, {});
}

TEST_F(ForwardSm80, Shards) {
  using Params = device::Paged<device::Sm80ForwardParams>;
  using Base = SpecOf<Bf16, 24, 40, false, false>;
  Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 90, .seqlen_k = 150};
  c.seed = 500 + sample_seed() % 50;
  expect<WithShard<Base, Params, device::Causal<Align::top_left>>, ConfigOf<48, 2>>(c, {CausalMask{}});
  expect<WithShard<Base, Params, device::BlockSparse<32, 64, false>>, ConfigOf<32, 2>>(
      c, {BlockSparseMask{32, 64, false}});
}

}  // namespace
}  // namespace flashjit::testing_support
