// Tests of covering arrays, and what they show without a compiler: each spec has a config on every target.
#include "tests/support/covering_array.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "codegen/families/kernel_family.hpp"
#include "codegen/families/search_space.hpp"
#include "tests/support/feature_space.hpp"
#include "tests/support/sample_seed.hpp"

namespace flashjit::testing_support {
namespace {

// Every triple that some possible row has is in a row of the array, every row is possible, and there are few.
// All rows are counted out, which shares nothing with the array's search.
void expect_covering(const std::vector<int>& sizes, std::size_t most_rows, const auto& is_possible) {
  const CoveringArray array = covering_array(sizes, sample_seed(), is_possible);
  Triples expected(sizes);
  Row row(sizes.size());
  for (;;) {
    if (is_possible(row)) expected.add(row);
    std::size_t axis = 0;
    while (axis < row.size() && ++row[axis] == sizes[axis]) row[axis++] = 0;
    if (axis == row.size()) break;
  }
  Triples of_rows(sizes);
  for (const Row& one : array.rows) {
    EXPECT_TRUE(is_possible(one));
    EXPECT_GT(of_rows.add(one), 0u) << "a row that adds nothing";
  }
  expected.for_each([&](const Triples::Triple& triple) {
    EXPECT_EQ(of_rows.has(triple), expected.has(triple));
    EXPECT_EQ(array.covered.has(triple), expected.has(triple));
  });
  EXPECT_EQ(array.covered.count(), expected.count());
  EXPECT_LE(array.rows.size(), most_rows);
}

TEST(CoveringArray, HoldsEachTriple) {
  expect_covering({2, 2, 2}, 8, [](const Row&) { return true; });
  expect_covering({3, 2, 4, 2, 3, 2}, 60, [](const Row&) { return true; });
}

TEST(CoveringArray, HoldsEachTripleThatIsPossible) {
  // Value 2 of axis 2 needs value 1 of axis 0; two flags exclude each other; three do together.
  expect_covering({3, 2, 4, 2, 3, 2, 2}, 70, [](const Row& row) {
    return (row[2] != 2 || row[0] == 1) && !(row[1] == 1 && row[3] == 1) &&
           !(row[3] == 1 && row[5] == 1 && row[6] == 1);
  });
}

TEST(CoveringArray, FollowsFromItsSeed) {
  const auto any = [](const Row&) { return true; };
  const std::vector<int> sizes = {3, 2, 4, 2, 3};
  EXPECT_EQ(covering_array(sizes, 1, any).rows, covering_array(sizes, 1, any).rows);
  EXPECT_NE(covering_array(sizes, 1, any).rows, covering_array(sizes, 2, any).rows);
}

std::vector<Operation> every_operation() {
  std::vector<Operation> all;
  for (const OperationInfo& row : operation_table) all.push_back(row.op);
  return all;
}

using OpAndTarget = std::tuple<Operation, const char*>;
class Covering : public testing::TestWithParam<OpAndTarget> {};

// The rows of the target's family on each target: one that serves the spec has a config for it, which fits,
// and one that does not says so.
TEST_P(Covering, SpecsHaveAConfig) {
  const auto& [op, of] = GetParam();
  const std::vector<Operation> ops = operations_on(Target::parse(of));
  if (std::find(ops.begin(), ops.end(), op) == ops.end()) GTEST_SKIP() << "no kernels of the operation";
  const FeatureSpace space(op, Target::parse(of));
  const std::vector<Row> rows = space.covering(sample_seed()).rows;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (!in_sample(of, i, 4)) continue;
    const FeatureCase c = space.at(rows[i]);
    for (const Target& target : Target::all()) {
      const std::string refused = why_unsupported(c.spec, target);
      try {
        const KernelConfig config = heuristic_config(c.spec, target, c.shape());
        EXPECT_EQ(refused, "") << target.str() << " " << c.spec.to_json();
        EXPECT_EQ(misfit(c.spec, target, config), "") << target.str() << " " << c.spec.to_json();
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::unsupported) << error.message();
        EXPECT_EQ(error.message(), refused) << target.str() << " " << c.spec.to_json();
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Of, Covering,
                         testing::Combine(testing::ValuesIn(every_operation()),
                                          testing::Values("x86-64-v3", "sm_80", "sm_90a")),
                         [](const auto& of) {
                           std::string name =
                               to_string(std::get<0>(of.param)) + std::string("_") + std::get<1>(of.param);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace flashjit::testing_support
