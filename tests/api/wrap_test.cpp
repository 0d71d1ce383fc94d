// Tensors over memory of other types, and what a caller need not bring: workspaces, the launches of a step.
#include "runtime/wrap.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/flashjit.h"
#include "runtime/workspace.hpp"

namespace flashjit {
namespace {

using testing::HasSubstr;

std::string refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.message();
  }
  return "accepted";
}

void expect_tensor(const Tensor& t, const void* data, DType dtype, std::vector<std::int64_t> shape,
                   std::vector<std::int64_t> strides) {
  EXPECT_EQ(t.data, data);
  EXPECT_EQ(t.dtype, dtype);
  EXPECT_EQ(std::vector(t.shape.begin(), t.shape.begin() + t.rank), shape);
  EXPECT_EQ(std::vector(t.strides.begin(), t.strides.begin() + t.rank), strides);
}

TEST(Wrap, Ranges) {
  std::vector<float> floats(24);
  const std::vector<std::int32_t> ints(6);
  std::array<std::uint16_t, 8> bits{};
  expect_tensor(wrap(floats, {2, 3, 4}), floats.data(), DType::fp32, {2, 3, 4}, {12, 4, 1});
  expect_tensor(wrap(std::span(floats).subspan(4, 8), {8}), floats.data() + 4, DType::fp32, {8}, {1});
  expect_tensor(wrap(ints, {6}), ints.data(), DType::int32, {6}, {1});
  expect_tensor(wrap(bits, DType::bf16, {2, 4}), bits.data(), DType::bf16, {2, 4}, {4, 1});
  expect_tensor(wrap(std::span<float>(), {0, 5}), nullptr, DType::fp32, {0, 5}, {5, 1});
  EXPECT_EQ(wrap(floats, {24}, {Device::Kind::cuda, 1}).device.str(), "cuda:1");
}

TEST(Wrap, RefusesOtherSizes) {
  std::vector<float> floats(24);
  EXPECT_THAT(refusal([&] { wrap(floats, {2, 3, 5}); }),
              HasSubstr("memory of 24 elements cannot be a tensor [2, 3, 5], which has 30"));
  EXPECT_THAT(refusal([&] { wrap(floats, {-24, -1}); }), HasSubstr("sizes are at least 0"));
  EXPECT_THAT(refusal([&] { wrap(floats, {}); }), HasSubstr("rank 0; 1 to 6 would work"));
  EXPECT_THAT(refusal([&] { wrap(floats, {24, 1, 1, 1, 1, 1, 1}); }), HasSubstr("rank 7"));
  EXPECT_THAT(refusal([&] { wrap(floats, {1LL << 40, 1LL << 40}); }), HasSubstr("more than 64 bits count"));
}

// As in dlpack.h.
struct DLTensor {
  void* data;
  struct {
    std::int32_t device_type, device_id;
  } device;
  std::int32_t ndim;
  struct {
    std::uint8_t code, bits;
    std::uint16_t lanes;
  } dtype;
  std::int64_t *shape, *strides;
  std::uint64_t byte_offset;
};

