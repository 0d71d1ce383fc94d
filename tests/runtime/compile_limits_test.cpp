// Limits of compilations, and cancelling them.
#include <gmock/gmock.h>

#include <atomic>
#include <cmath>
#include <stdexcept>
#include <thread>
#include <vector>

#include "codegen/families/search_space.hpp"
#include "codegen/render.hpp"
#include "runtime/compiler.hpp"
#include "runtime/flashjit.hpp"
#include "tests/cache/support.hpp"

namespace flashjit::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class CompileLimitsTest : public ::testing::Test {
 protected:
  EngineOptions options(CompileLimits limits) const {
    return {.cache_dir = folder.path(), .cache_path = "", .num_threads = 1, .compile = std::move(limits)};
  }
  const Kernel& get(Engine& engine) const { return engine.get(spec, shape); }
  // The code of the error that is thrown; its message is kept.
  template <class Call>
  ErrorCode code_of(Call call) {
    try {
      call();
    } catch (const Error& error) {
      message = error.message();
      return error.code();
    }
    return {};
  }
  ErrorCode failure(Engine& engine) {
    return code_of([&] { get(engine); });
  }
  KernelSource kernel_source() const {
    const AttentionSpec valid = spec.validated();
    return render(valid, Target::native(), heuristic_config(valid, Target::native(), bucket(shape)));
  }
  void expect_compiled_by(const CompileLimits& limits) const {
    Engine engine(options(limits));
    EXPECT_EQ(get(engine).info().origin, Origin::compiled);
  }

  const Scratch folder;
  const AttentionSpec spec{.dtype = DType::fp32, .head_dim = 64};
  const Shape shape{.batch = 1, .seqlen_q = 60, .seqlen_k = 60, .num_heads_q = 2, .num_heads_kv = 2};
  std::string message;
};

TEST_F(CompileLimitsTest, TooLongIsAnErrorThatKeepsNothing) {
  Engine engine(options({.seconds = 1e-9}));
  for (int again = 0; again < 2; ++again) EXPECT_EQ(failure(engine), ErrorCode::limit_exceeded);
  EXPECT_THAT(message, AllOf(HasSubstr(Target::native().str()), HasSubstr("more than its limit of 1e-09"),
                             HasSubstr("a higher limit")));
  expect_compiled_by({});
}

TEST_F(CompileLimitsTest, TooMuchMemoryIsAnErrorThatKeepsNothing) {
  Engine engine(options({.bytes = 1 << 20}));
  EXPECT_EQ(failure(engine), ErrorCode::limit_exceeded);
  EXPECT_THAT(message, HasSubstr("bytes of memory, more than its limit of 1048576"));
  expect_compiled_by({.seconds = 1e6, .bytes = std::uint64_t{1} << 40, .cancelled = [] { return false; }});
}

TEST_F(CompileLimitsTest, ClangEndsAnywhere) {
  const KernelSource source = kernel_source();
  int most = 1;
  for (;; most *= 2) {
    int asked = 0;
    const CompileLimits limits{.cancelled = [&] { return ++asked > most; }};
    const ErrorCode code = code_of([&] { clang_compiler()->compile(source, false, limits); });
    EXPECT_EQ(code, asked > most ? ErrorCode::cancelled : ErrorCode{});
    if (code == ErrorCode{}) break;
  }
  EXPECT_GT(most, 1);
}

// A compiler's questions meanwhile decide no code.
TEST_F(CompileLimitsTest, CodeIsTheSame) {
  const KernelSource source = kernel_source();
  int asked = 0;
  const CompileLimits limits{.seconds = 1e6, .bytes = std::uint64_t{1} << 40, .cancelled = [&] {
                               ++asked;
                               return false;
                             }};
  EXPECT_EQ(clang_compiler()->compile(source, false, limits).code, clang_compiler()->compile(source).code);
  EXPECT_GT(asked, 0);
}

TEST_F(CompileLimitsTest, CancellingEndsAllThreadsOfTheEngine) {
  constexpr int count = 4;
  std::atomic<int> waiting = 0, cancelled = 0;
  std::atomic<bool> wanted = true;
  Engine engine(options({.cancelled = [&] { return wanted && waiting == count; }}));
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < count; ++i)
      threads.emplace_back([&] {
        ++waiting;
        try {
          get(engine);
        } catch (const Error& error) {
          cancelled += error.code() == ErrorCode::cancelled;
        }
      });
  }
  EXPECT_EQ(cancelled, count);
  wanted = false;
  EXPECT_EQ(get(engine).info().origin, Origin::compiled);
}

// An engine waits for the compilation of another, which is cancelled: it compiles itself. The wait can be
// cancelled, too.
TEST_F(CompileLimitsTest, OthersWhoWaitGoOn) {
  std::atomic<bool> compiles = false, ends = false;
  Engine first(options({.cancelled = [&] {
    compiles = true;
    compiles.notify_all();
    ends.wait(false);
    return true;
  }}));
  std::jthread thread([&] {
    try {
      get(first);
      ADD_FAILURE() << "compiled";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::cancelled);
    }
  });
  compiles.wait(false);
  Engine impatient(options({.cancelled = [] { return true; }}));
  EXPECT_EQ(failure(impatient), ErrorCode::cancelled);
  std::atomic<int> asked = 0;
  Engine patient(options({.cancelled = [&] {
    if (++asked == 3) {
      ends = true;
      ends.notify_all();
    }
    return false;
  }}));
  EXPECT_EQ(get(patient).info().origin, Origin::compiled);
  EXPECT_GE(asked, 3);
}

TEST_F(CompileLimitsTest, AnExceptionOfTheHostCancelsAndIsThrown) {
  Engine engine(options({.cancelled = []() -> bool { throw std::runtime_error("of the host"); }}));
  EXPECT_THROW(get(engine), std::runtime_error);
  expect_compiled_by({});
}

TEST_F(CompileLimitsTest, ImpossibleLimitsAreRefusedWhenTheyAreSet) {
  for (const double seconds : {-1.0, std::nan("")})
    EXPECT_EQ(code_of([&] { Engine engine(options({.seconds = seconds})); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] {
              compile(spec, Target::parse("sm_90"), shape, folder.path(), "",
                      {.bytes = std::uint64_t{1} << 40});
            }),
            ErrorCode::unsupported);
}

}  // namespace
}  // namespace flashjit::testing
