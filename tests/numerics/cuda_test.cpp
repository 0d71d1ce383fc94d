// Features that only GPUs have: streams, graphs, memory of their own.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <random>
#include <string_view>
#include <thread>
#include <utility>

#include "runtime/cuda/memory.hpp"
#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"
#include "tests/unit/expect_error.h"
#include "tools/verify/random_tensor.hpp"

namespace flashjit::testing_support {
namespace {

class Cuda : public OnEveryDevice {
 protected:
  void SetUp() override {
    OnEveryDevice::SetUp();
    if (GetParam() && !on().is_cuda()) GTEST_SKIP() << "for GPUs";
  }
  static Case medium(std::uint64_t seed = 1) {
    return {.spec = forward_spec(DType::bf16, 128, {CausalMask{}}),
            .batch = 2,
            .heads_q = 4,
            .heads_kv = 2,
            .seqlen_q = 300,
            .seqlen_k = 500,
            .seed = seed};
  }
};

TEST_P(Cuda, CapturedInAGraph) {
  Workload workload(on(), medium());
  const Kernel& kernel = workload.kernel(on().engine());
  const PreparedLaunch prepared = kernel.prepare(workload.args());
  const cuda::Graph direct(on().context(), [&](Stream stream) { kernel.launch(workload.args(), stream); });
  const cuda::Graph from_prepared(on().context(), [&](Stream stream) {
    for (int i = 0; i < 3; ++i) prepared.launch(stream);
  });
  for (const cuda::Graph* graph : {&direct, &from_prepared, &direct}) {
    workload.reset();
    graph->launch();
    EXPECT_TRUE(workload.check());
  }
}

// A grid of fewer blocks than multiprocessors computes the same.
TEST_P(Cuda, LeavesMultiprocessorsToOthers) {
  for (const Operation op : {Operation::forward, Operation::backward}) {
    Case c = medium(2);
    c.seqlen_q = c.seqlen_k = 1000;
    c.spec = c.spec.for_op(op);
    Workload workload(on(), c);
    const Kernel& kernel = workload.kernel(on().engine());
    AttentionArgs args = workload.args();
    for (const int spare : {0, 8, 100}) {
      args.spare_multiprocessors = spare;
      workload.reset();
      kernel.launch(args);
      EXPECT_TRUE(workload.check()) << spare;
    }
    args.spare_multiprocessors = 100000;
    expect_error(ErrorCode::invalid_argument, {"spare_multiprocessors", "100000"},
                 [&] { kernel.launch(args); });
  }
}

// A captured launch reads lengths and page table when it runs.
TEST_P(Cuda, LengthsOfPagesThatChangeBetweenReplays) {
  Workload workload(on(), {.spec = forward_spec(DType::bf16, 64, {CausalMask{}}, {.paged = true}),
                           .batch = 3,
                           .heads_q = 4,
                           .heads_kv = 2,
                           .seqlen_q = 70,
                           .seqlen_k = 800,
                           .lengths_k = {800, 800, 800},
                           .page_size = 16});
  const Kernel& kernel = workload.kernel(on().engine());  // allocates the workspace
  const cuda::Graph graph(on().context(), [&](Stream stream) { kernel.launch(workload.args(), stream); });
  auto* lengths = static_cast<std::int32_t*>(workload.host_args().seqlens_k->data);
  for (const std::array<int, 3>& now : {std::array{800, 800, 800}, {0, 1, 799}, {350, 70, 0}}) {
    std::copy(now.begin(), now.end(), lengths);
    workload.tensor(&AttentionArgs::seqlens_k).upload();
    workload.reset();
    graph.launch();
    EXPECT_TRUE(workload.check());
  }
}

// Lists that a graph makes anew at each replay, for the forward after them.
TEST_P(Cuda, ListsAndForwardInOneGraph) {
  const std::vector<Mask> masks = {CausalMask{}, PaddingMask{},
                                   BlockSparseMask{.block_m = 128, .block_n = 64, .of_masks = true}};
  Case c{.spec = forward_spec(DType::bf16, 64, masks),
         .batch = 3,
         .heads_q = 4,
         .heads_kv = 2,
         .seqlen_q = 700,
         .seqlen_k = 800,
         .masks = verify::MaskDataOptions{}};
  Workload forward(on(), c);
  // Rows beyond the lengths that were drawn hold NaN, but the graph's lengths are others.
  for (const TensorMember rows : {&AttentionArgs::q, &AttentionArgs::k, &AttentionArgs::v}) {
    verify::fill_random(*(forward.host_args().*rows), 5, {.outlier_every = 0});
    forward.tensor(rows).upload();
  }
  AttentionSpec masks_alone = c.spec;
  c.spec =
      AttentionSpec{.op = Operation::make_block_lists, .dtype = DType::bf16, .head_dim = 64, .mask = masks}
          .validated();
  Workload lists(on(), c);
  const Kernel &make = lists.kernel(on().engine()), &attend = forward.kernel(on().engine());
  AttentionArgs made = lists.args(), taken = forward.args();
  for (const TensorMember length : {&AttentionArgs::seqlens_q, &AttentionArgs::seqlens_k})
    made.*length = taken.*length;
  for (const TensorMember list : {&AttentionArgs::block_offsets, &AttentionArgs::block_indices,
                                  &AttentionArgs::block_bitmask_of, &AttentionArgs::block_bitmasks})
    taken.*list = made.*list;
  const std::size_t bytes = make.workspace_bytes(lists.given().shape());
  const cuda::DeviceBuffer workspace(on().context(), bytes);
  made.workspace = Tensor::contiguous(workspace.data(), DType::int32, on().device(),
                                      {static_cast<std::int64_t>((bytes + 3) / 4)});
  const cuda::Graph graph(on().context(), [&](Stream stream) {
    make.launch(made, stream);
    attend.launch(taken, stream);
  });
  std::erase_if(masks_alone.mask,
                [](const Mask& mask) { return std::holds_alternative<BlockSparseMask>(mask); });
  auto* lengths = static_cast<std::int32_t*>(forward.host_args().seqlens_k->data);
  for (const std::array<int, 3>& now : {std::array{800, 800, 800}, {0, 1, 799}, {350, 70, 0}}) {
    std::copy(now.begin(), now.end(), lengths);
    forward.tensor(&AttentionArgs::seqlens_k).upload();
    forward.reset();
    graph.launch();
    ASSERT_TRUE(forward.fetch());
    const verify::Report report = verify::verify_outputs(masks_alone, forward.host_args());
    EXPECT_TRUE(report.ok()) << report.str();
  }
}

TEST_P(Cuda, OnSeveralStreamsAndThreads) {
  constexpr int count = 4;
  std::vector<std::unique_ptr<Workload>> workloads;
  std::vector<std::unique_ptr<cuda::OwnedStream>> streams;
  for (int i = 0; i < count; ++i) {
    workloads.push_back(std::make_unique<Workload>(on(), medium(static_cast<std::uint64_t>(i) + 1)));
    workloads.back()->reset();
    streams.push_back(std::make_unique<cuda::OwnedStream>(on().context()));
  }
  const Kernel& kernel = workloads[0]->kernel(on().engine());
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < count; ++i) {
      threads.emplace_back([&, i] {
        for (int round = 0; round < 20; ++round) kernel.launch(workloads[i]->args(), streams[i]->get());
      });
    }
  }
  for (const auto& stream : streams) stream->synchronize();
  for (const auto& workload : workloads) EXPECT_TRUE(workload->check());
}

