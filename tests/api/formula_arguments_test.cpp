// Tables and scalars of formulas through both interfaces. tests/runtime has the refusals of each kind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "codegen/spec/declarations.hpp"
#include "runtime/flashjit.h"
#include "tests/api/arguments.hpp"
#include "tests/unit/expect_error.h"

namespace flashjit {
namespace {

using testing::HasSubstr;

constexpr char json[] = R"({"op": "forward", "dtype": "bf16", "head_dim": 16, "head_dim_v": 24,
    "mask": ["position - key < reach"], "score": ["cap * tanh(score / cap) + slope[head] * key"],
    "tables": {"slope": {"dtype": "fp32", "shape": ["heads_q"]}}, "scalars": {"cap": "fp32", "reach": "int32"},
    "sink_logits": true})";

class NamedArguments : public testing::Test {
 protected:
  NamedArguments() {
    std::memset(good.args.q->data, 0, 16384);
    std::memset(good.args.k->data, 0, 16384);
    auto* const v = static_cast<std::uint16_t*>(good.args.v->data);
    for (int i = 0; i < 8192; ++i) v[i] = static_cast<std::uint16_t>(0x3f80 + i % 64);
    good.args.sink_logits = Tensor::contiguous(sinks, DType::fp32, {}, {4});
    good.args.named = named;
  }
  std::vector<char> output() const {
    const auto* const o = static_cast<const char*>(good.args.o->data);
    return {o, o + std::size_t{2} * GoodArguments::batch * GoodArguments::seqlen_q * GoodArguments::heads_q *
                       GoodArguments::head_dim_v};
  }
  void launch() { kernel.launch(good.args); }

  Engine engine{EngineOptions{}};
  const Kernel& kernel = engine.get(AttentionSpec::from_json(json), GoodArguments::shape());
  GoodArguments good;
  float slopes[4] = {0.5f, 1, 2, 4}, sinks[4] = {};
  NamedArgument named[3] = {
      {"cap", 3.5f}, {"slope", Tensor::contiguous(slopes, DType::fp32, {}, {4})}, {"reach", 3}};
};

TEST_F(NamedArguments, InAnyOrderAndByAnyStride) {
  launch();
  const std::vector<char> expected = output();
  std::swap(named[0], named[2]);
  launch();
  EXPECT_EQ(output(), expected);
  float spread[10] = {0.5f, 9, 9, 1, 9, 9, 2, 9, 9, 4};
  std::get<Tensor>(named[1].value).data = spread;
  std::get<Tensor>(named[1].value).strides[0] = 3;
  launch();
  EXPECT_EQ(output(), expected);
  // All heads share the element: head 0 is as before, head 1 is not.
  std::get<Tensor>(named[1].value).strides[0] = 0;
  launch();
  EXPECT_NE(output(), expected);
  EXPECT_EQ(std::memcmp(output().data(), expected.data(), 2 * GoodArguments::head_dim_v), 0);
}

TEST_F(NamedArguments, RefusedOnesNameTheArgument) {
  const auto refused = [&](std::initializer_list<const char*> parts) {
    expect_error(ErrorCode::invalid_argument, parts, [&] { launch(); });
    expect_error(ErrorCode::invalid_argument, parts, [&] { kernel.prepare(good.args); });
    good.args.named = named;
    EXPECT_NO_THROW(launch());
  };
  good.args.named = {};
  refused({"table slope is missing"});
  good.args.named = std::span(named).first(2);
  refused({"scalar reach is missing"});
  NamedArgument other[4] = {named[0], named[1], named[2], {"slopes", 1}};
  good.args.named = other;
  refused({"\"slopes\"", "did you mean slope?"});
  std::get<Tensor>(other[1].value).shape[0] = 5;
  good.args.named = std::span(other).first(3);
  refused({"table slope has shape [5]", "num_heads_q"});
}

