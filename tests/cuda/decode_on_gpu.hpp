// The GPU decode's own code on the host, thread by thread (emulator/emulator.hpp): its launches against the
// float64 oracle.
#pragma once

#include "codegen/families/decode_kernels.hpp"
#include "codegen/families/search_space.hpp"
#include "cuda/decode_latents.cuh"
#include "runtime/operation.hpp"
#include "tests/cuda/emulated_attention.hpp"
#include "tests/cuda/formula_specs.hpp"
#include "tests/cuda/kv_specs.hpp"
#include "tests/cuda/offset_specs.hpp"
#include "tests/support/planned_kernel.hpp"
#include "tests/support/positions.hpp"

namespace flashjit::testing_support {

template <class Element, int head_dim, int head_dim_v, bool paged_, bool varlen_, class... Masks>
struct SpecOf : AttentionOf<device::DecodeCudaSpec, Element, head_dim, head_dim_v, Masks...> {
  static constexpr bool paged = paged_, varlen = varlen_;
};
template <int block_m, int block_n, int num_stages, int num_warps>
using ConfigOf = TilesOf<block_m, block_n, num_stages, num_warps>;

class DecodeOnGpu : public EmulatorTest {
 protected:
  std::size_t steps = 0;  // of the last launch

  template <class Spec>
  static Case with_spec(Case given, std::vector<Mask> masks) {
    given.spec = spec_of<Spec>(Operation::decode, std::move(masks));
    given.spec = with_offsets<Spec>(with_formulas<Spec>(with_kv<Spec>(given.spec)));
    if (Spec::paged && given.page_size == 0) given.page_size = 16;
    return given;
  }
  template <class Spec, class Config>
  void expect(const Case& given, std::vector<Mask> masks, int multiprocessors = 5) {
    if (has_turn()) expect_always<Spec, Config>(given, std::move(masks), multiprocessors);
  }
  template <class Spec, class Config>
  void expect_always(const Case& given, std::vector<Mask> masks, int multiprocessors) {
    Workload workload(host, with_spec<Spec>(given, std::move(masks)));
    workload.reset();
    launch<Spec, Config>(workload.given(), workload.args(), multiprocessors);
    EXPECT_TRUE(workload.check()) << "block_m " << Config::block_m << ", block_n " << Config::block_n << ", "
                                  << Config::num_warps << " warps";
  }

  template <class Spec, class Config>
  void launch(const Case& given, AttentionArgs args, int multiprocessors) {
    const KernelConfig config{Config::block_m, Config::block_n, Config::num_stages, Config::num_warps};
    // sm_90a has other kernels for wide heads, with exceptions.
    constexpr bool keys_as_rows = Config::block_n > 32;
    const Target target =
        Target::parse(std::max(Spec::head_dim, Spec::head_dim_v) > 256 && !keys_as_rows ? "sm_80" : "sm_90a");
    ASSERT_EQ(misfit(given.spec, target, config), "");
    const PlannedWithoutCode planned(given.spec, target, config, multiprocessors);
    const PlannedKernel& kernel = planned.kernel();
    const OperationRuntime& operation = runtime_of(Operation::decode);
    DirtyWorkspace workspace(operation.workspace_bytes(kernel, given.shape()));
    args.workspace = workspace.view();
    Launch launch;
    operation.plan(kernel, args, launch);
    if (launch.size() == 0) return;
    ASSERT_EQ(launch.size(), 2u);
    steps = launch[1].grid.x > 0 ? 2 : 1;
    using Own = std::conditional_t<device::is_quantised<typename Spec::kv_dtype>,
                                   device::Quantised<device::CudaDecodeParams>, device::CudaDecodeParams>;
    constexpr bool reads_formulas = requires(AttentionSpec spec) { Spec::add_to(spec); };
    using Params = std::conditional_t<reads_formulas, device::WithFormulas<Own>, Own>;
    const auto& p = params_for<ParamsInShard<Spec, Params>>(launch[0]);
    run_grid(launch[0].grid, Config::num_warps * 32, cuda_decode_layout(given.spec, config).end, [&] {
      if constexpr (keys_as_rows)
        device::decode_latents<Spec, Config>(p);
      else
        device::decode<Spec, Config>(p);
    });
    if (steps == 1) return;  // blocks take whole tiles
    run_grid(launch[1].grid, device::decode_merge_threads, device::decode_merge_shared, [&] {
      if constexpr (keys_as_rows)
        device::decode_latents_merge<Spec, Config>(p);
      else
        device::decode_merge<Spec, Config>(p);
    });
  }
};

// A row alone, and among other rows and sequences, on other grids, in other tiles, by other numbers of groups
// of warps: where a block has all parts of its tile, and where the second kernel merges them. Its bits are
// the same.
class DecodeInvariant : public DecodeOnGpu {
 protected:
  // window: keys before a row.
  template <class Masked, class... Configs>
  void expect_same(const std::vector<Mask>& masks, std::optional<int> window = {}) {
    using Spec = Invariant<WithFloatOutput<Masked>>;
    // Some lanes have two parts.
    constexpr int keys = device::fixed_part_keys * (device::decode_lanes(Spec::head_dim_v) + 1) + 101;
    std::vector<std::byte> expected;
    const auto compare = [&]<class Config>(Config, Case given, int multiprocessors) {
      if (!expected.empty() && !has_turn()) return;
      given.heads_q = 6;
      given.heads_kv = 1;
      given.seqlen_k = keys + 100;
      Workload workload(host, with_spec<Spec>(given, masks));
      std::vector<std::uint64_t> names;
      int entry = 0;
      for (int b = 0; b < given.batch; ++b) {
        const bool it = given.lengths_k[static_cast<std::size_t>(b)] >= keys;
        if (it) entry = b;
        names.push_back(it ? 1000 : static_cast<std::uint64_t>(b));
      }
      fill_by_position(workload, names);
      const int row = keys - 1 - (given.lengths_k[static_cast<std::size_t>(entry)] - given.seqlen_q);
      AttentionArgs args = workload.args();
      if (window) args.window_left = *window, args.window_right = 0;
      workload.reset();
      launch<Spec, Config>(workload.given(), args, multiprocessors);
      ASSERT_TRUE(workload.fetch());
      const std::vector<std::byte> bits = bits_of_row(workload, entry, row);
      if (expected.empty()) expected = bits;
      EXPECT_EQ(bits, expected) << given.str() << " on " << multiprocessors << ", block_m " << Config::block_m
                                << ", " << Config::num_warps << " warps";
    };
    const auto compare_by = [&](auto config) {
      compare(config, {.batch = 1, .seqlen_q = 1, .lengths_k = {keys}, .page_size = 16}, 1);
      compare(config, {.batch = 3, .seqlen_q = 1, .lengths_k = {5, keys, 0}, .page_size = 1}, 3);
      for (const int later : {0, 1})
        compare(config, {.batch = 2, .seqlen_q = 9, .lengths_k = {keys + later * 8, 100}, .page_size = 48},
                later ? 1 : 3);
    };
    (compare_by(Configs{}), ...);
  }
};

}  // namespace flashjit::testing_support