TEST(Wrap, Dlpack) {
  std::vector<float> floats(32);
  std::int64_t shape[] = {2, 3}, strides[] = {8, 1};
  DLTensor t{floats.data(), {1, 0}, 2, {2, 32, 1}, shape, strides, 16};
  expect_tensor(wrap_dlpack(t), floats.data() + 4, DType::fp32, {2, 3}, {8, 1});
  t.strides = nullptr;
  expect_tensor(wrap_dlpack(t), floats.data() + 4, DType::fp32, {2, 3}, {3, 1});
  const std::pair<decltype(t.dtype), DType> dtypes[] = {
      {{2, 16, 1}, DType::fp16},     {{4, 16, 1}, DType::bf16},    {{0, 32, 1}, DType::int32},
      {{0, 64, 1}, DType::int64},    {{0, 8, 1}, DType::int8},     {{1, 8, 1}, DType::uint8},
      {{10, 8, 1}, DType::fp8_e4m3}, {{12, 8, 1}, DType::fp8_e5m2}};
  for (const auto& [foreign, dtype] : dtypes) {
    t.dtype = foreign;
    EXPECT_EQ(wrap_dlpack(t).dtype, dtype);
  }
  t.device = {2, 3};
  EXPECT_EQ(wrap_dlpack(t).device.str(), "cuda:3");
  flashjit_tensor c = {};
  ASSERT_EQ(flashjit_tensor_from_dlpack(&t, &c), FLASHJIT_OK) << flashjit_last_error_message();
  EXPECT_EQ(c.data, floats.data() + 4);
  EXPECT_EQ(c.dtype, FLASHJIT_FP8_E5M2);
  EXPECT_EQ(c.device_index, 3);
  EXPECT_EQ(c.strides[0], 3);
  t.device = {10, 0};
  EXPECT_THAT(refusal([&] { wrap_dlpack(t); }), HasSubstr("on a device of type 10"));
  t.device = {1, 0};
  t.dtype = {2, 64, 1};
  EXPECT_THAT(refusal([&] { wrap_dlpack(t); }), HasSubstr("type code 2 with 64 bits"));
  t.dtype = {2, 32, 4};
  EXPECT_THAT(refusal([&] { wrap_dlpack(t); }), HasSubstr("4 lanes"));
  t.ndim = 7;
  EXPECT_THAT(refusal([&] { wrap_dlpack(t); }), HasSubstr("rank 7"));
  EXPECT_EQ(flashjit_tensor_from_dlpack(nullptr, &c), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_EQ(flashjit_tensor_from_dlpack(&t, nullptr), FLASHJIT_INVALID_ARGUMENT);
}

TEST(Wrap, ArrayInterface) {
  std::vector<std::int32_t> ints(24);
  const auto address = reinterpret_cast<std::uintptr_t>(ints.data());
  const std::vector<std::int64_t> shape = {2, 3}, strides = {48, 4};
  expect_tensor(wrap_array_interface(address, "<i4", shape, strides, {}), ints.data(), DType::int32, {2, 3},
                {12, 1});
  expect_tensor(wrap_array_interface(address, "<f2", shape, {}, {Device::Kind::cuda, 0}), ints.data(),
                DType::fp16, {2, 3}, {3, 1});
  EXPECT_EQ(wrap_array_interface(address, "<V2", shape, {}, {}).dtype, DType::bf16);
  EXPECT_EQ(wrap_array_interface(address, "|u1", shape, {}, {}).dtype, DType::uint8);
  for (const char* typestr : {">f4", "<f8", "|b1", "", "f4"})
    EXPECT_THAT(refusal([&] { wrap_array_interface(address, typestr, shape, {}, {}); }),
                HasSubstr("typestr"));
  EXPECT_THAT(
      refusal([&] { wrap_array_interface(address, "<i4", shape, std::vector<std::int64_t>{48, 2}, {}); }),
      HasSubstr("a stride of 2 bytes"));
  EXPECT_THAT(refusal([&] { wrap_array_interface(address, "<i4", shape, std::vector<std::int64_t>{4}, {}); }),
              HasSubstr("1 strides and 2 dimensions"));
  flashjit_tensor c = {};
  ASSERT_EQ(flashjit_tensor_from_array_interface(ints.data(), "<i4", 2, shape.data(), strides.data(),
                                                 FLASHJIT_CPU, 0, &c),
            FLASHJIT_OK)
      << flashjit_last_error_message();
  EXPECT_EQ(c.strides[0], 12);
  EXPECT_EQ(
      flashjit_tensor_from_array_interface(ints.data(), "<i4", 2, nullptr, nullptr, FLASHJIT_CPU, 0, &c),
      FLASHJIT_INVALID_ARGUMENT);
  EXPECT_EQ(
      flashjit_tensor_from_array_interface(ints.data(), "<i4", 0, nullptr, nullptr, FLASHJIT_CPU, 0, &c),
      FLASHJIT_INVALID_ARGUMENT);
  EXPECT_EQ(flashjit_tensor_from_array_interface(ints.data(), "<i4", 2, shape.data(), nullptr, 7, 0, &c),
            FLASHJIT_INVALID_ARGUMENT);
}

TEST(Workspaces, AreAlignedAndAsLargeAsAsked) {
  for (const std::size_t bytes : {0, 1, 63, 64, 1000}) {
    Workspace made(Device{}, bytes);
    const Workspace workspace = std::move(made);
    EXPECT_EQ(workspace.bytes(), bytes);
    const Tensor t = workspace.tensor();
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(t.data) % 64, 0u);
    EXPECT_EQ(t.shape[0], static_cast<std::int64_t>(bytes));
    std::fill_n(static_cast<char*>(t.data), bytes, 'x');  // under a sanitizer: the memory is ours
  }
  EXPECT_THROW(Workspace(Device{}, SIZE_MAX), Error);
  EXPECT_THROW(Workspace(Device{}, SIZE_MAX / 2), Error);
}

