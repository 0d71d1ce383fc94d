// A backward through the C++ interface: bad input refused with the argument's name, the workspace's size.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "runtime/flashjit.hpp"
#include "tests/api/arguments.hpp"
#include "tests/unit/expect_error.h"

namespace flashjit {
namespace {

Engine& backward_engine() {
  static Engine instance{EngineOptions{.device = "cpu", .num_threads = 2}};
  return instance;
}

const Kernel& backward_kernel(const char* rest = "") {
  return backward_engine().get(
      AttentionSpec::from_json(
          std::string(R"({"op": "backward", "dtype": "bf16", "head_dim": 16, "head_dim_v": 24)") + rest +
          "}"),
      GoodArguments::shape());
}

// Valid arguments of a backward.
struct GoodBackward : GoodArguments {
  std::vector<std::vector<float>> gradients;
  std::vector<float> workspace;

  GoodBackward() {
    const auto like = [&](const Tensor& t) {
      Tensor made = t;
      made.data = gradients.emplace_back(4096).data();
      return made;
    };
    args.d_o = like(*args.o), args.dlse = like(*args.lse);
    args.dq = like(*args.q), args.dk = like(*args.k), args.dv = like(*args.v);
    const std::size_t bytes = backward_kernel().workspace_bytes(shape());
    workspace.resize(bytes / 4 + 16);
    auto at = reinterpret_cast<std::uintptr_t>(workspace.data());
    at = (at + 63) / 64 * 64;
    args.workspace = Tensor::contiguous(reinterpret_cast<void*>(at), DType::fp32, {},
                                        {static_cast<std::int64_t>((bytes + 3) / 4)});
  }
};

void expect_refused(std::initializer_list<const char*> texts,
                    const std::function<void(AttentionArgs&)>& spoil) {
  GoodBackward good;
  AttentionArgs bad = good.args;
  spoil(bad);
  expect_error(ErrorCode::invalid_argument, texts, [&] { backward_kernel().launch(bad); });
  backward_kernel().launch(good.args);
}

TEST(BackwardArguments, EveryTensorIsChecked) {
  const struct {
    const char* name;
    std::optional<Tensor> AttentionArgs::* member;
    bool required;
  } tensors[] = {{"o", &AttentionArgs::o, true},    {"lse", &AttentionArgs::lse, true},
                 {"do", &AttentionArgs::d_o, true}, {"dlse", &AttentionArgs::dlse, false},
                 {"dq", &AttentionArgs::dq, true},  {"dk", &AttentionArgs::dk, true},
                 {"dv", &AttentionArgs::dv, true}};
  for (const auto& [name, member, required] : tensors) {
    const auto of = [member = member](AttentionArgs& args) -> Tensor& { return *(args.*member); };
    if (required)
      expect_refused({name, "missing"}, [member = member](AttentionArgs& args) { (args.*member).reset(); });
    expect_refused({name, "null"}, [&](AttentionArgs& args) { of(args).data = nullptr; });
    expect_refused({name, "rank"}, [&](AttentionArgs& args) { --of(args).rank; });
    expect_refused({name, "int32"}, [&](AttentionArgs& args) { of(args).dtype = DType::int32; });
    expect_refused({name}, [&](AttentionArgs& args) { ++of(args).shape[1]; });
    expect_refused({name}, [&](AttentionArgs& args) { ++of(args).shape[of(args).rank - 1]; });
    expect_refused({name, "contiguous"},
                   [&](AttentionArgs& args) { of(args).strides[of(args).rank - 1] = 2; });
  }
}

// The alignment of elements.
TEST(BackwardArguments, RowsOfFloatsAreAligned) {
  for (const auto& [name, member] : {std::pair("lse", &AttentionArgs::lse), {"dlse", &AttentionArgs::dlse}})
    expect_refused({name, "not aligned to 4 bytes"}, [member = member](AttentionArgs& args) {
      Tensor& tensor = *(args.*member);
      tensor.data = static_cast<char*>(tensor.data) + 2;
    });
}

// A message says the request, the mistake and a value that works.
TEST(BackwardArguments, MessagesSayWhatWorks) {
  expect_refused({"lse has shape [2, 4, 6]: dimension 2 must be 5, q's rows"},
                 [](AttentionArgs& args) { ++args.lse->shape[2]; });
  expect_refused({"lse has dtype bf16, this kernel takes fp32"},
                 [](AttentionArgs& args) { args.lse->dtype = DType::bf16; });
  for (const auto& [name, member] : {std::pair("o", &AttentionArgs::o), {"do", &AttentionArgs::d_o}}) {
    const std::string missing =
        std::string(name) + " is missing: this kernel needs it as [batch, seqlen, heads, head_dim]";
    expect_refused({missing.c_str()}, [member = member](AttentionArgs& args) { (args.*member).reset(); });
  }
  expect_refused({"do has dtype fp32, this kernel takes bf16"},
                 [](AttentionArgs& args) { args.d_o->dtype = DType::fp32; });
  expect_refused({"workspace has", "this launch needs", "Kernel::workspace_bytes(shape) says"},
                 [](AttentionArgs& args) { --args.workspace->shape[0]; });
  expect_refused({R"(parts_o was given, but the spec has "op": "backward")", "leave it out"},
                 [](AttentionArgs& args) { args.parts_o = args.o; });
}

// The C interface takes the same arguments, and refuses with the same message.
TEST(BackwardArguments, ThroughC) {
  GoodBackward good;
  for (const std::optional<Tensor>* tensor : {&good.args.q, &good.args.k, &good.args.v, &good.args.d_o})
    std::fill_n(static_cast<std::uint16_t*>((*tensor)->data), (*tensor)->shape[0] * (*tensor)->strides[0],
                std::uint16_t{0x3f80});  // 1
  backward_kernel().launch(good.args);
  const std::vector<std::vector<float>> expected = good.gradients;
  EXPECT_NE(static_cast<const std::uint16_t*>(good.args.dv->data)[0], 0);
  flashjit_engine* engine = nullptr;
  flashjit_spec* spec = nullptr;
  const flashjit_kernel* kernel = nullptr;
  flashjit_engine_options options{};
  options.struct_size = sizeof options;
  options.device = "cpu";
  options.num_threads = 2;
  ASSERT_EQ(flashjit_engine_create(&options, &engine), FLASHJIT_OK) << flashjit_last_error_message();
  ASSERT_EQ(
      flashjit_spec_create(R"({"op": "backward", "dtype": "bf16", "head_dim": 16, "head_dim_v": 24})", &spec),
      FLASHJIT_OK);
  flashjit_shape shape{};
  shape.struct_size = sizeof shape;
  const Shape s = GoodArguments::shape();
  shape.batch = s.batch, shape.seqlen_q = s.seqlen_q, shape.seqlen_k = s.seqlen_k;
  shape.num_heads_q = s.num_heads_q, shape.num_heads_kv = s.num_heads_kv;
  ASSERT_EQ(flashjit_engine_get(engine, spec, &shape, &kernel), FLASHJIT_OK) << flashjit_last_error_message();
  std::size_t bytes = 0;
  ASSERT_EQ(flashjit_kernel_workspace(kernel, &shape, &bytes), FLASHJIT_OK);
  EXPECT_EQ(bytes, backward_kernel().workspace_bytes(s));

  const std::pair<std::int32_t, const std::optional<Tensor>*> given[] = {
      {FLASHJIT_ARG_Q, &good.args.q},     {FLASHJIT_ARG_K, &good.args.k},
      {FLASHJIT_ARG_V, &good.args.v},     {FLASHJIT_ARG_O, &good.args.o},
      {FLASHJIT_ARG_LSE, &good.args.lse}, {FLASHJIT_ARG_DLSE, &good.args.dlse},
      {FLASHJIT_ARG_DQ, &good.args.dq},   {FLASHJIT_ARG_DK, &good.args.dk},
      {FLASHJIT_ARG_DV, &good.args.dv},   {FLASHJIT_ARG_WORKSPACE, &good.args.workspace},
      {FLASHJIT_ARG_DO, &good.args.d_o}};
  std::vector<flashjit_tensor> tensors;
  for (const auto& [id, tensor] : given) tensors.push_back(c_tensor(**tensor));
  std::vector<flashjit_argument> args(std::size(given));
  for (std::size_t i = 0; i < args.size(); ++i) {
    args[i].id = given[i].first;
    args[i].value.tensor = &tensors[i];
  }
  for (const std::optional<Tensor>* tensor : {&good.args.dq, &good.args.dk, &good.args.dv})
    std::fill_n(static_cast<std::uint16_t*>((*tensor)->data), 16, std::uint16_t{0xffff});
  EXPECT_EQ(flashjit_kernel_launch(kernel, args.data(), args.size() - 1, nullptr), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_STREQ(flashjit_last_error_message(),
               "do is missing: this kernel needs it as [batch, seqlen, heads, head_dim]");
  EXPECT_EQ(flashjit_kernel_launch(kernel, args.data(), args.size(), nullptr), FLASHJIT_OK)
      << flashjit_last_error_message();
  EXPECT_EQ(good.gradients, expected);
  flashjit_spec_destroy(spec);
  flashjit_engine_destroy(engine);
}

TEST(BackwardArguments, Workspace) {
  expect_refused({"workspace is missing"}, [](AttentionArgs& args) { args.workspace.reset(); });
  expect_refused({"workspace has", "bytes"}, [](AttentionArgs& args) { --args.workspace->shape[0]; });
  expect_refused({"workspace", "aligned to 64"}, [](AttentionArgs& args) {
    args.workspace->data = static_cast<float*>(args.workspace->data) + 1;
  });
}

TEST(BackwardArguments, OutputsMustNotOverlap) {
  using Member = std::optional<Tensor> AttentionArgs::*;
  struct Named {
    const char* name;
    Member member;
  };
  const Named outputs[] = {
      {"dq", &AttentionArgs::dq}, {"dk", &AttentionArgs::dk}, {"dv", &AttentionArgs::dv}};
  const Named inputs[] = {{"q", &AttentionArgs::q},      {"k", &AttentionArgs::k},
                          {"v", &AttentionArgs::v},      {"o", &AttentionArgs::o},
                          {"do", &AttentionArgs::d_o},   {"lse", &AttentionArgs::lse},
                          {"dlse", &AttentionArgs::dlse}};
  const auto refuse = [](const Named& a, const Named& b) {
    const std::string text = std::string(a.name) + " and " + b.name + " share memory";
    expect_refused({text.c_str()},
                   [&](AttentionArgs& args) { (args.*a.member)->data = (args.*b.member)->data; });
  };
  for (const Named& output : outputs)
    for (const Named& input : inputs) refuse(output, input);
  refuse(outputs[0], outputs[1]);
  refuse(outputs[0], outputs[2]);
  refuse(outputs[1], outputs[2]);
  // A tensor anywhere within the bytes that the launch uses, and none behind them.
  for (const Named& tensor :
       {outputs[0], outputs[1], outputs[2], inputs[0], inputs[3], inputs[5], inputs[6]}) {
    const std::string text = std::string("workspace and ") + tensor.name + " share memory";
    expect_refused({text.c_str()}, [&](AttentionArgs& args) {
      (args.*tensor.member)->data = static_cast<float*>(args.workspace->data) + 64;
    });
  }
  GoodBackward good;
  std::vector<float> memory(good.workspace.size() + 4096);
  const auto start = (reinterpret_cast<std::uintptr_t>(memory.data()) + 63) / 64 * 64;
  const std::int64_t used = good.args.workspace->shape[0];
  good.args.workspace->data = reinterpret_cast<void*>(start);
  good.args.workspace->shape[0] = used + 4000;
  good.args.dq->data = reinterpret_cast<float*>(start) + used;
  EXPECT_NO_THROW(backward_kernel().launch(good.args));
}

// The formula of runtime/semantics.md.
TEST(BackwardArguments, WorkspaceBytes) {
  const Shape shape{.batch = 3, .seqlen_q = 50, .seqlen_k = 90, .num_heads_q = 6, .num_heads_kv = 2};
  const std::size_t threads = 2, entry = 64, rows = 3 * entry, row = 32;
  EXPECT_EQ(backward_kernel().workspace_bytes(shape),
            4 * (3 * 6 * rows + (4 * threads * entry + 2 * rows) * 3 * row));
  Shape longer = shape;
  longer.seqlen_k = 1 << 20;
  EXPECT_EQ(backward_kernel().workspace_bytes(longer), backward_kernel().workspace_bytes(shape));
}

TEST(BackwardArguments, WorkspaceThatNoMemoryHolds) {
  constexpr int most = std::numeric_limits<int>::max();
  for (const Shape& shape : {Shape{.batch = most, .seqlen_q = most, .seqlen_k = 1, .num_heads_q = most},
                             Shape{.batch = 4, .seqlen_q = 1 << 30, .seqlen_k = 1, .num_heads_q = 1},
                             Shape{.batch = 1, .seqlen_q = 1 << 30, .seqlen_k = 1, .num_heads_q = 1 << 20}})
    expect_error(ErrorCode::invalid_argument, {"no memory holds the workspace", "split the batch"},
                 [&] { backward_kernel().workspace_bytes(shape); });
}

TEST(BackwardSpec, RefusesWhatItCannot) {
  expect_error(ErrorCode::unsupported, {"lse false", "true would work"},
               [] { backward_kernel(R"(, "lse": false)"); });
  expect_error(ErrorCode::unsupported, {"paged true"}, [] { backward_kernel(R"(, "paged": true)"); });
  expect_error(ErrorCode::invalid_spec, {"grad_dtype fp16", "bf16"},
               [] { backward_kernel(R"(, "grad_dtype": "fp16")"); });
  expect_error(ErrorCode::unsupported, {"grad_dtype", "leaving it out would work"}, [] {
    AttentionSpec::from_json(R"({"op": "forward", "dtype": "bf16", "head_dim": 64, "grad_dtype": "fp32"})");
  });
}

}  // namespace
}  // namespace flashjit
