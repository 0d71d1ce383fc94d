// How sm_90a's backward divides groups of heads and rows: right for every shape, and so that few of them fill
// a GPU.
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "codegen/families/search_space.hpp"
#include "runtime/operations/backward_groups.hpp"
#include "templates/shared/backward_cuda_params.h"

namespace flashjit {
namespace {

using i64 = std::int64_t;

struct DividedShape {
  int batch, heads_q, heads_kv, seqlen_q, seqlen_k;
};

class BackwardGroupsOf {
 public:
  explicit BackwardGroupsOf(const std::string& more, int head_dim = 128)
      : spec_(AttentionSpec::from_json(R"({"op": "backward", "dtype": "bf16", "head_dim": )" +
                                       std::to_string(head_dim) + more + "}")) {}

  BackwardGroups::Tile tile(const DividedShape& s) const {
    device::ProblemParams p{};
    p.batch = s.batch;
    p.num_heads_q = s.heads_q;
    p.num_heads_kv = s.heads_kv;
    p.seqlen_q = s.seqlen_q;
    p.seqlen_k = s.seqlen_k;
    p.window_left = 100;
    return BackwardGroups{kernel_}.tile(p, key_rows(s));
  }
  i64 rows(const DividedShape& s) const {
    return BackwardGroups{kernel_}.rows_of_sums(s.heads_q, s.heads_kv, key_rows(s), s.seqlen_q);
  }
  i64 row_parts(const DividedShape& s) const {
    return BackwardGroups{kernel_}.most_row_parts(i64{s.batch} * s.heads_q, s.seqlen_q);
  }
  static i64 key_rows(const DividedShape& s) { return device::backward_rows(s.batch, s.seqlen_k, -1); }

 private:
  AttentionSpec spec_;
  Target target_ = Target::parse("sm_90a");
  KernelConfig config_ = heuristic_config(spec_, target_, Shape{});
  PlannedKernel kernel_{.spec = spec_, .target = target_, .config = config_, .parallelism = 132};
};

TEST(BackwardGroups, HaveTheSumsThatTheyNeed) {
  std::mt19937 random(7);
  const auto up_to = [&](int most) { return std::uniform_int_distribution(1, most)(random); };
  for (const char* more : {"", R"(, "mask": ["causal"])", R"(, "mask": ["sliding_window"])",
                           R"(, "mask": ["causal"], "deterministic": true)"}) {
    const BackwardGroupsOf groups(more);
    for (int i = 0; i < 300; ++i) {
      const int heads_kv = up_to(8), group = up_to(12);
      const DividedShape s{up_to(4), heads_kv * group, heads_kv, up_to(9000), up_to(9000)};
      const BackwardGroups::Tile tile = groups.tile(s);
      ASSERT_GE(tile.heads, 1);
      ASSERT_EQ(group % tile.heads, 0);
      ASSERT_TRUE(tile.row_parts == 1 || tile.heads == 1);
      ASSERT_EQ(tile.rows % device::backward_row_unit, 0);
      ASSERT_GE(i64{tile.rows} * tile.row_parts, s.seqlen_q);
      ASSERT_LT(i64{tile.rows} * (tile.row_parts - 1), s.seqlen_q);
      const bool divides = tile.heads < group || tile.row_parts > 1;
      ASSERT_LE(divides ? heads_kv * BackwardGroupsOf::key_rows(s) : 0, groups.rows(s)) << more;
      ASSERT_LE(tile.row_parts > 1 ? i64{s.batch} * s.heads_q * tile.row_parts : 0, groups.row_parts(s))
          << more;
      DividedShape larger = s;
      larger.batch += up_to(3) - 1;
      larger.seqlen_q += up_to(9000);
      larger.seqlen_k += up_to(9000);
      ASSERT_LE(groups.rows(s), groups.rows(larger)) << more;
      ASSERT_LE(groups.row_parts(s), groups.row_parts(larger)) << more;
    }
  }
}

TEST(BackwardGroups, FillAGpu) {
  const std::string causal = R"(, "mask": ["causal"])";
  const BackwardGroupsOf groups(causal);
  const auto heads = [&](const DividedShape& s) { return groups.tile(s).heads; };
  EXPECT_EQ(heads({1, 16, 2, 2048, 2048}), 1);    // 32 whole groups for 132 multiprocessors
  EXPECT_EQ(heads({64, 32, 8, 2048, 2048}), 4);   // 8,192
  EXPECT_EQ(heads({1, 64, 8, 16384, 16384}), 1);  // no rows of a group stay in the cache
  EXPECT_EQ(BackwardGroupsOf(causal + R"(, "deterministic": true)").tile({1, 16, 2, 2048, 2048}).heads, 8);
  EXPECT_EQ(BackwardGroupsOf(causal, 256).tile({1, 16, 2, 2048, 2048}).heads, 8);
  EXPECT_EQ(heads({0, 0, 0, 0, 0}), 1);
  const BackwardGroupsOf full("");
  EXPECT_GT(full.tile({2, 10, 10, 4096, 77}).row_parts, 4);  // 20 tiles
  EXPECT_EQ(full.tile({16, 16, 16, 4096, 77}).row_parts, 1);
  EXPECT_EQ(BackwardGroupsOf(R"(, "mask": ["tree"])").tile({2, 10, 10, 4096, 77}).row_parts, 1);
}

}  // namespace
}  // namespace flashjit
