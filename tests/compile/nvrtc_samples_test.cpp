// A seeded pairwise sample of specs x configs x targets, and a sample of sm_90a's search space: all
// kernels compile and have the intended instructions. FLASHJIT_TEST_ALL=1 takes larger samples and the
// whole search space; FLASHJIT_TEST_SEED takes other samples. Needs NVRTC, but no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/compile/nvrtc_test.hpp"

namespace flashjit::nvrtc_testing {
namespace {

// A point of the sample: an index into each axis.
using Point = std::vector<int>;

// Points that together contain every pair of values of every two axes. The
// search is greedy: each time it takes the best of a few random points.
std::vector<Point> pairwise(const std::vector<int>& sizes, std::mt19937& random) {
  std::set<std::tuple<int, int, int, int>> missing;
  const int axes = static_cast<int>(sizes.size());
  for (int a = 0; a < axes; ++a) {
    for (int b = a + 1; b < axes; ++b) {
      for (int i = 0; i < sizes[a]; ++i) {
        for (int j = 0; j < sizes[b]; ++j) missing.insert({a, i, b, j});
      }
    }
  }
  const auto covered = [&](const Point& p) {
    std::vector<std::tuple<int, int, int, int>> pairs;
    for (int a = 0; a < axes; ++a) {
      for (int b = a + 1; b < axes; ++b) {
        if (missing.contains({a, p[a], b, p[b]})) pairs.push_back({a, p[a], b, p[b]});
      }
    }
    return pairs;
  };
  std::vector<Point> points;
  while (!missing.empty()) {
    Point best;
    std::size_t most = 0;
    for (int attempt = 0; attempt < 30; ++attempt) {
      Point p;
      for (const int size : sizes) p.push_back(std::uniform_int_distribution<>(0, size - 1)(random));
      const auto& [a, i, b, j] = *missing.begin();  // guarantees progress
      p[a] = i;
      p[b] = j;
      if (const std::size_t count = covered(p).size(); count > most) {
        most = count;
        best = p;
      }
    }
    for (const auto& pair : covered(best)) missing.erase(pair);
    points.push_back(best);
  }
  return points;
}

TEST_F(NvrtcTest, PairwiseSample) {
  std::mt19937 random(seed());
  const std::vector<Target> targets = cuda_targets();
  const std::vector<int> head_dims =
      test_all() ? std::vector{8, 40, 64, 96, 128, 192, 256} : std::vector{40, 64, 128, 256};
  const std::vector<std::vector<Mask>> masks = {{},
                                                {CausalMask{}},
                                                {CausalMask{CausalAlign::top_left}},
                                                {SlidingWindowMask{.sinks = true}},
                                                {CausalMask{}, BlockSparseMask{}},
                                                {TreeMask{}}};
  const std::vector<int> sizes = {static_cast<int>(targets.size()),
                                  static_cast<int>(head_dims.size()),
                                  static_cast<int>(head_dims.size()),
                                  static_cast<int>(masks.size()),
                                  /*dtype*/ 2,
                                  /*lse*/ 2,
                                  /*varlen*/ 2,
                                  /*dropout*/ 2,
                                  /*o_dtype*/ 2,
                                  /*paged*/ 2,
                                  /*third of the search space*/ 3};
  std::vector<Case> cases;
  for (int repeat = 0; repeat < (test_all() ? 4 : 1); ++repeat) {
    std::vector<Point> points = pairwise(sizes, random);
    if (!test_all()) points.resize(points.size() / 2);  // they hold more than half of the pairs
    for (const Point& p : points) {
      AttentionSpec spec = make_spec(p[4] ? DType::fp16 : DType::bf16, head_dims[p[1]], head_dims[p[2]]);
      spec.mask = masks[p[3]];
      spec.lse = p[5];
      spec.varlen = p[6];
      spec.dropout = p[7];
      if (p[8]) spec.o_dtype = DType::fp32;
      spec.paged = p[9];
      spec = spec.validated();
      const Target target = targets[p[0]];
      const std::vector<KernelConfig> space = search_space(spec, target);
      const std::size_t begin = space.size() * p[10] / 3;
      const std::size_t end = std::max(begin + 1, space.size() * (p[10] + 1) / 3);
      cases.push_back(
          {spec, target, space[std::uniform_int_distribution<std::size_t>(begin, end - 1)(random)]});
    }
  }
  int spilling = 0;
  for_each_compiled(cases, [&](const Case& c, const CompiledKernel& kernel) {
    expect_sound(c, kernel);
    if (c.target.arch_specific) expect_no_spill(c, kernel);
    // Other targets may spill: the tuner measures, and takes another config.
    spilling += step_of(kernel).spill_bytes > 0;
  });
  std::cout << cases.size() << " kernels of the search space, " << spilling << " of them spill\n";
}

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

}  // namespace
}  // namespace flashjit::nvrtc_testing
