// Compiles many CUDA kernels with NVRTC, and holds the expectations that all of them must meet.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "codegen/base/error.hpp"
#include "codegen/families/forward_kernels.hpp"
#include "codegen/families/search_space.hpp"
#include "codegen/render.hpp"
#include "runtime/cuda/nvrtc.hpp"
#include "tests/support/sample_seed.hpp"

namespace flashjit::nvrtc_testing {

using testing_support::test_all;

inline unsigned seed() {
  return static_cast<unsigned>(testing_support::sample_seed());
}

// Whether a place has a turn: every n-th place has, and every place
// with FLASHJIT_TEST_ALL=1. The seed decides which place is the first.
inline bool has_turn(std::size_t place, std::size_t n = 19) {
  return test_all() || (place + seed()) % n == 0;
}

inline std::vector<Target> cuda_targets() {
  std::vector<Target> targets;
  for (const Target& target : Target::all()) {
    if (target.is_cuda()) targets.push_back(target);
  }
  return targets;
}

inline AttentionSpec make_spec(DType dtype, int head_dim, int head_dim_v = 0) {
  AttentionSpec spec;
  spec.dtype = dtype;
  spec.head_dim = head_dim;
  spec.head_dim_v = head_dim_v;
  return spec.validated();
}

struct Case {
  AttentionSpec spec;
  Target target;
  KernelConfig config;
  std::string name() const { return target.str() + " " + spec.to_json() + " " + to_json(config); }
};

inline Case default_case(const AttentionSpec& spec, const Target& target, int seqlen = 4096) {
  const Shape shape{
      .batch = 2, .seqlen_q = seqlen, .seqlen_k = seqlen, .num_heads_q = 16, .num_heads_kv = 16};
  return {spec, target, heuristic_config(spec, target, shape)};
}

class NvrtcTest : public testing::Test {
 protected:
  void SetUp() override {
    try {
      compiler_ = nvrtc_compiler();
    } catch (const Error& error) {
      GTEST_SKIP() << error.message() << "\n" << error.detail();
    }
  }

  CompiledKernel compile(const Case& c) const {
    const KernelSource source = render(c.spec, c.target, c.config);
    CompiledKernel kernel = compiler_->compile(source, /*keep_assembly=*/true);
    for (const Step& step : source.steps) {
      EXPECT_EQ(bytes_of_param(kernel.assembly, step.function, 0), step.params.bytes) << c.name();
      EXPECT_EQ(bytes_of_param(kernel.assembly, step.function, 1), step.params.second_bytes) << c.name();
    }
    return kernel;
  }

  // The bytes of an entry's parameter in PTX: ".param .align 64 .b8 NAME_param_0[712]". 0 if it has none.
  static std::size_t bytes_of_param(const std::string& ptx, const std::string& entry, int index) {
    const std::string name = entry + "_param_" + std::to_string(index) + "[";
    const std::size_t at = ptx.find(name);
    return at == std::string::npos ? 0 : std::stoull(ptx.substr(at + name.size(), 16));
  }

  // Compiles each different case once and checks the results one at a time. Without FLASHJIT_TEST_ALL=1 it
  // takes one of each three in a row, which the seed decides anew for the next three. FLASHJIT_TEST_PART=I/N
  // takes every N-th of these. It uses two threads, as many as the smallest machine that runs this test has.
  void for_each_compiled(const std::vector<Case>& all,
                         const std::function<void(const Case&, const CompiledKernel&)>& check) const {
    std::vector<Case> cases;
    std::set<std::string> seen;
    std::size_t taken = 0;
    const testing_support::Part part = testing_support::asked_part().value_or(testing_support::Part{});
    const char* const test = testing::UnitTest::GetInstance()->current_test_info()->name();
    for (const Case& c : all) {
      const std::size_t place = seen.size();
      if (seen.insert(c.name()).second &&
          (test_all() || testing_support::drawn(test, place / 3, 3) == place % 3) &&
          taken++ % part.of == part.index)
        cases.push_back(c);
    }
    std::cout << cases.size() << " kernels of " << seen.size() << " different ones\n";
    std::atomic<std::size_t> next = 0;
    std::mutex checking;
    const auto work = [&] {
      for (std::size_t i; (i = next++) < cases.size();) {
        try {
          const CompiledKernel kernel = compile(cases[i]);
          const std::lock_guard lock(checking);
          check(cases[i], kernel);
        } catch (const Error& error) {
          const std::lock_guard lock(checking);
          ADD_FAILURE() << cases[i].name() << ": " << error.message() << "\n" << error.detail();
        }
      }
    };
    std::thread second(work);
    work();
    second.join();
  }

  std::shared_ptr<const Compiler> compiler_;
};

// The step of this function; without a function the kernel's first step.
inline const CompiledStep& step_of(const CompiledKernel& kernel, std::string_view function = {}) {
  for (const CompiledStep& step : kernel.steps)
    if (function.empty() || step.function == function) return step;
  throw Error(ErrorCode::internal, "ptxas said nothing of " + std::string(function));
}

// Every kernel is so.
inline void expect_clean(const Case& c, const CompiledKernel& kernel) {
  EXPECT_THAT(kernel.code.substr(0, 4),
              "\x7f"
              "ELF")
      << c.name();
  EXPECT_THAT(kernel.log, testing::Not(testing::HasSubstr("C75"))) << c.name();
  EXPECT_THAT(kernel.log, testing::Not(testing::HasSubstr("warning"))) << c.name();
  EXPECT_GT(step_of(kernel).registers, 0) << c.name();
}

// The same of a kernel that multiplies, which has the instructions for it.
inline void expect_sound(const Case& c, const CompiledKernel& kernel) {
  expect_clean(c, kernel);
  // sm_90a multiplies 8-bit keys in fp16.
  const bool by_wgmma = !forwards_by_mma(c.spec, c.target);
  const bool halves = c.spec.kv_dtype && by_wgmma;
  const std::string type = c.spec.dtype == DType::bf16 && !halves ? "bf16" : "f16";
  std::vector<std::string> instructions = {"ex2.approx.ftz.f32"};
  if (by_wgmma) {
    instructions.insert(
        instructions.end(),
        {"wgmma.mma_async.sync.aligned.m64n" + std::to_string(c.config.block_n) + "k16.f32." + type + "." +
             type,
         "cp.async.bulk.tensor.4d.shared", "mbarrier.try_wait", "setmaxnreg.inc", "setmaxnreg.dec"});
  } else {
    instructions.insert(
        instructions.end(),
        {"mma.sync.aligned.m16n8k16.row.col.f32." + type + "." + type + ".f32",
         "ldmatrix.sync.aligned.m8n8.x4.shared", ".trans.shared.b16", "cp.async.cg.shared.global"});
  }
  for (const std::string& instruction : instructions) {
    EXPECT_NE(kernel.assembly.find(instruction), std::string::npos) << c.name() << " has no " << instruction;
  }
}

inline void expect_no_spill(const Case& c, const CompiledKernel& kernel) {
  for (const CompiledStep& step : kernel.steps)
    EXPECT_EQ(step.spill_bytes, 0) << c.name() << " " << step.function << "\n" << kernel.log;
}

}  // namespace flashjit::nvrtc_testing