TEST_F(NamedArguments, HaveIdsInC) {
  launch();
  const std::vector<char> expected = output();
  std::memset(good.args.o->data, 0xff, expected.size());
  flashjit_engine* c_engine = nullptr;
  flashjit_spec* spec = nullptr;
  const flashjit_kernel* c_kernel = nullptr;
  const flashjit_shape shape = {sizeof shape,
                                GoodArguments::batch,
                                GoodArguments::seqlen_q,
                                GoodArguments::seqlen_k,
                                GoodArguments::heads_q,
                                GoodArguments::heads_kv,
                                0,
                                0,
                                0};
  ASSERT_EQ(flashjit_engine_create(nullptr, &c_engine), FLASHJIT_OK);
  ASSERT_EQ(flashjit_spec_create(json, &spec), FLASHJIT_OK);
  ASSERT_EQ(flashjit_engine_get(c_engine, spec, &shape, &c_kernel), FLASHJIT_OK)
      << flashjit_last_error_message();
  const auto id_of = [&](const char* name) {
    std::int32_t id = -1;
    EXPECT_EQ(flashjit_spec_argument(spec, name, &id), FLASHJIT_OK) << flashjit_last_error_message();
    return id;
  };
  EXPECT_EQ(id_of("cap"), FLASHJIT_FIRST_NAMED_ARG);
  EXPECT_EQ(id_of("reach"), FLASHJIT_FIRST_NAMED_ARG + 1);
  EXPECT_EQ(id_of("slope"), FLASHJIT_FIRST_NAMED_ARG + 2);
  EXPECT_EQ(id_of("sink_logits"), FLASHJIT_ARG_SINK_LOGITS);
  std::int32_t id = -1;
  for (const char* unknown : {"slop", "", "window_left"}) {
    EXPECT_EQ(flashjit_spec_argument(spec, unknown, &id), FLASHJIT_INVALID_ARGUMENT);
    EXPECT_THAT(flashjit_last_error_message(), HasSubstr("is no argument of the spec"));
  }
  EXPECT_EQ(flashjit_spec_argument(nullptr, "cap", &id), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_EQ(flashjit_spec_argument(spec, nullptr, &id), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_EQ(flashjit_spec_argument(spec, "cap", nullptr), FLASHJIT_INVALID_ARGUMENT);

  const Tensor slope = std::get<Tensor>(named[1].value);
  const flashjit_tensor tensors[] = {c_tensor(*good.args.q),          c_tensor(*good.args.k),
                                     c_tensor(*good.args.v),          c_tensor(*good.args.o),
                                     c_tensor(*good.args.lse),        c_tensor(slope),
                                     c_tensor(*good.args.sink_logits)};
  flashjit_argument args[] = {{FLASHJIT_ARG_Q, {.tensor = &tensors[0]}},
                              {FLASHJIT_ARG_K, {.tensor = &tensors[1]}},
                              {FLASHJIT_ARG_V, {.tensor = &tensors[2]}},
                              {FLASHJIT_ARG_O, {.tensor = &tensors[3]}},
                              {FLASHJIT_ARG_LSE, {.tensor = &tensors[4]}},
                              {FLASHJIT_ARG_SINK_LOGITS, {.tensor = &tensors[6]}},
                              {id_of("slope"), {.tensor = &tensors[5]}},
                              {id_of("reach"), {.integer = 3}},
                              {id_of("cap"), {.real = 3.5}}};
  const auto launch_c = [&](std::size_t count) {
    return flashjit_kernel_launch(c_kernel, args, count, nullptr);
  };
  ASSERT_EQ(launch_c(9), FLASHJIT_OK) << flashjit_last_error_message();
  EXPECT_EQ(output(), expected);
  const auto refused = [&](const char* part, std::size_t count = 9) {
    EXPECT_EQ(launch_c(count), FLASHJIT_INVALID_ARGUMENT);
    EXPECT_THAT(flashjit_last_error_message(), HasSubstr(part));
    EXPECT_EQ(flashjit_merge(c_engine, args, count, nullptr), FLASHJIT_INVALID_ARGUMENT);
  };
  refused("scalar cap is missing", 8);
  args[8].id = id_of("reach");
  refused("\"reach\" was given before");
  for (const std::int32_t wrong :
       {FLASHJIT_FIRST_NAMED_ARG + 3, 2147483647, FLASHJIT_FIRST_NAMED_ARG - 1, -1}) {
    args[8].id = wrong;
    refused(std::to_string(wrong).c_str());
  }
  args[8].id = id_of("cap");
  args[6].value.tensor = nullptr;
  refused("null pointer");
  flashjit_spec_destroy(spec);
  flashjit_engine_destroy(c_engine);
}

// Kernels compute addresses along rows, keys and free dimensions from 32 bits.
TEST(NamedTables, StridesOfInnerDimensionsReachTwoGigabytes) {
  Engine engine{EngineOptions{}};
  const AttentionSpec spec =
      AttentionSpec::from_json(R"({"op": "forward", "dtype": "bf16", "head_dim": 16, "head_dim_v": 24,
      "score": ["score + t[batch, key]"], "tables": {"t": {"dtype": "fp32", "shape": ["batch", "seqlen_k"]}}})");
  const Kernel& kernel = engine.get(spec, GoodArguments::shape());
  GoodArguments good;
  float table[1] = {};
  Tensor t = Tensor::contiguous(table, DType::fp32, {}, {2, 7});
  const auto prepare = [&](std::int64_t batch_stride, std::int64_t key_stride) {
    t.strides = {batch_stride, key_stride};
    const NamedArgument named[] = {{"t", t}};
    good.args.named = named;
    kernel.prepare(good.args);  // reads no element
  };
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max() / 4;
  EXPECT_NO_THROW(prepare(std::int64_t{1} << 40, most));
  EXPECT_NO_THROW(prepare(-(std::int64_t{1} << 40), -most));
  for (const std::int64_t wrong : {most + 1, -most - 1})
    expect_error(ErrorCode::invalid_argument, {"table t has stride", "along dimension 1", "2^31 bytes"},
                 [&] { prepare(7, wrong); });
}

// Only tensors say the sizes of a table's own dimensions. A workspace has room for the sums of usual ones.
TEST(NamedGradients, WorkspaceOfOwnDimensionsIsBounded) {
  Engine engine{EngineOptions{}};
  const auto bytes = [&](const char* indices, const char* sizes) {
    const std::string spec = R"({"op": "backward", "dtype": "bf16", "head_dim": 16, "score": ["score + t[)" +
                             std::string(indices) +
                             R"(]"], "tables": {"t": {"dtype": "fp32", "grad": true, "shape": [)" + sizes +
                             "]}}}";
    return engine.get(AttentionSpec::from_json(spec), GoodArguments::shape())
        .workspace_bytes(GoodArguments::shape());
  };
  constexpr std::size_t of_element = 96;
  const std::size_t of_two = bytes("row, key", R"("a", "b")");
  EXPECT_GT(of_two, 128 * 128 * of_element);
  EXPECT_EQ(bytes("row, key, row, key", R"("a", "b", "c", "d")") - of_two,
            ((1 << 20) - 128 * 128) * of_element);
}

// A backward writes gradients of tables and sink logits by name; what they must be.
TEST(NamedGradients, AreCheckedAndHaveIds) {
  constexpr char backward[] = R"({"op": "backward", "dtype": "bf16", "head_dim": 16, "head_dim_v": 24,
      "score": ["score + a_table_of_a_long_name[head, row] + cap"], "scalars": {"cap": "fp32"}, "sink_logits": true,
      "tables": {"a_table_of_a_long_name": {"dtype": "fp32", "shape": ["heads_q", "seqlen_q"], "grad": true}}})";
  const AttentionSpec spec = AttentionSpec::from_json(backward);
  Engine engine{EngineOptions{}};
  const Kernel& kernel = engine.get(spec, GoodArguments::shape());
  GoodArguments good;
  AttentionArgs& args = good.args;
  std::vector<std::vector<float>> memory;
  const auto like = [&](const Tensor& t) {
    Tensor made = t;
    made.data = memory.emplace_back(4096).data();
    return made;
  };
  args.d_o = like(*args.o), args.dq = like(*args.q), args.dk = like(*args.k), args.dv = like(*args.v);
  float table[20] = {}, gradient[40], sinks[4] = {}, d_sinks[8];
  args.sink_logits = Tensor::contiguous(sinks, DType::fp32, {}, {4});
  args.d_sink_logits = Tensor::contiguous(d_sinks, DType::fp32, {}, {4});
  std::vector<float> workspace(kernel.workspace_bytes(GoodArguments::shape()) / 4 + 16);
  const auto at = (reinterpret_cast<std::uintptr_t>(workspace.data()) + 63) / 64 * 64;
  args.workspace = Tensor::contiguous(reinterpret_cast<void*>(at), DType::fp32, {},
                                      {static_cast<std::int64_t>(workspace.size()) - 16});
  NamedArgument named[] = {
      {"cap", 1},
      {"a_table_of_a_long_name", Tensor::contiguous(table, DType::fp32, {}, {4, 5})},
      {"d_a_table_of_a_long_name", Tensor::contiguous(gradient, DType::fp32, {}, {4, 5})}};
  args.named = named;
  for (float& x : gradient) x = 77;
  kernel.launch(args);
  EXPECT_EQ(std::count(std::begin(gradient), std::end(gradient), 77.0f), 20);

  const auto refused = [&](std::initializer_list<const char*> parts, const auto& spoil) {
    const AttentionArgs args_before = args;
    const NamedArgument before = named[2];
    spoil(std::get<Tensor>(named[2].value));
    expect_error(ErrorCode::invalid_argument, parts, [&] { kernel.launch(args); });
    args = args_before;
    named[2] = before;
    EXPECT_NO_THROW(kernel.launch(args));
  };
  const char* const name = "d_a_table_of_a_long_name";
  refused({name, "is missing", "\"grad\": true", "leave grad out"},
          [&](Tensor&) { args.named = args.named.first(2); });
  refused({name, "dtype bf16", "fp32"}, [](Tensor& t) { t.dtype = DType::bf16; });
  refused({name, "rank 1"}, [](Tensor& t) { t.rank = 1; });
  refused({name, "shape [4, 6]", "must be 5", "as table a_table_of_a_long_name"},
          [](Tensor& t) { t.shape[1] = 6; });
  refused({name}, [](Tensor& t) { t.strides[0] = 0; });
  refused({name, "not aligned to 4 bytes"}, [](Tensor& t) { t.data = static_cast<char*>(t.data) + 2; });
  refused({name, "null"}, [](Tensor& t) { t.data = nullptr; });
  refused({name, "share memory", "a_table_of_a_long_name"}, [&](Tensor& t) { t.data = table; });
  refused({name, "share memory", "lse"}, [&](Tensor& t) { t.data = args.lse->data; });
  refused({"d_sink_logits is missing"}, [&](Tensor&) { args.d_sink_logits.reset(); });
  refused({"sink_logits is missing"}, [&](Tensor&) { args.sink_logits.reset(); });
  refused({"d_sink_logits", "shape [3]"}, [&](Tensor&) { args.d_sink_logits->shape[0] = 3; });
  refused({"d_sink_logits"}, [&](Tensor&) { args.d_sink_logits->strides[0] = 0; });
  refused({"d_sink_logits", "share memory", name}, [&](Tensor&) { args.d_sink_logits->data = gradient; });
  refused({"workspace"}, [&](Tensor&) { args.workspace->shape[0] /= 8; });
  named[2] = {name, 3};
  expect_error(ErrorCode::invalid_argument, {name, "given as a number"}, [&] { kernel.launch(args); });

  AttentionSpec forward = spec;
  forward.op = Operation::forward;
  EXPECT_EQ(place_of_name(forward.validated(), name), -1);  // it has no such argument
  flashjit_spec* c_spec = nullptr;
  ASSERT_EQ(flashjit_spec_create(backward, &c_spec), FLASHJIT_OK);
  std::int32_t id = -1;
  for (const auto& [of, expected] : {std::pair{"a_table_of_a_long_name", FLASHJIT_FIRST_NAMED_ARG},
                                     {"cap", FLASHJIT_FIRST_NAMED_ARG + 1},
                                     {name, FLASHJIT_FIRST_NAMED_ARG + 2},
                                     {"d_sink_logits", int{FLASHJIT_ARG_D_SINK_LOGITS}}}) {
    ASSERT_EQ(flashjit_spec_argument(c_spec, of, &id), FLASHJIT_OK) << flashjit_last_error_message();
    EXPECT_EQ(id, expected) << of;
  }
  flashjit_spec_destroy(c_spec);
}

}  // namespace
}  // namespace flashjit
