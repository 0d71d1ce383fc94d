// flashjit prebuild: the folder serves a manifest's kernels without a compiler.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>

#include "tests/cli/command_line.hpp"

namespace flashjit::cli_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::string manifest = R"({"kernels": [
  {"spec": {"op": "forward", "dtype": "fp32", "head_dim": 16, "mask": ["causal"]}},
  {"spec": {"op": "forward", "dtype": "bf16", "head_dim": 16}, "shapes": [{"seqlen_q": 64, "num_heads_q": 2}]}]})";

TEST(Prebuild, ServesEveryShapeWithoutACompiler) {
  CommandLine flashjit;
  const std::string bundle = flashjit.folder() + "/made/as well/bundle",
                    file = flashjit.file("manifest.json", manifest);
  const Outcome built =
      flashjit({"prebuild", file, "--target", "native", "-o", bundle, "--jobs", "2", "--json"});
  ASSERT_EQ(built.exit_code, 0) << built.err;
  const nlohmann::json report = built.json();
  EXPECT_GE(report["compiled"].get<int>(), 2);
  EXPECT_EQ(report["failed"], 0);
  EXPECT_EQ(report["compiled"].get<std::size_t>(), report["kernels"].size());
  EXPECT_GT(report["bytes"].get<int>(), 1000);
  struct stat status;
  ASSERT_EQ(::stat(bundle.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0755u) << "to be read by others";

  // A second run finds nothing to do.
  const Outcome again = flashjit({"prebuild", file, "--target", "native", "-o", bundle});
  EXPECT_EQ(again.exit_code, 0);
  EXPECT_THAT(again.err, HasSubstr("there already"));

  flashjit.environment["FLASHJIT_LLVM_PLUGIN"] = flashjit.missing("plugin.so");
  flashjit.environment["FLASHJIT_CACHE_PATH"] = bundle;
  for (const char* seqlen : {"1", "40", "100", "300"}) {
    for (const char* heads : {"1", "3", "16"}) {
      const Outcome run = flashjit({"run", small_spec, "--seqlen-q", seqlen, "--heads-q", heads, "--batch",
                                    "2", "--verify", "--json"});
      ASSERT_EQ(run.exit_code, 0) << run.err;
      EXPECT_EQ(run.json()["origin"], "disk");
    }
  }
}

TEST(Prebuild, DecodeOfEveryPageSize) {
  CommandLine flashjit;
  const std::string spec =
      R"({"op": "decode", "dtype": "bf16", "head_dim": 32, "mask": ["causal"], "paged": true})";
  const std::string bundle = flashjit.folder() + "/bundle";
  const Outcome built =
      flashjit({"prebuild",
                R"({"kernels": [{"spec": )" + spec +
                    R"(, "shapes": [{"batch": 4, "seqlen_q": 1, "seqlen_k": 300, "num_heads_q": 8,
                                                       "num_heads_kv": 2, "page_size": 16}]}]})",
                "--target", "native", "-o", bundle, "--json"});
  ASSERT_EQ(built.exit_code, 0) << built.err;
  EXPECT_EQ(built.json()["failed"], 0);
  flashjit.environment["FLASHJIT_LLVM_PLUGIN"] = flashjit.missing("plugin.so");
  flashjit.environment["FLASHJIT_CACHE_PATH"] = bundle;
  for (const char* page_size : {"1", "16", "256"}) {
    const Outcome run =
        flashjit({"run", spec, "--seqlen-q", "2", "--seqlen-k", "700", "--batch", "3", "--heads-q", "8",
                  "--heads-kv", "1", "--page-size", page_size, "--verify", "--json"});
    ASSERT_EQ(run.exit_code, 0) << run.err;
    EXPECT_EQ(run.json()["origin"], "disk");
  }
}

TEST(Prebuild, CheckSaysWhatIsMissing) {
  CommandLine flashjit;
  const auto check = [&](const std::string& target) {
    return flashjit({"prebuild", manifest, "--target", target, "--check", "--json"});
  };
  Outcome outcome = check("x86-64-v3");
  EXPECT_EQ(outcome.exit_code, 7);
  const std::size_t wanted = nlohmann::json::parse(outcome.out)["wanted"];
  EXPECT_EQ(nlohmann::json::parse(outcome.out)["missing"].size(), wanted);
  ASSERT_EQ(flashjit({"prebuild", manifest, "--target", "x86-64-v3", "-o", flashjit.cache()}).exit_code, 0);
  outcome = check("x86-64-v3");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out;
  EXPECT_EQ(nlohmann::json::parse(outcome.out)["missing"].size(), 0u);
  EXPECT_EQ(check("x86-64-v4").exit_code, 7);
  // One entry is removed.
  const std::filesystem::directory_iterator entries(flashjit.cache() + "/v3");
  const auto entry = std::find_if(begin(entries), end(entries),
                                  [](const auto& item) { return item.path().extension() == ".kernel"; });
  std::filesystem::remove(*entry);
  outcome = flashjit({"prebuild", manifest, "--target", "x86-64-v3", "--check"});
  EXPECT_EQ(outcome.exit_code, 7);
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("missing: x86-64-v3 "), HasSubstr("kernels are there")));
}

TEST(Prebuild, WhatATargetCannotDoIsSaidBeforeAnythingIsBuilt) {
  const CommandLine flashjit;
  const Outcome outcome = flashjit({"prebuild", manifest, "--target", "sm_90a", "-o", flashjit.cache()});
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("fp32 is not supported on sm_90a"));
  EXPECT_FALSE(std::filesystem::exists(flashjit.cache() + "/v3"));
}

// A tuned config's kernel and its record go into the folder.
TEST(Prebuild, TakesTuningRecordsAlong) {
  CommandLine tuner, flashjit;
  const std::string spec =
      R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "mask": ["causal"], "config": {"block_m": 48}})";
  const Outcome tuned = tuner({"tune", spec, "--json", "--seqlens", "40", "--heads-q", "2"});
  ASSERT_EQ(tuned.exit_code, 0) << tuned.err;
  const std::string bundle = flashjit.folder() + "/bundle";
  const Outcome built =
      flashjit({"prebuild", spec, "--target", "native", "--records", tuner.cache(), "-o", bundle, "--json"});
  ASSERT_EQ(built.exit_code, 0) << built.err;
  EXPECT_EQ(built.json()["tune_records"], 1);
  flashjit.environment["FLASHJIT_LLVM_PLUGIN"] = flashjit.missing("plugin.so");
  flashjit.environment["FLASHJIT_CACHE_PATH"] = bundle;
  const Outcome ran = flashjit({"run", spec, "--json", "--seqlen-q", "40", "--heads-q", "2"});
  ASSERT_EQ(ran.exit_code, 0) << ran.err;
  EXPECT_EQ(ran.json()["origin"], "disk");
  EXPECT_EQ(ran.json()["kernel"]["config_source"], "record");
}

TEST(Prebuild, BadInput) {
  const CommandLine flashjit;
  EXPECT_EQ(flashjit({"prebuild", "sdxl", "--target", "native"}).exit_code, 3);
  EXPECT_EQ(flashjit({"prebuild", "sdxl", "-o", "/tmp/x"}).exit_code, 64);
  EXPECT_THAT(flashjit({"prebuild", "no-such-model", "--target", "native", "-o", "/tmp/x"}).err,
              AllOf(HasSubstr("cannot be read"), HasSubstr("or a model: llama-3-8b, ")));
  EXPECT_EQ(flashjit({"prebuild", "sdxl", "--target", "native", "-o", "/proc/nowhere"}).exit_code, 7);
}

}  // namespace
}  // namespace flashjit::cli_test
