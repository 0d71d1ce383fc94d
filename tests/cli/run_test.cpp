// The verb `run`: on generated tensors and on files, for every kind of spec.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>

#include "tests/cli/command_line.hpp"

namespace flashjit::cli_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Type and shape of a .npy file: "'<f4' (2,48)".
std::string npy_header(const std::string& path) {
  const std::string bytes = slurp(path).substr(0, 128);
  std::smatch found;
  if (!std::regex_search(bytes, found, std::regex("'descr': ('[^']*').*'shape': \\(([0-9, ]*)\\)")))
    return "none";
  return found[1].str() + " (" + std::regex_replace(found[2].str(), std::regex(" |,$"), "") + ")";
}

TEST(Run, VerifiesGeneratedTensors) {
  const CommandLine flashjit;
  const nlohmann::json result =
      flashjit(std::vector<std::string>{"run", small_spec, "--seed", "7", "--verify", "--json"} + tiny)
          .json();
  for (const char* name :
       {"device", "config", "cold_ms", "warm_ms", "hot_us", "ms", "tflops", "max_error", "error_bound", "ok"})
    EXPECT_TRUE(result.contains(name)) << name;
  EXPECT_EQ(result["device"], "cpu");
  EXPECT_EQ(result["origin"], "compiled");
  EXPECT_TRUE(result["ok"].get<bool>());
  EXPECT_LE(result["max_error"].get<double>(), result["error_bound"].get<double>());
  EXPECT_EQ(result["verification"]["rows"], 2 * 48 * 4);
  EXPECT_LE(result["verification"]["lse_error"].get<double>(),
            result["verification"]["lse_error_bound"].get<double>());
  EXPECT_GT(result["cold_ms"].get<double>(), result["warm_ms"].get<double>());
  EXPECT_EQ(result["shape"], (nlohmann::json{{"batch", 2},
                                             {"seqlen_q", 48},
                                             {"seqlen_k", 48},
                                             {"num_heads_q", 4},
                                             {"num_heads_kv", 2},
                                             {"heads_q", 4},
                                             {"heads_kv", 2}}));
}

TEST(Run, MeasuresColdWhereTheKernelIsOnDiskIfAsked) {
  CommandLine flashjit;
  flashjit(std::vector<std::string>{"compile", small_spec} + tiny);
  const std::vector<std::string> run = std::vector<std::string>{"run", small_spec, "--json"} + tiny;
  const nlohmann::json cold = flashjit(run + std::vector<std::string>{"--cold"}).json();
  EXPECT_EQ(cold["origin"], "disk");
  EXPECT_GT(cold["cold_ms"].get<double>(), cold["warm_ms"].get<double>());
  // Otherwise nothing is compiled, and no temporary folder is needed.
  flashjit.environment["FLASHJIT_LLVM_PLUGIN"] = flashjit.missing("plugin.so");
  flashjit.environment["TMPDIR"] = flashjit.missing("tmp");
  const nlohmann::json result = flashjit(run).json();
  EXPECT_TRUE(result["cold_ms"].is_null());
  EXPECT_TRUE(result["ok"].is_null());
  EXPECT_TRUE(result["max_error"].is_null());
}

