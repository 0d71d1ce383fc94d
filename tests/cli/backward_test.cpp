// Every verb with op backward.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "tests/cli/command_line.hpp"

namespace flashjit::cli_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string small_backward =
    R"({"op": "backward", "dtype": "fp32", "head_dim": 16, "mask": ["causal"]})";

// The command line of a verb with a small problem.
std::vector<std::string> on_small(std::vector<std::string> verb, const std::vector<std::string>& more = {}) {
  for (const char* word : {"--batch", "2", "--seqlen-q", "40", "--heads-q", "4", "--heads-kv", "2"})
    verb.emplace_back(word);
  verb.insert(verb.end(), more.begin(), more.end());
  return verb;
}

TEST(BackwardVerbs, RunVerifiesGeneratedTensors) {
  const CommandLine flashjit;
  for (const std::string& spec :
       {small_backward,
        std::string(R"({"op": "backward", "dtype": "bf16", "head_dim": 16, "head_dim_v": 24, "dropout": true,
                        "varlen": true, "mask": ["padding"], "grad_dtype": "fp32"})")}) {
    const Outcome run = flashjit(on_small({"run", spec, "--verify", "--json"}));
    ASSERT_EQ(run.exit_code, 0) << run.err;
    const nlohmann::json json = run.json();
    EXPECT_TRUE(json["ok"].get<bool>());
    EXPECT_GT(json["tflops"].get<double>(), 0);
    for (const char* name : {"dk", "dv"})
      EXPECT_LE(json["verification"][std::string(name) + "_error"].get<double>(),
                json["verification"][std::string(name) + "_error_bound"].get<double>());
  }
}

