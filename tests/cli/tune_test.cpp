// flashjit tune: records that engines then use, a report, reasons, Ctrl-C.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/cli/command_line.hpp"

namespace flashjit::cli_test {
namespace {

using ::testing::HasSubstr;

// Four candidates.
const std::string narrow_spec =
    R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "mask": ["causal"], "config": {"block_m": 48}})";

TEST(Tune, ItsRecordIsWhatEnginesUse) {
  const CommandLine flashjit;
  const std::vector<std::string> command = {"tune", narrow_spec,     "--seqlens", "40,200", "--heads-q",
                                            "2",    "--num-threads", "1",         "--json"};
  const Outcome first = flashjit(command);
  const nlohmann::json json = first.json();
  EXPECT_FALSE(json["interrupted"]);
  EXPECT_GT(json["peak_tflops"], 0);
  ASSERT_EQ(json["shapes"].size(), 2u);
  for (const nlohmann::json& shape : json["shapes"]) {
    EXPECT_EQ(shape["state"], "measured");
    EXPECT_TRUE(shape["complete"]);
    EXPECT_EQ(shape["candidates"].size(), 4u);
    EXPECT_GT(shape["heuristic_ms"], 0);
    EXPECT_TRUE(std::filesystem::exists(shape["path"].get<std::string>()));
  }
  EXPECT_THAT(first.err, HasSubstr("[2/2] 1 x 200, heads 2/2: measuring"));
  for (const nlohmann::json& shape : flashjit(command).json()["shapes"]) EXPECT_EQ(shape["state"], "known");

  const nlohmann::json kernel =
      flashjit({"run", narrow_spec, "--seqlen-q", "40", "--heads-q", "2", "--num-threads", "1", "--json"})
          .json()["kernel"];
  EXPECT_EQ(kernel["config_source"], "record");
  EXPECT_EQ(kernel["config_note"], json["shapes"][0]["path"]);
  EXPECT_EQ(kernel["config"], json["shapes"][0]["chosen"]);
}

TEST(Tune, ExplainsAndReports) {
  const CommandLine flashjit;
  const std::string page = flashjit.folder() + "/tune.html";
  const Outcome outcome = flashjit({"tune", narrow_spec, "--seqlens", "40", "--heads-q", "1", "--num-threads",
                                    "1", "--explain", "--report", page});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("heuristic"));
  EXPECT_THAT(outcome.out, HasSubstr("not tried for {"));
  EXPECT_THAT(outcome.out, HasSubstr("48x64: "));
  std::ifstream file(page);
  const std::string html{std::istreambuf_iterator<char>(file), {}};
  EXPECT_THAT(html, HasSubstr("<svg"));
  EXPECT_THAT(html, HasSubstr("48x512"));
  EXPECT_THAT(html, HasSubstr("% of the peak"));
  EXPECT_THAT(html, ::testing::Not(HasSubstr("http")));  // needs nothing else
}

TEST(Tune, BadCommandLines) {
  const CommandLine flashjit;
  for (const char* budget : {"soon", "-3s", "5h", "nan", ""}) {
    const Outcome outcome = flashjit({"tune", narrow_spec, "--budget", budget});
    EXPECT_EQ(outcome.exit_code, 3) << budget;
    EXPECT_THAT(outcome.err, HasSubstr("would work")) << budget;
  }
  EXPECT_EQ(flashjit({"tune", narrow_spec, "--seqlens", "0"}).exit_code, 64);
  EXPECT_EQ(flashjit({"tune", narrow_spec, "--seqlens", "8", "--report", "/no/such/folder/x.html"}).exit_code,
            3);
}

// Sixteen candidates of a tenth of a second take longer than that.
TEST(Tune, CtrlCKeepsWhatThereIs) {
  const CommandLine flashjit;
  const std::string err = flashjit.folder() + "/stderr";
  const std::string command = "FLASHJIT_CACHE_DIR=" + flashjit.cache() +
                              " timeout --preserve-status -s INT 2 " FLASHJIT_COMMAND " tune '" +
                              R"({"op": "forward", "dtype": "fp32", "head_dim": 128})" +
                              "' --seqlens 4096 --num-threads 1 --budget 0 >/dev/null 2>" + err;
  const int status = std::system(command.c_str());
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 130);
  std::ifstream file(err);
  EXPECT_THAT((std::string{std::istreambuf_iterator<char>(file), {}}),
              HasSubstr("the same command goes on from there"));
}

}  // namespace
}  // namespace flashjit::cli_test