// A serving loop in pages: requests of changing lengths, whose values are the steps' numbers.
class StepTest : public testing::Test {
 protected:
  static constexpr int requests = 3, heads_q = 4, heads_kv = 2, dim = 16, page_size = 16, pages = 3;
  StepTest() {
    for (int i = 0; i < requests * pages; ++i) page_table[i] = requests * pages - 1 - i;
    for (int i = 0; i < requests; ++i) positions[i] = 9 * i;
  }
  AttentionArgs append_args() {
    return {.k = cache(k),
            .v = cache(v),
            .page_table = wrap(page_table, {requests, pages}),
            .k_new = wrap(k_new, {requests, 1, heads_kv, dim}),
            .v_new = wrap(v_new, {requests, 1, heads_kv, dim}),
            .append_positions = wrap(positions, {requests})};
  }
  AttentionArgs decode_args() {
    return {.q = wrap(q, {requests, 1, heads_q, dim}),
            .k = cache(k),
            .v = cache(v),
            .o = wrap(o, {requests, 1, heads_q, dim}),
            .seqlens_k = wrap(lengths, {requests}),
            .page_table = wrap(page_table, {requests, pages})};
  }
  Tensor cache(std::vector<float>& data) { return wrap(data, {requests * pages, page_size, heads_kv, dim}); }
  // Keys of zeros weigh all tokens alike, so that o is the mean of the values.
  template <class Launch>
  void serve(Launch launch) {
    std::vector<double> sums(requests);
    for (int step = 1; step <= 20; ++step) {
      std::fill(v_new.begin(), v_new.end(), static_cast<float>(step));
      for (int i = 0; i < requests; ++i) lengths[i] = positions[i] + 1;
      launch();
      for (int i = 0; i < requests; ++i) {
        sums[i] += step;
        EXPECT_NEAR(o[i * heads_q * dim], sums[i] / lengths[i], 1e-5 * step) << "request " << i;
        ++positions[i];
      }
    }
  }

  std::vector<float> q = std::vector<float>(requests * heads_q * dim, 0.1f), o = q,
                     k_new = std::vector<float>(requests * heads_kv * dim), v_new = k_new,
                     k = std::vector<float>(requests * pages * page_size * heads_kv * dim), v = k;
  std::vector<std::int32_t> page_table = std::vector<std::int32_t>(requests * pages),
                            positions = std::vector<std::int32_t>(requests), lengths = positions;
  const Shape shape{.batch = requests,
                    .seqlen_q = 1,
                    .seqlen_k = pages * page_size,
                    .num_heads_q = heads_q,
                    .num_heads_kv = heads_kv,
                    .page_size = page_size};
  static constexpr char
      append_json[] = R"({"op": "append_kv", "dtype": "fp32", "head_dim": 16, "paged": true})",
      decode_json[] = R"({"op": "decode", "dtype": "fp32", "head_dim": 16, "paged": true, "lse": false})";
};

TEST_F(StepTest, ReadsLengthsAtEachLaunch) {
  Engine engine({.num_threads = 2});
  EngineStep made(engine);
  made.add(engine.get(AttentionSpec::from_json(append_json), shape), append_args(), shape);
  made.add(engine.get(AttentionSpec::from_json(decode_json), shape), decode_args(), shape);
  const EngineStep step = std::move(made);
  serve([&] { step.launch(); });
  lengths[1] = pages * page_size + 1;
  EXPECT_THAT(refusal([&] { step.launch(); }), HasSubstr("seqlens_k[1] is 49"));
}

// A backward needs a workspace, and a spec's formula a table by a name that is gone after add().
TEST_F(StepTest, KeepsWorkspacesAndNames) {
  const AttentionSpec spec = AttentionSpec::from_json(
      R"({"op": "backward", "dtype": "fp32", "head_dim": 16, "score": ["score + slope[head]"],
          "tables": {"slope": {"dtype": "fp32", "shape": ["heads_q"]}}})");
  const Shape sizes{.batch = 1, .seqlen_q = 20, .seqlen_k = 20, .num_heads_q = 2, .num_heads_kv = 2};
  Engine engine({.num_threads = 2});
  const Kernel& kernel = engine.get(spec, sizes);
  std::vector<float> x(20 * 2 * 16, 0.5f), lse(2 * 20, std::log(20.0f) + 1), dq(x.size()), dk = dq, dv = dq,
                                                                                           slope(2, 1 - 2.0f);
  const auto rows = [](std::vector<float>& data) { return wrap(data, {1, 20, 2, 16}); };
  EngineStep step(engine);
  {
    const auto name = std::make_unique<std::string>("slope");
    const NamedArgument named[] = {{*name, wrap(slope, {2})}};
    AttentionArgs args{.q = rows(x), .k = rows(x), .v = rows(x), .o = rows(x)};
    args.lse = wrap(lse, {1, 2, 20});
    args.d_o = rows(x);
    args.dq = rows(dq);
    args.dk = rows(dk);
    args.dv = rows(dv);
    args.named = named;
    step.add(kernel, args, sizes);
  }
  step.launch();
  // The scores are 16 * 0.25 / 4 - 1 = 0 and the weights 1 / 20 each, so that dv is the mean of do.
  for (const float value : dv) EXPECT_NEAR(value, 0.5f * std::exp(-1.0f), 1e-5);
}

