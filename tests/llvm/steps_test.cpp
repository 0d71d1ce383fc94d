// A launch of several steps from arguments to outputs, on the CPU, of an operation made up for this test.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "codegen/embedded_headers.hpp"
#include "runtime/arguments/attention.hpp"
#include "runtime/compiler.hpp"
#include "runtime/operation.hpp"
#include "runtime/step_params.hpp"
#include "templates/shared/merge_params.h"
#include "tests/unit/expect_error.h"

namespace flashjit {
namespace {

struct ReverseParams : device::ProblemParams {
  int *numbers, *out;
};

// The first step writes a number for each row of a batch entry; the second reverses their order.
constexpr const char* text = R"(
#include "shared/params.h"
struct ReverseParams : flashjit::device::ProblemParams {
  int *numbers, *out;
};
extern "C" void make_numbers(const ReverseParams* p, long long begin, long long end, void* scratch) {
  for (long long i = begin; i < end; ++i) p->numbers[i] = static_cast<int*>(scratch)[0] + static_cast<int>(i);
}
extern "C" void reverse_numbers(const ReverseParams* p, long long begin, long long end, void*) {
  const long long count = static_cast<long long>(p->batch) * p->seqlen_q;
  for (long long i = begin; i < end; ++i) p->out[i] = p->numbers[count - 1 - i];
}
)";
constexpr int first_number = 1000;

struct Reverse {
  struct Checked {
    ReverseParams params{};
    Shape shape{};
    bool empty = false;
  };
  static Checked check(const AttentionSpec&, Device, const AttentionArgs& args) {
    Checked checked;
    checked.params.batch = static_cast<int>(args.o->shape[0]);
    checked.params.seqlen_q = static_cast<int>(args.o->shape[1]);
    checked.shape = {.batch = checked.params.batch, .seqlen_q = checked.params.seqlen_q};
    checked.params.out = static_cast<int*>(args.o->data);
    checked.empty = checked.params.batch == 0;
    return checked;
  }
  static std::size_t workspace_bytes(const PlannedKernel&, const Shape& shape) {
    return sizeof(int) * static_cast<std::size_t>(shape.batch) * static_cast<std::size_t>(shape.seqlen_q);
  }
  static void plan_cuda(const PlannedKernel&, const ReverseParams&, void*, Launch&) { FAIL(); }
  static void plan_cpu(const PlannedKernel& kernel, const ReverseParams& params, void* workspace,
                       Launch& launch) {
    const std::int64_t count = std::int64_t{params.batch} * params.seqlen_q;
    for (int i = 0; i < 2; ++i) {
      StepLaunch& step = launch.add_step();
      step.make_params<ReverseParams>(params).numbers = static_cast<int*>(workspace);
      step.items = {.count = count, .pieces = std::min<std::int64_t>(count, kernel.parallelism)};
      std::memcpy(step.items.scratch_head.data(), &first_number, sizeof first_number);
    }
  }
};

class Steps : public testing::Test {
 protected:
  static constexpr int batch = 3, rows = 50, count = batch * rows;

  Steps() : out_(count, -1), args_{.o = tensor(out_.data(), {batch, rows})} { load(); }

  // Whose family says that the second step's params have so many bytes; nothing of them if 0.
  void load(std::size_t bytes = 0) {
    KernelSource source;
    source.target = target_;
    source.text = text;
    source.headers.assign(embedded_headers().begin(), embedded_headers().end());
    source.steps = {{.function = "make_numbers"}, {.function = "reverse_numbers"}};
    if (bytes)
      source.steps[1].params = {.own = &id_of_struct<ReverseParams>, .text = "ReverseParams", .bytes = bytes};
    const ParallelFor threads = [](std::int64_t pieces, auto* body, void* context) {
      std::vector<std::jthread> workers;
      for (std::int64_t i = 0; i < pieces; ++i) workers.emplace_back([=] { body(context, i, i + 1); });
    };
    executable_ = load_cpu(threads, 4, clang_compiler()->compile(source).code, source.steps);
  }

  static Tensor tensor(void* data, std::initializer_list<std::int64_t> shape) {
    return Tensor::contiguous(data, DType::int32, {}, shape);
  }
  Launch planned() const {
    Launch launch;
    operation_runtime<Reverse>.plan(
        {spec_, target_, config_, {}, executable_->parallelism(), nullptr, executable_->steps()}, args_,
        launch);
    return launch;
  }
  void expect_refusal(std::initializer_list<const char*> parts) const {
    expect_error(ErrorCode::invalid_argument, parts, [&] { planned(); });
  }

