// Dropout's arguments through both interfaces. Arguments that are missing, out of range or
// contradictory are refused by name, and a kernel without dropout accepts none of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "runtime/dropout.hpp"
#include "runtime/flashjit.h"
#include "tests/api/arguments.hpp"
#include "tests/unit/expect_error.h"

namespace flashjit {
namespace {

using testing::HasSubstr;

AttentionSpec spec(bool dropout) {
  AttentionSpec s;
  s.head_dim = GoodArguments::head_dim;
  s.head_dim_v = GoodArguments::head_dim_v;
  s.dropout = dropout;
  return s;
}

const Kernel& dropout_kernel(bool dropout = true) {
  static Engine engine{EngineOptions{}};
  return engine.get(spec(dropout), GoodArguments::shape());
}

class DropoutArguments : public testing::Test {
 protected:
  DropoutArguments() {
    good.args.dropout_p = 0.1;
    good.args.dropout_seed = 1;
  }
  Tensor number(std::uint64_t& value) { return Tensor::contiguous(&value, DType::int64, {}, {1}); }
  void use_tensors(AttentionArgs& args) {
    args.dropout_seed.reset();
    args.dropout_seed_tensor = number(seed);
    args.dropout_offset_tensor = number(offset);
  }
  void expect_refusal(std::initializer_list<const char*> parts,
                      const std::function<void(AttentionArgs&)>& spoil) {
    AttentionArgs bad = good.args;
    spoil(bad);
    expect_error(ErrorCode::invalid_argument, parts, [&] { dropout_kernel().launch(bad); });
    expect_error(ErrorCode::invalid_argument, parts, [&] { dropout_kernel().prepare(bad); });
    EXPECT_NO_THROW(dropout_kernel().launch(good.args));
  }

