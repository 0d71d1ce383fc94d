// The verb `bench`: its measurements and tables.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "codegen/spec/operation.hpp"
#include "tests/cli/command_line.hpp"

namespace flashjit::cli_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Bench, ComparesConfigs) {
  const CommandLine flashjit;
  const std::vector<std::string> bench = {"bench", small_spec,      "--seqlens", "32,64",    "--heads-q",
                                          "2",     "--num-threads", "1",         "--rounds", "3"};
  const nlohmann::json all = flashjit(bench + std::vector<std::string>{"--configs", "all", "--json"}).json();
  EXPECT_GT(all["rows"].size(), 2u);
  EXPECT_EQ(all["rounds"], 3);
  EXPECT_GT(all["fma_tflops"].get<double>(), 0);
  for (const nlohmann::json& row : all["rows"]) {
    for (const char* name : {"ms", "spread_percent", "tflops", "fma_share"})
      EXPECT_TRUE(row[name].is_number()) << name;
  }
  const nlohmann::json& config = all["rows"][0]["config"];
  const std::string one =
      std::to_string(config["block_m"].get<int>()) + "x" + std::to_string(config["block_n"].get<int>());
  const Outcome table = flashjit(bench + std::vector<std::string>{"--configs", one, "--processor-time"});
  EXPECT_EQ(table.exit_code, 0) << table.err;
  EXPECT_THAT(table.out,
              AllOf(HasSubstr(one), HasSubstr("32 x 32"), HasSubstr("64 x 64"), HasSubstr("of FMA")));
}