// `run` reads what `generate` writes for any operation, by the folder or by an option for each file.
TEST(Run, ReadsWhatGenerateWrites) {
  const std::string forward = R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "mask": ["causal"], )"
                              R"("score": ["score + slope[head]"], "lse": false, "tables": )"
                              R"({"slope": {"dtype": "fp32", "shape": ["heads_q"]}}})";
  const struct {
    std::string spec, op;
    std::vector<std::string> sizes;
  } cases[] = {
      {forward, "forward", {"--seqlen-q", "20"}},
      {forward, "decode", {"--seqlen-k", "40"}},
      {forward, "append_kv", {"--seqlen-q", "3", "--seqlen-k", "40"}},
      {forward, "copy_kv", {"--seqlen-q", "3", "--seqlen-k", "40"}},
      {R"({"op": "append_kv", "dtype": "bf16", "head_dim": 16, "paged": true, "varlen": true, "kv_dtype": "int8",
           "kv_scale": "token_head", "rotary": {"q": true}})",
       "append_kv",
       {"--seqlen-q", "3", "--seqlen-k", "40", "--heads-kv", "1"}},
      {R"({"op": "decode", "dtype": "bf16", "head_dim": 16, "paged": true, "append": true, "kv_dtype": "fp8_e4m3",
           "kv_scale": "token_head", "rotary": {"q": true, "tables": "fp32"}})",
       "decode",
       {"--seqlen-q", "2", "--seqlen-k", "40"}},
      {R"({"op": "forward", "dtype": "fp32", "head_dim": 16,
           "mask": [{"kind": "block_sparse", "of_masks": true}, "causal"]})",
       "make_block_lists",
       {"--seqlen-q", "200"}},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.op + " of " + c.spec);
    const CommandLine flashjit;
    const std::string in = flashjit.folder() + "/in";
    const std::vector<std::string> heads = {"--batch", "2", "--heads-q", "2"};
    ASSERT_EQ(
        flashjit(std::vector<std::string>{"generate", c.spec, "--op", c.op, "--out", in} + heads + c.sizes)
            .exit_code,
        0);
    std::vector<std::string> by_option;
    for (const auto& file : std::filesystem::directory_iterator(in)) {
      std::string option = file.path().stem().string();
      if (option == "slope") {
        by_option = by_option + std::vector<std::string>{"--named", "slope=" + file.path().string()};
        continue;
      }
      std::replace(option.begin(), option.end(), '_', '-');
      by_option = by_option + std::vector<std::string>{"--" + option, file.path().string()};
    }
    const std::vector<std::string> run = {"run", c.spec, "--op", c.op, "--verify", "--json"};
    // By turns: the same code reads both.
    const bool by_folder = &c - cases != 1 && &c - cases != 3;
    const Outcome outcome =
        flashjit(run + (by_folder ? std::vector<std::string>{"--tensors", in} : by_option));
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_TRUE(outcome.json()["ok"].get<bool>());
    EXPECT_EQ(outcome.json()["shape"]["batch"], 2);
    if (c.op == "append_kv" || c.op == "copy_kv") {
      EXPECT_EQ(outcome.json()["shape"]["seqlen_k"], c.op == "append_kv" && c.spec != forward ? 48 : 40);
      EXPECT_GT(outcome.json()["verification"]["rows"], 0) << "places are in the caches";
    }
  }
}

// A launch that writes rows of caches keeps the others, and caches that are not given have room for its rows.
TEST(Run, CachesThatALaunchWritesInto) {
  const CommandLine flashjit;
  const std::string in = flashjit.folder() + "/in", written = flashjit.folder() + "/k.npy";
  const auto made = [&](const std::string& spec) {
    return flashjit({"generate", spec, "--out", in, "--batch", "2", "--seqlen-q", "3", "--seqlen-k", "40",
                     "--heads-q", "4", "--heads-kv", "2"})
        .exit_code;
  };
  const auto run = [&](const std::string& spec) {
    return flashjit({"run", spec, "--tensors", in, "--verify", "--json", "--k-out", written});
  };
  const std::string append = R"({"op": "append_kv", "dtype": "fp32", "head_dim": 16, "rotary": {"q": true}})";
  ASSERT_EQ(made(append), 0);
  EXPECT_EQ(run(append).json()["verification"]["rows"], 2 * 3 * 2);
  const std::string before = slurp(in + "/k.npy"), after = slurp(written);
  ASSERT_EQ(before.size(), after.size());
  int kept = 0;
  for (std::size_t i = before.size() - 2 * 40 * 2 * 16 * 4; i < before.size(); i += 16 * 4)
    kept += before.compare(i, 16 * 4, after, i, 16 * 4) == 0;
  EXPECT_EQ(kept, 2 * 2 * (40 - 3));

  for (const char* name : {"/k.npy", "/v.npy"}) std::filesystem::remove(in + name);
  const nlohmann::json by_positions = run(append).json();
  EXPECT_EQ(by_positions["verification"]["rows"], 2 * 3 * 2);
  EXPECT_EQ(by_positions["shape"]["num_heads_q"], 4);

  const std::string paged = R"({"op": "append_kv", "dtype": "fp32", "head_dim": 16, "paged": true})";
  ASSERT_EQ(made(paged), 0);
  EXPECT_EQ(run(paged).json()["shape"]["seqlen_k"], 48) << "3 pages of 16";
  std::filesystem::remove(in + "/k.npy");
  EXPECT_THAT(run(paged).error()["message"].get<std::string>(), HasSubstr("k is missing"));
}

