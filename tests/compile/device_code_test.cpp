// The text of `flashjit render --standalone` needs no other file: nvcc compiles it alone, or Clang for a CPU.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <string_view>

#include "codegen/families/kernel_family.hpp"
#include "codegen/families/search_space.hpp"
#include "codegen/render.hpp"
#include "tests/support/sample_seed.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;

struct Case {
  const char* spec;
  const char* target;
};

// Runs the compiler in an empty folder and shows its messages if it fails.
void compile(const std::string& command, const std::string& file, const std::string& text) {
  const fs::path folder = fs::path(testing::TempDir()) / ("flashjit_compile_" + std::to_string(getpid()));
  fs::create_directories(folder);
  if (!text.empty()) std::ofstream(folder / file) << text;
  const int status =
      std::system(("cd '" + folder.string() + "' && " + command + " '" + file + "' >log 2>&1").c_str());
  std::ifstream log(folder / "log");
  EXPECT_EQ(status, 0) << std::string(std::istreambuf_iterator<char>(log), {});
  fs::remove_all(folder);
}

// About a third of the cases, each with FLASHJIT_TEST_ALL=1.
void compile_alone(const Case& what, const std::string& command, const char* file) {
  if (!testing_support::in_sample(what.spec, std::hash<std::string_view>{}(what.target), 3)) return;
  SCOPED_TRACE(std::string(what.spec) + " for " + what.target);
  const AttentionSpec spec = AttentionSpec::from_json(what.spec);
  const Target target = Target::parse(what.target);
  const Shape shape{.batch = 2, .seqlen_q = 4096, .seqlen_k = 4096, .num_heads_q = 8, .num_heads_kv = 8};
  compile(command, file, standalone(render(spec, target, heuristic_config(spec, target, shape))));
}

const char bf16[] = R"({"op": "forward", "dtype": "bf16", "head_dim": 64, "mask": ["causal"]})";
const char masks[] =
    R"({"op": "forward", "dtype": "bf16", "head_dim": 64, "mask": ["causal", "padding", "block_sparse",
        {"kind": "sliding_window", "sinks": true}]})";
const char tree[] = R"({"op": "forward", "dtype": "bf16", "head_dim": 64, "mask": ["padding", "tree"]})";
const char fp16[] = R"({"op": "forward", "dtype": "fp16", "head_dim": 72, "head_dim_v": 40, "varlen": true})";
const char dropout[] =
    R"({"op": "forward", "dtype": "bf16", "head_dim": 128, "mask": ["causal"], "dropout": true})";
const char fp32[] = R"({"op": "forward", "dtype": "fp32", "head_dim": 128, "lse": false})";
const char backward[] =
    R"({"op": "backward", "dtype": "bf16", "head_dim": 64, "mask": ["causal", "padding", "block_sparse"],
        "dropout": true, "varlen": true})";

// 177: a constant without a use. A kernel need not use all constants of its headers.
std::string nvcc_command() {
  const std::string path = FLASHJIT_NVCC;
  return path.empty()
             ? path
             : "'" + path + "' -std=c++20 -Werror all-warnings -diag-suppress=177 -cubin -o kernel.cubin ";
}

TEST(Standalone, Nvcc) {
  const std::string nvcc = nvcc_command();
  if (nvcc.empty()) GTEST_SKIP() << "no nvcc was found when the build was configured";
  for (const Case& what : {Case{fp16, "sm_90a"}, Case{masks, "sm_120"}, Case{dropout, "sm_80"},
                           Case{backward, "sm_80"}, Case{backward, "sm_90a"}})
    compile_alone(what, nvcc + "-arch=" + what.target, "kernel.cu");
}

TEST(Standalone, Clang) {
  const std::string clang = FLASHJIT_CLANG;
  if (clang.empty()) GTEST_SKIP() << "no clang++ was found when the build was configured";
  for (const Case& what : {Case{bf16, "x86-64-v3"}, Case{fp16, "x86-64-v4"}, Case{fp32, "x86-64-v4"},
                           Case{backward, "x86-64-v3"}}) {
    compile_alone(what, "'" + clang + "' -std=c++20 -O1 -c -march=" + what.target, "kernel.cpp");
  }
  for (const char* spec : {masks, tree, dropout})
    compile_alone({spec, "x86-64-v4+amx"},
                  "'" + clang + "' -std=c++20 -O1 -c -march=x86-64-v4 -mamx-tile -mamx-bf16", "kernel.cpp");
  compile_alone({backward, "x86-64-v4+bf16"},
                "'" + clang + "' -std=c++20 -O1 -c -march=x86-64-v4 -mavx512bf16", "kernel.cpp");
}

}  // namespace
}  // namespace flashjit
