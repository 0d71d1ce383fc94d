// Every failure prints one message to stderr and nothing to stdout, and has its own exit code.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "tests/cli/command_line.hpp"

namespace flashjit::cli_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int invalid_spec = 1, unsupported = 2, invalid_argument = 3, target_unavailable = 4,
              compiler_unavailable = 5, cache_failed = 7, usage = 64, output_failed = 74;

void expect_failure(const CommandLine& flashjit, const std::vector<std::string>& arguments, int exit_code,
                    const std::vector<std::string>& words) {
  const Outcome text = flashjit(arguments);
  EXPECT_EQ(text.exit_code, exit_code) << text.err;
  EXPECT_EQ(text.out, "");
  for (const std::string& word : words) EXPECT_THAT(text.err, HasSubstr(word));
  EXPECT_EQ(text.err.find("terminate called"), std::string::npos);

  std::vector<std::string> with_json = arguments;
  with_json.push_back("--json");
  const Outcome json = flashjit(with_json);
  EXPECT_EQ(json.exit_code, exit_code);
  EXPECT_EQ(json.error()["exit_code"], exit_code);
  for (const std::string& word : words)
    EXPECT_THAT(json.error()["message"].get<std::string>(), HasSubstr(word));
}

TEST(BadCommandLine, Verbs) {
  const CommandLine flashjit;
  expect_failure(flashjit, {}, usage, {"--help"});
  expect_failure(flashjit, {"compute"}, usage, {"--help"});
  expect_failure(flashjit, {"cache"}, usage, {});
  expect_failure(flashjit, {"compile"}, usage, {"SPEC"});
  expect_failure(flashjit, {"compile", small_spec, "--taget", "sm_90"}, usage,
                 {"no option --taget", "did you mean --target?"});
  expect_failure(flashjit, {"rnu", small_spec}, usage, {"no verb \"rnu\"", "did you mean run?"});
  expect_failure(flashjit, {"frobnicate"}, usage, {"the verbs are doctor, "});
  expect_failure(flashjit, {"cache", "stta"}, usage, {"flashjit cache has no verb", "did you mean stat?"});
  expect_failure(flashjit, {"run", small_spec, "--seqlen", "16"}, usage, {"did you mean --seqlen-q?"});
  expect_failure(flashjit, {"run", "--head=16"}, usage, {"did you mean --heads-q?"});
  expect_failure(flashjit, {"bench", small_spec, "--seqlen", "16"}, usage, {"did you mean --seqlens?"});
  expect_failure(flashjit, {"run", small_spec, "16"}, usage, {"\"16\" is one argument more"});
  expect_failure(flashjit, {"run", small_spec, "--batch", "many"}, usage, {"--batch"});
  expect_failure(flashjit, {"run", small_spec, "--batch", "-1"}, usage, {"--batch"});
  expect_failure(flashjit, {"run", small_spec, "--q", "q.npy"}, usage, {"--k"});
  expect_failure(flashjit, {"bench", small_spec, "--rounds", "0"}, usage, {"--rounds"});
}

TEST(BadSpec, Text) {
  const CommandLine flashjit;
  expect_failure(flashjit, {"compile", "{\"op\": "}, invalid_spec, {});
  expect_failure(flashjit, {"compile", R"({"op": "forward", "dtpe": "bf16", "head_dim": 64})"}, invalid_spec,
                 {"dtpe", "dtype"});
  expect_failure(flashjit, {"render", R"({"op": "forward", "dtype": "bf16"})"}, invalid_spec, {"head_dim"});
  expect_failure(flashjit, {"compile", flashjit.file("empty.json", "")}, invalid_spec, {"empty.json"});
  expect_failure(flashjit, {"compile", R"({"op": "merge", "dtype": "bf16", "head_dim": 64, "paged": true})"},
                 unsupported, {"paged true"});
  expect_failure(
      flashjit,
      {"compile", R"({"op": "forward", "dtype": "bf16", "head_dim": 64, "config": {"block_m": 7}})"},
      invalid_spec, {"block_m"});
}