// generate writes what run reads. --op makes the backward of a forward's spec.
TEST(BackwardVerbs, RunReadsAndWritesTensors) {
  const CommandLine flashjit;
  const std::string in = flashjit.folder() + "/in/", out = flashjit.folder() + "/";
  ASSERT_EQ(flashjit(on_small({"generate", small_spec, "--op", "backward", "--out", in})).exit_code, 0);
  std::vector<std::string> run = {"run", small_spec, "--op", "backward", "--verify", "--json"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), run.begin(), run.end());
    return more;
  };
  for (const char* name : {"q", "k", "v", "o", "lse"}) {
    run.push_back(std::string("--") + name);
    run.push_back(in + name + ".npy");
  }
  const Outcome without_do = flashjit(with({}));
  EXPECT_EQ(without_do.exit_code, 3);
  EXPECT_THAT(without_do.error()["message"].get<std::string>(),
              HasSubstr("do is missing: op backward takes it"));
  run.insert(run.end(), {"--do", in + "do.npy"});
  EXPECT_TRUE(flashjit(with({})).json()["ok"].get<bool>()) << "dlse may be absent";

  const Outcome all = flashjit(with({"--dlse", in + "dlse.npy", "--dq-out", out + "dq.npy", "--dk-out",
                                     out + "dk.npy", "--dv-out", out + "dv.npy"}));
  ASSERT_EQ(all.exit_code, 0) << all.err;
  EXPECT_TRUE(all.json()["ok"].get<bool>());
  const auto text = [&](const char* name) {
    std::ifstream file(out + name, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const auto header = [&](const char* name) { return text(name).substr(0, 128); };
  EXPECT_THAT(header("dq.npy"), HasSubstr("'shape': (2,40,4,16,)"));
  EXPECT_THAT(header("dk.npy"), HasSubstr("'shape': (2,40,2,16,)"));
  EXPECT_FALSE(text("dk.npy") == text("dv.npy"));

  const Outcome wrong = flashjit(with({"--out", out + "o.npy"}));
  EXPECT_EQ(wrong.exit_code, 3);
  EXPECT_THAT(wrong.error()["message"].get<std::string>(),
              HasSubstr("--out was given, but the spec does not write it; --dq-out, --dk-out, --dv-out would "
                        "work"));
  const Outcome forward = flashjit({"run", small_spec, "--q", in + "q.npy", "--k", in + "k.npy", "--v",
                                    in + "v.npy", "--do", in + "do.npy"});
  EXPECT_EQ(forward.exit_code, 3);
  EXPECT_THAT(forward.err, HasSubstr("--do was given, but op forward does not read it"));
}

// Kernels without blocks of rows (backward) and without any blocks (merge) come from disk, too.
TEST(BackwardVerbs, CompileFindsOnDisk) {
  const CommandLine flashjit;
  for (const char* op : {"backward", "merge", "append_kv"}) {
    const std::string spec = std::string(R"({"op": ")") + op + R"(", "dtype": "bf16", "head_dim": 16})";
    EXPECT_EQ(flashjit({"compile", spec, "--json"}).json()["origin"], "compiled");
    EXPECT_EQ(flashjit({"compile", spec, "--json"}).json()["origin"], "disk");
  }
  EXPECT_THAT(flashjit({"compile", R"({"op": "backward", "dtype": "bf16", "head_dim": 16})"}).out,
              testing::ContainsRegex(" x[1-9][0-9]* "));
  EXPECT_THAT(flashjit({"cache", "ls"}).out, testing::ContainsRegex(" x[1-9][0-9]* "));
}

TEST(BackwardVerbs, DoctorNamesTheOperations) {
  const CommandLine flashjit;
  const nlohmann::json operations = flashjit({"doctor", "--json"}).json()["operations"];
  ASSERT_GE(operations.size(), 1u);
  for (const auto& [target, names] : operations.items()) {
    EXPECT_THAT(names, ::testing::Contains("forward")) << target;
    if (target[0] == 'x') {
      EXPECT_THAT(names, ::testing::Contains("backward")) << target;
    }
  }
  EXPECT_THAT(flashjit({"doctor"}).out,
              HasSubstr(" has op forward, backward, decode, merge, append_kv, make_block_lists"));
}

// A target either has the kernels or is refused with those that have them.
TEST(BackwardVerbs, RenderEveryTarget) {
  const CommandLine flashjit;
  for (const char* target : {"x86-64-v3", "x86-64-v4+bf16", "x86-64-v4+amx", "sm_80", "sm_90", "sm_90a"}) {
    const std::string spec = R"({"op": "forward", "dtype": "bf16", "head_dim": 64})";
    const Outcome rendered = flashjit({"render", spec, "--op", "backward", "--target", target, "--json"});
    if (rendered.exit_code == 0) {
      const nlohmann::json json = rendered.json();
      EXPECT_THAT(
          json["text"].get<std::string>(),
          AllOf(HasSubstr(std::string("// flashjit backward for ") + target), HasSubstr("struct Spec")));
      EXPECT_GE(json["steps"].size(), 2u);
    } else {
      EXPECT_EQ(target[0], 's');
      EXPECT_THAT(rendered.error()["message"].get<std::string>(),
                  AllOf(HasSubstr(std::string("op backward is not supported on ") + target),
                        HasSubstr("x86-64-v3"), HasSubstr("would work")));
    }
  }
}

TEST(BackwardVerbs, BenchCountsFiveProductsForTwo) {
  const CommandLine flashjit;
  const std::vector<std::string> bench = {"bench",    small_spec, "--seqlens",     "32", "--heads-q", "2",
                                          "--rounds", "1",        "--num-threads", "1"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), bench.begin(), bench.end());
    return flashjit(more);
  };
  const auto work = [](const nlohmann::json& json) {
    const nlohmann::json& row = json["rows"].at(0);
    return row["tflops"].get<double>() * row["ms"].get<double>();
  };
  const nlohmann::json backward = with({"--op", "backward", "--json"}).json();
  EXPECT_EQ(backward["rows"][0]["spec"]["op"], "backward");
  EXPECT_NEAR(work(backward), 2.5 * work(with({"--json"}).json()), 1e-9 * work(backward));

  // Its configs have no block_m.
  const Outcome configs = with({"--op", "backward", "--configs", "x64,x128"});
  EXPECT_EQ(configs.exit_code, 0) << configs.err;
  EXPECT_THAT(configs.out, AllOf(HasSubstr(" x64 "), HasSubstr(" x128 ")));
  const Outcome rows = with({"--op", "backward", "--configs", "64x64"});
  EXPECT_EQ(rows.exit_code, 1);
  EXPECT_THAT(rows.err, AllOf(HasSubstr("block_m is no choice of op backward's kernels"),
                              testing::ContainsRegex("block_n [1-9]"), HasSubstr("would work"),
                              Not(HasSubstr("for ;"))));
  EXPECT_EQ(with({"--op", "sideways"}).exit_code, 1);
  EXPECT_EQ(with({"--configs", "x"}).exit_code, 3);

  const Outcome served =
      flashjit({"bench", "--serve", "--num-threads", "1", "--rounds", "1"},
               R"({"spec": )" + small_backward + R"(, "shapes": [{"seqlen_q": 24}]})" + "\n");
  EXPECT_GT(nlohmann::json::parse(served.out)["rows"].at(0)["tflops"].get<double>(), 0) << served.out;
}