// The kernel needs O(N) memory: it allocates no device memory
// while it runs, at a length whose scores would not fit.
TEST_P(Cuda, TakesNoDeviceMemory) {
  Workload small(on(), medium());
  small.kernel(on().engine()).launch(small.args());  // loads the code
  Workload large(on(),
                 {.spec = medium().spec, .heads_q = 4, .heads_kv = 1, .seqlen_q = 65536, .seqlen_k = 65536});
  const Kernel& kernel = large.kernel(on().engine());
  on().synchronize();
  const std::size_t before = cuda::free_memory(on().context());
  kernel.launch(large.args());
  std::size_t least = before;
  for (int i = 0; i < 20; ++i) least = std::min(least, cuda::free_memory(on().context()));
  on().synchronize();
  EXPECT_EQ(least, before);
  EXPECT_EQ(cuda::free_memory(on().context()), before);
  // A workspace is of the same size for all shapes, and may be left out.
  EXPECT_EQ(kernel.workspace_bytes(large.given().shape()), kernel.workspace_bytes(small.given().shape()));
}

// Few rows see many keys. With a workspace tiles of sm_90a have parts of the keys.
TEST_P(Cuda, NeedsNoWorkspace) {
  for (const int seqlen_k : {900, 5000}) {
    Case c = medium();
    c.batch = 1;
    c.seqlen_q = 100;
    c.seqlen_k = seqlen_k;
    Workload workload(on(), c);
    const Kernel& kernel = workload.kernel(on().engine());
    AttentionArgs args = workload.args();
    for (const bool given : {true, false}) {
      workload.reset();
      if (!given) args.workspace.reset();
      kernel.launch(args);
      EXPECT_TRUE(workload.check()) << seqlen_k << (given ? " with a workspace" : " without one");
    }
  }
}

