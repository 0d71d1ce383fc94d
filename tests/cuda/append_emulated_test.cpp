// The GPU append's own code on the host, thread by thread (emulator/emulator.hpp), against the float64
// oracle.
#include "codegen/families/search_space.hpp"
#include "cuda/append_quantised.cuh"
#include "runtime/operation.hpp"
#include "shared/last_keys.h"
#include "tests/cuda/emulated.hpp"
#include "tests/support/append_problem.hpp"
#include "tests/support/planned_kernel.hpp"

namespace flashjit::testing_support {
namespace {

using DeviceStyle = device::RotaryStyle;

template <class Element, int head_dim, int head_dim_v, bool varlen_ = false>
struct SpecOf : HeadsOf<device::AppendCudaSpec, Element, head_dim, head_dim_v> {
  static constexpr bool varlen = varlen_;
};
template <class Spec, RotaryStyle style, int dim, bool q, class Table = void>
struct Rotating : Spec {
  static constexpr DeviceStyle rotary =
      style == RotaryStyle::half ? DeviceStyle::half : DeviceStyle::interleaved;
  static constexpr int rotary_dim = dim;
  static constexpr bool rotates_q = q;
  using RotaryTable = Table;
};
template <class Spec, int first>
struct From : Spec {
  static constexpr int rotary_first = first;
};
template <class Spec, class KvElement, KvScale scale>
struct Storing : Spec {
  using kv_dtype = KvElement;
  static constexpr device::KvScale kv_scale = scale == KvScale::tensor ? device::KvScale::tensor
                                              : scale == KvScale::head ? device::KvScale::head
                                                                       : device::KvScale::token_head;
};
template <class Spec, class Config, bool quantises>
struct KernelOf {
  using type = device::Append<Spec, Config>;
};
template <class Spec, class Config>
struct KernelOf<Spec, Config, true> {
  using type = device::AppendQuantised<Spec, Config>;
};

class AppendOnGpu : public EmulatorTest {
 protected:
  template <class Spec, int num_warps>
  void expect(AppendCase c) {
    c.dtype = dtype_of<typename Spec::Element>;
    c.head_dim = Spec::head_dim;
    c.head_dim_v = Spec::head_dim_v;
    c.packed = Spec::varlen;
    c.v_in_k = Spec::v_in_k;
    if constexpr (Spec::rotary != DeviceStyle::none) {
      c.rotary =
          Rotary{.style = Spec::rotary == DeviceStyle::half ? RotaryStyle::half : RotaryStyle::interleaved,
                 .first = Spec::rotary_first,
                 .dim = Spec::rotary_dim,
                 .q = Spec::rotates_q};
      if constexpr (!std::is_void_v<typename Spec::RotaryTable>)
        c.rotary->tables = dtype_of<typename Spec::RotaryTable>;
    }
    constexpr bool quantises = requires { typename Spec::kv_dtype; };
    if constexpr (quantises) {
      c.kv_dtype = dtype_of<typename Spec::kv_dtype>;
      if (!device::is_ds_mla<typename Spec::kv_dtype>) c.kv_scale = static_cast<KvScale>(Spec::kv_scale);
    }
    AppendProblem problem(host, c);
    const KernelConfig config{.num_warps = num_warps};
    const Target target = Target::parse("sm_90a");
    ASSERT_EQ(misfit(problem.spec(), target, config), "");
    Launch launch;
    runtime_of(Operation::append_kv)
        .plan(PlannedWithoutCode(problem.spec(), target, config, 5).kernel(), problem.args(), launch);
    ASSERT_EQ(launch.size(), 1u);
    using Kernel = typename KernelOf<Spec, WarpsOf<num_warps>, quantises>::type;
    const auto& params = const_cast<StepLaunch&>(launch[0]).params_as<typename Kernel::Params>();
    run_grid(launch[0].grid, num_warps * 32, 0, [&] { Kernel::run(params); });
    EXPECT_TRUE(problem.check()) << num_warps << " warps";
    EXPECT_GT(problem.written(), 0) << c.str();
    if (c.by_slots || c.in_place || quantises) return;

    // The same rows as the last keys of their batch entries, as in a decode.
    AppendProblem last(host, c);
    Launch of_last;
    runtime_of(Operation::append_kv)
        .plan(PlannedWithoutCode(last.spec(), target, config, 5).kernel(), last.args(), of_last);
    using LastKeys = device::Append<Spec, WarpsOf<num_warps>, device::LastKeys<device::CudaAppendParams>>;
    const auto& q = const_cast<StepLaunch&>(of_last[0]).params_as<typename Kernel::Params>();
    typename LastKeys::Params p{};
    static_cast<device::CudaAppendParams&>(p) = q;
    if constexpr (Kernel::rotates) p.rotary = q.rotary;
    std::vector<int> lengths;
    for (int b = 0; b < p.batch; ++b)
      lengths.push_back(p.append_positions[b] +
                        (Spec::varlen ? p.cu_seqlens[b + 1] - p.cu_seqlens[b] : c.seqlen));
    p.append_positions = nullptr;
    p.seqlens_k = lengths.data();
    p.seqlen_k = 1 << 30;
    run_grid(of_last[0].grid, num_warps * 32, 0, [&] { LastKeys::run(p); });
    EXPECT_TRUE(last.check()) << "last keys";
  }
};

// Several tokens of a block, one token, parts of a token; caches of every kind.
TEST_F(AppendOnGpu, PlacesAndBlocks) {
  for (const int page_size : {0, 1, 16, 48})
    for (const bool by_slots : {false, true})
      for (const int heads : {1, 5, 17}) {
        const AppendCase c{.batch = 3,
                           .seqlen = 7,
                           .rows = 50,
                           .heads_kv = heads,
                           .by_slots = by_slots,
                           .page_size = page_size};
        expect<SpecOf<Bf16, 24, 40>, 2>(c);
        expect<SpecOf<Fp16, 72, 16, true>, 4>(c);
      }
}

// Rotary dimensions whose halves take 16, 8, 4 and 2 bytes at a time.
TEST_F(AppendOnGpu, Rotary) {
  using enum RotaryStyle;
  const AppendCase c{.seqlen = 6};
  expect<Rotating<SpecOf<Bf16, 128, 128>, half, 0, true>, 4>(c);
  expect<Rotating<SpecOf<Bf16, 80, 80>, half, 16, false>, 4>(c);
  expect<Rotating<SpecOf<Fp16, 64, 64>, half, 24, true>, 2>(c);
  expect<Rotating<SpecOf<Bf16, 64, 64>, half, 20, true>, 2>(c);
  expect<Rotating<SpecOf<Bf16, 24, 24>, half, 6, true>, 2>(c);
  expect<Rotating<SpecOf<float, 40, 40>, half, 0, true>, 8>(c);
  expect<Rotating<SpecOf<Bf16, 128, 64>, interleaved, 0, true>, 4>(c);
  expect<Rotating<SpecOf<Fp16, 64, 64>, interleaved, 20, true>, 2>(c);
  expect<Rotating<SpecOf<Bf16, 24, 24>, interleaved, 6, false>, 2>(c);
  expect<Rotating<SpecOf<float, 24, 24>, interleaved, 8, true>, 2>(c);
}

// The rotated columns are the last ones, or in the middle. Latent caches have no V.
TEST_F(AppendOnGpu, RotaryFromAColumnOnAndLatentCaches) {
  using enum RotaryStyle;
  const AppendCase c{.seqlen = 6};
  expect<From<Rotating<SpecOf<Bf16, 96, 96>, half, 0, true>, 32>, 4>(c);
  expect<From<Rotating<SpecOf<Bf16, 96, 96>, half, 20, true>, 40>, 4>(c);
  expect<From<Rotating<SpecOf<float, 40, 24>, half, 16, true, float>, 8>, 2>(c);
  expect<From<Rotating<SpecOf<Bf16, 96, 96>, interleaved, 20, true, Bf16>, 40>, 4>(c);
  expect<From<Rotating<SpecOf<Fp16, 64, 64>, interleaved, 0, false>, 8>, 2>(c);
  const AppendCase latent{.seqlen = 4, .heads_kv = 1, .heads_q = 5, .page_size = 64, .in_place = true};
  expect<ValuesInKeys<From<Rotating<SpecOf<Bf16, 576, 512>, half, 0, true>, 512>>, 4>(latent);
  expect<ValuesInKeys<From<Rotating<SpecOf<Fp16, 576, 512, true>, interleaved, 0, true>, 512>>, 4>(latent);
  expect<ValuesInKeys<SpecOf<float, 40, 16>>, 2>(c);
}

TEST_F(AppendOnGpu, RotaryPositionsAndTables) {
  using enum RotaryStyle;
  for (const bool by_slots : {false, true}) {
    const AppendCase c{.by_slots = by_slots,
                       .page_size = 16,
                       .in_place = by_slots,
                       .own_positions = true,
                       .longest_position = 0x7fffffff};
    expect<Rotating<SpecOf<float, 32, 32>, half, 0, true>, 4>(c);
    expect<Rotating<SpecOf<Bf16, 64, 64, true>, interleaved, 0, true>, 4>(c);
    expect<Rotating<SpecOf<Bf16, 64, 64>, half, 0, true, float>, 4>(c);
    expect<Rotating<SpecOf<Bf16, 64, 64>, half, 40, true, Bf16>, 4>(c);
    expect<Rotating<SpecOf<Fp16, 64, 64>, interleaved, 20, true, Fp16>, 4>(c);
  }
}

TEST_F(AppendOnGpu, Layouts) {
  for (const MemoryLayout layout : {MemoryLayout::heads_first, MemoryLayout::batch_inside,
                                    MemoryLayout::padded, MemoryLayout::sliced_heads})
    for (const int page_size : {0, 16})
      expect<Rotating<SpecOf<Bf16, 64, 64>, RotaryStyle::half, 0, true>, 4>(
          {.page_size = page_size, .layout = layout});
}

// Rows of a part of a warp, of all of it, and of several items of its threads; pieces of 8, 4, 2 and 1 bytes.
TEST_F(AppendOnGpu, QuantisedCaches) {
  using enum RotaryStyle;
  using device::fp8_e4m3, device::fp8_e5m2, device::int8;
  constexpr auto tensor = KvScale::tensor, head = KvScale::head, token_head = KvScale::token_head;
  const AppendCase c{.seqlen = 6, .heads_kv = 3, .heads_q = 5};
  expect<Storing<SpecOf<Bf16, 64, 48>, int8, tensor>, 2>(c);
  expect<Storing<SpecOf<Fp16, 64, 48>, fp8_e5m2, head>, 4>(c);
  expect<Storing<SpecOf<Bf16, 64, 48>, fp8_e4m3, token_head>, 4>(c);
  expect<Storing<SpecOf<Bf16, 16, 80, true>, int8, token_head>, 2>(c);
  expect<Storing<Rotating<SpecOf<Bf16, 128, 128>, half, 0, true>, fp8_e4m3, token_head>, 4>(c);
  expect<Storing<Rotating<SpecOf<Fp16, 64, 64>, half, 24, true>, fp8_e5m2, token_head>, 2>(c);
  expect<Storing<Rotating<SpecOf<Bf16, 64, 64, true>, half, 20, true, float>, int8, head>, 2>(c);
  expect<Storing<Rotating<SpecOf<Bf16, 256, 16>, half, 6, true>, int8, token_head>, 8>(c);
  expect<Storing<Rotating<SpecOf<Bf16, 96, 64>, interleaved, 20, true, Bf16>, fp8_e4m3, tensor>, 4>(c);
  expect<Storing<Rotating<SpecOf<Fp16, 64, 64>, interleaved, 0, true>, int8, token_head>, 4>(c);
  expect<Storing<ValuesInKeys<From<Rotating<SpecOf<Bf16, 96, 64>, half, 0, true>, 64>>, fp8_e4m3, tensor>, 4>(
      c);
  expect<Storing<ValuesInKeys<From<Rotating<SpecOf<Bf16, 576, 512>, interleaved, 0, true>, 512>>, fp8_e4m3,
                 token_head>,
         4>(c);
  // Several tokens of a block, whose items are no multiple of a row's threads.
  expect<Storing<Rotating<SpecOf<Bf16, 96, 96>, interleaved, 0, true>, int8, token_head>, 8>(c);
}

TEST_F(AppendOnGpu, QuantisedHardRowsAndPlaces) {
  using device::fp8_e4m3, device::fp8_e5m2, device::int8;
  const AppendCase c{
      .batch = 3, .seqlen = 16, .heads_kv = 3, .by_slots = true, .page_size = 16, .hard_rows = true};
  expect<Storing<SpecOf<Bf16, 64, 64>, int8, KvScale::token_head>, 4>(c);
  expect<Storing<SpecOf<Bf16, 64, 64>, fp8_e4m3, KvScale::token_head>, 4>(c);
  expect<Storing<SpecOf<Bf16, 64, 64>, fp8_e5m2, KvScale::token_head>, 4>(c);
  expect<Storing<SpecOf<Bf16, 64, 64>, int8, KvScale::head>, 4>(c);
  expect<Storing<SpecOf<Bf16, 64, 64>, fp8_e4m3, KvScale::head>, 4>(c);
}

// A scale of each 128 columns; rotated columns that are stored in 8 bits, too.
TEST_F(AppendOnGpu, KeysOfDsMla) {
  using enum RotaryStyle;
  using Latent = ValuesInKeys<SpecOf<Bf16, 576, 512>>;
  const auto storing = []<class Spec>(Spec) { return Storing<Spec, device::fp8_ds_mla, KvScale::tensor>{}; };
  AppendCase c{.seqlen = 4, .heads_kv = 1, .heads_q = 5, .page_size = 64, .in_place = true};
  expect<decltype(storing(From<Rotating<Latent, half, 0, true>, 512>{})), 4>(c);
  expect<decltype(storing(From<Rotating<Latent, interleaved, 40, true>, 104>{})), 2>(c);
  expect<decltype(storing(Rotating<Latent, half, 64, true, float>{})), 8>(c);
  c.in_place = false;
  c.hard_rows = true;
  c.heads_kv = 2;
  expect<decltype(storing(Latent{})), 4>(c);
}

// The arithmetic of GPUs without instructions for 8-bit floats: every pair of neighbours of them, and what
// lies around the middle between them.
TEST(RoundToFp8, IsToNearestEvenAndSaturates) {
  const auto expect_same = [](float x) {
    for (const float y : {x, -x}) {
      ASSERT_EQ(device::round_to_fp8<device::fp8_e4m3>(y) | (std::isnan(y) ? 0x80 : 0),
                verify::e4m3.bits(y) | (std::isnan(y) ? 0x80 : 0))
          << y;
      ASSERT_EQ(device::round_to_fp8<device::fp8_e5m2>(y) | (std::isnan(y) ? 0x80 : 0),
                verify::e5m2.bits(y) | (std::isnan(y) ? 0x80 : 0))
          << y;
    }
  };
  for (const verify::Fp8& type : {verify::e4m3, verify::e5m2})
    for (int bits = 0; bits < 0x7f; ++bits) {
      const float a = type.value(static_cast<std::uint8_t>(bits)),
                  b = type.value(static_cast<std::uint8_t>(bits + 1)), middle = (a + b) / 2;
      for (const float x :
           {a, std::nextafter(a, b), middle, std::nextafter(middle, a), std::nextafter(middle, b)})
        expect_same(x);
    }
  for (const float x : {1e-45f, 1e-30f, 449.f, 464.f, 1e4f, 57345.f, 61440.f, 1e30f, INFINITY, NAN})
    expect_same(x);
}

TEST(Divisor, IsRightWhileNumberTimesSizeFits64Bits) {
  for (const device::u64 size : {1u, 2u, 3u, 7u, 16u, 48u, 100u, 256u, 8191u, 1u << 20, 0x7fffffffu}) {
    const device::Divisor divisor{size, size > 1 ? ~device::u64{0} / size + 1 : 0};
    const device::u64 largest = ~device::u64{0} / size;
    for (const device::u64 near :
         {device::u64{0}, size, 7 * size, device::u64{1} << 31, largest / size * size})
      for (device::u64 n = near < 3 ? 0 : near - 3; n <= std::min(near + 3, largest); ++n)
        ASSERT_EQ(divisor.quotient(n), n / size) << n << " / " << size;
  }
}

}  // namespace
}  // namespace flashjit::testing_support
