// flashjit tune: records that engines use, the report, reasons, Ctrl-C.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>

#include "tests/cli/command_line.hpp"
#include "tests/cli/on_terminal.hpp"
#include "tests/cli/xml.hpp"

namespace flashjit::cli_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// A spec with four candidates.
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
  EXPECT_THAT(html, AllOf(HasSubstr("aria-label=\"roofline\""), HasSubstr("allows (measured")));
  // Every label lies in its picture, and a bar beyond the axis ends in an arrow.
  const std::regex labels(
      "<text x=\"(-?[0-9.]+)\" y=\"(-?[0-9.]+)\"( text-anchor=\"(middle|end)\")?[^>]*>([^<]*)<");
  for (std::sregex_iterator label(html.begin(), html.end(), labels), end; label != end; ++label) {
    const double x = std::stod((*label)[1]), size = 6.5 * static_cast<double>((*label)[5].length());
    const std::string anchor = (*label)[4];
    const double left = anchor == "end" ? x - size : anchor == "middle" ? x - size / 2 : x;
    if ((*label)[0].str().find("rotate") != std::string::npos) continue;
    EXPECT_TRUE(left >= -1 && left + size <= 721) << (*label)[0].str();
    EXPECT_GE(std::stod((*label)[2]), 10) << (*label)[0].str();
  }
  for (const char* words :
       {">TFLOP/s</text>", ">arithmetic intensity: FLOP for each byte of the tensors</text>",
        ">milliseconds a launch (shorter is faster)</text>", ">block_m x block_n</text>"})
    EXPECT_THAT(html, HasSubstr(words));
  EXPECT_TRUE(
      std::regex_search(html, std::regex("<p>(The heuristic config 48x[0-9]+ stays: no other config was "
                                         "faster beyond noise \\(the closest, 48x[0-9]+, took |48x[0-9]+ "
                                         "won: it takes [0-9.]+% less time than the heuristic config)")))
      << html;
  for (std::size_t begin = 0; (begin = html.find("<svg", begin)) != std::string::npos; ++begin)
    EXPECT_EQ(xml_error(html.substr(begin, html.find("</svg>", begin) + 6 - begin)), "");
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
  EXPECT_EQ(
      flashjit({"tune", narrow_spec, "--seqlens", "8", "--report", flashjit.missing("x.html")}).exit_code, 3);
}

// The test stops the command in the second round of the second shape. There are at least five rounds, and
// each takes a tenth of a second or more.
TEST(Tune, CtrlCKeepsWhatThereIsAndTheSameCommandGoesOn) {
  const CommandLine flashjit;
  const std::string out = flashjit.folder() + "/out.json";
  const std::vector<std::string> command = {
      "tune",          R"({"op": "forward", "dtype": "fp32", "head_dim": 128, "config": {"block_m": 48}})",
      "--seqlens",     "40,1024",
      "--heads-q",     "4",
      "--num-threads", "1",
      "--budget",      "10m",
      "--json"};
  OnTerminal tune(flashjit, command, 200, out);
  ASSERT_TRUE(tune.wait_for("[2/2] 1 x 1024, heads 4/4: measuring: round 2 of")) << tune.shown();
  tune.press_ctrl_c();
  EXPECT_TRUE(tune.wait_for("the same command goes on from there"));
  EXPECT_EQ(tune.exit_code(), 130);
  EXPECT_THAT(tune.shown(), HasSubstr(" s left"));
  EXPECT_LE(widest_line(tune.shown()), 200u);
  EXPECT_EQ(tune.shown().find('\033'), std::string::npos);

  std::ifstream file(out);
  const nlohmann::json first = nlohmann::json::parse(file);
  EXPECT_TRUE(first["interrupted"]);
  ASSERT_EQ(first["shapes"].size(), 2u);
  EXPECT_EQ(first["shapes"][0]["state"], "measured");
  EXPECT_EQ(first["shapes"][1]["state"], "not finished");
  for (const nlohmann::json& shape : first["shapes"])
    EXPECT_TRUE(std::filesystem::exists(shape["path"].get<std::string>()));

  const nlohmann::json second = flashjit(command).json();
  EXPECT_EQ(second["shapes"][0]["state"], "known");
  EXPECT_EQ(second["shapes"][1]["state"], "measured");
  const nlohmann::json &before = first["shapes"][1]["candidates"], &after = second["shapes"][1]["candidates"];
  ASSERT_EQ(before.size(), 4u);
  for (std::size_t i = 0; i < before.size(); ++i) {
    const std::vector<double> kept = before[i]["samples_ms"], all = after[i]["samples_ms"];
    ASSERT_GE(kept.size(), 1u);
    ASSERT_GE(all.size(), kept.size());
    EXPECT_TRUE(std::equal(kept.begin(), kept.end(), all.begin())) << "measured anew";
  }
  EXPECT_GT(after[0]["samples_ms"].size(), before[0]["samples_ms"].size());
}

}  // namespace
}  // namespace flashjit::cli_test