TEST_P(Cuda, LeavesTheCallersContextCurrent) {
  Workload workload(on(), medium());
  const auto& api = cuda::driver();
  cuda::CUcontext before = nullptr, after = nullptr;
  api.CtxGetCurrent(&before);
  workload.kernel(on().engine()).launch(workload.args());
  api.CtxGetCurrent(&after);
  EXPECT_EQ(before, after);
  std::jthread([&] {  // a thread that never saw CUDA
    workload.kernel(on().engine()).launch(workload.args());
    api.CtxGetCurrent(&after);
  })
      .join();
  EXPECT_EQ(after, nullptr);
  EXPECT_TRUE(workload.check());
}

// The host does not read lengths on a GPU: wrong ones may give wrong numbers, but a kernel never reads or
// writes out of bounds.
TEST_P(Cuda, WrongLengthsStayInsideTheTensors) {
  Workload workload(on(), {.spec = forward_spec(DType::bf16, 64, {CausalMask{}}, {.varlen = true}),
                           .heads_q = 2,
                           .heads_kv = 2,
                           .lengths_q = {50, 60, 70},
                           .lengths_k = {90, 20, 70}});
  AttentionArgs args = workload.args();
  for (const std::vector<std::int32_t>& starts :
       {std::vector<std::int32_t>{0, 1000000, -5, 180}, {-2147483647, 2147483647, 0, 7}, {180, 120, 60, 0}}) {
    cuda::DeviceBuffer wrong(on().context(), 16);
    wrong.copy_from(starts.data(), 16);
    args.cu_seqlens_q->data = args.cu_seqlens_k->data = wrong.data();
    workload.reset();
    workload.kernel(on().engine()).launch(args);
    EXPECT_NO_THROW(on().synchronize());
  }
  workload.reset();
  workload.kernel(on().engine()).launch(workload.args());
  EXPECT_TRUE(workload.check());
}

// A kernel never reads or writes out of bounds, whatever lengths, page ids,
// lists and prefixes of masks are (compute-sanitizer watches).
TEST_P(Cuda, WrongMaskTablesStayInsideTheTensors) {
  std::mt19937 random(20250712);
  for (const auto& masks : std::vector<std::vector<Mask>>{{PaddingMask{}},
                                                          {BlockSparseMask{64, 64}},
                                                          {CausalMask{}, BlockSparseMask{128, 32, true}},
                                                          {PaddingMask{}, TreeMask{}},
                                                          {TreeMask{}},
                                                          {CausalMask{}},
                                                          {SlidingWindowMask{}}}) {
    const bool paged = masks.size() == 1;
    Workload workload(on(), {.spec = forward_spec(DType::bf16, 64, masks, {.paged = paged}),
                             .batch = 2,
                             .heads_q = 2,
                             .heads_kv = 1,
                             .seqlen_q = 200,
                             .seqlen_k = 300,
                             .page_size = paged ? 16 : 0});
    const Kernel& kernel = workload.kernel(on().engine());
    for (int repeat = 0; repeat < 20; ++repeat) {
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
        if (table.argument == &AttentionArgs::page_table) args.page_table->strides[0] = table.shape[1];
      }
      workload.reset();
      kernel.launch(args);
      ASSERT_NO_THROW(on().synchronize());
    }
    workload.reset();
    kernel.launch(workload.args());
    EXPECT_TRUE(workload.check());
  }
}

// A kernel never reads or writes out of bounds, whatever lengths and page ids are.
TEST_P(Cuda, WrongPagesStayInsideTheTensors) {
  const AttentionSpec spec = decode_spec(DType::bf16, 64, {CausalMask{}}, {.paged = true});
  std::mt19937 random(20250713);
  for (const int page_size : {1, 16, 256}) {
    Workload workload(on(), {.spec = spec,
                             .batch = 3,
                             .heads_q = 4,
                             .heads_kv = 2,
                             .seqlen_q = 3,
                             .seqlen_k = 600,
                             .lengths_k = {600, 20, 0},
                             .page_size = page_size});
    const Kernel& kernel = workload.kernel(on().engine());
    for (int repeat = 0; repeat < 20; ++repeat) {
      AttentionArgs args = workload.args();
      std::vector<cuda::DeviceBuffer> buffers;
      for (const MaskTable& table : workload.masks().tables) {
        const Tensor& given = *(args.*table.argument);
        std::vector<std::int32_t> wrong(static_cast<std::size_t>(given.shape[0] * given.strides[0]));
        for (std::int32_t& value : wrong)
          value = static_cast<std::int32_t>(random() % 2 ? random() : random() % 700 - 2);
        buffers.emplace_back(on().context(), wrong.size() * 4);
        buffers.back().copy_from(wrong.data(), wrong.size() * 4);
        on().synchronize();
        (args.*table.argument)->data = buffers.back().data();
      }
      workload.reset();
      kernel.launch(args);
      ASSERT_NO_THROW(on().synchronize());
    }
    workload.reset();
    kernel.launch(workload.args());
    EXPECT_TRUE(workload.check());
  }
}

