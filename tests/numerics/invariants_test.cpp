// Invariants across launches: the same bits however a kernel
// is run, and no influence of one sequence on another.
#include <gtest/gtest.h>
#include <xmmintrin.h>

#include <algorithm>
#include <atomic>
#include <latch>
#include <limits>
#include <thread>

#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"
#include "tools/verify/element.hpp"

namespace flashjit::testing_support {
namespace {

const std::vector<Mask> causal = {CausalMask{}};

Case medium(DType dtype, bool varlen = false) {
  return {.spec = forward_spec(dtype, 64, causal, {.varlen = varlen}),
          .batch = 2,
          .heads_q = 4,
          .heads_kv = 2,
          .seqlen_q = 200,
          .seqlen_k = 300,
          .lengths_q = {1, 150, 0, 77},
          .lengths_k = {33, 150, 5, 300}};
}

class Invariants : public ComputesOnEveryDevice {
 protected:
  std::vector<std::byte> run(Workload& workload, const Kernel& kernel) {
    workload.reset();
    kernel.launch(workload.args());
    return workload.outputs();
  }
};

TEST_P(Invariants, SameBitsRunAfterRun) {
  for (const DType dtype : own_dtypes()) {
    for (const bool varlen : {false, true}) {
      Workload workload(on(), medium(dtype, varlen));
      const Kernel& kernel = workload.kernel(on().engine());
      const auto bits = run(workload, kernel);
      EXPECT_TRUE(workload.check());
      for (int i = 0; i < 20; ++i) ASSERT_EQ(run(workload, kernel), bits) << "run " << i;
    }
  }
}

TEST_P(Invariants, PreparedLaunchesDoTheSame) {
  Workload workload(on(), medium(DType::bf16, true));
  const Kernel& kernel = workload.kernel(on().engine());
  const auto bits = run(workload, kernel);
  PreparedLaunch prepared = kernel.prepare(workload.args());
  PreparedLaunch moved = std::move(prepared);
  for (int i = 0; i < 3; ++i) {
    workload.reset();
    moved.launch();
    EXPECT_EQ(workload.outputs(), bits);
  }
}

TEST_P(Invariants, SameBitsFromTheDiskCacheAndFromAnotherEngine) {
  Workload workload(on(), medium(DType::bf16));
  const auto bits = run(workload, workload.kernel(on().engine()));
  const auto second = on().make_engine();
  EXPECT_EQ(run(workload, workload.kernel(*second)), bits);
  EXPECT_EQ(workload.kernel(*second).info().origin, Origin::disk);
  const auto uncached = on().make_engine({.cache_dir = "", .cache_path = ""});
  EXPECT_EQ(run(workload, workload.kernel(*uncached)), bits);
  EXPECT_EQ(workload.kernel(*uncached).info().origin, Origin::compiled);
}

TEST_P(Invariants, LaunchesFromSeveralThreadsAtOnce) {
  constexpr int threads = 4, rounds = 10;
  std::vector<std::unique_ptr<Workload>> workloads;
  std::vector<std::vector<std::byte>> expected;
  for (int i = 0; i < threads; ++i) {
    Case c = medium(DType::bf16, i % 2 == 1);
    c.seed = static_cast<std::uint64_t>(i) + 1;
    workloads.push_back(std::make_unique<Workload>(on(), c));
    expected.push_back(run(*workloads.back(), workloads.back()->kernel(on().engine())));
    EXPECT_TRUE(workloads.back()->check());
  }
  std::atomic<int> wrong = 0;
  std::latch start(threads);
  {
    std::vector<std::jthread> running;
    for (int i = 0; i < threads; ++i) {
      running.emplace_back([&, i] {
        start.arrive_and_wait();
        for (int round = 0; round < rounds; ++round) {
          wrong += run(*workloads[i], workloads[i]->kernel(on().engine())) != expected[i];
        }
      });
    }
  }
  EXPECT_EQ(wrong, 0);
}

// Denormal numbers would slow instructions down many times.
// The host's own floating-point mode is unchanged afterwards.
TEST_P(Invariants, DenormalNumbersAreZerosOnACpuWhileAKernelRuns) {
  if (on().device().kind != Device::Kind::cpu) GTEST_SKIP() << "not a CPU";
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    Case c = medium(dtype);
    c.spec = forward_spec(dtype, 64, causal, {.lse = false});
    Workload workload(on(), c);
    const Tensor v = workload.v().on_host();
    for (std::int64_t i = 0; i < c.batch * v.strides[0]; ++i)
      verify::store_element(v.data, v.dtype, i, 0x1p-127f);
    workload.v().upload();
    const unsigned mode = _mm_getcsr();
    const auto outputs = run(workload, workload.kernel(on().engine()));
    EXPECT_EQ(_mm_getcsr(), mode);
    EXPECT_TRUE(std::all_of(outputs.begin(), outputs.end(), [](std::byte b) { return b == std::byte{}; }));
  }
}

TEST_P(Invariants, ABatchEntryFullOfNaNsStaysWithItself) {
  Case c = medium(DType::bf16);
  c.spec = forward_spec(DType::bf16, 64, causal, {.lse = false});
  Workload workload(on(), c);
  const Kernel& kernel = workload.kernel(on().engine());
  const auto before = run(workload, kernel);
  for (GuardedTensor* tensor : {&workload.k(), &workload.v()}) {
    const Tensor t = tensor->on_host();
    for (std::int64_t i = t.strides[0]; i < 2 * t.strides[0]; ++i) {
      verify::store_element(t.data, t.dtype, i, std::numeric_limits<float>::quiet_NaN());
    }
    tensor->upload();
  }
  const auto after = run(workload, kernel);
  const auto half = static_cast<std::ptrdiff_t>(before.size() / 2);
  EXPECT_TRUE(std::equal(before.begin(), before.begin() + half, after.begin()));
  EXPECT_NE(before, after);
}

// The keys of a sequence without queries may hold anything.
TEST_P(Invariants, PackedNeighboursFullOfNaNsAreNeverSeen) {
  for (const DType dtype : own_dtypes()) {
    Workload workload(on(), {.spec = forward_spec(dtype, 64, {}, {.varlen = true}),
                             .heads_q = 2,
                             .heads_kv = 1,
                             .lengths_q = {20, 0, 90, 0},
                             .lengths_k = {33, 100, 77, 5}});
    for (GuardedTensor* tensor : {&workload.k(), &workload.v()}) {
      const Tensor t = tensor->on_host();
      for (const auto& [first, last] : {std::pair{33, 133}, std::pair{210, 215}}) {
        for (std::int64_t i = first * t.strides[0]; i < last * t.strides[0]; ++i) {
          verify::store_element(t.data, t.dtype, i, std::numeric_limits<float>::quiet_NaN());
        }
      }
      tensor->upload();
    }
    run(workload, workload.kernel(on().engine()));
    EXPECT_TRUE(workload.check());
  }
}

TEST_P(Invariants, InputsMayBeSharedByTheBatch) {
  Case c = medium(DType::bf16);
  c.spec = forward_spec(DType::bf16, 64, causal, {.lse = false});
  c.batch = 1;
  Workload one(on(), c);
  // With more threads, a half alone could be split over its keys.
  const auto engine = on().make_engine({.num_threads = 1});
  const auto bits = run(one, one.kernel(*engine));
  c.batch = 2;
  Workload two(on(), c);  // only its output is used
  AttentionArgs args = two.args();
  for (const auto& [to, from] : {std::pair{&args.q, &one.args().q}, std::pair{&args.k, &one.args().k},
                                 std::pair{&args.v, &one.args().v}}) {
    *to = *from;
    (*to)->shape[0] = 2;
    (*to)->strides[0] = 0;
  }
  two.reset();
  two.kernel(*engine).launch(args);
  auto expected = bits;
  expected.insert(expected.end(), bits.begin(), bits.end());
  EXPECT_EQ(two.outputs(), expected);
}

TEST_P(Invariants, SameBitsOnAnyNumberOfThreads) {
  if (on().is_cuda()) GTEST_SKIP() << "threads are a CPU's";
  for (const DType dtype : own_dtypes()) {
    Case c = medium(dtype);
    // There are enough rows for all threads: if keys were split as well, the number of parts would show.
    c.heads_q = c.heads_kv = 16;
    Workload workload(on(), c);
    const auto one = on().make_engine({.num_threads = 1});
    const auto bits = run(workload, workload.kernel(*one));
    EXPECT_TRUE(workload.check());
    for (const int n : {2, 3, 7}) {
      const auto engine = on().make_engine({.num_threads = n});
      for (int i = 0; i < 5; ++i) ASSERT_EQ(run(workload, workload.kernel(*engine)), bits) << n << " threads";
    }
  }
}

TEST_P(Invariants, SameBitsOnTheCallersThreads) {
  if (on().is_cuda()) GTEST_SKIP() << "threads are a CPU's";
  Workload workload(on(), medium(DType::bf16, true));
  const auto bits = run(workload, workload.kernel(on().engine()));
  using Body = void (*)(void*, std::int64_t, std::int64_t);
  std::atomic<std::int64_t> covered = 0, asked = 0;
  const auto piece = [&](Body body, void* context, std::int64_t begin, std::int64_t end) {
    covered += end - begin;
    body(context, begin, end);
  };
  const std::pair<const char*, ParallelFor> ways[] = {
      {"all at once",
       [&](std::int64_t count, Body body, void* context) { asked += count, piece(body, context, 0, count); }},
      {"one by one, last to first",
       [&](std::int64_t count, Body body, void* context) {
         asked += count;
         for (std::int64_t i = count; i-- > 0;) piece(body, context, i, i + 1);
       }},
      {"uneven ranges on three threads",
       [&](std::int64_t count, Body body, void* context) {
         asked += count;
         const std::int64_t a = count / 5, b = count / 2;
         std::jthread first([=, &piece] { piece(body, context, 0, a); });
         std::jthread second([=, &piece] { piece(body, context, a, b); });
         piece(body, context, b, count);
       }},
  };
  for (const auto& [name, parallel_for] : ways) {
    const auto engine = on().make_engine({.parallel_for = parallel_for});
    covered = asked = 0;
    EXPECT_EQ(run(workload, workload.kernel(*engine)), bits) << name;
    EXPECT_GT(asked, 0) << name << ": not asked to run anything";
    EXPECT_EQ(covered, asked);
  }
}

FLASHJIT_ON_EVERY_DEVICE(Invariants);

}  // namespace
}  // namespace flashjit::testing_support
