// The GPU's copy_kv on the host, thread by thread (emulator/emulator.hpp): each copied row has the bytes of
// its source.
#include <gtest/gtest.h>

#include "cuda/copy.cuh"
#include "runtime/operation.hpp"
#include "tests/support/copy_problem.hpp"
#include "tests/support/planned_kernel.hpp"

namespace flashjit::testing_support {
namespace {

using From = CopyCase::From;

template <class Element_, int head_dim_, int head_dim_v_>
struct SpecOf : device::CopyCudaSpec {
  using Element = Element_;
  static constexpr int head_dim = head_dim_, head_dim_v = head_dim_v_;
};
template <class Spec, class KvElement, KvScale scale>
struct Storing : Spec {
  using kv_dtype = KvElement;
  static constexpr device::KvScale kv_scale =
      scale == KvScale::token_head ? device::KvScale::token_head : device::KvScale::tensor;
};
template <class Spec>
struct Latent : Spec {
  static constexpr bool v_in_k = true;
};
template <int num_warps_>
struct ConfigOf {
  static constexpr int num_warps = num_warps_;
};

class CopyOnGpu : public testing::Test {
 protected:
  // Only lends its memory.
  TestDevice host{{Device::Kind::cpu, 0}, "x86-64-v3"};

  template <class Spec, int num_warps>
  void expect(CopyCase c) {
    c.head_dim = Spec::head_dim;
    c.head_dim_v = Spec::head_dim_v;
    c.v_in_k = Spec::v_in_k;
    c.dtype = std::is_same_v<typename Spec::Element, device::bf16> ? DType::bf16 : DType::fp32;
    if constexpr (!std::is_void_v<typename Spec::kv_dtype>) {
      c.kv_dtype = DType::fp8_e4m3;
      c.kv_scale = static_cast<KvScale>(Spec::kv_scale);
    }
    const AttentionSpec spec = c.spec();
    const KernelConfig config{.num_warps = num_warps};
    const Target target = Target::parse("sm_90a");
    const PlannedWithoutCode planned(spec, target, config, 5);
    const OperationRuntime& copy = runtime_of(Operation::copy_kv);
    CopyProblem problem(host, c, copy.workspace_bytes(planned.kernel(), c.shape()));
    Launch launch;
    copy.plan(planned.kernel(), problem.args(), launch);
    ASSERT_EQ(launch.size(), 2u);
    EXPECT_EQ(launch[0].grid.x > 0, c.from != From::others)
        << "rows are gathered where they may be overwritten";
    for (std::size_t i = 0; i < launch.size(); ++i)
      if (launch[i].grid.x > 0)
        run<Spec, num_warps>(launch[i].grid, params_for<device::CudaCopyParams>(launch[i]));
    EXPECT_TRUE(problem.check()) << num_warps << " warps";
    EXPECT_GT(problem.copied(), 0) << c.str();
  }

 private:
  template <class Spec, int num_warps>
  static void run(const Grid& grid, const device::CudaCopyParams& p) {
    gridDim.x = grid.x;
    gridDim.y = blockIdx.y = 0;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
      emulator::Block::run(num_warps * 32, 0, 0xff, [&] { device::copy_rows<Spec, ConfigOf<num_warps>>(p); });
  }
};

constexpr From everywhere[] = {From::others, From::themselves, From::later_pages};

// Rows of one piece and of many, of 16 and of 8 bytes; V wider than K, and narrower.
TEST_F(CopyOnGpu, RowsOfAnyWidth) {
  using device::bf16, device::fp8_e4m3;
  for (const From from : everywhere)
    for (const int heads : {1, 3}) {
      const CopyCase c{.heads = heads, .from = from};
      expect<SpecOf<bf16, 8, 8>, 2>(c);
      expect<SpecOf<bf16, 72, 40>, 4>(c);
      expect<SpecOf<float, 64, 200>, 8>(c);
      expect<Storing<SpecOf<bf16, 128, 64>, fp8_e4m3, KvScale::tensor>, 4>(c);
      expect<Storing<SpecOf<bf16, 24, 40>, fp8_e4m3, KvScale::token_head>, 2>(c);
      expect<Storing<SpecOf<bf16, 576, 512>, fp8_e4m3, KvScale::token_head>, 4>(c);
      expect<Latent<SpecOf<bf16, 72, 40>>, 4>(c);
      expect<Latent<Storing<SpecOf<bf16, 576, 512>, fp8_e4m3, KvScale::token_head>>, 4>(c);
    }
}

TEST_F(CopyOnGpu, PagesAndLayouts) {
  using device::bf16, device::fp8_e4m3;
  for (const From from : everywhere)
    for (const int page_size : {1, 7, 64}) {
      const CopyCase c{
          .pages = 90 / page_size + 1, .page_size = page_size, .from_page_size = page_size + 3, .from = from};
      expect<SpecOf<bf16, 64, 64>, 4>(c);
      for (const MemoryLayout layout : {MemoryLayout::heads_first, MemoryLayout::padded}) {
        CopyCase other = c;
        other.layout = layout;
        other.from_layout = MemoryLayout::sliced_heads;
        expect<Storing<SpecOf<bf16, 64, 64>, fp8_e4m3, KvScale::token_head>, 4>(other);
      }
    }
}

}  // namespace
}  // namespace flashjit::testing_support
