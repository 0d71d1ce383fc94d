// flashjit mask: text for a terminal and pictures.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "tests/cli/command_line.hpp"
#include "tests/cli/xml.hpp"

namespace flashjit::cli_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string picture_of(const CommandLine& flashjit, std::vector<std::string> arguments) {
  const std::string path = flashjit.folder() + "/mask.svg";
  arguments.insert(arguments.begin(), "mask");
  arguments.insert(arguments.end(), {"--svg", path});
  const Outcome outcome = flashjit(arguments);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(Mask, Text) {
  const CommandLine flashjit;
  const Outcome causal = flashjit({"mask", small_spec, "--seqlen-q", "384", "--heads-q", "1"});
  EXPECT_EQ(causal.exit_code, 0) << causal.err;
  EXPECT_EQ(causal.out,
            "causal\n"
            "384 query rows x 384 keys, in tiles of 128 x 128\n"
            "\n"
            "            keys\n"
            "query rows  0   256\n"
            "         0  ▒▒····\n"
            "       128  ██▒▒··\n"
            "       256  ████▒▒\n"
            "\n"
            "██ kept whole: 3 tiles   ▒▒ tested per element: 3 tiles   ·· skipped: 3 tiles\n"
            "50.1% of all pairs are kept; 66.7% of the tiles are computed\n");
  EXPECT_EQ(flashjit({"mask", small_spec, "--head", "99"}).exit_code, 3);
}

TEST(Mask, TextOfManyTilesHasOneColumnATile) {
  const CommandLine flashjit;
  const Outcome causal =
      flashjit({"mask", small_spec, "--seqlen-q", "8", "--seqlen-k", "40", "--tile-m", "1", "--tile-n", "1"});
  EXPECT_THAT(causal.out, HasSubstr("query rows  0   4   8   12"));
  EXPECT_THAT(causal.out, HasSubstr("\n         7  ████████████████████████████████████████\n"));
  EXPECT_THAT(causal.out, HasSubstr("·\n         7"));
}

TEST(Mask, JsonHasATileACharacter) {
  const CommandLine flashjit;
  const nlohmann::json result =
      flashjit({"mask", small_spec, "--seqlen-q", "384", "--tile-n", "64", "--json"}).json();
  EXPECT_EQ(result["full"], 6);
  EXPECT_EQ(result["tiles"], (nlohmann::json{"++....", "##++..", "####++"}));
}

TEST(Mask, PictureHasTitleAxesAndLegend) {
  const CommandLine flashjit;
  const std::string svg = picture_of(flashjit, {small_spec, "--seqlen-q", "384", "--tile-n", "64"});
  EXPECT_EQ(xml_error(svg), "");
  EXPECT_THAT(svg, AllOf(HasSubstr("width=\"600\""), HasSubstr("<title>causal</title>"),
                         HasSubstr(">384 query rows x 384 keys, in tiles of 128 x 64</text>"),
                         HasSubstr(">keys</text>"), HasSubstr(">query rows</text>")));
  EXPECT_THAT(svg, AllOf(HasSubstr(">kept whole: 6</text>"), HasSubstr(">tested per element: 6</text>"),
                         HasSubstr(">skipped: 6</text>"), HasSubstr(">50.1% of all pairs are kept")));
  EXPECT_THAT(svg, HasSubstr("<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>")) << "for dark pages";
  // Labels at the ends of tiles, on both axes.
  for (const char* label : {">0</text>", ">64</text>", ">128</text>", ">256</text>", ">384</text>"})
    EXPECT_THAT(svg, HasSubstr(label));
  EXPECT_EQ(attribute(svg, "full", "d"), "M0 128h128v128h-128zM0 256h256v128h-256z");
  EXPECT_EQ(attribute(svg, "partial", "d"), "M0 0h128v128h-128zM128 128h128v128h-128zM256 256h128v128h-128z");
  EXPECT_EQ(attribute(svg, "skipped", "d"), "M128 0h256v128h-256zM256 128h128v128h-128z");
  EXPECT_EQ(attribute(svg, "pairs", "d"), "") << "too many to see";
}

TEST(Mask, SmallPictureShowsThePairsOfTestedTiles) {
  const CommandLine flashjit;
  // The last tiles are cut by the end of the sequence.
  const std::string svg =
      picture_of(flashjit, {small_spec, "--seqlen-q", "3", "--tile-m", "2", "--tile-n", "2"});
  EXPECT_EQ(xml_error(svg), "");
  EXPECT_EQ(attribute(svg, "full", "d"), "M0 2h3v1h-3z");
  EXPECT_EQ(attribute(svg, "partial", "d"), "M0 0h2v2h-2z");
  EXPECT_EQ(attribute(svg, "skipped", "d"), "M2 0h1v2h-1z");
  EXPECT_EQ(attribute(svg, "pairs", "d"), "M0 0h1v1h-1zM0 1h2v1h-2z");
}

TEST(Mask, PictureNamesWhatTheMaskDependsOn) {
  const CommandLine flashjit;
  const std::string spec =
      R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "mask": [{"kind": "causal", "align": "top_left"}, )"
      R"({"kind": "sliding_window", "align": "top_left", "sinks": true}, {"kind": "block_sparse", "block_m": 16}, "padding"]})";
  const std::string svg =
      picture_of(flashjit, {spec, "--batch", "2", "--entry", "1", "--window-left", "40", "--num-sinks", "3"});
  EXPECT_EQ(xml_error(svg), "");
  EXPECT_THAT(svg, HasSubstr("<title>causal (top_left) and sliding_window (top_left, sinks) and padding and "
                             "block_sparse (block_m 16, block_n 128)</title>"));
  for (const char* value : {"window_left 40", "window_right 0", "num_sinks 3", "seqlens_k ", "batch entry 1"})
    EXPECT_THAT(svg, HasSubstr(value));
}

TEST(Mask, PictureOfNothing) {
  const CommandLine flashjit;
  EXPECT_EQ(xml_error(picture_of(flashjit, {small_spec, "--seqlen-q", "0"})), "");
  EXPECT_EQ(xml_error(picture_of(flashjit, {small_spec, "--seqlen-q", "5", "--seqlen-k", "0"})), "");
  EXPECT_EQ(flashjit({"mask", small_spec, "--seqlen-q", "0"}).exit_code, 0);
}

}  // namespace
}  // namespace flashjit::cli_test
