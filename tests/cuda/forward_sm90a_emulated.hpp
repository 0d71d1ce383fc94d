// Runs the sm_90a forward's own code on the host, thread by thread (emulator/emulator.hpp), and compares it
// with the float64 oracle.
#pragma once

#include <numeric>

#include "codegen/families/search_space.hpp"
#include "cuda/forward_sm90a.cuh"
#include "cuda/forward_sm90a_gathered.cuh"
#include "cuda/forward_sm90a_latents.cuh"
#include "cuda/forward_sm90a_quantised.cuh"
#include "runtime/arguments/attention.hpp"
#include "runtime/cuda/tile_plan.hpp"
#include "runtime/step_params.hpp"
#include "tests/cuda/emulated_attention.hpp"
#include "tests/cuda/formula_specs.hpp"
#include "tests/cuda/kv_specs.hpp"
#include "tests/cuda/listed_specs.hpp"
#include "tests/cuda/offset_specs.hpp"
#include "tests/support/far_scores.hpp"
#include "tests/support/planned_kernel.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/random_tensor.hpp"

namespace flashjit::testing_support {

template <class Element, int head_dim, int head_dim_v, bool varlen_, class... Masks>
struct SpecOf : AttentionOf<device::ForwardSm90aSpec, Element, head_dim, head_dim_v, Masks...> {
  static constexpr bool varlen = varlen_;
};
template <class Spec>
struct WithPages : Spec {
  static constexpr bool paged = true;
};
template <class Spec>
struct WithGatheredKeys : Spec {
  static constexpr bool gathered = true;
  using Mask =
      device::Both<typename Spec::Mask, device::LateKeys<device::WithGathered<device::Sm90aForwardParams>>>;
};
template <int block_m_, int block_n_, bool q_in_registers_, bool pack_gqa_,
          device::TileOrder tile_order_ = device::TileOrder::heads>
struct ConfigOf {
  static constexpr int block_m = block_m_, block_n = block_n_, num_stages = 2, num_warps = block_m / 16 + 4;
  static constexpr bool q_in_registers = q_in_registers_, ping_pong = block_m > 64, pack_gqa = pack_gqa_;
  static constexpr device::TileOrder tile_order = tile_order_;
  static constexpr int given_registers = 0;
};

// Two warpgroups divide the columns of an output of more than 256.
template <int block_n_, int num_stages_, bool pack_gqa_,
          device::TileOrder tile_order_ = device::TileOrder::heads>
struct DividedConfigOf : ConfigOf<64, block_n_, false, pack_gqa_, tile_order_> {
  static constexpr int num_stages = num_stages_, num_warps = 12;
};

// And take turns at blocks of keys.
template <bool pack_gqa_, device::TileOrder tile_order_ = device::TileOrder::heads>
struct AlternatingConfigOf : DividedConfigOf<64, 2, pack_gqa_, tile_order_> {
  static constexpr bool ping_pong = true;
};

template <class Config>
struct WithQInRegisters : Config {
  static constexpr bool q_in_registers = true;
};

// A warpgroup more converts.
template <class Config>
struct ConvertingConfigOf : Config {
  static constexpr int num_warps = Config::num_warps + 4;
  static constexpr int given_registers = 40;
};

template <class Spec, class Config>
struct Emulated : Config {
  using Products = device::EmulatedProducts<Spec, Config>;
};

using FormulaParams = device::WithFormulas<device::Paged<device::Sm90aForwardParams>>;
using QuantisedFormulaParams =
    device::WithFormulas<device::Quantised<device::Paged<device::Sm90aForwardParams>>>;

// parts: of each tile's keys, with so many multiprocessors; 0: one, with few of them and no workspace.
// arrived: words of gathered keys' pieces.
template <class Spec, class Config>
void launch(const AttentionSpec& spec, const AttentionArgs& args, int garbage, int parts = 0,
            int multiprocessors = 200, const std::vector<device::u32>& arrived = {}) {
  if (parts == 0) multiprocessors = 5;
  const KernelConfig config{Config::block_m,
                            Config::block_n,
                            Config::num_stages,
                            Config::num_warps,
                            Config::q_in_registers,
                            Config::ping_pong,
                            static_cast<TileOrder>(Config::tile_order),
                            Config::pack_gqa};
  const Target target = Target::parse("sm_90a");
  ASSERT_EQ(misfit(spec, target, config), "");
  const CheckedArguments checked = check_arguments(spec, {Device::Kind::cpu, 0}, args);
  if (checked.empty) return;
  const PlannedWithoutCode planned(spec, target, config, multiprocessors);
  Launch launched;
  StepLaunch& step = add_step(planned.kernel(), launched, "flashjit_forward");
  device::Sm90aForwardParams& p = [&]() -> device::Sm90aForwardParams& {
    if constexpr (Spec::gathered) {
      auto& made = make_params<device::Sm90aForwardParams>(step, checked.params,
                                                           {.gathered = if_any(checked.gathered)});
      auto& gathered = static_cast<device::WithGathered<device::Sm90aForwardParams>&>(made).gathered;
      gathered = cuda::pad_gathered(config, *checked.gathered, made);
      if (!arrived.empty()) {
        gathered.arrived = arrived.data();
        gathered.piece_keys = gathered.keys / static_cast<int>(arrived.size());
      }
      return made;
    } else {
      // Params of all other kernels here have room for pages.
      auto& paged = step_params::with_scales<device::Paged<device::Sm90aForwardParams>>(
          step, checked.params,
          {.formulas = if_any(checked.formulas),
           .kv_scales = if_any(checked.kv_scales),
           .offsets = if_any(checked.offsets)});
      paged.pages = checked.pages;
      if (spec.paged) {
        paged.box_keys = std::gcd(checked.pages.page_size, config.block_n);
        paged.copying_warps = std::min(4, config.block_n / paged.box_keys);
      }
      return paged;
    }
  }();
  std::vector<float> workspace(
      cuda::PartsWorkspace(spec, config, multiprocessors, checked.shape).bytes / 4 + 1,
      std::numeric_limits<float>::quiet_NaN());
  const Grid grid =
      cuda::plan_tiles(spec, config, multiprocessors, parts > 0 ? workspace.data() : nullptr, p, parts, [&] {
        if constexpr (Spec::gathered)
          return device::rows_without(device::gathered_keys(p));
        else
          return 0;
      }());
  ASSERT_EQ(p.parts, std::max(parts, 1));
  const cuda::TensorMapShapes shapes = cuda::tensor_map_shapes(spec, config, p);
  device::GatheredMaps maps;
  const auto describe = [](const device::TensorView& tensor, const cuda::TensorMapShape& shape,
                           device::TensorMap& map, unsigned element_bytes) {
    const emulator::TensorMap described{tensor.data, &shape, element_bytes};
    std::memcpy(&map, &described, sizeof described);
    EXPECT_EQ(shape.box[0] * shape.box[1] * element_bytes % 128, 0u);  // where the next box begins
    EXPECT_TRUE(element_bytes != 2 || shape.box[0] == 64);
    for (const unsigned size : shape.box) EXPECT_LE(size, 256u);
    for (const auto stride : shape.strides) EXPECT_EQ(stride % 16, 0u);
  };
  describe(p.q, shapes.q, maps.q, 2);
  const auto bytes = static_cast<unsigned>(spec.kv_dtype ? cuda::stored_element_bytes(spec) : 2);
  describe(p.k, shapes.k, maps.k, bytes);
  describe(p.v, shapes.v, maps.v, bytes);
  cuda::GatheredMapShapes gathered;
  if constexpr (Spec::gathered) {
    gathered = cuda::gathered_map_shapes(spec, config, p);
    describe(device::gathered_keys(p).k, gathered.k, maps.k_gathered, 2);
    describe(device::gathered_keys(p).v, gathered.v, maps.v_gathered, 2);
  }
  constexpr int shared_bytes = device::Sm90aShared<Spec, Config>::layout.end;
  run_grid(
      grid, Config::num_warps * 32, shared_bytes,
      [&] { device::forward_sm90a<Spec, Emulated<Spec, Config>>(p, maps); }, garbage);
  if (p.parts == 1) return;
  run_grid(
      cuda::merge_grid(spec, config, multiprocessors, p), device::forward_merge_threads,
      device::lengths_merge_shared, [&] { device::forward_sm90a_merge<Spec, Emulated<Spec, Config>>(p); },
      garbage);
}

class ForwardSm90a : public EmulatorTest {
 protected:
  template <class Spec>
  static Case with_spec(Case given, std::vector<Mask> masks) {
    given.spec = spec_of<Spec>(Operation::forward, std::move(masks));
    given.spec = with_offsets<Spec>(with_formulas<Spec>(with_kv<Spec>(given.spec)));
    return given;
  }
  template <class Spec, class Config>
  void expect(const Case& given, std::vector<Mask> masks, int parts = 0, int multiprocessors = 200) {
    if (!has_turn()) return;
    Workload workload(host, with_spec<Spec>(given, std::move(masks)));
    workload.reset();
    launch<Spec, Config>(workload.given().spec, workload.args(), not_a_number, parts, multiprocessors);
    EXPECT_TRUE(workload.check());
  }
  // With keys in two pairs of tensors, of which the first `gathered` ones come in pieces, against attention
  // of keys in one pair.
  template <class Spec, class Config>
  void expect_gathered(Case c, std::vector<Mask> masks, int gathered, int early_rows, int late_keys,
                       const std::vector<device::u32>& arrived = {}, int parts = 0,
                       bool waits_forever = false) {
    if (!has_turn()) return;
    Case split = with_spec<Spec>(c, masks);
    split.spec.gathered = true;
    masks.emplace_back(
        FormulaMask{"row >= " + std::to_string(early_rows) + " || key >= " + std::to_string(late_keys)});
    Workload workload(host, with_spec<Spec>(c, std::move(masks)));
    workload.reset();
    AttentionArgs args = workload.args();
    for (const auto& [own, others] : {std::pair{&AttentionArgs::k, &AttentionArgs::k_gathered},
                                      std::pair{&AttentionArgs::v, &AttentionArgs::v_gathered}}) {
      args.*others = args.*own;
      (args.*others)->shape[1] = gathered;
      Tensor& after = *(args.*own);
      after.data = static_cast<std::byte*>(after.data) + gathered * after.strides[1] * 2;
      after.shape[1] -= gathered;
    }
    args.early_rows = early_rows, args.late_keys = late_keys;
    const auto launch_it = [&] {
      launch<Spec, Config>(split.spec.validated(), args, not_a_number, parts, 200, arrived);
    };
    if (waits_forever) {
      EXPECT_THROW(launch_it(), std::runtime_error);
      return;
    }
    launch_it();
    EXPECT_TRUE(workload.check());
  }
  // With lists of the spec's own masks, against attention of the masks alone.
  template <class Spec, class Config>
  void expect_listed(Case given, int parts = 0) {
    if (!has_turn()) return;
    Workload workload(host, with_spec<Spec>(given, {}));
    expect_attention_of_masks(workload, [&](const AttentionSpec& spec, const AttentionArgs& args) {
      launch<Spec, Config>(spec, args, not_a_number, parts);
    });
  }