// FLASHJIT_CHECK=1 makes wrong tables an error. A process
// reads it once, so this test needs a process that has it.
TEST_P(Cuda, CheckModeRefusesWrongTables) {
  const char* mode = std::getenv("FLASHJIT_CHECK");
  if (!mode || std::string_view(mode) != "1") GTEST_SKIP() << "FLASHJIT_CHECK is not 1";
  Workload workload(on(), {.spec = forward_spec(DType::bf16, 64, {PaddingMask{}}),
                           .batch = 2,
                           .seqlen_q = 20,
                           .seqlen_k = 30,
                           .masks = verify::MaskDataOptions{}});
  const Kernel& kernel = workload.kernel(on().engine());
  EXPECT_NO_THROW(kernel.launch(workload.args()));
  AttentionArgs args = workload.args();
  const std::int32_t lengths[] = {30, 31};
  cuda::DeviceBuffer wrong(on().context(), sizeof lengths);
  wrong.copy_from(lengths, sizeof lengths);
  args.seqlens_k->data = wrong.data();
  expect_error(ErrorCode::invalid_argument, {"seqlens_k[1] is 31", "seqlen_k = 30"},
               [&] { kernel.launch(args); });
}

TEST_P(Cuda, CheckModeRefusesWrongPages) {
  const char* mode = std::getenv("FLASHJIT_CHECK");
  if (!mode || std::string_view(mode) != "1") GTEST_SKIP() << "FLASHJIT_CHECK is not 1";
  const AttentionSpec spec = decode_spec(DType::bf16, 64, {}, {.paged = true});
  Workload workload(
      on(),
      {.spec = spec, .batch = 2, .seqlen_q = 1, .seqlen_k = 64, .lengths_k = {64, 20}, .page_size = 16});
  const Kernel& kernel = workload.kernel(on().engine());
  EXPECT_NO_THROW(kernel.launch(workload.args()));
  const auto expect_refused = [&](TensorMember member, std::int64_t at, std::int32_t value,
                                  std::initializer_list<const char*> texts) {
    auto& number = static_cast<std::int32_t*>((workload.host_args().*member)->data)[at];
    const std::int32_t before = std::exchange(number, value);
    workload.tensor(member).upload();
    expect_error(ErrorCode::invalid_argument, texts, [&] { kernel.launch(workload.args()); });
    number = before;
    workload.tensor(member).upload();
  };
  expect_refused(&AttentionArgs::page_table, 1, 8, {"page_table[0, 1] is 8", "between 0 and 7"});
  expect_refused(&AttentionArgs::page_table, 0, -1, {"page_table[0, 0] is -1"});
  expect_refused(&AttentionArgs::seqlens_k, 1, 65,
                 {"seqlens_k[1] is 65", "page_table's max_pages x page_size"});
  EXPECT_NO_THROW(kernel.launch(workload.args()));
}

TEST_P(Cuda, CheckModeRefusesWrongPageIds) {
  const char* mode = std::getenv("FLASHJIT_CHECK");
  if (!mode || std::string_view(mode) != "1") GTEST_SKIP() << "FLASHJIT_CHECK is not 1";
  Workload workload(on(), {.spec = forward_spec(DType::bf16, 64, {}, {.paged = true}),
                           .batch = 2,
                           .seqlen_q = 20,
                           .seqlen_k = 30,
                           .lengths_k = {16, 30},
                           .page_size = 16});
  const Kernel& kernel = workload.kernel(on().engine());
  EXPECT_NO_THROW(kernel.launch(workload.args()));
  AttentionArgs args = workload.args();
  const std::int32_t table[] = {0, -1, 1, 4};  // the second entry is beyond a length
  cuda::DeviceBuffer wrong(on().context(), sizeof table);
  wrong.copy_from(table, sizeof table);
  args.page_table->data = wrong.data();
  args.page_table->strides[0] = 2;
  expect_error(ErrorCode::invalid_argument, {"page_table[1, 1] is 4", "between 0 and 3"},
               [&] { kernel.launch(args); });
}

FLASHJIT_ON_EVERY_DEVICE(Cuda);

}  // namespace
}  // namespace flashjit::testing_support