TEST_F(StepTest, InC) {
  flashjit_engine* engine = nullptr;
  ASSERT_EQ(flashjit_engine_create(nullptr, &engine), FLASHJIT_OK);
  flashjit_step* step = nullptr;
  ASSERT_EQ(flashjit_step_create(engine, &step), FLASHJIT_OK);
  const flashjit_shape sizes = {sizeof sizes, requests, 1, pages * page_size, heads_q, heads_kv,
                                page_size,    0,        0};
  const auto tensor = [](auto& data, std::vector<std::int64_t> dims) {
    const bool real =
        sizeof(data[0]) == 4 && std::is_floating_point_v<std::remove_cvref_t<decltype(data[0])>>;
    auto made = std::make_unique<flashjit_tensor>();
    EXPECT_EQ(flashjit_tensor_from_array_interface(data.data(), real ? "<f4" : "<i4",
                                                   static_cast<std::int32_t>(dims.size()), dims.data(),
                                                   nullptr, FLASHJIT_CPU, 0, made.get()),
              FLASHJIT_OK);
    return made;
  };
  const auto k_ = tensor(k, {requests * pages, page_size, heads_kv, dim}),
             v_ = tensor(v, {requests * pages, page_size, heads_kv, dim}),
             table = tensor(page_table, {requests, pages}),
             new_k = tensor(k_new, {requests, 1, heads_kv, dim}),
             new_v = tensor(v_new, {requests, 1, heads_kv, dim}), at = tensor(positions, {requests}),
             q_ = tensor(q, {requests, 1, heads_q, dim}), o_ = tensor(o, {requests, 1, heads_q, dim}),
             seqlens = tensor(lengths, {requests});
  const std::vector<flashjit_argument> append = {{FLASHJIT_ARG_K, {.tensor = k_.get()}},
                                                 {FLASHJIT_ARG_V, {.tensor = v_.get()}},
                                                 {FLASHJIT_ARG_PAGE_TABLE, {.tensor = table.get()}},
                                                 {FLASHJIT_ARG_K_NEW, {.tensor = new_k.get()}},
                                                 {FLASHJIT_ARG_V_NEW, {.tensor = new_v.get()}},
                                                 {FLASHJIT_ARG_APPEND_POSITIONS, {.tensor = at.get()}}},
                                       decode = {{FLASHJIT_ARG_Q, {.tensor = q_.get()}},
                                                 {FLASHJIT_ARG_K, {.tensor = k_.get()}},
                                                 {FLASHJIT_ARG_V, {.tensor = v_.get()}},
                                                 {FLASHJIT_ARG_O, {.tensor = o_.get()}},
                                                 {FLASHJIT_ARG_SEQLENS_K, {.tensor = seqlens.get()}},
                                                 {FLASHJIT_ARG_PAGE_TABLE, {.tensor = table.get()}}};
  for (const auto& [json, args] : {std::pair(append_json, &append), {decode_json, &decode}}) {
    flashjit_spec* spec = nullptr;
    const flashjit_kernel* kernel = nullptr;
    ASSERT_EQ(flashjit_spec_create(json, &spec), FLASHJIT_OK);
    ASSERT_EQ(flashjit_engine_get(engine, spec, &sizes, &kernel), FLASHJIT_OK);
    ASSERT_EQ(flashjit_step_add(step, kernel, args->data(), args->size(), &sizes), FLASHJIT_OK)
        << flashjit_last_error_message();
    flashjit_spec_destroy(spec);
  }
  serve(
      [&] { ASSERT_EQ(flashjit_step_launch(step, nullptr), FLASHJIT_OK) << flashjit_last_error_message(); });
  EXPECT_EQ(flashjit_step_launch(nullptr, nullptr), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_EQ(flashjit_step_add(step, nullptr, nullptr, 0, &sizes), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_EQ(flashjit_step_create(nullptr, &step), FLASHJIT_INVALID_ARGUMENT);

  flashjit_workspace* workspace = nullptr;
  flashjit_tensor memory = {};
  ASSERT_EQ(flashjit_workspace_create(engine, 100, &workspace), FLASHJIT_OK);
  ASSERT_EQ(flashjit_workspace_tensor(workspace, &memory), FLASHJIT_OK);
  EXPECT_EQ(memory.shape[0], 100);
  EXPECT_EQ(flashjit_workspace_tensor(nullptr, &memory), FLASHJIT_INVALID_ARGUMENT);
  flashjit_workspace_destroy(workspace);
  flashjit_workspace_destroy(nullptr);
  flashjit_step_destroy(step);
  flashjit_step_destroy(nullptr);
  flashjit_engine_destroy(engine);
}

}  // namespace
}  // namespace flashjit