TEST(BadSpec, File) {
  const CommandLine flashjit;
  expect_failure(flashjit, {"run", flashjit.missing("spec.json")}, invalid_argument,
                 {flashjit.missing("spec.json"), "No such file"});
  expect_failure(flashjit, {"run", flashjit.folder()}, invalid_argument, {flashjit.folder()});
}

// The command must neither wait for these files nor read them to their end.
TEST(BadInput, ThatIsNoRegularFile) {
  const CommandLine flashjit;
  const std::string fifo = flashjit.folder() + "/fifo", file = flashjit.file("text.npy", "not numpy");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  for (const std::string& path : {fifo, std::string("/dev/zero"), flashjit.folder()}) {
    expect_failure(flashjit, {"run", path}, invalid_argument, {path, "cannot be read", "'-'"});
    expect_failure(flashjit,
                   {"prebuild", path, "--target", "x86-64-v3", "-o", flashjit.folder() + "/kernels"},
                   invalid_argument, {path, "cannot be read"});
    expect_failure(flashjit, {"run", small_spec, "--q", path, "--k", file, "--v", file}, invalid_argument,
                   {path, "cannot be read", ".npy"});
  }
}

TEST(BadInput, WithoutAnEnd) {
  const CommandLine flashjit;
  const Outcome outcome = flashjit({"render", "-"}, std::string((16 << 20) + 1, ' '));
  EXPECT_EQ(outcome.exit_code, invalid_argument);
  EXPECT_THAT(outcome.err, HasSubstr("longer than 16 MiB"));
}

// A device to which nothing can be written.
TEST(BadOutput, Full) {
  CommandLine flashjit;
  flashjit.standard_output = "/dev/full";
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {"cache", "path"}, {"cache", "ls", "--json"}, {"render", small_spec}, {"--help"}, {"--version"}}) {
    const Outcome outcome = flashjit(arguments);
    EXPECT_EQ(outcome.exit_code, output_failed) << arguments.front();
    EXPECT_THAT(outcome.err, HasSubstr("standard output could not be written")) << arguments.front();
  }
  // doctor exits with 4 if no kernel runs.
  EXPECT_THAT(flashjit({"doctor"}).exit_code, testing::AnyOf(output_failed, target_unavailable));
  EXPECT_EQ(flashjit({"cache", "path", "--json"}).error()["code"], "output_failed");
  expect_failure(flashjit, {"compute"}, usage, {"--help"});
}

TEST(BadSpec, Dropout) {
  const CommandLine flashjit;
  expect_failure(flashjit, {"run", small_spec, "--dropout-p", "0.5"}, invalid_argument,
                 {"dropout was given", "\"dropout\": true"});
  expect_failure(flashjit, {"bench", small_spec, "--dropout-seed", "5"}, invalid_argument,
                 {"dropout was given"});
  const std::string spec = R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "dropout": true})";
  expect_failure(flashjit, {"run", spec, "--seqlen-q", "8", "--dropout-p", "1.5"}, invalid_argument,
                 {"dropout_p is 1.5"});
  expect_failure(flashjit, {"run", spec, "--dropout-p", "most"}, usage, {"--dropout-p"});
}

TEST(BadTarget, UnknownOrNotOfThisMachine) {
  const CommandLine flashjit;
  expect_failure(flashjit, {"compile", small_spec, "--target", "sm_91"}, invalid_argument,
                 {"sm_91", "sm_90"});
  expect_failure(flashjit, {"run", small_spec, "--device", "tpu"}, invalid_argument, {"tpu", "cpu"});
  expect_failure(flashjit, {"run", small_spec, "--target", "sm_90"}, target_unavailable, {"sm_90", "cpu"});
  expect_failure(flashjit, {"run", small_spec, "--device", "cuda:99"}, target_unavailable, {});
}

