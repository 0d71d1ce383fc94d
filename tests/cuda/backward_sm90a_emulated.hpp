// The sm_90a backward's own code on the host, thread by thread (emulator/emulator.hpp), against the float64
// oracle.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <tuple>

#include "codegen/families/backward_kernels.hpp"
#include "codegen/formulas/formula_traits.hpp"
#include "cuda/backward_sm90a.cuh"
#include "cuda/backward_sm90a_dq.cuh"
#include "cuda/backward_sm90a_wide.cuh"
#include "cuda/backward_sm90a_wide_dq.cuh"
#include "shared/backward_cpu_params.h"
#include "tests/cuda/emulated_backward.hpp"

namespace flashjit::testing_support {

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
using Wide = TilesOf<64, 64, 1, 12>;
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
template <class Spec>
constexpr bool is_wide = device::backward_is_wide(Spec::head_dim, Spec::head_dim_v);
template <class Spec, class Config>
struct Emulated : Config {
  using Products = device::EmulatedBackwardProducts<Spec, Config, false>;
};
template <class Spec, class Config>
  requires(is_wide<Spec>)
struct Emulated<Spec, Config> : Config {
  using Products = device::EmulatedWideProducts<Spec>;
};
template <class Spec, class Config>
  requires(!is_wide<Spec> && separates_dq<Spec, Config>())
struct Emulated<Spec, Config> : Config {
  using Products = device::EmulatedBackwardProducts<Spec, Config, true>;
  using DqProducts = device::EmulatedDqProducts<Spec>;
};

struct Sm90aKernels {
  template <class Spec, class Config>
  static void launch(const Case& given, AttentionArgs args) {
    using device::BackwardSums;
    constexpr bool divides_sums = device::backward_divides_sums(Spec::head_dim, Spec::head_dim_v);
    constexpr bool wide = is_wide<Spec>, separate_dq = wide || separates_dq<Spec, Config>();
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
    const auto main_step = [&] {
      if constexpr (!wide) device::backward_sm90a<Spec, Emulated<Spec, Config>>(p, maps);
    };
    constexpr int threads = Config::num_warps * 32;
    if constexpr (wide) {
      using device::WideSums;
      using Kernels = Emulated<Spec, Config>;
      const auto bytes = [](WideSums sums) {
        return device::Sm90aWideLayout(sums, Spec::head_dim, Spec::head_dim_v, Spec::dropout,
                                       device::ScoreGradient<typename Spec::Score>::changes)
            .end;
      };
      run_grid(2 * places, threads, std::max(bytes(WideSums::dk), bytes(WideSums::dv)),
               [&] { device::backward_sm90a_wide<Spec, Kernels>(p, maps); });
      run_grid(i64{p.batch} * p.num_heads_q * device::ceil_div(p.seqlen_q, device::Sm90aWideLayout::own),
               threads, bytes(WideSums::dq), [&] { device::backward_dq_sm90a_wide<Spec, Kernels>(p, maps); });
    } else if constexpr (divides_sums) {
      run_grid(2 * places, threads,
               std::max(shared_memory(Config::num_stages, BackwardSums::dk),
                        shared_memory(device::backward_dv_stages, BackwardSums::dv)),
               main_step);
    } else if (places > 0) {
      // A persistent grid of few blocks. The first one takes all turns.
      run_grid(std::min<i64>(places, 2), threads, shared_memory(Config::num_stages, BackwardSums::both),
               main_step);
    }
    if constexpr (separate_dq && !wide)
      run_grid(i64{p.batch} * p.num_heads_q * device::ceil_div(p.seqlen_q, device::Sm90aDqLayout::rows),
               device::Sm90aDqLayout::threads,
               device::Sm90aDqLayout(Spec::head_dim, Spec::head_dim_v, Spec::dropout).end,
               [&] { device::backward_dq_sm90a<Spec, Emulated<Spec, Config>>(p, maps); });
    else if constexpr (!wide || (Spec::Sinks::exist && !Spec::deterministic))
      run_grid((divides_sums && !wide ? row_units : 0) + (Spec::Sinks::exist ? p.num_heads_q : 0) +
                   (has_key_sums ? i64{p.batch} * p.num_heads_kv *
                                       device::ceil_div(p.seqlen_k, device::backward_row_unit)
                                 : 0),
               device::backward_threads, device::backward_sinks_shared,
               [&] { device::backward_finish<Spec, wide || !divides_sums>(p); });
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

}  // namespace flashjit::testing_support