TEST(Run, PrintsATable) {
  const CommandLine flashjit;
  const Outcome result =
      flashjit(std::vector<std::string>{"run", small_spec, "--verify", "--num-threads", "1"} + tiny);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("cold ms"), HasSubstr("GFLOP/s"), HasSubstr("384 rows"), HasSubstr(".kernel")));
}

TEST(Run, WithoutADiskCache) {
  const CommandLine flashjit;
  const nlohmann::json result =
      flashjit(std::vector<std::string>{"run", small_spec, "--cache-dir", "", "--json"} + tiny).json();
  EXPECT_EQ(result["origin"], "compiled");
  EXPECT_TRUE(result["warm_ms"].is_null());
  EXPECT_EQ(result["kernel"]["path"], "");
  EXPECT_FALSE(result["kernel"]["cache_note"].get<std::string>().empty());
}

TEST(Run, Dropout) {
  const CommandLine flashjit;
  const std::string spec = R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "dropout": true})";
  const auto output = [&](const std::vector<std::string>& options) {
    const std::string out = flashjit.folder() + "/out.npy";
    const nlohmann::json result =
        flashjit(std::vector<std::string>{"run", spec, "--verify", "--json", "--out", out} + tiny + options)
            .json();
    EXPECT_TRUE(result["ok"].get<bool>());
    std::ifstream file(out, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const std::string usual = output({});
  EXPECT_EQ(output({"--dropout-p", "0.1", "--dropout-seed", "1", "--dropout-offset", "0"}), usual);
  EXPECT_NE(output({"--dropout-p", "0.5"}), usual);
  EXPECT_NE(output({"--dropout-seed", "2"}), usual);
  EXPECT_NE(output({"--dropout-offset", "18446744073709551615"}), usual);
  EXPECT_TRUE(flashjit(std::vector<std::string>{"bench", spec, "--seqlens", "16", "--rounds", "1",
                                                "--dropout-p", "0.5", "--json"})
                  .json()["rows"][0]["spec"]["dropout"]
                  .get<bool>());
}

TEST(Run, EveryMask) {
  const CommandLine flashjit;
  for (const char* masks :
       {R"(["padding"])", R"(["causal", {"kind": "sliding_window", "sinks": true}])",
        R"([{"kind": "block_sparse", "block_m": 16, "block_n": 16, "per_head": true}])", R"(["tree"])"}) {
    const std::string spec =
        std::string(R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "mask": )") + masks + "}";
    const nlohmann::json generated =
        flashjit(std::vector<std::string>{"run", spec, "--verify", "--json", "--density", "0.5"} + tiny)
            .json();
    EXPECT_TRUE(generated["ok"].get<bool>()) << masks;
  }
  // generate writes tensors; run reads them.
  const std::string spec =
      R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "mask": ["padding", "tree"]})";
  const std::string in = flashjit.folder() + "/in/";
  ASSERT_EQ(flashjit(std::vector<std::string>{"generate", spec, "--out", in} + tiny).exit_code, 0);
  const nlohmann::json own =
      flashjit({"run", spec, "--verify", "--json", "--q", in + "q.npy", "--k", in + "k.npy", "--v",
                in + "v.npy", "--seqlens-q", in + "seqlens_q.npy", "--seqlens-k", in + "seqlens_k.npy",
                "--tree-bits", in + "tree_bits.npy"})
          .json();
  EXPECT_TRUE(own["ok"].get<bool>());
}

TEST(Run, OnOwnTensors) {
  const CommandLine flashjit;
  const std::string in = flashjit.folder() + "/in", out = flashjit.folder() + "/o.npy",
                    lse = flashjit.folder() + "/lse.npy";
  ASSERT_EQ(
      flashjit(std::vector<std::string>{"generate", small_spec, "--seed", "3", "--out", in} + tiny).exit_code,
      0);
  const std::vector<std::string> run = {"run", small_spec,    "--q", in + "/q.npy",
                                        "--k", in + "/k.npy", "--v", in + "/v.npy"};
  const nlohmann::json own =
      flashjit(run + std::vector<std::string>{"--out", out, "--lse-out", lse, "--verify", "--json"}).json();
  EXPECT_TRUE(own["ok"].get<bool>());
  EXPECT_EQ(own["shape"]["heads_kv"], 2);
  EXPECT_EQ(npy_header(out), "'<f4' (2,48,4,16)");
  EXPECT_EQ(npy_header(lse), "'<f4' (2,4,48)");

  // The same seed generates the same problem.
  const std::string again = flashjit.folder() + "/again.npy";
  flashjit(std::vector<std::string>{"run", small_spec, "--seed", "3", "--out", again} + tiny);
  EXPECT_TRUE(slurp(again) == slurp(out));
  // Another scale gives another result.
  flashjit(run + std::vector<std::string>{"--softmax-scale", "2", "--out", again});
  EXPECT_FALSE(slurp(again) == slurp(out));
}

