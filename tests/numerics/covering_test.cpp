// Rows of covering arrays: every three features that may meet in one kernel meet in one of them
// (support/feature_space.hpp). A row's numbers and layouts follow from its place.
//   FLASHJIT_TEST_ALL=1         every row; otherwise a few, which the seed draws
//   FLASHJIT_TEST_PART=I/N      the I-th of N parts of each array, from 0; the first ones cover
//   most
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <optional>
#include <string>

#include "codegen/families/kernel_family.hpp"
#include "tests/support/append_problem.hpp"
#include "tests/support/copy_problem.hpp"
#include "tests/support/feature_workload.hpp"
#include "tests/support/merge_problem.hpp"
#include "tools/verify/random_tensor.hpp"

namespace flashjit::testing_support {
namespace {

// Launches of what a row describes, in guarded memory: those of which Workload knows nothing.
AppendCase append_of(const FeatureCase& of) {
  return {.batch = of.shape().batch,
          .seqlen = of.seqlen_q,
          .rows = of.seqlen_k,
          .heads_kv = of.heads_kv,
          .heads_q = of.heads_q,
          .head_dim = of.spec.head_dim,
          .head_dim_v = of.spec.head_dim_v,
          .dtype = of.spec.dtype,
          .kv_dtype = of.spec.kv_dtype,
          .kv_scale = of.spec.kv_scale.value_or(KvScale::tensor),
          .v_in_k = of.spec.v_in_k,
          .packed = of.spec.varlen,
          .by_slots = of.by_slots,
          .page_size = of.page_size,
          .rotary = of.spec.rotary,
          .in_place = of.seed % 2 == 0,
          .own_positions = of.spec.rotary && (of.own_positions || of.by_slots),
          .hard_rows = of.seed % 3 == 0 && !of.spec.rotary,
          .seed = static_cast<unsigned>(of.seed)};
}

MergeCase merge_of(const FeatureCase& of) {
  return {.parts = of.parts,
          .batch = 2,
          .seqlen = of.seqlen_q,
          .heads = of.heads_q,
          .head_dim = of.spec.head_dim,
          .dtype = of.spec.dtype,
          .parts_dtype = of.spec.parts_dtype.value_or(DType::fp32),
          .lse = of.spec.lse,
          .packed = of.spec.varlen,
          .gap = static_cast<int>(of.seed % 2) * 8,
          .seed = static_cast<unsigned>(of.seed)};
}

CopyCase copy_of(const FeatureCase& of) {
  return {.rows = of.seqlen_q,
          .pages = 3,
          .page_size = of.seqlen_k,
          .from_pages = 2,
          .from_page_size = of.seqlen_q,
          .heads = of.heads_kv,
          .head_dim = of.spec.head_dim,
          .head_dim_v = of.spec.head_dim_v,
          .dtype = of.spec.dtype,
          .kv_dtype = of.spec.kv_dtype,
          .kv_scale = of.spec.kv_scale.value_or(KvScale::tensor),
          .v_in_k = of.spec.v_in_k,
          .from = of.in_place ? CopyCase::From::themselves : CopyCase::From::others,
          .seed = static_cast<unsigned>(of.seed)};
}

class Covering : public ComputesOnEveryDevice {
 protected:
  void run(Operation op) {
    const Target target = Target::parse(on().target());
    const std::vector<Operation> ops = operations_on(target);
    if (std::find(ops.begin(), ops.end(), op) == ops.end()) GTEST_SKIP() << "no kernels of the operation";
    const FeatureSpace space(op, target);
    const CoveringArray array = space.covering(sample_seed());
    const std::size_t count = array.rows.size();
    const std::optional<Part> part = asked_part();
    const std::size_t begin = part ? count * part->index / part->of : 0,
                      end = part ? count * (part->index + 1) / part->of : count;
    Triples covered(space.sizes());
    for (std::size_t i = 0; i < begin; ++i) covered.add(array.rows[i]);
    const std::string name = std::string("covering ") + to_string(op) + " " + on().target();
    std::size_t ran = 0;
    for (std::size_t i = begin; i < end; ++i) {
      if (!part && !in_sample(name, i, one_in)) continue;
      FeatureCase c = space.at(array.rows[i]);
      c.seed = i + 1;
      EXPECT_TRUE(computes(c)) << name << " row " << i << "\n"
                               << c.command(on().is_cuda() ? "cuda:0" : "cpu", on().target());
      covered.add(array.rows[i]);
      ++ran;
    }
    // A part counts what the parts before it cover, too.
    std::printf("%s: %zu of %zu rows, %zu of %zu triples\n", name.c_str(), begin + ran, count,
                covered.count(), array.covered.count());
    if (ran > 0 && begin + ran == count) {
      EXPECT_EQ(covered.count(), array.covered.count());
    }
  }

 private:
  static constexpr std::uint64_t one_in = 150;

  testing::AssertionResult computes(const FeatureCase& c) {
    try {
      if (c.spec.op == Operation::append_kv) {
        AppendProblem problem(on(), append_of(c));
        on().engine().get(problem.spec(), append_of(c).shape()).launch(problem.args());
        on().synchronize();
        return problem.check();
      }
      if (c.spec.op == Operation::copy_kv) {
        const CopyCase given = copy_of(c);
        const Kernel& kernel = on().engine().get(c.spec, given.shape());
        CopyProblem problem(on(), given, kernel.workspace_bytes(given.shape()));
        kernel.launch(problem.args());
        on().synchronize();
        return problem.check();
      }
      if (c.spec.op == Operation::merge) {
        MergeProblem problem(on(), merge_of(c));
        merge(on().engine(), problem.args());
        on().synchronize();
        return problem.check();
      }
    } catch (const Error& error) {
      return testing::AssertionFailure() << error.message() << "\n" << error.detail();
    }
    return testing_support::computes(on(), workload_of(c), !has_unbounded_score(c));
  }
  // Next to a score of 0 its rounding makes any error of the logarithm: such elements cannot be told.
  static bool has_unbounded_score(const FeatureCase& c) {
    return c.spec.score == std::vector<std::string>{"log(abs(score))"};
  }
};

// A test for each operation, by its name.
#define FLASHJIT_COVERING_TEST(name) \
  TEST_P(Covering, name) {           \
    run(Operation::name);            \
  }
FLASHJIT_FOR_EACH_OPERATION(FLASHJIT_COVERING_TEST)

FLASHJIT_ON_EVERY_DEVICE(Covering);

}  // namespace
}  // namespace flashjit::testing_support
