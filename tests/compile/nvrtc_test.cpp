// NVRTC itself: its identity, options, reports and refusals, and the places where it is looked for.
#include "runtime/cuda/nvrtc.hpp"
#include "runtime/cuda/cold_launches.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>

#include "codegen/base/error.hpp"
#include "codegen/render.hpp"
#include "tests/compile/nvrtc_test.hpp"

namespace flashjit::nvrtc_testing {
namespace {

using testing::HasSubstr;

TEST_F(NvrtcTest, IdentityNamesVersionAndBuild) {
  EXPECT_THAT(compiler_->identity(), testing::MatchesRegex("NVRTC [0-9]+\\.[0-9]+ build [0-9a-f]+"));
  EXPECT_EQ(compiler_->identity(), open_nvrtc(nvrtc_candidates())->identity());
}

TEST_F(NvrtcTest, OptionsNameTheArchitecture) {
  const AttentionSpec spec = make_spec(DType::bf16, 64);
  const auto options = [&](const char* target) {
    const Case c = default_case(spec, Target::parse(target));
    return compiler_->options(render(c.spec, c.target, c.config));
  };
  EXPECT_THAT(options("sm_90"), HasSubstr("sm_90"));
  EXPECT_NE(options("sm_90"), options("sm_80"));
}

TEST_F(NvrtcTest, EqualSourcesGiveEqualCode) {
  const Case c = default_case(make_spec(DType::bf16, 64), Target::parse("sm_90"));
  EXPECT_EQ(compile(c).code, compile(c).code);
}

TEST_F(NvrtcTest, BadSourceIsRefusedWithTheLog) {
  const Case c = default_case(make_spec(DType::bf16, 64), Target::parse("sm_90"));
  KernelSource source = render(c.spec, c.target, c.config);
  source.text += "int broken = undeclared_name;\n";
  try {
    compiler_->compile(source);
    FAIL() << "compiled";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::compile_failed);
    EXPECT_THAT(error.message(), HasSubstr("sm_90"));
    EXPECT_THAT(error.detail(), HasSubstr("undeclared_name"));
  }
}

TEST_F(NvrtcTest, CompilationsEndWhenAsked) {
  const Case c = default_case(make_spec(DType::bf16, 64), Target::parse("sm_90"));
  const KernelSource source = render(c.spec, c.target, c.config);
  const auto code = [&](const CompileLimits& limits) {
    try {
      compiler_->compile(source, false, limits);
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode{};
  };
  compiler_->check({.seconds = 1});
  EXPECT_EQ(code({.seconds = 1e-9}), ErrorCode::limit_exceeded);
  int asked = 0;
  EXPECT_EQ(code({.cancelled = [&] { return ++asked == 2; }}), ErrorCode::cancelled);
  EXPECT_EQ(asked, 2);
}

TEST_F(NvrtcTest, HeadersComeFromMemoryOnly) {
  const Case c = default_case(make_spec(DType::bf16, 64), Target::parse("sm_90"));
  KernelSource source = render(c.spec, c.target, c.config);
  source.headers.pop_back();
  EXPECT_THROW(compiler_->compile(source), Error);
}

TEST_F(NvrtcTest, UnknownArchitectureNamesTheKnownOnes) {
  Case c = default_case(make_spec(DType::bf16, 64), Target::parse("sm_90"));
  KernelSource source = render(c.spec, c.target, c.config);
  source.target.level = 999;
  try {
    compiler_->compile(source);
    FAIL() << "compiled";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::compiler_unavailable);
    EXPECT_THAT(error.message(), HasSubstr("sm_90"));
  }
}

// Eight loads of 16 bytes are in flight, in as many threads as a multiprocessor of sm_80 has.
TEST_F(NvrtcTest, PlainReadLoadsWideAndDoesNotSpill) {
  for (const Target& target : cuda_targets()) {
    if (target.level % 10 != 0 && !test_all()) continue;
    const CompiledKernel kernel = compiler_->compile(cuda::plain_read_source(target), true);
    EXPECT_EQ(step_of(kernel).spill_bytes, 0) << target.str();
    std::size_t loads = 0;
    for (std::size_t at = 0; (at = kernel.assembly.find("ld.global.nc.v4", at)) != std::string::npos; ++at)
      ++loads;
    EXPECT_EQ(loads, 8u) << target.str();
  }
}

TEST_F(NvrtcTest, StaticSharedMemoryIsReported) {
  KernelSource source;
  source.target = Target::parse("sm_80");
  source.text =
      "extern \"C\" __global__ void f(float* p) {\n"
      "  __shared__ float s[100];\n"
      "  s[threadIdx.x] = p[threadIdx.x];\n"
      "  __syncthreads();\n"
      "  p[threadIdx.x] = s[99 - threadIdx.x];\n"
      "}\n";
  const CompiledKernel kernel = compiler_->compile(source);
  ASSERT_EQ(kernel.steps.size(), 1u);
  EXPECT_EQ(kernel.steps[0].function, "f");
  EXPECT_EQ(kernel.steps[0].static_shared_memory, 400);
  EXPECT_EQ(kernel.steps[0].spill_bytes, 0);
  EXPECT_TRUE(kernel.assembly.empty());
}

TEST_F(NvrtcTest, SpillsAreReported) {
  KernelSource source;
  source.target = Target::parse("sm_80");
  source.text =
      "extern \"C\" __global__ void __launch_bounds__(1024, 2) f(float* p) {\n"
      "  float v[64];\n"
      "#pragma unroll\n"
      "  for (int i = 0; i < 64; ++i) v[i] = p[i * 1024 + threadIdx.x];\n"
      "  for (int n = 0; n < 100; ++n) {\n"
      "#pragma unroll\n"
      "    for (int i = 0; i < 64; ++i) v[i] = v[i] * v[(i + 1) % 64] + p[n];\n"
      "  }\n"
      "#pragma unroll\n"
      "  for (int i = 0; i < 64; ++i) p[i * 1024 + threadIdx.x] = v[i];\n"
      "}\n";
  // The report on one kernel function is not that on another.
  source.text += "extern \"C\" __global__ void g(float* p) { p[0] = 1; }\n";
  const CompiledKernel kernel = compiler_->compile(source);
  EXPECT_GT(step_of(kernel, "f").spill_bytes, 0);
  EXPECT_EQ(step_of(kernel, "g").spill_bytes, 0);
  EXPECT_LT(step_of(kernel, "g").registers, step_of(kernel, "f").registers);
}

// ---- the places where NVRTC is looked for ----

TEST(NvrtcSearch, NowhereToBeFound) {
  try {
    open_nvrtc({"/proc/no/such/libnvrtc.so.13", "libflashjit-no-such-library.so"});
    FAIL() << "opened";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::compiler_unavailable);
    EXPECT_THAT(error.message(), HasSubstr("FLASHJIT_NVRTC"));
    EXPECT_THAT(error.detail(), HasSubstr("/proc/no/such/libnvrtc.so.13"));
    EXPECT_THAT(error.detail(), HasSubstr("libflashjit-no-such-library.so"));
  }
}

