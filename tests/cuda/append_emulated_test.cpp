// The GPU append's own code on the host, thread by thread (emulator/emulator.hpp), against the float64
// oracle.
#include <gtest/gtest.h>

#include "codegen/search_space.hpp"
#include "cuda/append.cuh"
#include "runtime/operation.hpp"
#include "tests/support/append_problem.hpp"

namespace flashjit::testing_support {
namespace {

using Bf16 = device::bf16;
using Fp16 = device::fp16;
using DeviceStyle = device::RotaryStyle;

template <class Element_, int head_dim_, int head_dim_v_, bool varlen_ = false>
struct SpecOf : device::AppendCudaSpec {
  using Element = Element_;
  static constexpr int head_dim = head_dim_, head_dim_v = head_dim_v_;
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
template <int num_warps_>
struct ConfigOf {
  static constexpr int num_warps = num_warps_;
};

template <class Element>
constexpr DType dtype_of = std::is_same_v<Element, Bf16>   ? DType::bf16
                           : std::is_same_v<Element, Fp16> ? DType::fp16
                                                           : DType::fp32;

class AppendOnGpu : public testing::Test {
 protected:
  // Only lends its memory.
  TestDevice host{{Device::Kind::cpu, 0}, "x86-64-v3"};

  template <class Spec, int num_warps>
  void expect(AppendCase c) {
    c.dtype = dtype_of<typename Spec::Element>;
    c.head_dim = Spec::head_dim;
    c.head_dim_v = Spec::head_dim_v;
    c.packed = Spec::varlen;
    if constexpr (Spec::rotary != DeviceStyle::none) {
      c.rotary =
          Rotary{.style = Spec::rotary == DeviceStyle::half ? RotaryStyle::half : RotaryStyle::interleaved,
                 .dim = Spec::rotary_dim,
                 .q = Spec::rotates_q};
      if constexpr (!std::is_void_v<typename Spec::RotaryTable>)
        c.rotary->tables = dtype_of<typename Spec::RotaryTable>;
    }
    AppendProblem problem(host, c);
    const KernelConfig config{.num_warps = num_warps};
    const Target target = Target::parse("sm_90a");
    ASSERT_EQ(misfit(problem.spec(), target, config), "");
    Launch launch;
    runtime_of(Operation::append_kv)
        .plan({problem.spec(), target, config, {Device::Kind::cpu, 0}, 5, nullptr}, problem.args(), launch);
    ASSERT_EQ(launch.size(), 1u);
    using Kernel = device::Append<Spec, ConfigOf<num_warps>>;
    const auto& p = const_cast<StepLaunch&>(launch[0]).params_as<typename Kernel::Params>();
    gridDim.x = launch[0].grid.x;
    gridDim.y = launch[0].grid.y;
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
        emulator::Block::run(num_warps * 32, 0, 0xff, [&] { Kernel::run(p); });
    EXPECT_TRUE(problem.check()) << num_warps << " warps";
    EXPECT_GT(problem.written(), 0) << c.str();
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