TEST(Run, PackedSequences) {
  const CommandLine flashjit;
  const std::string spec =
      R"({"op": "forward", "dtype": "fp16", "head_dim": 16, "mask": ["causal"], "varlen": true})";
  const std::string in = flashjit.folder() + "/in";
  ASSERT_EQ(
      flashjit(std::vector<std::string>{"generate", spec, "--out", in, "--seqlen-k", "80"} + tiny).exit_code,
      0);
  const nlohmann::json result = flashjit({"run", spec, "--q", in + "/q.npy", "--k", in + "/k.npy", "--v",
                                          in + "/v.npy", "--cu-seqlens-q", in + "/cu_seqlens_q.npy",
                                          "--cu-seqlens-k", in + "/cu_seqlens_k.npy", "--verify", "--json"})
                                    .json();
  EXPECT_TRUE(result["ok"].get<bool>());
  EXPECT_EQ(result["shape"]["batch"], 2);
  EXPECT_EQ(result["shape"]["seqlen_k"], 80);
}

TEST(Run, PagedDecode) {
  const CommandLine flashjit;
  const std::string spec =
      R"({"op": "decode", "dtype": "fp16", "head_dim": 16, "mask": ["causal"], "paged": true, "varlen": true})";
  const std::string in = flashjit.folder() + "/in";
  ASSERT_EQ(flashjit(std::vector<std::string>{"generate", spec, "--out", in, "--seqlen-k", "80",
                                              "--page-size", "32"} +
                     tiny)
                .exit_code,
            0);
  const std::vector<std::string> files = {
      "run", spec,          "--q",          in + "/q.npy",          "--k",      in + "/k.npy",
      "--v", in + "/v.npy", "--page-table", in + "/page_table.npy", "--verify", "--json"};
  const nlohmann::json result =
      flashjit(files + std::vector<std::string>{"--cu-seqlens-q", in + "/cu_seqlens_q.npy"}).json();
  EXPECT_TRUE(result["ok"].get<bool>());
  EXPECT_EQ(result["shape"]["seqlen_k"], 96);
  const auto refused = flashjit(files);
  EXPECT_EQ(refused.exit_code, 3);
  EXPECT_NE(refused.err.find("--cu-seqlens-q must say"), std::string::npos) << refused.err;
}

// A tree of drafts after a cache in pages, generated and verified.
TEST(Run, DecodeOfATreeAfterPages) {
  const CommandLine flashjit;
  for (const char* mask : {R"("tree")", R"("tree", "causal")"}) {
    const std::string spec = R"({"op": "decode", "dtype": "bf16", "head_dim": 32, "mask": [)" +
                             std::string(mask) + R"(], "paged": true})";
    const nlohmann::json result =
        flashjit({"run", spec, "--seqlen-q", "33", "--lengths-k", "300,33,70", "--page-size", "8",
                  "--heads-q", "4", "--heads-kv", "2", "--verify", "--json"})
            .json();
    EXPECT_TRUE(result["ok"].get<bool>()) << result;
    EXPECT_EQ(result["verification"]["rows"], 3 * 33 * 4);
  }
}

TEST(Run, OutputInFloat) {
  const CommandLine flashjit;
  const std::string spec = R"({"op": "forward", "dtype": "fp16", "head_dim": 16, "o_dtype": "fp32"})";
  const std::string out = flashjit.folder() + "/o.npy";
  const nlohmann::json result =
      flashjit(std::vector<std::string>{"run", spec, "--out", out, "--verify", "--json"} + tiny).json();
  EXPECT_TRUE(result["ok"].get<bool>());
  EXPECT_NE(slurp(out).find("<f4"), std::string::npos);
}

TEST(Run, SizesOfZero) {
  const CommandLine flashjit;
  for (const char* size : {"--batch", "--seqlen-q", "--seqlen-k"}) {
    const Outcome result = flashjit({"run", small_spec, "--heads-q", "2", size, "0", "--verify", "--json"});
    EXPECT_TRUE(result.json()["ok"].get<bool>()) << size;
  }
}

}  // namespace
}  // namespace flashjit::cli_test