TEST(NvrtcSearch, AnotherLibraryIsNotNvrtc) {
  try {
    open_nvrtc({"libm.so.6"});
    FAIL() << "opened";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::compiler_unavailable);
    EXPECT_THAT(error.detail(), HasSubstr("nvrtcVersion"));
  }
}

class NvrtcEnvironment : public testing::Test {
 protected:
  void TearDown() override {
    if (had_) {
      setenv("FLASHJIT_NVRTC", before_.c_str(), 1);
    } else {
      unsetenv("FLASHJIT_NVRTC");
    }
  }
  const bool had_ = std::getenv("FLASHJIT_NVRTC") != nullptr;
  const std::string before_ = had_ ? std::getenv("FLASHJIT_NVRTC") : "";
};

TEST_F(NvrtcEnvironment, ChosenFileIsTheOnlyCandidate) {
  setenv("FLASHJIT_NVRTC", "/proc/no/such/nvrtc.so", 1);
  EXPECT_THAT(nvrtc_candidates(), testing::ElementsAre("/proc/no/such/nvrtc.so"));
}

TEST_F(NvrtcEnvironment, ChosenFolderHasTheUsualNames) {
  setenv("FLASHJIT_NVRTC", testing::TempDir().c_str(), 1);
  for (const std::string& candidate : nvrtc_candidates()) {
    EXPECT_THAT(candidate, testing::StartsWith(testing::TempDir()));
    EXPECT_THAT(candidate, HasSubstr("libnvrtc.so.1"));
  }
}

