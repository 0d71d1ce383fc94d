// The GPU's copy_kv on the host, thread by thread (emulator/emulator.hpp): each copied row has the bytes of
// its source.
#include "cuda/copy.cuh"
#include "runtime/operation.hpp"
#include "tests/cuda/emulated.hpp"
#include "tests/support/copy_problem.hpp"
#include "tests/support/planned_kernel.hpp"

namespace flashjit::testing_support {
namespace {

using From = CopyCase::From;

template <class Element, int head_dim, int head_dim_v>
using SpecOf = HeadsOf<device::CopyCudaSpec, Element, head_dim, head_dim_v>;
template <class Spec, class KvElement, KvScale scale>
struct Storing : Spec {
  using kv_dtype = KvElement;
  static constexpr device::KvScale kv_scale =
      scale == KvScale::token_head ? device::KvScale::token_head : device::KvScale::tensor;
};
class CopyOnGpu : public EmulatorTest {
 protected:
  template <class Spec, int num_warps>
  void expect(CopyCase c) {
    c.head_dim = Spec::head_dim;
    c.head_dim_v = Spec::head_dim_v;
    c.v_in_k = Spec::v_in_k;
    c.dtype = dtype_of<typename Spec::Element>;
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
      if (launch[i].grid.x > 0) {
        const auto& p = params_for<device::CudaCopyParams>(launch[i]);
        run_grid(launch[i].grid, num_warps * 32, 0, [&] { device::copy_rows<Spec, WarpsOf<num_warps>>(p); });
      }
    EXPECT_TRUE(problem.check()) << num_warps << " warps";
    EXPECT_GT(problem.copied(), 0) << c.str();
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
      expect<ValuesInKeys<SpecOf<bf16, 72, 40>>, 4>(c);
      expect<ValuesInKeys<Storing<SpecOf<bf16, 576, 512>, fp8_e4m3, KvScale::token_head>>, 4>(c);
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
