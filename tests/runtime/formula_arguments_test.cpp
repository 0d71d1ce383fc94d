// Tables, scalars and sink logits of a launch: what is refused, and the params that kernels get.
#include "runtime/arguments/formulas.hpp"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <limits>

#include "codegen/formulas/write_out.hpp"
#include "codegen/spec/declarations.hpp"
#include "codegen/spec/spec_fields.hpp"
#include "runtime/arguments/checks.hpp"
#include "tests/unit/expect_error.h"

namespace flashjit {
namespace {

const device::ProblemParams problem = [] {
  device::ProblemParams p{};
  p.batch = 2, p.num_heads_q = 4, p.num_heads_kv = 2, p.seqlen_q = 5, p.seqlen_k = 7, p.total_q = 9,
  p.total_k = 11;
  return p;
}();

DeclaredTable table(const char* name, DType dtype, std::initializer_list<const char*> shape) {
  DeclaredTable declared{name, dtype};
  for (const char* dim : shape) declared.shape.push_back(dimension_of(dim));
  return declared;
}

AttentionSpec spec_of(bool varlen = false) {
  AttentionSpec spec{.head_dim = 64, .varlen = varlen};
  spec.score = {
      "score + slope[head] * reach + bias[row, key] + pairs[batch, head_kv, 0] + near[1, 0] + far[2] + cap"};
  spec.tables = {table("slope", DType::fp32, {"heads_q"}),
                 table("bias", DType::bf16, {"batch or 1", "heads_q or 1", "seqlen_q", "seqlen_k"}),
                 table("pairs", DType::int8, {"batch", "heads_kv", "width"}),
                 table("near", DType::int32, {"width", varlen ? "total_k" : "batch"}),
                 table("far", DType::uint8, {"width"})};
  spec.scalars = {{"cap", DType::fp32}, {"reach", DType::int32}};
  spec.sink_logits = true;
  write_out_formulas(spec);
  return without_defaults(std::move(spec));
}

class FormulaArguments : public testing::Test {
 protected:
  explicit FormulaArguments(bool varlen = false) : spec(spec_of(varlen)), varlen_(varlen) {
    args.named = named;
    args.sink_logits = tensor(DType::fp32, {4});
  }
  Tensor tensor(DType dtype, std::initializer_list<std::int64_t> shape) {
    return Tensor::contiguous(memory, dtype, {}, shape);
  }
  std::optional<device::FormulaParams> check() {
    return check_formula_arguments(spec, {}, args, problem, 0.25f);
  }
  Tensor& at(int i) { return std::get<Tensor>(named[i].value); }

  void refused(std::initializer_list<const char*> parts, auto&& spoil) {
    const auto before = named;
    const AttentionArgs args_before = args;
    spoil();
    expect_error(ErrorCode::invalid_argument, parts, [&] {
      // The other arguments that a forward needs are there.
      AttentionSpec only = spec;
      only.lse = only.varlen = false;
      const Tensor other = tensor(DType::bf16, {1});
      check_presence(
          only, {.q = other, .k = other, .v = other, .o = other, .sink_logits = other, .named = args.named});
      check();
    });
    named = before;
    args = args_before;
    EXPECT_TRUE(check());
  }