// The process may end, by exit() or in a forked child, while another thread compiles.
class NvrtcEnds : public NvrtcTest {
 protected:
  // Runs body() in a child whose other thread compiles, and returns how the child ended.
  int status_of(const std::function<int()>& body) const {
    const Case c = default_case(make_spec(DType::bf16, 64), Target::parse("sm_80"));
    const KernelSource source = render(c.spec, c.target, c.config);
    std::fflush(nullptr);
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(120);
      std::atomic<bool> begun = false;
      std::thread compiling([&] {
        begun = true;
        try {
          for (;;) compiler_->compile(source);
        } catch (const Error&) {  // once the process ends
        }
        ::pause();
      });
      while (!begun) std::this_thread::yield();
      ::usleep(20'000);
      std::exit(body());
    }
    int status = 0;
    return ::waitpid(child, &status, 0) == child ? status : -1;
  }
};

TEST_F(NvrtcEnds, AtExit) {
  EXPECT_EQ(status_of([] { return 0; }), 0);
}

// The state of a child whose compile is under way when it ends.
std::atomic<bool> begun = false, ending = false;
std::atomic<int> outcome = 0;
struct AfterNvrtc {
  ~AfterNvrtc() {
    if (!begun) return;
    while (outcome == 0) std::this_thread::yield();
    ::_exit(outcome);
  }
} const after_nvrtc;  // made before NVRTC is opened, so destroyed once exit() has waited for its compiles

// Static objects that NVRTC made when it first compiled are not destroyed under a compile: the first or
// another.
class NvrtcAtExit : public NvrtcEnds, public testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(, NvrtcAtExit, testing::Bool());

TEST_P(NvrtcAtExit, EndsTheCompileUnderWay) {
  constexpr int compiled = 1, ended = 2, failed = 3;
  const Case c = default_case(make_spec(DType::bf16, 64), Target::parse("sm_80"));
  const KernelSource source = render(c.spec, c.target, c.config);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(120);
    std::thread compiling([&] {
      if (GetParam()) {
        KernelSource small = source;
        small.text = "extern \"C\" __global__ void f() {}";
        compiler_->compile(small);
      }
      int asked = 0;
      const auto host = [&] {
        if (++asked == (GetParam() ? 1 : 2)) begun = true;  // and stays so: exit() may take a while to end it
        while (begun && !ending) std::this_thread::yield();
        return false;
      };
      try {
        compiler_->compile(source, false, {.cancelled = host});
        outcome = compiled;
      } catch (const Error& error) {
        outcome = error.code() == ErrorCode::compiler_unavailable ? ended : failed;
      }
      ::pause();
    });
    while (!begun) std::this_thread::yield();
    std::atexit([] { ending = true; });
    std::exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(WEXITSTATUS(status), ended);
}

TEST_F(NvrtcEnds, InAForkedChild) {
  const Case c = default_case(make_spec(DType::bf16, 64), Target::parse("sm_80"));
  EXPECT_EQ(status_of([&] {
              const pid_t child = ::fork();
              if (child == 0) {
                ::alarm(60);
                int result = 0;
                try {
                  compile(c);  // where it was forked between two compiles
                } catch (const Error& error) {
                  result = error.message().find("forked while NVRTC compiled") == std::string::npos;
                }
                std::exit(result);
              }
              int status = 0;
              return ::waitpid(child, &status, 0) == child && status == 0 ? 0 : 1;
            }),
            0);
}

}  // namespace
}  // namespace flashjit::nvrtc_testing