TEST(BackwardVerbs, TuneRecordsWhatEnginesUse) {
  const CommandLine flashjit;
  const std::vector<std::string> command = {"tune", small_backward,  "--seqlens", "40",    "--heads-q",
                                            "2",    "--num-threads", "1",         "--json"};
  const nlohmann::json first = flashjit(command).json()["shapes"].at(0);
  EXPECT_EQ(first["state"], "measured");
  EXPECT_GT(first["candidates"].size(), 1u);
  for (const nlohmann::json& candidate : first["candidates"])
    EXPECT_NE(candidate["verdict"], "wrong") << candidate["reason"];
  EXPECT_EQ(flashjit(command).json()["shapes"][0]["state"], "known");
  const nlohmann::json kernel =
      flashjit({"run", small_backward, "--seqlen-q", "40", "--heads-q", "2", "--num-threads", "1", "--json"})
          .json()["kernel"];
  EXPECT_EQ(kernel["config_source"], "record");
  EXPECT_EQ(kernel["config"], first["chosen"]);
}

// A training process on a host without a compiler.
TEST(BackwardVerbs, PrebuildServesForwardAndBackward) {
  CommandLine flashjit;
  const std::string bundle = flashjit.folder() + "/bundle";
  const Outcome built = flashjit(
      {"prebuild", R"({"kernels": [{"spec": )" + small_spec + R"(}, {"spec": )" + small_backward + "}]}",
       "--target", "native", "-o", bundle, "--json"});
  ASSERT_EQ(built.exit_code, 0) << built.err;
  flashjit.environment["FLASHJIT_LLVM_PLUGIN"] = flashjit.missing("plugin.so");
  flashjit.environment["FLASHJIT_CACHE_PATH"] = bundle;
  for (const char* seqlen : {"1", "300"}) {
    const Outcome run = flashjit({"run", small_backward, "--seqlen-q", seqlen, "--verify", "--json"});
    ASSERT_EQ(run.exit_code, 0) << run.err;
    EXPECT_EQ(run.json()["origin"], "disk");
  }
  // A model is prebuilt for training by its "ops".
  const Outcome missing =
      flashjit({"prebuild", R"({"kernels": [{"model": "siglip-so400m-224", "ops": ["backward"]}]})",
                "--target", "x86-64-v4", "--check", "--json"});
  EXPECT_EQ(missing.exit_code, 7);
  const nlohmann::json wanted = nlohmann::json::parse(missing.out)["missing"];
  EXPECT_GE(wanted.size(), 4u);
  for (const nlohmann::json& kernel : wanted) EXPECT_EQ(kernel["spec"]["op"], "backward");
}

}  // namespace
}  // namespace flashjit::cli_test
