// A sample of the rows of covering arrays, and a sample of sm_90a's search space: all kernels compile and
// have the intended instructions. FLASHJIT_TEST_ALL=1 takes larger samples and the whole search space;
// FLASHJIT_TEST_SEED takes other samples. Needs NVRTC, but no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "codegen/families/kernel_family.hpp"
#include "tests/compile/nvrtc_test.hpp"
#include "tests/support/feature_space.hpp"

namespace flashjit::nvrtc_testing {
namespace {

// Rows of the covering arrays of all operations (tests/support/feature_space.hpp), each for a target of the
// family and with a config of its search space, both drawn.
class NvrtcCoveringSample : public NvrtcTest, public testing::WithParamInterface<const char*> {};

TEST_P(NvrtcCoveringSample, Compiles) {
  using namespace testing_support;
  const Target family = Target::parse(GetParam());
  std::mt19937 random(seed());
  std::vector<Target> targets = cuda_targets();
  std::erase_if(targets, [&](const Target& target) {
    return target.has(Instructions::wgmma) != family.has(Instructions::wgmma);
  });
  const auto draw = [&](std::size_t count) {
    return std::uniform_int_distribution<std::size_t>(0, count - 1)(random);
  };
  std::vector<Case> cases;
  std::size_t all = 0;
  for (const Operation op : operations_on(family)) {
    const FeatureSpace space(op, family);
    const std::vector<Row> rows = space.covering(sample_seed()).rows;
    const std::size_t step = test_all() ? 12 : 160;
    for (std::size_t i = draw(step); i < rows.size(); i += step) {
      const FeatureCase c = space.at(rows[i]);
      // The family's first target has a kernel of each row. Later ones may lack the shared memory for it.
      const Target& drawn = targets[draw(targets.size())];
      const Target& target = why_unsupported(c.spec, drawn).empty() ? drawn : family;
      const std::vector<KernelConfig> configs = search_space(c.spec, target);
      cases.push_back({c.spec, target, configs[draw(configs.size())]});
    }
    all += rows.size();
  }
  int spilling = 0;
  for_each_compiled(cases, [&](const Case& c, const CompiledKernel& kernel) {
    c.spec.op == Operation::forward ? expect_sound(c, kernel) : expect_clean(c, kernel);
    // The tuner measures, and takes another config.
    spilling += std::any_of(kernel.steps.begin(), kernel.steps.end(),
                            [](const CompiledStep& step) { return step.spill_bytes > 0; });
  });
  std::cout << cases.size() << " of " << all << " rows, " << spilling << " of them spill\n";
}

INSTANTIATE_TEST_SUITE_P(Of, NvrtcCoveringSample, testing::Values("sm_80", "sm_90a"),
                         [](const auto& of) { return std::string(of.param); });

// A sample of sm_90a's search space at the most important head dimensions, or all of it with
// FLASHJIT_TEST_ALL=1, which takes minutes for each of them and each dtype. The register budgets promise that
// nothing spills.
using HeadDims = std::pair<int, int>;
class NvrtcSearchSpaceOfSm90a : public NvrtcTest,
                                public testing::WithParamInterface<std::tuple<HeadDims, DType>> {};

TEST_P(NvrtcSearchSpaceOfSm90a, DoesNotSpill) {
  const auto& [head_dims, dtype] = GetParam();
  std::mt19937 random(seed() + static_cast<unsigned>(head_dims.first));
  const Target target = Target::parse("sm_90a");
  std::vector<Case> cases;
  for (const bool causal : {false, true}) {
    for (const bool dropout : {false, true}) {
      for (int other = 0; other < 4; ++other) {
        AttentionSpec spec = make_spec(dtype, head_dims.first, head_dims.second);
        if (causal) spec.mask = {CausalMask{}};
        spec.dropout = dropout;
        if (other % 2) spec.o_dtype = DType::fp32;
        spec.paged = other / 2;
        std::vector<KernelConfig> space = search_space(spec, target);
        std::shuffle(space.begin(), space.end(), random);
        const int place = head_dims.first / 16 + (dtype == DType::fp16) + causal + dropout;
        if (!has_turn(static_cast<std::size_t>(2 * other + place), 43)) continue;
        if (!test_all()) space.resize(1);
        for (const KernelConfig& config : space) cases.push_back({spec, target, config});
      }
    }
  }
  for_each_compiled(cases, [&](const Case& c, const CompiledKernel& kernel) {
    expect_sound(c, kernel);
    expect_no_spill(c, kernel);
  });
}

// Sections of packed groups take registers of a producer that makes dropout's words.
TEST_F(NvrtcTest, DropoutInSectionsOfPackedGroups) {
  const Target target = Target::parse("sm_90a");
  std::vector<Case> cases;
  for (const int head_dim : {72, 80, 88, 96, 104}) {
    AttentionSpec spec = make_spec(DType::bf16, head_dim);
    spec.mask = {CausalMask{}};
    spec.dropout = true;
    for (const KernelConfig& config : search_space(spec, target))
      if (config.block_m == 128 && config.block_n == 80 && config.num_stages == 3 && config.q_in_registers &&
          config.pack_gqa)
        cases.push_back({spec, target, config});
  }
  ASSERT_GE(cases.size(), 5u);
  for_each_compiled(cases, [&](const Case& c, const CompiledKernel& kernel) {
    expect_sound(c, kernel);
    expect_no_spill(c, kernel);
  });
}

std::string search_space_name(const testing::TestParamInfo<std::tuple<HeadDims, DType>>& of) {
  const auto& [head_dims, dtype] = of.param;
  return std::to_string(head_dims.first) + "_" + std::to_string(head_dims.second) + "_" + to_string(dtype);
}
INSTANTIATE_TEST_SUITE_P(Of, NvrtcSearchSpaceOfSm90a,
                         testing::Combine(testing::Values(HeadDims{64, 64}, HeadDims{80, 80},
                                                          HeadDims{128, 128}, HeadDims{192, 128},
                                                          HeadDims{256, 256}),
                                          testing::Values(DType::bf16, DType::fp16)),
                         search_space_name);

// Pages take registers of sm_90a's producer. Specs and configs are drawn together: the defaults alone leave
// most configs of two and three consumers out.
TEST_F(NvrtcTest, SearchSpaceWithPages) {
  std::mt19937 random(seed());
  const Target target = Target::parse("sm_90a");
  const std::vector<std::vector<Mask>> masks = {
      {},
      {CausalMask{}},
      {CausalMask{}, PaddingMask{}},
      {SlidingWindowMask{}},
      {SlidingWindowMask{.sinks = true}, PaddingMask{}},
      {TreeMask{}},
      {CausalMask{}, BlockSparseMask{}},
      {SlidingWindowMask{.sinks = true}, BlockSparseMask{.block_m = 64, .block_n = 64}},
      {FormulaMask{"key % 3 != 1"}}};
  std::vector<Case> cases;
  for (int i = test_all() ? 200 : 8; i > 0; --i) {
    constexpr int head_dims[] = {64, 128, 192, 256};
    AttentionSpec spec =
        make_spec(random() % 2 ? DType::bf16 : DType::fp16, head_dims[random() % 4], head_dims[random() % 4]);
    spec.mask = masks[random() % masks.size()];
    spec.paged = true;
    spec.varlen = random() % 4 == 0;
    spec.dropout = random() % 4 == 0;
    spec = spec.validated();
    const std::vector<KernelConfig> space = search_space(spec, target);
    cases.push_back({spec, target, space[random() % space.size()]});
  }
  for_each_compiled(cases, [&](const Case& c, const CompiledKernel& kernel) {
    expect_sound(c, kernel);
    expect_no_spill(c, kernel);
  });
}

}  // namespace
}  // namespace flashjit::nvrtc_testing