  // Numbers of query heads for each key/value head: one, powers
  // of two, divisors of no tile, more than a tile has rows.
  template <class Spec, class Config>
  void expect_gqa(const std::vector<Mask>& masks, std::initializer_list<int> seqlens_q, int seqlen_k) {
    std::uint64_t seed = 0;
    for (const auto& [heads_per_kv_head, heads_kv] :
         {std::pair{1, 3}, {2, 2}, {3, 2}, {4, 2}, {5, 1}, {6, 1}, {7, 2}, {8, 1}, {16, 1}, {71, 1}})
      for (const int rows : seqlens_q) {
        Case c{.batch = 2,
               .heads_q = heads_per_kv_head * heads_kv,
               .heads_kv = heads_kv,
               .seqlen_q = rows,
               .seqlen_k = seqlen_k,
               .layout = static_cast<MemoryLayout>(seed % 5),
               .layout_kv = static_cast<MemoryLayout>(seed / 2 % 5),
               .seed = ++seed};
        if (Spec::varlen) c.lengths_q = {rows, 0, rows / 2 + 1}, c.lengths_k = {seqlen_k / 3, 5, seqlen_k};
        expect<Spec, Config>(c, masks);
      }
  }
};

using device::TileOrder::sections;
using device::TileOrder::waves;
}  // namespace flashjit::testing_support
