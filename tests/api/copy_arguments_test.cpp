// copy_kv through the C++ and the C interface: an example by hand, and bad arguments, each of which is
// refused with its name.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/flashjit.h"
#include "runtime/flashjit.hpp"
#include "tests/unit/expect_error.h"

namespace flashjit::copy_arguments_testing {
namespace {

constexpr int pages = 2, page_size = 4, heads = 2, head_dim = 8, row = heads * head_dim;

const Kernel& kernel_of(const std::string& more) {
  static Engine engine{EngineOptions{}};
  return engine.get(
      AttentionSpec::from_json(R"({"op": "copy_kv", "dtype": "bf16", "head_dim": 8)" + more + "}"),
      {.batch = 1, .seqlen_q = 4, .seqlen_k = page_size, .num_heads_q = heads, .num_heads_kv = heads});
}
constexpr char plain[] = "", int8[] = R"(, "kv_dtype": "int8")",
               scaled[] = R"(, "kv_dtype": "int8", "kv_scale": "token_head")";

// A draft of five tokens in slots 1 to 5, of which 1, 3 and 4 are accepted: they become slots 1 to 3, in
// place.
struct Accepted {
  std::vector<std::int8_t> k, v;
  std::vector<float> k_scale, v_scale;
  std::vector<std::int64_t> from = {1, 3, 4}, to = {1, 2, 3};
  std::vector<std::byte> memory = std::vector<std::byte>(8192);
  AttentionArgs args;