  const AttentionSpec spec_{};
  const Target target_ = Target::parse("x86-64-v3");
  const KernelConfig config_{};
  std::vector<int> out_;
  alignas(64) int workspace_[count + 1] = {};
  AttentionArgs args_;
  std::unique_ptr<Executable> executable_;
};

TEST_F(Steps, HaveParamsOfTheSizeThatLaunchesMake) {
  EXPECT_NO_THROW(load(sizeof(ReverseParams)));
  for (const std::size_t wrong : {sizeof(ReverseParams) - 8, sizeof(ReverseParams) + 8})
    expect_error(
        ErrorCode::internal,
        {"reverse_numbers", std::to_string(sizeof(ReverseParams)).c_str(), std::to_string(wrong).c_str()},
        [&] { load(wrong); });
}

TEST_F(Steps, AreAsManyAsTheKernelHas) {
  args_.workspace = tensor(workspace_, {count});
  Launch launch;
  launch.add_step();
  const auto run = [&] { executable_->launch(launch, nullptr); };
  expect_error(ErrorCode::internal, {"1 steps", "2: make_numbers, reverse_numbers"}, run);
  launch.add_step();
  launch.add_step();
  expect_error(ErrorCode::internal, {"3 steps", "the kernel 2"}, run);
  EXPECT_EQ(out_, std::vector<int>(count, -1));
}

// An operation's plan names its steps, in their order, and the types of their params.
TEST_F(Steps, AreThoseThatTheFamilyNames) {
  load(sizeof(ReverseParams));
  const PlannedKernel kernel{spec_, target_, config_, {}, 1, nullptr, executable_->steps()};
  Launch launch;
  StepLaunch& second = add_step(kernel, launch, "reverse_numbers");
  EXPECT_EQ(launch.size(), 2u);
  EXPECT_EQ(launch[0].items.pieces, 0);  // left out
  expect_error(ErrorCode::internal, {"make_numbers", "none or had it before"},
               [&] { add_step(kernel, launch, "make_numbers"); });
  const device::MergeParams other{};
  expect_error(ErrorCode::internal, {"reverse_numbers", "ReverseParams", "a struct"},
               [&] { make_params<device::MergeParams>(second, other); });
  expect_error(ErrorCode::internal, {"reverse_numbers", "a second struct"},
               [&] { make_second<device::MergeParams>(second); });
  const device::FormulaParams formulas{};
  const ReverseParams params{};
  expect_error(ErrorCode::internal, {"reverse_numbers", "formulas"},
               [&] { make_params<ReverseParams>(second, params, {.formulas = &formulas}); });
  EXPECT_NO_THROW(make_params<ReverseParams>(second, params));
}

TEST_F(Steps, RunOneAfterTheOtherThroughTheWorkspace) {
  args_.workspace = tensor(workspace_, {count});
  const Launch launch = planned();
  ASSERT_EQ(launch.size(), 2u);
  for (int again = 0; again < 20; ++again) {
    std::fill(out_.begin(), out_.end(), -1);
    std::fill(std::begin(workspace_), std::end(workspace_), -1);
    executable_->launch(launch, nullptr);
    for (int i = 0; i < count; ++i) ASSERT_EQ(out_[i], first_number + count - 1 - i);
    ASSERT_EQ(workspace_[count], -1);
  }
}

TEST_F(Steps, NothingToComputeHasNone) {
  args_.o->shape[0] = 0;
  const Launch launch = planned();
  EXPECT_EQ(launch.size(), 0u);
  EXPECT_NO_THROW(executable_->launch(launch, nullptr));
}

TEST_F(Steps, TheWorkspaceIsChecked) {
  expect_refusal({"workspace is missing", "600 bytes", "workspace_bytes"});
  args_.workspace = tensor(workspace_, {count - 1});
  expect_refusal({"workspace has 596 bytes", "needs 600"});
  args_.workspace = tensor(workspace_ + 1, {count});
  expect_refusal({"workspace", "aligned to 64 bytes"});
  args_.workspace = tensor(nullptr, {count});
  expect_refusal({"workspace", "null"});
  args_.workspace = tensor(workspace_, {2, count});
  args_.workspace->strides[0] = 0;
  expect_refusal({"workspace", "contiguous"});
  args_.workspace = tensor(workspace_, {count});
  args_.workspace->device = {Device::Kind::cuda, 0};
  expect_refusal({"workspace is on cuda:0", "cpu"});
  args_.workspace = tensor(workspace_, {3, count / 3});
  EXPECT_NO_THROW(planned());
}

}  // namespace
}  // namespace flashjit