TEST(Missing, Compilers) {
  CommandLine flashjit;
  flashjit.environment["FLASHJIT_LLVM_PLUGIN"] = flashjit.missing("plugin.so");
  flashjit.environment["FLASHJIT_NVRTC"] = flashjit.missing("libnvrtc.so");
  expect_failure(flashjit, {"run", small_spec}, compiler_unavailable, {flashjit.missing("plugin.so")});
  expect_failure(flashjit,
                 {"compile", R"({"op": "forward", "dtype": "bf16", "head_dim": 64})", "--target", "sm_90"},
                 compiler_unavailable, {"NVRTC", "FLASHJIT_NVRTC"});
}

TEST(BadCache, ThatCannotBeMadeOrTrusted) {
  CommandLine flashjit;
  const std::string file = flashjit.file("a_file", "");
  expect_failure(flashjit, {"compile", small_spec, "--cache-dir", file}, cache_failed, {file});
  expect_failure(flashjit, {"compile", small_spec, "--cache-dir", "/proc/flashjit"}, cache_failed,
                 {"/proc/flashjit"});
  const std::string open_to_all = flashjit.folder() + "/open";
  ASSERT_EQ(mkdir(open_to_all.c_str(), 0777), 0);
  ASSERT_EQ(chmod(open_to_all.c_str(), 0777), 0);
  expect_failure(flashjit, {"run", small_spec, "--cache-dir", open_to_all}, cache_failed, {open_to_all});
  expect_failure(flashjit, {"cache", "ls", "--cache-dir", open_to_all}, cache_failed, {open_to_all});
}

TEST(BadTensors, Files) {
  const CommandLine flashjit;
  const std::string in = flashjit.folder() + "/in", other = flashjit.folder() + "/other";
  const std::vector<std::string> sizes = {"--seqlen-q", "16", "--heads-q", "2"};
  const auto generate = [&](const std::string& spec, const std::string& folder) {
    std::vector<std::string> arguments = {"generate", spec, "--out", folder};
    arguments.insert(arguments.end(), sizes.begin(), sizes.end());
    ASSERT_EQ(flashjit(arguments).exit_code, 0);
  };
  generate(small_spec, in);
  generate(R"({"op": "forward", "dtype": "fp32", "head_dim": 32})", other);
  const auto run_with = [&](const std::string& k) {
    return std::vector<std::string>{"run", small_spec, "--q", in + "/q.npy", "--k", k, "--v", in + "/v.npy"};
  };
  expect_failure(flashjit, run_with(other + "/k.npy"), invalid_argument, {"k", "head_dim"});
  expect_failure(flashjit, run_with(in + "/nothing.npy"), invalid_argument, {"nothing.npy"});
  expect_failure(flashjit, run_with(flashjit.file("text.npy", "not numpy")), invalid_argument, {"text.npy"});
  std::vector<std::string> both = run_with(in + "/k.npy");
  both.insert(both.end(), {"--batch", "2"});
  expect_failure(flashjit, both, usage, {"--batch"});
}

// An option that no mask of the spec uses is refused.
TEST(BadMaskOptions, WithoutTheMask) {
  const CommandLine flashjit;
  for (const char* verb : {"mask", "run"}) {
    for (const char* option : {"--window-left", "--num-sinks", "--document-length"})
      expect_failure(flashjit, {verb, small_spec, option, "1"}, invalid_argument, {option, "SPEC has no"});
  }
  const std::string window =
      R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "mask": ["sliding_window"]})";
  expect_failure(flashjit, {"mask", window, "--num-sinks", "1"}, invalid_argument, {"with sinks"});
  EXPECT_EQ(flashjit({"mask", window, "--window-left", "1"}).exit_code, 0);
}

TEST(BadShape, BeyondANeighbourhood) {
  const CommandLine flashjit;
  const std::string spec = R"({"op": "forward", "dtype": "fp32", "head_dim": 16,
                               "mask": [{"kind": "neighbourhood", "shape": [8, 8], "window": [3, 8]}]})";
  for (const char* verb : {"mask", "run"}) {
    expect_failure(flashjit, {verb, spec, "--seqlen-q", "65"}, invalid_argument,
                   {"seqlen_q 65", "64 places", "at most 64 would work"});
    expect_failure(flashjit, {verb, spec, "--seqlen-q", "1", "--seqlen-k", "200"}, invalid_argument,
                   {"seqlen_k 200"});
  }
  EXPECT_EQ(flashjit({"mask", spec, "--seqlen-q", "64"}).exit_code, 0);
}

