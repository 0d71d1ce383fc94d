// Engines of many processes on one cache folder, with real kernels: each is compiled once
// and all results are right, whichever process dies and whatever happens to the files.
#include <gmock/gmock.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <csignal>

#include "runtime/flashjit.hpp"
#include "tests/cache/support.hpp"
#include "tests/support/sample_seed.hpp"

namespace flashjit::testing {
namespace {

using ::testing::HasSubstr;

constexpr int num_processes = 16;
constexpr int num_kernels = 20;

// Small specs, quick to compile, all different.
AttentionSpec spec(int n) {
  AttentionSpec spec{.dtype = DType::fp32, .head_dim = 8 * (n % 5 + 1)};
  if (n / 5 % 2) spec.mask = {CausalMask{}};
  spec.lse = n / 10 % 2;
  return spec.validated();
}

EngineOptions options_for(const std::string& folder) {
  EngineOptions options;
  options.cache_dir = folder;
  options.cache_path = "";
  options.num_threads = 1;
  return options;
}

// Gets the spec's kernel and runs it. All values are equal, so the output must be that value.
const KernelInfo& run(Engine& engine, const AttentionSpec& spec) {
  constexpr int rows = 20;
  const Kernel& kernel = engine.get(spec, {1, rows, rows, 1, 1});
  const auto count = static_cast<std::size_t>(rows * spec.head_dim);
  std::vector<float> q(count), k(count), v(count, 0.75f), o(count), lse(rows);
  for (std::size_t i = 0; i < count; ++i) {
    q[i] = static_cast<float>(i % 7) * 0.3f;
    k[i] = static_cast<float>(i % 5) * 0.2f;
  }
  const auto tensor = [&](std::vector<float>& data) {
    return Tensor::contiguous(data.data(), DType::fp32, {}, {1, rows, 1, spec.head_dim});
  };
  AttentionArgs args{.q = tensor(q), .k = tensor(k), .v = tensor(v), .o = tensor(o)};
  if (spec.lse) args.lse = Tensor::contiguous(lse.data(), DType::fp32, {}, {1, 1, rows});
  kernel.launch(args);
  for (const float value : o) {
    if (!(std::fabs(value - 0.75f) < 1e-5f)) throw std::runtime_error("wrong result");
  }
  return kernel.info();
}

// Two architectures at once: half of the processes use the older one.
TEST(SharedCache, SixteenProcessesCompileEachKernelOnce) {
  const Scratch scratch;
  const std::vector<std::string> targets = {"x86-64-v3", Target::native().str()};
  const Shared<std::array<std::atomic<int>, 2 * num_kernels>> compiled;
  const unsigned seed = test_seed();
  std::vector<pid_t> children;
  for (int process = 0; process < num_processes; ++process) {
    children.push_back(start_child([&, process] {
      EngineOptions options = options_for(scratch / "cache");
      options.target = targets[process % 2];
      Engine engine(options);
      std::vector<int> order(num_kernels);
      for (int n = 0; n < num_kernels; ++n) order[n] = n;
      std::shuffle(order.begin(), order.end(), std::mt19937(seed + static_cast<unsigned>(process)));
      for (const int n : order) {
        const KernelInfo& info = run(engine, spec(n));
        FLASHJIT_CHECK(info.target.str() == options.target && info.cache_note.empty());
        if (info.origin == Origin::compiled) ++(*compiled)[process % 2 * num_kernels + n];
      }
      return true;
    }));
  }
  for (const pid_t child : children) EXPECT_TRUE(child_succeeded(child));
  for (int n = 0; n < num_kernels; ++n) {
    const int older = (*compiled)[n], native = (*compiled)[num_kernels + n];
    if (targets[0] == targets[1]) {
      EXPECT_EQ(older + native, 1) << n;
    } else {
      EXPECT_EQ(older, 1) << n;
      EXPECT_EQ(native, 1) << n;
    }
  }
}

TEST(SharedCache, KilledCompilersLeaveNothingBehind) {
  const Scratch scratch;
  std::mt19937 random(test_seed());
  for (int round = testing_support::test_all() ? 0 : 70; round < 100; ++round) {
    const pid_t child = start_child([&] {
      Engine engine(options_for(scratch / "cache"));
      for (int n = round;; ++n) {
        const KernelInfo& info = run(engine, spec(n % num_kernels));
        if (n % 3 == 0) std::filesystem::remove(info.path);
        if (n > round + 2 * num_kernels) return true;
      }
    });
    ::usleep(random() % 40'000);
    ::kill(child, SIGKILL);
    child_succeeded(child);
  }
  const DiskCache cache(scratch / "cache");
  for (const DiskCache::Listing& item : cache.list(true)) EXPECT_EQ(item.damage, "") << item.path;
  EXPECT_TRUE(names_in(scratch / "cache/v3/quarantine").empty());
  EXPECT_TRUE(child_succeeded(start_child([&] {
    Engine engine(options_for(scratch / "cache"));
    for (int n = 0; n < num_kernels; ++n) FLASHJIT_CHECK(run(engine, spec(n)).cache_note.empty());
    return true;
  })));
}

// Between publish and open anything may happen to a file. A process that
// compiled uses its own bytes; a process that finds a damaged file compiles.
TEST(SharedCache, FilesThatVanishAndSpoil) {
  const Scratch scratch;
  const std::string store = scratch / "cache/v3";
  std::filesystem::create_directories(store);
  ::chmod((scratch / "cache").c_str(), 0700);
  ::chmod(store.c_str(), 0700);
  const pid_t vandal = start_child([&] {
    for (unsigned i = 0;; ++i) {
      ::usleep(200);
      for (const std::string& name : names_in(store)) {
        if (!name.ends_with(".kernel")) continue;
        std::error_code ignored;
        if (i % 2) std::filesystem::remove(store + "/" + name, ignored);
        if (i % 2 == 0) std::filesystem::resize_file(store + "/" + name, i % 3000, ignored);
      }
    }
    return true;
  });
  EXPECT_TRUE(child_succeeded(start_child([&] {
    for (int round = testing_support::test_all() ? 0 : 3; round < 5; ++round) {
      Engine engine(options_for(scratch / "cache"));
      for (int n = 0; n < 5; ++n) run(engine, spec(n));
    }
    return true;
  })));
  ::kill(vandal, SIGKILL);
  child_succeeded(vandal);
}

TEST(SharedCache, DamageIsReportedOnceAndRebuilt) {
  const Scratch scratch;
  EXPECT_TRUE(child_succeeded(start_child([&] {
    const auto get = [&] {
      Engine engine(options_for(scratch / "cache"));
      return run(engine, spec(0));
    };
    const KernelInfo first = get();
    FLASHJIT_CHECK(first.origin == Origin::compiled && first.cache_note.empty());
    FLASHJIT_CHECK(get().origin == Origin::disk);
    std::string bytes = read_file(first.path);
    bytes[bytes.size() / 2] ^= 4;
    write_file(first.path, bytes);
    const KernelInfo rebuilt = get();
    FLASHJIT_CHECK(rebuilt.origin == Origin::compiled && rebuilt.path == first.path);
    FLASHJIT_CHECK(rebuilt.cache_note.find("set aside") != std::string::npos);
    const KernelInfo after = get();
    FLASHJIT_CHECK(after.origin == Origin::disk && after.cache_note.empty());
    return true;
  })));
}

TEST(SharedCache, AFolderThatCannotBeWrittenCostsNothingButTime) {
  const Scratch scratch;
  ::chmod(scratch.path().c_str(), 0755);
  EXPECT_TRUE(child_succeeded(start_child([&] {
    ::mkdir((scratch / "cache").c_str(), 0755);
    FLASHJIT_CHECK(become_ordinary_user());
    // The folder belongs to root, or to us without write permission: it can be read, not written.
    ::chmod((scratch / "cache").c_str(), 0555);
    Engine engine(options_for(scratch / "cache"));
    const KernelInfo& info = run(engine, spec(0));
    FLASHJIT_CHECK(info.origin == Origin::compiled && info.path.empty());
    FLASHJIT_CHECK(info.cache_note.find("Permission denied") != std::string::npos);
    return true;
  })));
}

}  // namespace
}  // namespace flashjit::testing