  Accepted()
      : k(pages * page_size * row), v(k.size()), k_scale(pages * page_size * heads), v_scale(k_scale.size()) {
    for (std::size_t i = 0; i < k.size(); ++i) {
      k[i] = static_cast<std::int8_t>(i);
      v[i] = static_cast<std::int8_t>(i ^ 0x55);
    }
    for (std::size_t i = 0; i < k_scale.size(); ++i) {
      k_scale[i] = static_cast<float>(i);
      v_scale[i] = -k_scale[i];
    }
    args.k = args.k_from = Tensor::contiguous(k.data(), DType::int8, {}, {pages, page_size, heads, head_dim});
    args.v = args.v_from = Tensor::contiguous(v.data(), DType::int8, {}, {pages, page_size, heads, head_dim});
    args.k_scale = args.k_scale_from =
        Tensor::contiguous(k_scale.data(), DType::fp32, {}, {pages, page_size, heads});
    args.v_scale = args.v_scale_from =
        Tensor::contiguous(v_scale.data(), DType::fp32, {}, {pages, page_size, heads});
    args.from_slots = Tensor::contiguous(from.data(), DType::int64, {}, {3});
    args.to_slots = Tensor::contiguous(to.data(), DType::int64, {}, {3});
    void* at = memory.data();
    std::size_t space = memory.size();
    std::align(64, 4096, at, space);
    args.workspace = Tensor::contiguous(at, DType::uint8, {}, {4096});
  }
  void leave_out_scales() {
    for (const auto member : {&AttentionArgs::k_scale, &AttentionArgs::v_scale, &AttentionArgs::k_scale_from,
                              &AttentionArgs::v_scale_from})
      (args.*member).reset();
  }
};

void expect_refusal(std::initializer_list<const char*> texts, const std::function<void(Accepted&)>& spoil,
                    const char* spec = scaled) {
  Accepted given;
  spoil(given);
  const std::vector<std::int8_t> before = given.k;
  expect_error(ErrorCode::invalid_argument, texts, [&] { kernel_of(spec).launch(given.args); });
  EXPECT_EQ(given.k, before);
}

void expect_accepted(const Accepted& given) {
  const Accepted before;
  for (std::size_t r = 0; r < std::size_t{pages} * page_size; ++r) {
    const std::size_t from = r == 2 ? 3 : r == 3 ? 4 : r;
    for (std::size_t c = 0; c < row; ++c) {
      ASSERT_EQ(given.k[r * row + c], before.k[from * row + c]) << r;
      ASSERT_EQ(given.v[r * row + c], before.v[from * row + c]) << r;
    }
    for (std::size_t head = 0; head < heads; ++head) {
      ASSERT_EQ(given.k_scale[r * heads + head], before.k_scale[from * heads + head]) << r;
      ASSERT_EQ(given.v_scale[r * heads + head], before.v_scale[from * heads + head]) << r;
    }
  }
}

TEST(CopyArguments, AcceptRowsOfADraft) {
  Accepted given;
  kernel_of(scaled).launch(given.args);
  expect_accepted(given);
}

TEST(CopyArguments, ByTheCInterface) {
  const std::string json = R"({"op": "copy_kv", "dtype": "bf16", "head_dim": 8)" + std::string(scaled) + "}";
  flashjit_engine* engine = nullptr;
  flashjit_spec* spec = nullptr;
  const flashjit_kernel* kernel = nullptr;
  flashjit_shape shape{};
  shape.struct_size = sizeof shape;
  shape.batch = 1;
  shape.seqlen_q = 3;
  shape.seqlen_k = page_size;
  shape.num_heads_q = shape.num_heads_kv = heads;
  ASSERT_EQ(flashjit_engine_create(nullptr, &engine), FLASHJIT_OK);
  ASSERT_EQ(flashjit_spec_create(json.c_str(), &spec), FLASHJIT_OK);
  ASSERT_EQ(flashjit_engine_get(engine, spec, &shape, &kernel), FLASHJIT_OK) << flashjit_last_error_message();
  Accepted given;
  const std::pair<int, Tensor> tensors[] = {{FLASHJIT_ARG_K, *given.args.k},
                                            {FLASHJIT_ARG_V, *given.args.v},
                                            {FLASHJIT_ARG_K_SCALE, *given.args.k_scale},
                                            {FLASHJIT_ARG_V_SCALE, *given.args.v_scale},
                                            {FLASHJIT_ARG_K_FROM, *given.args.k},
                                            {FLASHJIT_ARG_V_FROM, *given.args.v},
                                            {FLASHJIT_ARG_K_SCALE_FROM, *given.args.k_scale},
                                            {FLASHJIT_ARG_V_SCALE_FROM, *given.args.v_scale},
                                            {FLASHJIT_ARG_FROM_SLOTS, *given.args.from_slots},
                                            {FLASHJIT_ARG_TO_SLOTS, *given.args.to_slots},
                                            {FLASHJIT_ARG_WORKSPACE, *given.args.workspace}};
  std::vector<flashjit_tensor> values(std::size(tensors));
  std::vector<flashjit_argument> list(std::size(tensors));
  for (std::size_t i = 0; i < std::size(tensors); ++i) {
    const auto& [id, t] = tensors[i];
    values[i].data = t.data;
    values[i].dtype = t.dtype == DType::int8    ? FLASHJIT_INT8
                      : t.dtype == DType::int64 ? FLASHJIT_INT64
                      : t.dtype == DType::uint8 ? FLASHJIT_UINT8
                                                : FLASHJIT_FP32;
    values[i].device_kind = FLASHJIT_CPU;
    values[i].rank = t.rank;
    std::copy(t.shape.begin(), t.shape.end(), values[i].shape);
    std::copy(t.strides.begin(), t.strides.end(), values[i].strides);
    list[i].id = id;
    list[i].value.tensor = &values[i];
  }
  EXPECT_EQ(flashjit_kernel_launch(kernel, list.data(), list.size(), nullptr), FLASHJIT_OK)
      << flashjit_last_error_message();
  expect_accepted(given);
  flashjit_spec_destroy(spec);
  flashjit_engine_destroy(engine);
}

TEST(CopyArguments, ShapesHaveNoPages) {
  expect_error(ErrorCode::invalid_argument, {"page_size 16", "copy_kv serves every page size", "leave it 0"},
               [] { Engine(EngineOptions{}).get(kernel_of(plain).info().spec, {.page_size = 16}); });
}

// The bytes of a shape serve every launch of as many rows. Sources with memory of their own take none.
TEST(CopyArguments, Workspace) {
  const Kernel& kernel = kernel_of(scaled);
  const std::size_t bytes = kernel.workspace_bytes(
      {.batch = 1, .seqlen_q = 3, .seqlen_k = page_size, .num_heads_q = heads, .num_heads_kv = heads});
  EXPECT_EQ(bytes, 4 * 256u) << "K, V and their scales, from multiples of 256 on";
  EXPECT_EQ(kernel.workspace_bytes({.batch = 3, .seqlen_q = 1, .num_heads_q = heads, .num_heads_kv = heads}),
            bytes);
  expect_refusal({"workspace is missing", "this launch needs 1024 bytes"},
                 [](Accepted& g) { g.args.workspace.reset(); });
  expect_refusal({"workspace has 1023 bytes, this launch needs 1024"},
                 [](Accepted& g) { g.args.workspace->shape[0] = 1023; });
  Accepted given, other;
  given.args.k_from = other.args.k;
  given.args.v_from = other.args.v;
  given.args.k_scale_from = other.args.k_scale;
  given.args.v_scale_from = other.args.v_scale;
  given.args.workspace.reset();
  kernel.launch(given.args);
  expect_accepted(given);
}

TEST(CopyArguments, Slots) {
  expect_refusal({"from_slots is missing"}, [](Accepted& g) { g.args.from_slots.reset(); });
  expect_refusal({"to_slots is missing"}, [](Accepted& g) { g.args.to_slots.reset(); });
  expect_refusal({"to_slots has shape [2]", "must be 3, as from_slots"},
                 [](Accepted& g) { g.args.to_slots->shape[0] = 2; });
  expect_refusal({"from_slots has dtype int32", "int64"},
                 [](Accepted& g) { g.args.from_slots->dtype = DType::int32; });
  expect_refusal({"to_slots", "contiguous"}, [](Accepted& g) { g.args.to_slots->strides[0] = 2; });
  expect_refusal({"slots was given", "copy_kv"}, [](Accepted& g) { g.args.slots = g.args.to_slots; });
}

TEST(CopyArguments, Caches) {
  expect_refusal({"k_from is missing"}, [](Accepted& g) { g.args.k_from.reset(); });
  expect_refusal({"k_from has dtype fp32", "int8"}, [](Accepted& g) { g.args.k_from->dtype = DType::fp32; });
  expect_refusal({"k_from has shape [2, 4, 2, 7]", "the spec's head_dim"},
                 [](Accepted& g) { g.args.k_from->shape[3] = 7; });
  expect_refusal({"v_from has shape [2, 3, 2, 8]", "as k_from"},
                 [](Accepted& g) { g.args.v_from->shape[1] = 3; });
  expect_refusal({"v has shape [1, 4, 2, 8]", "as k"}, [](Accepted& g) { g.args.v->shape[0] = 1; });
  expect_refusal({"k has shape [2, 4, 1, 8]", "k_from's heads"}, [](Accepted& g) {
    for (const auto member :
         {&AttentionArgs::k, &AttentionArgs::v, &AttentionArgs::k_scale, &AttentionArgs::v_scale})
      (g.args.*member)->shape[2] = 1;
  });
  expect_refusal({"k is written, but its dimension of size 2 has stride 0"},
                 [](Accepted& g) { g.args.k->strides[0] = 0; });
  expect_refusal({"k", "v", "share memory"}, [](Accepted& g) { g.args.k = g.args.v; });
}

TEST(CopyArguments, ScalesOfTokensAlone) {
  expect_refusal({"k_scale_from is missing"}, [](Accepted& g) { g.args.k_scale_from.reset(); });
  expect_refusal({"v_scale has shape [2, 4, 1]", "as k"}, [](Accepted& g) { g.args.v_scale->shape[2] = 1; });
  expect_refusal({"v_scale_from has shape [1, 4, 2]", "as k_from"},
                 [](Accepted& g) { g.args.v_scale_from->shape[0] = 1; });
  expect_refusal({"k_scale was given", "do not move with rows", "token_head"}, [](Accepted&) {}, int8);
  Accepted given;
  given.leave_out_scales();
  kernel_of(int8).launch(given.args);
  for (std::size_t c = 0; c < row; ++c)
    EXPECT_EQ(given.k[2 * row + c], static_cast<std::int8_t>(3 * row + c));
  expect_refusal({"k_from has dtype int8", "bf16"}, [](Accepted& g) { g.leave_out_scales(); }, plain);
}

}  // namespace
}  // namespace flashjit::copy_arguments_testing