// By the customary count, of two entries of 8 rows and keys, 4 query heads and 2 key/value heads of 16: 512
// pairs of rows and keys of all query heads.
TEST(Bench, FlopsOfEveryOperation) {
  const std::map<std::string, std::pair<std::string, double>> expected = {
      {"forward", {"", 2 * (16 + 16) * 512}},
      {"backward", {"", 5 * (16 + 16) * 512}},
      {"decode", {"", 2 * (16 + 16) * 512}},
      {"merge", {"", 2 * 4 * 2 * 8 * 4 * 16}},  // of four parts
      {"append_kv", {R"(, "rotary": {"q": true})", 3 * 16 * (2 * 8 * 2 + 2 * 8 * 4)}},
      {"make_block_lists",
       {R"(, "mask": [{"kind": "block_sparse", "of_masks": true}, "causal"])", 2 * 8 * 8}},
      {"copy_kv", {"", 0}}};
  std::vector<std::string> bench = {"bench"};
  for (const OperationInfo& row : operation_table) {
    ASSERT_TRUE(expected.contains(row.name)) << row.name;
    bench.push_back(std::string(R"({"op": ")") + row.name + R"(", "dtype": "fp32", "head_dim": 16)" +
                    expected.at(row.name).first + "}");
  }
  const nlohmann::json rows =
      CommandLine()(bench + std::vector<std::string>{"--batch", "2", "--seqlens", "8", "--heads-q", "4",
                                                     "--heads-kv", "2", "--rounds", "1", "--json"})
          .json()["rows"];
  ASSERT_EQ(rows.size(), num_operations);
  for (const nlohmann::json& row : rows) {
    const double flops = expected.at(row["spec"]["op"].get<std::string>()).second;
    EXPECT_NEAR(row["tflops"].get<double>() * row["ms"].get<double>() * 1e9, flops, 1e-6 * flops) << row;
  }
}

// A rate of K and V: 2 heads of 200 keys, 2 x 16 elements of 4 bytes; with a window of the last 50 and one
// row.
TEST(Bench, RateAtWhichDecodeReadsKeysAndValues) {
  const CommandLine flashjit;
  const auto measured = [&](const std::string& mask, const std::vector<std::string>& more) {
    const std::string spec = R"({"op": "decode", "dtype": "fp32", "head_dim": 16, "mask": [)" + mask + "]}";
    const std::vector<std::string> bench = {"bench",    spec,        "--seqlens", "1",          "--seqlen-k",
                                            "200",      "--heads-q", "4",         "--heads-kv", "2",
                                            "--rounds", "3",         "--json"};
    const nlohmann::json json = flashjit(bench + more).json();
    return json["rows"][0];
  };
  const auto expect_bytes = [](const nlohmann::json& row, double bytes) {
    const auto rate = row["decoded_gb_per_s"].get<double>(), read = row["read_gb_per_s"].get<double>();
    EXPECT_NEAR(rate * row["ms"].get<double>() * 1e6, bytes, 1e-6 * bytes);
    EXPECT_GT(read, 0);
    EXPECT_DOUBLE_EQ(row["read_share"].get<double>(), rate / read);
  };
  expect_bytes(measured("", {}), 2 * 200 * 128);
  expect_bytes(measured("\"sliding_window\"", {"--window-left", "49"}), 2 * 50 * 128);
}

// Without sizes a decode has one row, as every verb takes it.
TEST(Bench, DecodeWithoutSizes) {
  const CommandLine flashjit;
  const std::string spec = R"({"op": "decode", "dtype": "fp32", "head_dim": 16})";
  const nlohmann::json rows =
      flashjit({"bench", spec, "--heads-q", "1", "--rounds", "1", "--json"}).json()["rows"];
  ASSERT_EQ(rows.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(rows[i]["seqlen_q"], 1);
    EXPECT_EQ(rows[i]["seqlen_k"], 512 << i);
  }
  EXPECT_EQ(flashjit({"bench", spec, "--heads-q", "1", "--rounds", "1", "--seqlen-k", "300", "--json"})
                .json()["rows"]
                .size(),
            1u);
  const nlohmann::json shape = flashjit({"run", spec, "--heads-q", "1", "--json"}).json()["shape"];
  EXPECT_EQ(shape["seqlen_q"], 1);
  EXPECT_EQ(shape["seqlen_k"], 1024);
}

// Two entries of 7 tokens and 2 heads: 64 bytes of K and V in bf16 are read, and 32 and two scales written.
TEST(Bench, RateAtWhichAppendMovesRows) {
  const CommandLine flashjit;
  const std::string spec =
      R"({"op": "append_kv", "dtype": "bf16", "head_dim": 16, "kv_dtype": "int8", "kv_scale": "token_head"})";
  const nlohmann::json row = flashjit({"bench", spec, "--batch", "2", "--seqlens", "7", "--seqlen-k", "20",
                                       "--heads-q", "2", "--rounds", "3", "--json"})
                                 .json()["rows"][0];
  EXPECT_NEAR(row["appended_gb_per_s"].get<double>() * row["ms"].get<double>() * 1e6,
              2 * 7 * 2 * (64 + 32 + 8), 1);
  EXPECT_EQ(row.count("decoded_gb_per_s"), 0u);
  const nlohmann::json run =
      flashjit({"run", spec, "--batch", "2", "--seqlen-q", "7", "--seqlen-k", "20", "--verify", "--json"})
          .json();
  EXPECT_GT(run["verification"]["rows"], 0) << run;
}

// The same rows, from one 8-bit cache to another: 32 bytes and two scales are read, and written.
TEST(Bench, RateAtWhichCopyMovesRows) {
  const CommandLine flashjit;
  const std::string spec =
      R"({"op": "copy_kv", "dtype": "bf16", "head_dim": 16, "kv_dtype": "int8", "kv_scale": "token_head"})";
  const nlohmann::json row = flashjit({"bench", spec, "--batch", "2", "--seqlens", "7", "--seqlen-k", "20",
                                       "--heads-q", "2", "--rounds", "3", "--json"})
                                 .json()["rows"][0];
  EXPECT_NEAR(row["copied_gb_per_s"].get<double>() * row["ms"].get<double>() * 1e6, 2 * 7 * 2 * 2 * (32 + 8),
              1);
  const nlohmann::json run =
      flashjit({"run", spec, "--batch", "2", "--seqlen-q", "7", "--seqlen-k", "20", "--verify", "--json"})
          .json();
  EXPECT_EQ(run["verification"]["rows"], 2 * 7 * 8) << run;
}

// Sequences of 3, 3 and 200 keys, 256 bytes for each, in pages of 16: 15 of them and not 39, as sequences of
// 200 keys would take.
TEST(Bench, LengthsOfACache) {
  const CommandLine flashjit;
  const std::string spec = R"({"op": "decode", "dtype": "fp32", "head_dim": 16, "paged": true})";
  const auto with = [&](const std::string& verb, const std::vector<std::string>& more) {
    return flashjit(std::vector<std::string>{verb, spec, "--heads-q", "4", "--heads-kv", "2"} + more);
  };
  const std::string file = flashjit.file("lengths", "3 3\n200\n");
  for (const std::string& lengths : {std::string("2x3,200"), file}) {
    const nlohmann::json row =
        with("bench", {"--seqlens", "1", "--rounds", "2", "--json", "--lengths-k", lengths})
            .json()["rows"][0];
    EXPECT_EQ(row["batch"], 3);
    EXPECT_EQ(row["seqlen_k"], 200);
    EXPECT_NEAR(row["decoded_gb_per_s"].get<double>() * row["ms"].get<double>() * 1e6, 206 * 256, 1);
    const nlohmann::json run =
        with("run", {"--seqlen-q", "2", "--verify", "--json", "--lengths-k", lengths}).json();
    EXPECT_EQ(run["shape"]["batch"], 3);
    EXPECT_EQ(run["verification"]["rows"], 3 * 2 * 4) << run;
  }
  EXPECT_EQ(
      with("bench", {"--seqlens", "1", "--rounds", "1", "--lengths-k", "2x3,200", "--heads-first"}).exit_code,
      0);
  const std::string out = flashjit.folder() + "/lengths_out";
  EXPECT_EQ(with("generate", {"--seqlen-q", "1", "--lengths-k", "2x3,200", "--out", out}).exit_code, 0);
  std::stringstream k;
  k << std::ifstream(out + "/k.npy").rdbuf();
  EXPECT_THAT(k.str().substr(0, 128), HasSubstr("(15,16,2,16,)"));
  for (const std::string& wrong :
       std::vector<std::string>{"1x2x3", "x3", "5x,3", "0x5", "3x-1", flashjit.missing("lengths"), ","}) {
    const Outcome outcome = with("bench", {"--seqlens", "1", "--lengths-k", wrong});
    EXPECT_EQ(outcome.exit_code, 3) << wrong;
    EXPECT_THAT(outcome.err, HasSubstr("1x100000,63x500")) << wrong;
  }
  EXPECT_EQ(with("bench", {"--lengths-k", "5", "--batch", "3"}).exit_code, 64);
  const Outcome forward = flashjit({"bench", small_spec, "--seqlens", "5", "--lengths-k", "5"});
  EXPECT_EQ(forward.exit_code, 3);
  EXPECT_THAT(forward.err, HasSubstr("op decode, or op forward with \"paged\": true"));
}

// A plain read of as many bytes is a row of its own.
TEST(Bench, DecodeOnAGpu) {
  const CommandLine flashjit;
  const std::vector<std::string> bench = {
      "bench",       R"({"op": "decode", "dtype": "bf16", "head_dim": 128, "paged": true})",
      "--device",    "cuda:0",
      "--seqlens",   "1",
      "--lengths-k", "2000,100",
      "--heads-q",   "8",
      "--heads-kv",  "2"};
  const Outcome table = flashjit(bench);
  if (table.exit_code != 0) GTEST_SKIP() << table.err;
  EXPECT_THAT(table.out, AllOf(HasSubstr("of read"), HasSubstr("\nread ")));
  const nlohmann::json row = flashjit(bench + std::vector<std::string>{"--json"}).json()["rows"].at(0);
  EXPECT_GT(row["read_gb_per_s"].get<double>(), 0);
  EXPECT_GT(row["read_share"].get<double>(), 0);
}

TEST(Bench, MeasuresTheWayToAKernel) {
  const CommandLine flashjit;
  const nlohmann::json report =
      flashjit({"bench", small_spec, "--compile", "--targets", "native", "--rounds", "2", "--json"}).json();
  const nlohmann::json& row = report["rows"].at(0);
  EXPECT_GT(row["cold_ms"].get<double>(), row["warm_ms"].get<double>());
  EXPECT_GT(row["hot_us"].get<double>(), 0);
  EXPECT_EQ(row["to"], "callable");
  EXPECT_FALSE(std::filesystem::exists(flashjit.cache())) << "the user's cache is not for measurements";
}

}  // namespace
}  // namespace flashjit::cli_test
