// The row of each operation is true of its launches and of its oracle.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "tests/api/any_launch.hpp"
#include "tests/unit/expect_error.h"
#include "tools/verify/oracle.hpp"

namespace flashjit {
namespace {

constexpr Shape launched_shape{
    .batch = 2, .seqlen_q = 5, .seqlen_k = 48, .num_heads_q = 4, .num_heads_kv = 2};

std::set<std::string> written_by(AnyLaunch& launch) {
  std::set<std::string> names;
  for (const AnyLaunch::Given& given : launch.tensors())
    if (given.written && given.name != "workspace") names.insert(given.name);
  return names;
}

TEST(Operations, OracleComparesEverythingThatALaunchWrites) {
  Engine engine{EngineOptions{}};
  std::set<std::string> met;
  for (const AnySpec& of : any_specs()) {
    SCOPED_TRACE(of.json);
    AnyLaunch launch(of, launched_shape, engine);
    met.insert(to_string(launch.spec.op));
    std::set<std::string> compared;
    for (const verify::Output& output : verify::oracle_of(launch.spec, launch.args).outputs)
      compared.insert(output.name);
    EXPECT_EQ(compared, written_by(launch));
  }
  for (const OperationInfo& row : operation_table) EXPECT_TRUE(met.contains(row.name)) << row.name;
}

TEST(Operations, RowsAreTheFirstSizesOfTheirTensor) {
  Engine engine{EngineOptions{}};
  for (const AnySpec& of : any_specs()) {
    SCOPED_TRACE(of.json);
    AnyLaunch launch(of, launched_shape, engine);
    const auto& rows = launch.args.*rows_of(launch.spec.op).tensor();
    ASSERT_TRUE(rows.has_value());
    const auto from_end = [&](int i) { return rows->shape[rows->rank - i]; };
    EXPECT_EQ(from_end(3), launched_shape.seqlen_q * (launch.spec.varlen ? launched_shape.batch : 1));
    if (!launch.spec.varlen) {
      EXPECT_EQ(from_end(4), launched_shape.batch);
    }
    EXPECT_TRUE(from_end(2) == launched_shape.num_heads_q || from_end(2) == launched_shape.num_heads_kv);
  }
}

// An operation has caches, appends and writes gradients as its arguments say.
TEST(Operations, RowsAgreeWithTheTableOfArguments) {
  using Args = AttentionArgs;
  for (const OperationInfo& row : operation_table) {
    SCOPED_TRACE(row.name);
    const auto has = [&](TensorMember member) {
      return (argument_of(member).operations >> static_cast<int>(row.op) & 1) != 0;
    };
    EXPECT_EQ(row.caches != When::never, has(&Args::page_table) || has(&Args::k_from));
    EXPECT_EQ(row.copies, has(&Args::k_from));
    EXPECT_EQ(row.appends != When::never, has(&Args::k_new));
    EXPECT_EQ(row.writes_gradients, has(&Args::dq));
    EXPECT_EQ(row.attends, has(&Args::sink_logits));
    const AttentionSpec spec{.op = row.op, .mask = {BlockSparseMask{}}};
    EXPECT_EQ(row.makes_lists,
              has(&Args::block_offsets) && argument_of(&Args::block_offsets).role_in(spec) == Role::output);
    if (!row.after) continue;
    // The other operation's outputs are inputs of this one.
    for (const TensorMember member : {&Args::o, &Args::lse}) {
      EXPECT_EQ(argument_of(member).role_in({.op = *row.after}), Role::output);
      EXPECT_EQ(argument_of(member).role_in(spec), Role::input);
    }
  }
}

TEST(Operations, ANumberBeyondTheTableIsRefused) {
  const auto beyond = static_cast<Operation>(num_operations);
  EXPECT_STREQ(to_string(beyond), "unknown");
  expect_error(ErrorCode::invalid_spec, {"is no enumerator of Operation"},
               [&] { AttentionSpec{.op = beyond, .head_dim = 64}.validated(); });
}

}  // namespace
}  // namespace flashjit
