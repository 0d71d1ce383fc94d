// A backward on a GPU: graphs, streams, memory, and tables of any numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <random>
#include <thread>

#include "codegen/families/kernel_family.hpp"
#include "runtime/cuda/memory.hpp"
#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"
#include "tools/verify/backward_oracle.hpp"

namespace flashjit::testing_support {
namespace {

AttentionSpec gpu_backward(std::vector<Mask> mask, bool varlen = false) {
  return attention_spec(Operation::backward, DType::bf16, 64, std::move(mask), {.varlen = varlen});
}

class BackwardOnCuda : public OnEveryDevice {
 protected:
  void SetUp() override {
    OnEveryDevice::SetUp();
    if (IsSkipped()) return;
    if (!on().is_cuda()) GTEST_SKIP() << "for GPUs";
    if (const std::string why = why_unsupported(gpu_backward({}), Target::parse(on().target())); !why.empty())
      GTEST_SKIP() << why;
  }
  static Case medium(std::uint64_t seed = 1) {
    return {.spec = gpu_backward({CausalMask{}}),
            .batch = 2,
            .heads_q = 4,
            .heads_kv = 2,
            .seqlen_q = 300,
            .seqlen_k = 500,
            .seed = seed};
  }
};

// A workspace may hold anything before each replay.
TEST_P(BackwardOnCuda, CapturedInAGraph) {
  Workload workload(on(), medium());
  const Kernel& kernel = workload.kernel(on().engine());
  const std::size_t bytes = kernel.workspace_bytes(workload.given().shape());
  cuda::DeviceBuffer workspace(on().context(), bytes);
  AttentionArgs args = workload.args();
  args.workspace = Tensor::contiguous(workspace.data(), DType::int32, on().device(),
                                      {static_cast<std::int64_t>((bytes + 3) / 4)});
  const PreparedLaunch prepared = kernel.prepare(args);
  const cuda::Graph direct(on().context(), [&](Stream stream) { kernel.launch(args, stream); });
  const cuda::Graph twice(on().context(), [&](Stream stream) {
    prepared.launch(stream);
    prepared.launch(stream);
  });
  for (const cuda::Graph* graph : {&direct, &twice, &direct}) {
    workspace.fill(0xff);
    workload.reset();
    graph->launch();
    EXPECT_TRUE(workload.check());
  }
}

// A captured launch reads lengths when it runs.
TEST_P(BackwardOnCuda, ReplaysWithOtherLengths) {
  Workload workload(on(), {.spec = gpu_backward({CausalMask{}, PaddingMask{}}),
                           .batch = 3,
                           .heads_q = 4,
                           .heads_kv = 2,
                           .seqlen_q = 300,
                           .seqlen_k = 400,
                           .masks = verify::MaskDataOptions{}});
  const Kernel& kernel = workload.kernel(on().engine());
  const cuda::Graph graph(on().context(), [&](Stream stream) { kernel.launch(workload.args(), stream); });
  const auto lengths = [&](TensorMember member) {
    return static_cast<std::int32_t*>((workload.host_args().*member)->data);
  };
  const std::array<int, 3> rows = {lengths(&AttentionArgs::seqlens_q)[0],
                                   lengths(&AttentionArgs::seqlens_q)[1],
                                   lengths(&AttentionArgs::seqlens_q)[2]};
  for (const int divisor : {1, 3, 1}) {
    for (std::size_t b = 0; b < rows.size(); ++b) lengths(&AttentionArgs::seqlens_q)[b] = rows[b] / divisor;
    workload.tensor(&AttentionArgs::seqlens_q).upload();
    // Causal rows see other keys now.
    verify::fill_forward(workload.given().spec, workload.host_args());
    for (const TensorMember member : {TensorMember(&AttentionArgs::o), TensorMember(&AttentionArgs::lse)})
      workload.tensor(member).upload();
    workload.reset();
    graph.launch();
    EXPECT_TRUE(workload.check());
  }
}

// Rows of a group that would not stay in the second-level cache: blocks of the grid have one query head each.
TEST_P(BackwardOnCuda, GroupsBeyondTheCache) {
  for (const bool varlen : {false, true}) {
    Workload workload(on(), {.spec = gpu_backward({SlidingWindowMask{}}, varlen),
                             .heads_q = 34,
                             .heads_kv = 1,
                             .seqlen_q = 2'050,
                             .seqlen_k = 2'000,
                             .lengths_q = varlen ? std::vector{900, 0, 1'150} : std::vector<int>{},
                             .lengths_k = varlen ? std::vector{1'100, 70, 830} : std::vector<int>{},
                             .masks = verify::MaskDataOptions{.window_left = 40, .window_right = 10}});
    const Kernel& kernel = workload.kernel(on().engine());
    for (int launch = 0; launch < 2; ++launch) {
      workload.reset();
      kernel.launch(workload.args());
      EXPECT_TRUE(workload.check());
    }
  }
}

TEST_P(BackwardOnCuda, OnSeveralStreamsAndThreads) {
  constexpr int count = 4;
  std::vector<std::unique_ptr<Workload>> workloads;
  std::vector<std::unique_ptr<cuda::OwnedStream>> streams;
  for (int i = 0; i < count; ++i) {
    workloads.push_back(std::make_unique<Workload>(on(), medium(static_cast<std::uint64_t>(i) + 1)));
    workloads.back()->kernel(on().engine());  // adds the workspace
    workloads.back()->reset();
    streams.push_back(std::make_unique<cuda::OwnedStream>(on().context()));
  }
  const Kernel& kernel = workloads[0]->kernel(on().engine());
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < count; ++i) {
      threads.emplace_back([&, i] {
        for (int round = 0; round < 10; ++round) kernel.launch(workloads[i]->args(), streams[i]->get());
      });
    }
  }
  for (const auto& stream : streams) stream->synchronize();
  for (const auto& workload : workloads) EXPECT_TRUE(workload->check());
}

// No memory but the workspace, which is linear in the sequence length.
TEST_P(BackwardOnCuda, TakesNoDeviceMemory) {
  Workload small(on(), medium());
  small.kernel(on().engine()).launch(small.args());  // loads the code
  Workload large(on(),
                 {.spec = medium().spec, .heads_q = 2, .heads_kv = 1, .seqlen_q = 4096, .seqlen_k = 4096});
  const Kernel& kernel = large.kernel(on().engine());
  on().synchronize();
  const std::size_t before = cuda::free_memory(on().context());
  kernel.launch(large.args());
  std::size_t least = before;
  for (int i = 0; i < 20; ++i) least = std::min(least, cuda::free_memory(on().context()));
  on().synchronize();
  EXPECT_EQ(least, before);
  EXPECT_EQ(cuda::free_memory(on().context()), before);

  Shape shape = large.given().shape();
  const std::size_t once = kernel.workspace_bytes(shape);
  shape.seqlen_q *= 2, shape.seqlen_k *= 2;
  EXPECT_LE(kernel.workspace_bytes(shape), 2 * once);
  EXPECT_GE(kernel.workspace_bytes(shape), once);
}

// The host reads no lengths, lists and prefixes: wrong ones may give wrong numbers, but a kernel
// never reads or writes out of bounds (compute-sanitizer watches).
TEST_P(BackwardOnCuda, WrongTablesStayInsideTheTensors) {
  std::mt19937 random(20261123);
  for (const auto& masks : std::vector<std::vector<Mask>>{{PaddingMask{}},
                                                          {BlockSparseMask{64, 64}},
                                                          {CausalMask{}, BlockSparseMask{128, 32, true}},
                                                          {PaddingMask{}, TreeMask{}}}) {
    Workload workload(on(), {.spec = gpu_backward(masks),
                             .batch = 2,
                             .heads_q = 2,
                             .heads_kv = 1,
                             .seqlen_q = 200,
                             .seqlen_k = 300});
    const Kernel& kernel = workload.kernel(on().engine());
    for (int repeat = 0; repeat < 10; ++repeat) {
      AttentionArgs args = workload.args();
      std::vector<cuda::DeviceBuffer> buffers;
      for (const MaskTable& table : workload.masks().tables) {
        std::vector<std::int32_t> wrong(table.values.size());
        for (std::int32_t& value : wrong)
          value = static_cast<std::int32_t>(random() % 2 ? random() : random() % 12 - 2);
        buffers.emplace_back(on().context(), wrong.size() * 4);
        buffers.back().copy_from(wrong.data(), wrong.size() * 4);
        on().synchronize();
        (args.*table.argument)->data = buffers.back().data();
      }
      workload.reset();
      kernel.launch(args);
      ASSERT_NO_THROW(on().synchronize());
      EXPECT_TRUE(workload.fetch());
    }
    workload.reset();
    kernel.launch(workload.args());
    EXPECT_TRUE(workload.check());
  }
}

TEST_P(BackwardOnCuda, WrongStartsStayInsideTheTensors) {
  Workload workload(on(), {.spec = gpu_backward({CausalMask{}}, true),
                           .heads_q = 2,
                           .heads_kv = 2,
                           .lengths_q = {50, 60, 70},
                           .lengths_k = {90, 20, 70}});
  const Kernel& kernel = workload.kernel(on().engine());
  AttentionArgs args = workload.args();
  for (const std::vector<std::int32_t>& starts :
       {std::vector<std::int32_t>{0, 1000000, -5, 180}, {-2147483647, 2147483647, 0, 7}, {180, 120, 60, 0}}) {
    cuda::DeviceBuffer wrong(on().context(), 16);
    wrong.copy_from(starts.data(), 16);
    on().synchronize();
    args.cu_seqlens_q->data = args.cu_seqlens_k->data = wrong.data();
    workload.reset();
    kernel.launch(args);
    ASSERT_NO_THROW(on().synchronize());
    EXPECT_TRUE(workload.fetch());
  }
  workload.reset();
  kernel.launch(workload.args());
  EXPECT_TRUE(workload.check());
}

FLASHJIT_ON_EVERY_DEVICE(BackwardOnCuda);

}  // namespace
}  // namespace flashjit::testing_support
