// Scales of an 8-bit cache: what is refused, and the params that kernels get.
#include "runtime/arguments/scales.hpp"

#include <gtest/gtest.h>

#include <limits>

#include "tests/unit/expect_error.h"

namespace flashjit {
namespace {

float memory[4 * 16 * 2];

Tensor scales(std::initializer_list<std::int64_t> shape) {
  return Tensor::contiguous(memory, DType::fp32, {}, shape);
}

// A cache of four entries, or pages, of 16 keys and 2 heads.
AttentionArgs args_with(const Tensor& scale) {
  AttentionArgs args;
  args.k = args.v = Tensor::contiguous(nullptr, DType::int8, {}, {4, 16, 2, 64});
  args.k_scale = args.v_scale = scale;
  return args;
}

AttentionSpec spec_of(KvScale scale, bool paged = false) {
  return {
      .op = Operation::decode, .head_dim = 64, .paged = paged, .kv_dtype = DType::int8, .kv_scale = scale};
}

TEST(KvScaleArguments, Strides) {
  EXPECT_FALSE(check_kv_scales({.op = Operation::decode}, {}, {}).has_value());

  const auto one = check_kv_scales(spec_of(KvScale::tensor), {}, args_with(scales({1})));
  EXPECT_EQ(one->k.data, memory);
  EXPECT_EQ(one->k.batch_stride, 0);
  EXPECT_EQ(one->k.row_stride, 0);
  EXPECT_EQ(one->v.head_stride, 0);

  Tensor of_heads = scales({2});
  of_heads.strides[0] = 5;
  EXPECT_EQ(check_kv_scales(spec_of(KvScale::head), {}, args_with(of_heads))->k.head_stride, 5);

  Tensor of_tokens = scales({4, 16, 2});
  of_tokens.strides = {32, 1, 16};
  const auto each = check_kv_scales(spec_of(KvScale::token_head, true), {}, args_with(of_tokens));
  EXPECT_EQ(each->v.batch_stride, 32);
  EXPECT_EQ(each->v.row_stride, 1);
  EXPECT_EQ(each->v.head_stride, 16);
}

TEST(KvScaleArguments, Refused) {
  const auto refused = [](KvScale scale, const Tensor& tensor, std::initializer_list<const char*> parts,
                          bool paged = false) {
    expect_error(ErrorCode::invalid_argument, parts,
                 [&] { check_kv_scales(spec_of(scale, paged), {}, args_with(tensor)); });
  };
  refused(KvScale::tensor, scales({2}), {"k_scale has shape [2]", "one scale for all"});
  refused(KvScale::tensor, scales({1, 1}), {"k_scale has rank 2", "[1]"});
  refused(KvScale::head, scales({3}), {"k_scale has shape [3]", "must be 2, k's heads"});
  refused(KvScale::token_head, scales({3, 16, 2}), {"dimension 0 must be 4, k's batch"});
  refused(KvScale::token_head, scales({3, 16, 2}), {"dimension 0 must be 4, k's pages"}, true);
  refused(KvScale::token_head, scales({4, 15, 2}), {"dimension 1 must be 16, k's rows"});
  refused(KvScale::token_head, scales({4, 16, 1}), {"dimension 2 must be 2, k's heads"});
  Tensor wrong = scales({1});
  wrong.dtype = DType::bf16;
  refused(KvScale::tensor, wrong, {"k_scale has dtype bf16", "fp32"});
  wrong = scales({1});
  wrong.data = reinterpret_cast<char*>(memory) + 2;
  refused(KvScale::tensor, wrong, {"k_scale's data pointer", "4 bytes"});

  memory[1] = std::numeric_limits<float>::infinity();
  refused(KvScale::head, scales({2}), {"k_scale[1] is inf", "finite"});
  memory[1] = 0;

  AttentionArgs args = args_with(scales({1}));
  args.v_scale.reset();
  expect_error(ErrorCode::invalid_argument, {"v_scale is missing", "[1]"},
               [&] { check_kv_scales(spec_of(KvScale::tensor), {}, args); });
}

}  // namespace
}  // namespace flashjit
