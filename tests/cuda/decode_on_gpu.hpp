// The GPU decode's own code on the host, thread by thread (emulator/emulator.hpp): its launches against the
// float64 oracle.
#pragma once

#include <gtest/gtest.h>

#include "codegen/families/search_space.hpp"
#include "cuda/decode_quantised.cuh"
#include "runtime/operation.hpp"
#include "shared/sliding_window.h"
#include "tests/cuda/formula_specs.hpp"
#include "tests/cuda/kv_specs.hpp"
#include "tests/cuda/offset_specs.hpp"
#include "tests/numerics/specs.hpp"
#include "tests/support/planned_kernel.hpp"
#include "tests/support/workload.hpp"

namespace flashjit::testing_support {

using device::Align;
using device::i64;

// Spec and Config of a kernel, like those that render() writes.
template <class Element_, int head_dim_, int head_dim_v_, bool paged_, bool varlen_, class... Masks>
struct SpecOf : device::DecodeCudaSpec {
  using Element = Element_;
  using Mask = device::Intersect<device::Bounds, Masks...>;
  static constexpr int head_dim = head_dim_, head_dim_v = head_dim_v_;
  static constexpr bool paged = paged_, varlen = varlen_;
};
template <class Spec>
struct WithFloatOutput : Spec {
  using o_dtype = float;
};
template <class Spec>
struct Invariant : Spec {
  static constexpr bool batch_invariant = true;
};
template <class Spec>
struct ValuesInKeys : Spec {
  static constexpr bool v_in_k = true;
};
template <int block_m_, int block_n_, int num_stages_, int num_warps_>
struct ConfigOf {
  static constexpr int block_m = block_m_, block_n = block_n_, num_stages = num_stages_,
                       num_warps = num_warps_;
};

using Bf16 = device::bf16;
using Fp16 = device::fp16;
using enum CausalAlign;
using BottomRight = device::Causal<Align::bottom_right>;
using Window = device::SlidingWindow<Align::bottom_right>;
using WindowWithSinks = device::SlidingWindowWithSinks<Align::bottom_right>;

template <class Step>
void run_grid(const Grid& grid, int threads, int shared_bytes, const Step& step) {
  gridDim.x = grid.x;
  gridDim.y = grid.y;
  constexpr int not_a_number = 0xff;  // the value of every byte
  for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
      emulator::Block::run(threads, shared_bytes, not_a_number, step);
}

class DecodeOnGpu : public testing::Test {
 protected:
  // Only lends its memory.
  TestDevice host{{Device::Kind::cpu, 0}, "x86-64-v3"};
  std::size_t steps = 0;  // of the last launch

  template <class Spec>
  static Case with_spec(Case given, std::vector<Mask> masks) {
    constexpr bool bf16 = std::is_same_v<typename Spec::Element, device::bf16>;
    const auto o_dtype = std::is_void_v<typename Spec::o_dtype> ? std::nullopt : std::optional(DType::fp32);
    given.spec = decode_spec(bf16 ? DType::bf16 : DType::fp16, Spec::head_dim, std::move(masks),
                             {.head_dim_v = Spec::head_dim_v,
                              .lse = Spec::lse,
                              .varlen = Spec::varlen,
                              .o_dtype = o_dtype,
                              .paged = Spec::paged,
                              .v_in_k = Spec::v_in_k,
                              .batch_invariant = Spec::batch_invariant});
    given.spec = with_offsets<Spec>(with_formulas<Spec>(with_kv<Spec>(given.spec)));
    if (Spec::paged && given.page_size == 0) given.page_size = 16;
    return given;
  }
  template <class Spec, class Config>
  void expect(const Case& given, std::vector<Mask> masks, int multiprocessors = 5) {
    Workload workload(host, with_spec<Spec>(given, std::move(masks)));
    workload.reset();
    launch<Spec, Config>(workload.given(), workload.args(), multiprocessors);
    EXPECT_TRUE(workload.check()) << "block_m " << Config::block_m << ", block_n " << Config::block_n << ", "
                                  << Config::num_warps << " warps";
  }

  template <class Spec, class Config>
  void launch(const Case& given, AttentionArgs args, int multiprocessors) {
    const KernelConfig config{Config::block_m, Config::block_n, Config::num_stages, Config::num_warps};
    // sm_90a has another kernel for wide heads, with exceptions.
    const Target target =
        Target::parse(std::max(Spec::head_dim, Spec::head_dim_v) > 256 ? "sm_80" : "sm_90a");
    ASSERT_EQ(misfit(given.spec, target, config), "");
    const PlannedWithoutCode planned(given.spec, target, config, multiprocessors);
    const PlannedKernel& kernel = planned.kernel();
    const OperationRuntime& operation = runtime_of(Operation::decode);
    const auto bytes = static_cast<std::int64_t>(operation.workspace_bytes(kernel, given.shape()));
    // It may hold anything.
    std::vector<std::uint32_t> memory(static_cast<std::size_t>(bytes / 4 + 64), 0x7fc12345);
    const auto address = (reinterpret_cast<std::uintptr_t>(memory.data()) + 255) / 256 * 256;
    args.workspace = Tensor{.data = reinterpret_cast<void*>(address),
                            .dtype = DType::int32,
                            .device = {Device::Kind::cpu, 0},
                            .rank = 1,
                            .shape = {bytes / 4},
                            .strides = {1}};
    Launch launch;
    operation.plan(kernel, args, launch);
    if (launch.size() == 0) return;
    ASSERT_EQ(launch.size(), 2u);
    steps = launch[1].grid.x > 0 ? 2 : 1;
    using Own = std::conditional_t<std::is_void_v<typename Spec::kv_dtype>, device::CudaDecodeParams,
                                   device::Quantised<device::CudaDecodeParams>>;
    constexpr bool reads_formulas = requires(AttentionSpec spec) { Spec::add_to(spec); };
    using Params = std::conditional_t<reads_formulas, device::WithFormulas<Own>, Own>;
    const auto& p = params_for<ParamsInShard<Spec, Params>>(launch[0]);
    run_grid(launch[0].grid, Config::num_warps * 32, device::Decode<Spec, Config>::layout.end,
             [&] { device::decode<Spec, Config>(p); });
    if (steps == 1) return;  // blocks take whole tiles
    run_grid(launch[1].grid, device::decode_merge_threads, device::decode_merge_shared,
             [&] { device::decode_merge<Spec, Config>(p); });
  }
};

}  // namespace flashjit::testing_support
