// A child made by fork() uses, or destroys, what its parent had made. Each child is ended by a signal if it
// hangs.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "runtime/flashjit.hpp"
#include "tests/cache/support.hpp"

namespace flashjit::testing {
namespace {

// Attention of one head over ones: every output is 1.
bool computes_ones(const Kernel& kernel) {
  constexpr std::int64_t rows = 300, dim = 64;
  std::vector<float> ones(rows * dim, 1), o(rows * dim), lse(rows);
  const auto tensor = [](std::vector<float>& memory) {
    return Tensor::contiguous(memory.data(), DType::fp32, {}, {1, rows, 1, dim});
  };
  AttentionArgs args;
  args.q = tensor(ones), args.k = tensor(ones), args.v = tensor(ones), args.o = tensor(o);
  args.lse = Tensor::contiguous(lse.data(), DType::fp32, {}, {1, 1, rows});
  kernel.launch(args);
  for (const float x : o)
    if (!(x > 0.9999f && x < 1.0001f)) return false;
  return true;
}

AttentionSpec spec_of(const char* mask = "[]") {
  return AttentionSpec::from_json(
      std::string(R"({"op": "forward", "dtype": "fp32", "head_dim": 64, "mask": )") + mask + "}");
}
constexpr Shape shape{.batch = 1, .seqlen_q = 300, .seqlen_k = 300, .num_heads_q = 1, .num_heads_kv = 1};

bool child_succeeds(const std::function<bool()>& body) {
  return child_succeeded(start_child([&] {
    ::alarm(60);
    return body();
  }));
}

class Fork : public ::testing::Test {
 protected:
  std::unique_ptr<Engine> make_engine(int num_threads, const std::string& cache_dir) {
    EngineOptions options;
    options.num_threads = num_threads;
    options.cache_dir = cache_dir;
    return std::make_unique<Engine>(options);
  }
};

TEST_F(Fork, AnEngineWorksAndEndsInAChild) {
  const Scratch scratch;
  for (const int num_threads : {1, 3})
    for (const bool used : {false, true}) {
      auto engine = make_engine(num_threads, scratch.path());
      const Kernel& kernel = engine->get(spec_of(), shape);
      if (used) {
        EXPECT_TRUE(computes_ones(kernel));
      }
      EXPECT_TRUE(child_succeeds([&] {
        engine.reset();
        return true;
      }));
      EXPECT_TRUE(child_succeeds([&] {
        const bool right =
            computes_ones(kernel) && computes_ones(engine->get(spec_of("[\"causal\"]"), shape));
        engine.reset();
        return right;
      }));
      // A child's child, and the parent itself as before.
      EXPECT_TRUE(child_succeeds(
          [&] { return computes_ones(kernel) && child_succeeds([&] { return computes_ones(kernel); }); }));
      EXPECT_TRUE(computes_ones(kernel));
    }
}

TEST_F(Fork, WhatTheParentWasCompilingIsBegunAnew) {
  auto engine = make_engine(2, "");
  const auto other = engine->get_async(spec_of("[\"causal\"]"), shape);
  const auto pending = engine->get_async(spec_of(), shape);
  EXPECT_TRUE(child_succeeds([&] {
    // Where the parent was done before it forked, the child has its kernel.
    bool told = false;
    try {
      told = computes_ones(*pending.get());
    } catch (const Error& error) {
      told = error.message().find("forked") != std::string::npos;
    }
    return told && computes_ones(engine->get(spec_of(), shape)) &&
           computes_ones(*engine->get_async(spec_of(), shape).get());
  }));
  EXPECT_TRUE(child_succeeds([&] {
    engine.reset();
    return true;
  }));
  EXPECT_TRUE(computes_ones(*pending.get()));
  EXPECT_TRUE(computes_ones(*other.get()));
}

// Whatever the parent's threads were doing at the moment.
TEST_F(Fork, AmongThreadsThatLaunchAndGet) {
  const Scratch scratch;
  auto engine = make_engine(3, scratch.path());
  const Kernel& kernel = engine->get(spec_of(), shape);
  std::atomic<bool> over = false;
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    while (!over) computes_ones(kernel);
  });
  threads.emplace_back([&] {
    for (int n = 0; !over; n = n % 1000 + 1) {
      auto another = make_engine(2, scratch.path());
      another->get_async(spec_of(), shape);
      another->get(spec_of(), shape);
    }
  });
  for (int i = 0; i < 12; ++i)
    EXPECT_TRUE(child_succeeds([&] {
      const bool right =
          computes_ones(kernel) && computes_ones(make_engine(2, scratch.path())->get(spec_of(), shape));
      engine.reset();
      return right;
    })) << i;
  over = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace flashjit::testing
