// A backward through the C++ interface: bad input refused with the argument's name, the workspace's size.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
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

TEST(BackwardArguments, Workspace) {
  expect_refused({"workspace is missing"}, [](AttentionArgs& args) { args.workspace.reset(); });
  expect_refused({"workspace has", "bytes"}, [](AttentionArgs& args) { --args.workspace->shape[0]; });
  expect_refused({"workspace", "aligned to 64"}, [](AttentionArgs& args) {
    args.workspace->data = static_cast<float*>(args.workspace->data) + 1;
  });
}

TEST(BackwardArguments, OutputsMustNotOverlap) {
  expect_refused({"dk", "dv"}, [](AttentionArgs& args) { args.dv->data = args.dk->data; });
  expect_refused({"dq", "q"}, [](AttentionArgs& args) { args.dq->data = args.q->data; });
}

// The formula of runtime/semantics.md.
TEST(BackwardArguments, WorkspaceBytes) {
  const Shape shape{.batch = 3, .seqlen_q = 50, .seqlen_k = 90, .num_heads_q = 6, .num_heads_kv = 2};
  const auto up = [](std::size_t n) { return (n + 15) / 16 * 16; };
  const std::size_t threads = 2, rows = 3 * 50, row = 16;
  EXPECT_EQ(backward_kernel().workspace_bytes(shape),
            4 * (up(2 * 6 * rows) + (4 * threads * 50 + 2 * rows) * 3 * row));
  Shape longer = shape;
  longer.seqlen_k = 1 << 20;
  EXPECT_EQ(backward_kernel().workspace_bytes(longer), backward_kernel().workspace_bytes(shape));
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
