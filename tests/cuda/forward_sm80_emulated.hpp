// Runs the forward of the sm_80 family on the host, thread by thread (emulator/emulator.hpp), and compares it
// with the float64 oracle.
#pragma once

#include "tests/cuda/emulator/emulator.hpp"
// The kernel's name for what the emulator calls dynamic_shared.
#define shared_memory dynamic_shared
#include "cuda/forward_sm80.cuh"
#include "cuda/forward_sm80_columns.cuh"
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
                                                 Config::block_n, Config::num_stages, Spec::dropout);
    run_grid(Grid{grid.x}, Config::num_warps * 32, shared_bytes,
             [&] { device::forward_sm80<Spec, Config>(p); });
  }
};

}  // namespace flashjit::testing_support