  alignas(64) std::byte memory[4096] = {};
  AttentionSpec spec;
  bool varlen_;
  std::array<NamedArgument, 7> named = {{{"slope", tensor(DType::fp32, {4})},
                                         {"bias", tensor(DType::bf16, {2, 1, 5, 7})},
                                         {"pairs", tensor(DType::int8, {2, 2, 3})},
                                         {"cap", 30.5f},
                                         {"near", tensor(DType::int32, {3, varlen_ ? 11 : 2})},
                                         {"far", tensor(DType::uint8, {3})},
                                         {"reach", -7}}};
  AttentionArgs args;
};
class PackedFormulaArguments : public FormulaArguments {
 protected:
  PackedFormulaArguments() : FormulaArguments(true) {}
};

TEST_F(FormulaArguments, BecomeParamsInTheOrderOfNames) {
  at(1).strides = {0, 100, -7, 2, 0, 0};
  args.sink_logits->strides[0] = 3;
  const auto params = check();
  ASSERT_TRUE(params);
  EXPECT_EQ(params->scale, 0.25f);
  EXPECT_EQ(std::bit_cast<float>(params->scalars[0]), 30.5f);
  EXPECT_EQ(std::bit_cast<std::int32_t>(params->scalars[1]), -7);
  const device::FormulaTable& bias = params->tables[0];
  EXPECT_EQ(bias.data, memory);
  EXPECT_EQ(bias.sizes[0], 2);
  EXPECT_EQ(bias.sizes[1], 1);
  EXPECT_EQ(bias.sizes[3], 7);
  EXPECT_EQ(bias.strides[0], 0);
  EXPECT_EQ(bias.strides[1], 0);  // of a dimension of size 1
  EXPECT_EQ(bias.strides[2], -7);
  EXPECT_EQ(bias.strides[3], 2);
  EXPECT_EQ(params->tables[1].sizes[0], 3);    // far
  EXPECT_EQ(params->tables[2].strides[0], 2);  // near
  EXPECT_EQ(params->tables[3].sizes[2], 3);    // pairs
  EXPECT_EQ(params->tables[4].sizes[0], 4);    // slope
  EXPECT_EQ(params->tables[5].data, nullptr);
  EXPECT_EQ(params->sink_logits, reinterpret_cast<float*>(memory));
  EXPECT_EQ(params->sink_stride, 3);
}

TEST_F(FormulaArguments, WrongOnesAreRefusedByName) {
  refused({"slope has dtype bf16", "declares fp32"}, [&] { at(0).dtype = DType::bf16; });
  refused({"slope has rank 2", "[heads_q]"}, [&] { at(0) = tensor(DType::fp32, {2, 2}); });
  refused({"slope has shape [5]", "dimension 0 must be 4, num_heads_q"}, [&] { at(0).shape[0] = 5; });
  refused({"slope has a null data pointer"}, [&] { at(0).data = nullptr; });
  refused({"slope", "not aligned to 4 bytes"}, [&] { at(0).data = memory + 2; });
  refused({"slope is on cuda:0"}, [&] { at(0).device = {Device::Kind::cuda, 0}; });
  refused({"slope has shape [-1]"}, [&] { at(0).shape[0] = -1; });
  refused({"bias has shape [3, 1, 5, 7]", "must be 2, the batch, or 1"}, [&] { at(1).shape[0] = 3; });
  refused({"bias has shape [2, 2, 5, 7]", "must be 4, num_heads_q, or 1"}, [&] { at(1).shape[1] = 2; });
  refused({"bias", "dimension 2 must be 5, seqlen_q"}, [&] { at(1).shape[2] = 6; });
  refused({"bias", "dimension 3 must be 7, seqlen_k"}, [&] { at(1).shape[3] = 8; });
  refused({"pairs", "dimension 1 must be 2, num_heads_kv"}, [&] { at(2).shape[1] = 4; });
  refused({"pairs has shape [2, 2, 4]", "dimension 2 must be 3, since width is 3 in table far"},
          [&] { at(2).shape[2] = 4; });
  refused({"table slope was given as a number"}, [&] { named[0] = {"slope", 1}; });
  refused({"scalar cap was given as a tensor"}, [&] { named[3] = {"cap", tensor(DType::fp32, {1})}; });
  refused({"scalar cap is 1e+39", "inf would work"}, [&] { named[3] = {"cap", 1e39}; });
  refused({"scalar reach is 0.5", "integer of 32 bits"}, [&] { named[6] = {"reach", 0.5}; });
  refused({"scalar reach is 2147483648"}, [&] { named[6] = {"reach", std::int64_t{1} << 31}; });
  refused({"scalar reach is nan"}, [&] { named[6] = {"reach", std::numeric_limits<double>::quiet_NaN()}; });
  refused({"sink_logits has shape [5]", "num_heads_q"}, [&] { args.sink_logits->shape[0] = 5; });
  refused({"sink_logits has dtype bf16"}, [&] { args.sink_logits->dtype = DType::bf16; });
  refused({"sink_logits", "not aligned"}, [&] { args.sink_logits->data = memory + 1; });
  refused({"sink_logits is missing"}, [&] { args.sink_logits.reset(); });
  named[3] = {"cap", std::numeric_limits<double>::infinity()};
  EXPECT_EQ(std::bit_cast<float>(check()->scalars[0]), std::numeric_limits<float>::infinity());
}

TEST_F(FormulaArguments, EachNameIsGivenOnce) {
  refused({"\"slop\" was given, but the spec declares", "did you mean slope?"},
          [&] { named[0].name = "slop"; });
  refused({"\"cap\" was given before"}, [&] { named[0] = named[3]; });
  refused({"table slope is missing", "fp32 [heads_q]"}, [&] { args.named = args.named.subspan(1); });
  refused({"scalar reach is missing", "int32"}, [&] { args.named = args.named.first(6); });
  const AttentionSpec plain{.op = Operation::append_kv, .head_dim = 64, .lse = false};
  expect_error(ErrorCode::invalid_argument, {"\"slope\" was given, but the spec declares no tables"},
               [&] { check_presence(plain, {.named = named}); });
}

// Any index has an element: what no launch reads may be empty.
TEST_F(FormulaArguments, EmptyTables) {
  refused({"table far has shape [0]", "at least 1"},
          [&] { at(2).shape[2] = at(4).shape[0] = at(5).shape[0] = 0; });
  device::ProblemParams without_keys = problem;
  without_keys.seqlen_k = 0;
  at(1).shape[3] = 0;
  at(1).data = nullptr;
  const auto params = check_formula_arguments(spec, {}, args, without_keys, 1);
  EXPECT_EQ(params->tables[0].data, nullptr);
  EXPECT_EQ(params->tables[0].sizes[3], 0);
}

TEST_F(FormulaArguments, Strides) {
  at(1).strides[0] = std::int64_t{1} << 40;  // of batch entries
  EXPECT_EQ(check()->tables[0].strides[0], std::int64_t{1} << 40);
  refused({"table bias has stride 1099511627776 along dimension 3", "2^31 bytes"},
          [&] { at(1).strides[3] = std::int64_t{1} << 40; });
}

TEST_F(PackedFormulaArguments, MayBeMadeForLongerSequences) {
  EXPECT_TRUE(check());
  at(1) = tensor(DType::bf16, {1, 4, 6, 9});
  EXPECT_TRUE(check());
  refused({"bias", "must be at least 5", "max_seqlen_q"}, [&] { at(1).shape[2] = 4; });
  refused({"bias", "must be at least 7", "max_seqlen_k"}, [&] { at(1).shape[3] = 6; });
  refused({"near", "must be 11, total_k"}, [&] { at(4).shape[1] = 12; });
}

TEST(FormulaParams, OfSpecsWithoutFormulas) {
  EXPECT_FALSE(check_formula_arguments({.head_dim = 64}, {}, {}, problem, 1));
}

}  // namespace
}  // namespace flashjit