TEST(BadShape, Heads) {
  const CommandLine flashjit;
  expect_failure(flashjit, {"run", small_spec, "--heads-q", "3", "--heads-kv", "2", "--seqlen-q", "16"},
                 invalid_argument, {"3", "2"});
}

TEST(BadNumbers, Near31And64Bits) {
  const CommandLine flashjit;
  const std::string masks = R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "mask": )";
  const std::string drops = R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "dropout": true})";
  for (const char* number : {"18446744073709551616", "99999999999999999999999"}) {
    for (const char* option : {"--dropout-seed", "--dropout-offset", "--seed"})
      expect_failure(flashjit, {"run", drops, "--seqlen-q", "8", option, number}, usage,
                     {option, number, "beyond 64 bits"});
    expect_failure(flashjit, {"mask", small_spec, "--seqlen-q", number}, usage, {"--seqlen-q"});
  }
  EXPECT_EQ(flashjit({"run", drops, "--seqlen-q", "8", "--dropout-seed", "18446744073709551615", "--seed",
                      "0xffffffffffffffff"})
                .exit_code,
            0);
  for (const char* number : {"2147483648", "4294967296"})
    expect_failure(flashjit, {"mask", small_spec, "--seqlen-q", number}, usage, {"--seqlen-q"});

  const std::string largest = "2147483647";
  for (const char* kinds : {"[]", R"(["causal"])", R"(["block_sparse"])", R"(["tree"])", R"(["padding"])"}) {
    const std::string spec = masks + kinds + "}";
    expect_failure(flashjit, {"mask", spec, "--seqlen-q", largest}, invalid_argument, {"a drawing", largest});
    expect_failure(flashjit, {"mask", spec, "--seqlen-q", "1", "--seqlen-k", largest}, invalid_argument,
                   {"a drawing", largest});
    expect_failure(flashjit, {"mask", spec, "--seqlen-q", "8", "--batch", largest}, invalid_argument,
                   {"a drawing", "batch entries"});
    expect_failure(flashjit, {"mask", spec, "--batch", largest, "--heads-q", largest}, invalid_argument,
                   {"a drawing", "batch entries"});
    expect_failure(flashjit, {"run", spec, "--seqlen-q", largest}, invalid_argument, {largest, "1073741824"});
  }
  expect_failure(flashjit, {"mask", small_spec, "--seqlen-q", "100000"}, invalid_argument,
                 {"a drawing", "10000000000", "pairs"});
  expect_failure(flashjit, {"mask", small_spec, "--seqlen-q", "4096", "--tile-m", "1", "--tile-n", "1"},
                 invalid_argument, {"a drawing", "16777216", "tiles"});
  expect_failure(flashjit, {"run", masks + R"(["tree"]})", "--seqlen-q", "200000", "--heads-q", "1"},
                 invalid_argument, {"268435456 words of trees"});
  const std::string packed = R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "varlen": true})";
  expect_failure(flashjit, {"run", packed, "--seqlen-q", "1073741824", "--batch", "3"}, invalid_argument,
                 {"batch 3", "2147483647"});
}

TEST(BadThreads, TooMany) {
  const CommandLine flashjit;
  expect_failure(flashjit, {"run", small_spec, "--num-threads", "1000000000"}, usage,
                 {"--num-threads", "8192"});
}

TEST(BadConfigs, OfBench) {
  const CommandLine flashjit;
  expect_failure(flashjit, {"bench", small_spec, "--configs", "64"}, invalid_argument, {"64x128"});
  expect_failure(flashjit, {"bench", small_spec, "--configs", "64xlarge"}, invalid_argument, {"64xlarge"});
  expect_failure(flashjit, {"bench", small_spec, "--processor-time", "--num-threads", "2"}, invalid_argument,
                 {"--num-threads 1"});
}

}  // namespace
}  // namespace flashjit::cli_test
