// Merging partial results, against the float64 oracle: any
// number of parts, among them empty ones whose o is poison.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "codegen/families/kernel_family.hpp"
#include "tests/support/merge_problem.hpp"

namespace flashjit::testing_support {
namespace {

class Merge : public OnEveryDevice {
 protected:
  testing::AssertionResult computes(const MergeCase& given) {
    MergeProblem problem(on(), given);
    on().engine().get(given.spec(), given.shape()).launch(problem.args());
    on().synchronize();
    return problem.check();
  }
};

TEST_P(Merge, PartsHeadsAndHeadDims) {
  for (const int parts : {1, 2, 3, 8, 17})
    for (const int head_dim : {8, 24, 64, 128, 256, 576, 1024})
      for (const int heads : {1, 5, 32}) {
        const MergeCase c{.parts = parts, .batch = 2, .heads = heads, .head_dim = head_dim};
        if (!why_unsupported(c.spec(), Target::parse(on().target())).empty() || !takes_next(c.spec()))
          continue;
        EXPECT_TRUE(computes(c));
      }
}

TEST_P(Merge, DTypes) {
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    for (const DType parts_dtype : {DType::fp32, dtype})
      for (const bool lse : {true, false})
        EXPECT_TRUE(computes({.parts = 3, .dtype = dtype, .parts_dtype = parts_dtype, .lse = lse}));
}

TEST_P(Merge, PackedSequencesAndGaps) {
  for (const bool packed : {false, true})
    for (const int gap : {0, 8, 72})
      EXPECT_TRUE(computes({.parts = 4, .batch = 3, .seqlen = 33, .packed = packed, .gap = gap}));
}

TEST_P(Merge, PartsOfABatchEntrySideBySide) {
  EXPECT_TRUE(computes({.parts = 3, .batch = 4, .gap = 8, .parts_inside = true}));
}

// As scores of another level have them: the largest of a row counts as 1, wherever it lies.
TEST_P(Merge, PartsThatAreAllFarFromZero) {
  for (const double level : {-3e4, -300.0, 300.0, 3e4})
    EXPECT_TRUE(computes({.parts = 4, .empty_share = 0, .lse_level = level}));
}

// Parts of one row, with the lse that float32 holds, against the true softmax. Their roundings, in opposite
// directions, change the result by half of the lse's last place times the parts' largest output: less than
// rounding o does below a limit, and more beyond it.
TEST_P(Merge, RoundedLseAgainstTheTrueSoftmax) {
  // Two parts, 1 and -1, whose lse are a little above and below the middle between neighbours of float32.
  using Fence = GuardedTensor::Fence;
  const auto error_at = [&](DType dtype, float level) {
    const double last_place = std::exp2(std::floor(std::log2(std::abs(double{level}))) - 23);
    const double lse[] = {level + 0.501 * last_place, level + 0.499 * last_place};
    GuardedTensor parts_o(on(), DType::fp32, with_gaps({2, 1, 1, 1, 8}, 0), Poison::nan, Fence::after),
        parts_lse(on(), DType::fp32, with_gaps({2, 1, 1, 1}, 0), Poison::nan, Fence::after),
        o(on(), dtype, with_gaps({1, 1, 1, 8}, 0), Poison::nan, Fence::after);
    for (int part = 0; part < 2; ++part) {
      static_cast<float*>(parts_lse.on_host().data)[part] = static_cast<float>(lse[part]);
      for (int c = 0; c < 8; ++c)
        static_cast<float*>(parts_o.on_host().data)[part * 8 + c] = part == 0 ? 1 : -1;
    }
    for (GuardedTensor* const tensor : {&parts_o, &parts_lse, &o}) tensor->upload();
    merge(on().engine(),
          {.o = o.on_device(), .parts_o = parts_o.on_device(), .parts_lse = parts_lse.on_device()});
    on().synchronize();
    o.download();
    return std::abs(verify::load_element(o.on_host().data, dtype, 3) - std::tanh((lse[0] - lse[1]) / 2));
  };
  for (const float sign : {1.0f, -1.0f})
    for (const auto& [dtype, limit, rounding] :
         {std::tuple{DType::bf16, 0x1p15f, 0x1p-9}, {DType::fp16, 0x1p12f, 0x1p-12}}) {
      EXPECT_LT(error_at(dtype, sign * 0.9f * limit), rounding) << to_string(dtype);
      EXPECT_GT(error_at(dtype, sign * 2.1f * limit), rounding) << to_string(dtype);
    }
}

TEST_P(Merge, PartsThatDifferInSizeByFarMoreThanExpSpans) {
  for (const double spread : {100.0, 1e4}) EXPECT_TRUE(computes({.parts = 8, .lse_spread = spread}));
}

TEST_P(Merge, ManyBatchEntriesAndHeads) {
  for (const MergeCase& c : {MergeCase{.batch = 70'000, .seqlen = 1, .heads = 1, .head_dim = 8},
                             {.seqlen = 2, .heads = 300'000, .head_dim = 8}}) {
    if (!takes_next(c.spec())) continue;
    EXPECT_TRUE(computes(c));
  }
}

// Gradients of several launches.
TEST_P(Merge, Sums) {
  for (const int parts : {1, 2, 3, 9})
    for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
      for (const DType parts_dtype : {DType::fp32, dtype})
        EXPECT_TRUE(computes({.parts = parts,
                              .batch = 2,
                              .seqlen = 33,
                              .head_dim = parts == 3 ? 200 : 64,
                              .dtype = dtype,
                              .parts_dtype = parts_dtype,
                              .packed = parts == 2,
                              .sum = true,
                              .gap = parts == 9 ? 8 : 0}));
  EXPECT_TRUE(computes({.parts = 0, .sum = true}));
}

TEST_P(Merge, SumsIntoTheFirstPart) {
  const MergeCase given{.parts = 3, .batch = 2, .seqlen = 100, .heads = 5, .dtype = DType::fp32, .sum = true};
  MergeProblem apart(on(), given), within(on(), given);
  const Kernel& kernel = on().engine().get(given.spec(), given.shape());
  kernel.launch(apart.args());
  AttentionArgs args = within.args();
  Tensor first = *args.parts_o;
  first.rank = 4;
  for (std::size_t i = 0; i < 4; ++i)
    first.shape[i] = args.parts_o->shape[i + 1], first.strides[i] = args.parts_o->strides[i + 1];
  args.o = first;
  kernel.launch(args);
  // A sum of the sum alone is a copy of it.
  args.o = within.args().o;
  args.parts_o->shape[0] = 1;
  kernel.launch(args);
  on().synchronize();
  EXPECT_EQ(within.outputs(), apart.outputs());
}

TEST_P(Merge, NoRowsAndNoParts) {
  EXPECT_TRUE(computes({.batch = 0}));
  EXPECT_TRUE(computes({.seqlen = 0}));
  EXPECT_TRUE(computes({.parts = 0}));
}

TEST_P(Merge, SameInputsGiveTheSameBits) {
  MergeProblem problem(on(), {.parts = 8, .seqlen = 100, .heads = 4});
  std::vector<std::byte> first;
  for (int repeat = 0; repeat < 3; ++repeat) {
    merge(on().engine(), problem.args());
    on().synchronize();
    std::vector<std::byte> bits = problem.outputs();
    if (first.empty()) first = bits;
    EXPECT_EQ(bits, first);
  }
}

FLASHJIT_ON_EVERY_DEVICE(Merge);

}  // namespace
}  // namespace flashjit::testing_support
