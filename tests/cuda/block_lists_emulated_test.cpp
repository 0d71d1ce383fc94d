// The GPU's make_block_lists on the host, thread by thread (emulator/emulator.hpp), against the elementwise
// oracle.
#include "cuda/block_lists.cuh"

#include "codegen/families/search_space.hpp"
#include "cuda/formula.cuh"
#include "runtime/operation.hpp"
#include "shared/sliding_window.h"
#include "tests/cuda/emulated.hpp"
#include "tests/cuda/listed_specs.hpp"
#include "tests/support/planned_kernel.hpp"
#include "tests/support/workload.hpp"

namespace flashjit::testing_support {
namespace {

using Params = device::WithFormulas<device::BlockListsParams>;

struct Documents : WithLists<device::BlockListsCudaSpec, Params, 32, 48> {};
// A bitmask with more rows than the warps of a list make at once, and the most words.
struct LargestBlocks : WithLists<device::BlockListsCudaSpec, Params, 256, 256> {};
// Packed sequences, an interval of each row, lists of each head, and formulas of a head.
struct Windows : device::BlockListsCudaSpec {
  static constexpr bool varlen = true;
  using table_reach = device::Table<0, device::int8, device::Dimension::total_k>;

  struct Mask1 : device::Formula {
    static constexpr bool reads_head = true;
    template <class At, class Row>
    static auto value(const At& at, const Row&) {
      using device::Integer;
      return at.key % (at.head + Integer(1)) == Integer(0) || at.key == at.position;
    }
  };
  struct Mask2 : device::Formula {
    static constexpr bool interval = true;
    template <class At, class Tile>
    static auto begin(const At& at, const Tile&) {
      return bounded_difference(at.position, at.read(table_reach(), at.position) + device::Integer(40));
    }
    template <class At, class Tile>
    static auto end(const At& at, const Tile&) {
      return bounded_sum(at.position, device::Integer(9));
    }
  };
  using Mask = device::Intersect<device::Bounds,
                                 device::Listed<device::BlockSparse<16, 32, true, true>,
                                                device::Intersect<device::FormulaMask<Mask1, Params>,
                                                                  device::FormulaMask<Mask2, Params>>>>;

  static AttentionSpec add_to(AttentionSpec spec) {
    spec.varlen = true;
    spec.mask = {BlockSparseMask{.block_m = 16, .block_n = 32, .per_head = true, .of_masks = true},
                 FormulaMask{"key % (head + 1) == 0 || key == position"},
                 FormulaMask{"key >= position - (reach[position] + 40) && key < position + 9"}};
    spec.tables = {{"reach", DType::int8, {{.kind = TableDimension::Kind::total_k}}}};
    return spec.validated();
  }
};

class BlockListsOnGpu : public EmulatorTest {
 protected:
  template <class Spec, int num_warps>
  void expect(Case c) {
    c.spec = Spec::add_to({.op = Operation::make_block_lists, .dtype = DType::bf16, .head_dim = 64});
    Workload workload(host, c);
    const Target target = Target::parse("sm_90a");
    const KernelConfig config{.num_warps = num_warps};
    ASSERT_EQ(misfit(c.spec, target, config), "");
    const PlannedWithoutCode planned(c.spec, target, config, 5);
    const PlannedKernel& kernel = planned.kernel();
    DirtyWorkspace workspace(runtime_of(c.spec.op).workspace_bytes(kernel, c.shape()));
    AttentionArgs args = workload.args();
    args.workspace = workspace.view();
    Launch launch;
    runtime_of(c.spec.op).plan(kernel, args, launch);
    ASSERT_EQ(launch.size(), 2u);
    EXPECT_THROW(params_for<device::WithGradients<Params>>(launch[0]), std::logic_error);
    workload.reset();
    run<num_warps>(launch[0], [](const Params& p) { device::find_blocks<Spec, WarpsOf<num_warps>>(p); });
    run<device::block_lists_write_warps>(
        launch[1], [](const Params& p) { device::write_blocks<Spec, WarpsOf<num_warps>>(p); });
    EXPECT_TRUE(workload.check());
  }

 private:
  template <int num_warps, class Kernel>
  static void run(const StepLaunch& step, const Kernel& kernel) {
    const auto& p = params_for<Params>(step);
    run_grid(step.grid, num_warps * 32, 64, [&] { kernel(p); });
  }
};

TEST_F(BlockListsOnGpu, Documents) {
  expect<Documents, 4>({.batch = 2, .seqlen_q = 70, .seqlen_k = 200, .seed = 1});
  expect<Documents, 8>({.batch = 1, .seqlen_q = 33, .seqlen_k = 2000, .bitmasks = 3, .seed = 2});
  expect<Documents, 4>({.batch = 1, .seqlen_q = 40, .seqlen_k = 90, .bitmasks = 0, .seed = 3});
  expect<Documents, 4>({.batch = 1, .seqlen_q = 40, .seqlen_k = 0, .seed = 4});
}

TEST_F(BlockListsOnGpu, LargestBlocks) {
  static_assert(device::block_lists_writers * device::block_lists_write_warps * 4 < 256);
  expect<LargestBlocks, 4>({.batch = 1, .seqlen_q = 300, .seqlen_k = 520, .seed = 5});
}

TEST_F(BlockListsOnGpu, PackedSequencesAndHeads) {
  expect<Windows, 4>({.heads_q = 4,
                      .heads_kv = 2,
                      .lengths_q = {0, 20, 33},
                      .lengths_k = {7, 100, 70},
                      .spare_rows = 9,
                      .seed = 4});
}

}  // namespace
}  // namespace flashjit::testing_support