  GoodArguments good;
  std::uint64_t seed = 1, offset = 2;
};

TEST_F(DropoutArguments, GoodOnesAreAccepted) {
  for (const double p : {0.0, 1e-300, 0.5, 1 - 0x1p-32, 1.0}) {
    good.args.dropout_p = p;
    EXPECT_NO_THROW(dropout_kernel().launch(good.args)) << p;
  }
  good.args.dropout_offset = ~std::uint64_t{0};
  EXPECT_NO_THROW(dropout_kernel().launch(good.args));
  good.args.dropout_offset.reset();
  use_tensors(good.args);
  EXPECT_NO_THROW(dropout_kernel().launch(good.args));
}

TEST_F(DropoutArguments, Probabilities) {
  for (const double p : {-0.1, 1.5, -std::numeric_limits<double>::denorm_min(),
                         std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()})
    expect_refusal({"dropout_p is ", "between 0 and 1"}, [&](AttentionArgs& a) { a.dropout_p = p; });
  expect_refusal({"dropout_p is missing"}, [](AttentionArgs& a) { a.dropout_p.reset(); });
}

TEST_F(DropoutArguments, Seeds) {
  expect_refusal({"dropout_seed is missing", "dropout_seed_tensor"},
                 [](AttentionArgs& a) { a.dropout_seed.reset(); });
  expect_refusal({"dropout_seed_tensor and dropout_offset_tensor", "both"}, [&](AttentionArgs& a) {
    use_tensors(a);
    a.dropout_offset_tensor.reset();
  });
  expect_refusal({"dropout_seed_tensor and dropout_offset_tensor", "both"}, [&](AttentionArgs& a) {
    use_tensors(a);
    a.dropout_seed_tensor.reset();
  });
  expect_refusal({"twice"}, [&](AttentionArgs& a) {
    use_tensors(a);
    a.dropout_seed = 1;
  });
  expect_refusal({"twice"}, [&](AttentionArgs& a) {
    use_tensors(a);
    a.dropout_offset = 1;
  });
}

TEST_F(DropoutArguments, SeedTensors) {
  const std::pair<const char*, std::optional<Tensor> AttentionArgs::*> tensors[] = {
      {"dropout_seed_tensor", &AttentionArgs::dropout_seed_tensor},
      {"dropout_offset_tensor", &AttentionArgs::dropout_offset_tensor}};
  for (const auto& tensor : tensors) {
    const char* const name = tensor.first;
    const auto member = tensor.second;
    const auto refused = [&](std::initializer_list<const char*> parts,
                             const std::function<void(Tensor&)>& spoil) {
      expect_refusal(parts, [&](AttentionArgs& a) {
        use_tensors(a);
        spoil(*(a.*member));
      });
    };
    refused({name, "dtype int32", "int64"}, [](Tensor& t) { t.dtype = DType::int32; });
    refused({name, "rank 2"}, [](Tensor& t) { t.rank = 2; });
    refused({name, "[2]", "one number"}, [](Tensor& t) { t.shape[0] = 2; });
    refused({name, "null"}, [](Tensor& t) { t.data = nullptr; });
    refused({name, "aligned to 8"}, [](Tensor& t) { t.data = static_cast<char*>(t.data) + 4; });
    refused({name, "cuda:1", "cpu"}, [](Tensor& t) { t.device = {Device::Kind::cuda, 1}; });
  }
}

TEST_F(DropoutArguments, ToAKernelWithoutDropout) {
  const std::pair<const char*, std::function<void(AttentionArgs&)>> given[] = {
      {"dropout_p", [](AttentionArgs& a) { a.dropout_p = 0; }},
      {"dropout_seed", [](AttentionArgs& a) { a.dropout_seed = 0; }},
      {"dropout_offset", [](AttentionArgs& a) { a.dropout_offset = 1; }},
      {"dropout_seed_tensor", [&](AttentionArgs& a) { a.dropout_seed_tensor = number(seed); }},
      {"dropout_offset_tensor", [&](AttentionArgs& a) { a.dropout_offset_tensor = number(offset); }}};
  for (const auto& [name, give] : given) {
    GoodArguments plain;
    EXPECT_NO_THROW(dropout_kernel(false).launch(plain.args));
    give(plain.args);
    expect_error(ErrorCode::invalid_argument, {name, "\"dropout\": false"},
                 [&] { dropout_kernel(false).launch(plain.args); });
  }
}

// The shape alone is refused; the memory is never accessed.
TEST(DropoutMask, OfMoreThanCanBeCounted) {
  constexpr int largest = std::numeric_limits<int>::max();
  const auto refused = [](std::initializer_list<const char*> parts, const Shape& shape) {
    std::uint8_t byte = 7;
    expect_error(ErrorCode::invalid_argument, parts, [&] { dropout_mask_size(shape); });
    expect_error(ErrorCode::invalid_argument, parts, [&] { dropout_mask({.p = 0.5}, shape, {}); });
    const flashjit_shape c = {
        sizeof c, shape.batch, shape.seqlen_q, shape.seqlen_k, shape.num_heads_q, 1, 0, 0, 0};
    EXPECT_EQ(flashjit_dropout_mask(0.5, 1, 2, &c, &byte), FLASHJIT_INVALID_ARGUMENT);
    EXPECT_EQ(byte, 7);
  };
  refused({"64 bits", "65536"}, {65536, 65536, 65536, 65536});  // 2^64 wraps to 0
  refused({"64 bits"}, {largest, longest_sequence, longest_sequence, largest});
  refused({"2147483647", "1073741824"}, {1, largest, 1, 1});
  refused({"2147483647", "1073741824"}, {1, 1, largest, 1});
  EXPECT_EQ(dropout_mask_size({largest, 1, longest_sequence, 1}), std::size_t{largest} << 30);
  EXPECT_EQ(dropout_mask_size({largest, longest_sequence, 0, largest}), 0u);
  dropout_mask({.p = 0.5}, {largest, longest_sequence, 0, largest}, {});  // returns at once
  std::uint8_t byte = 0;
  expect_error(ErrorCode::invalid_argument, {"2147483648 keys", "1073741824"},
               [&] { dropout_row({.p = 0.5}, 0, 0, 0, {&byte, std::size_t{1} << 31}); });
}

// ---- C ----

TEST_F(DropoutArguments, FromC) {
  flashjit_engine* engine = nullptr;
  flashjit_spec* s = nullptr;
  const flashjit_kernel* k = nullptr;
  const flashjit_shape shape = {sizeof shape,
                                GoodArguments::batch,
                                GoodArguments::seqlen_q,
                                GoodArguments::seqlen_k,
                                GoodArguments::heads_q,
                                GoodArguments::heads_kv,
                                0,
                                0,
                                0};
  ASSERT_EQ(flashjit_engine_create(nullptr, &engine), FLASHJIT_OK);
  ASSERT_EQ(flashjit_spec_create(spec(true).to_json().c_str(), &s), FLASHJIT_OK);
  ASSERT_EQ(flashjit_engine_get(engine, s, &shape, &k), FLASHJIT_OK);
  const flashjit_tensor q = c_tensor(*good.args.q), key = c_tensor(*good.args.k), v = c_tensor(*good.args.v),
                        o = c_tensor(*good.args.o), lse = c_tensor(*good.args.lse),
                        at_seed = c_tensor(number(seed)), at_offset = c_tensor(number(offset));
  flashjit_argument args[] = {{FLASHJIT_ARG_Q, {.tensor = &q}},
                              {FLASHJIT_ARG_K, {.tensor = &key}},
                              {FLASHJIT_ARG_V, {.tensor = &v}},
                              {FLASHJIT_ARG_O, {.tensor = &o}},
                              {FLASHJIT_ARG_LSE, {.tensor = &lse}},
                              {FLASHJIT_ARG_DROPOUT_P, {.real = 0.5}},
                              {FLASHJIT_ARG_DROPOUT_SEED, {.integer = -1}},
                              {FLASHJIT_ARG_DROPOUT_OFFSET, {.integer = 2}}};
  auto* v_elements = static_cast<std::uint16_t*>(good.args.v->data);
  std::fill_n(v_elements, 4096, std::uint16_t{0x3f80});  // 1
  const auto outputs = [&] {
    const auto* elements = static_cast<const std::uint16_t*>(good.args.o->data);
    return std::vector<std::uint16_t>(elements, elements + 2 * 5 * 4 * 24);
  };
  EXPECT_EQ(flashjit_kernel_launch(k, args, 8, nullptr), FLASHJIT_OK) << flashjit_last_error_message();
  const auto by_value = outputs();
  // The same in C++.
  good.args.dropout_p = 0.5;
  good.args.dropout_seed = ~std::uint64_t{0};
  good.args.dropout_offset = 2;
  dropout_kernel().launch(good.args);
  EXPECT_EQ(outputs(), by_value);
  // And from memory.
  seed = ~std::uint64_t{0};
  args[6] = {FLASHJIT_ARG_DROPOUT_SEED_TENSOR, {.tensor = &at_seed}};
  args[7] = {FLASHJIT_ARG_DROPOUT_OFFSET_TENSOR, {.tensor = &at_offset}};
  EXPECT_EQ(flashjit_kernel_launch(k, args, 8, nullptr), FLASHJIT_OK) << flashjit_last_error_message();
  EXPECT_EQ(outputs(), by_value);
  offset = 3;
  EXPECT_EQ(flashjit_kernel_launch(k, args, 8, nullptr), FLASHJIT_OK);
  EXPECT_NE(outputs(), by_value);

  EXPECT_EQ(flashjit_kernel_launch(k, args, 7, nullptr), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_THAT(flashjit_last_error_message(), HasSubstr("dropout_offset_tensor"));
  args[5].value.real = 1.25;
  EXPECT_EQ(flashjit_kernel_launch(k, args, 8, nullptr), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_THAT(flashjit_last_error_message(), HasSubstr("dropout_p is 1.25"));

  std::vector<std::uint8_t> mask(2 * 4 * 5 * 7), expected(mask.size());
  EXPECT_EQ(flashjit_dropout_mask(0.5, 1, 2, &shape, mask.data()), FLASHJIT_OK);
  dropout_mask({.p = 0.5, .seed = 1, .offset = 2}, GoodArguments::shape(), expected);
  EXPECT_EQ(mask, expected);
  EXPECT_EQ(flashjit_dropout_mask(0.5, 1, 2, &shape, nullptr), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_EQ(flashjit_dropout_mask(0.5, 1, 2, nullptr, mask.data()), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_EQ(flashjit_dropout_mask(2, 1, 2, &shape, mask.data()), FLASHJIT_INVALID_ARGUMENT);
  flashjit_spec_destroy(s);
  flashjit_engine_destroy(engine);
}

}  // namespace
}  // namespace flashjit
