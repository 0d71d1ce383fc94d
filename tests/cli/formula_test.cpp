// Specs with formulas through the command: generated tables, tables of one's own, numbers, and mistakes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/cli/command_line.hpp"

namespace flashjit::cli_test {
namespace {

using ::testing::HasSubstr;

const std::string formulas = R"json({"op": "forward", "dtype": "fp32", "head_dim": 16,
    "mask": ["key - position <= ahead", "allowed[row, key] != 0"], "score": ["cap * tanh(score / cap)", "alibi"],
    "scalars": {"cap": "fp32", "ahead": "int32"},
    "tables": {"allowed": {"dtype": "uint8", "shape": ["seqlen_q", "seqlen_k"]}}, "sink_logits": true})json";

TEST(Formulas, AreRunOnGeneratedTablesAndOnFiles) {
  const CommandLine flashjit;
  const Outcome made =
      flashjit({"generate", formulas, "--seqlen-q", "40", "--out", flashjit.folder() + "/t"});
  ASSERT_EQ(made.exit_code, 0) << made.err;
  const Outcome run =
      flashjit({"run", formulas, "--seqlen-q", "40", "--verify", "--named", "cap=2", "--json"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(run.json()["ok"]);
  const auto file = [&](const char* name) { return flashjit.folder() + "/t/" + name + ".npy"; };
  std::vector<std::string> own = {"run", formulas, "--verify"};
  for (const char* name : {"q", "k", "v"}) own.insert(own.end(), {std::string("--") + name, file(name)});
  own.insert(own.end(), {"--sink-logits", file("sink_logits"), "--named", "allowed=" + file("allowed"),
                         "--named", "alibi_slopes=" + file("alibi_slopes"), "--named", "ahead=-2"});
  const Outcome of_files = flashjit(own);
  EXPECT_EQ(of_files.exit_code, 0) << of_files.err;

  const auto refused = [&](const std::string& named, const char* part) {
    const Outcome outcome = flashjit({"run", formulas, "--seqlen-q", "40", "--named", named});
    EXPECT_EQ(outcome.exit_code, 3) << named;
    EXPECT_THAT(outcome.err, HasSubstr(part));
  };
  refused("cap", "cap=30 would work");
  refused("cop=3", "did you mean cap?");
  refused("cap=x", "cap is a scalar");
  refused("ahead=0.5", "integer of 32 bits");
  refused("allowed=" + file("alibi_slopes"), "the spec declares [seqlen_q, seqlen_k]");
  refused("allowed=nothing.npy", "nothing.npy");
  refused("alibi_slopes=" + file("q"), "4 dimensions");
}

// Lists of a mask are made and written, and a forward runs with them.
TEST(Formulas, HaveBlockLists) {
  const CommandLine flashjit;
  const auto spec_of = [](const std::string& op) {
    return R"({"op": ")" + op + R"(", "dtype": "fp32", "head_dim": 16, "mask": [
        {"kind": "block_sparse", "block_m": 16, "block_n": 32, "of_masks": true}, "document[key] == document[position]"],
        "tables": {"document": {"dtype": "int32", "shape": ["batch", "seqlen_k"]}}})";
  };
  const std::string offsets = flashjit.folder() + "/offsets.npy";
  const Outcome lists = flashjit({"run", spec_of("make_block_lists"), "--seqlen-q", "100", "--batch", "2",
                                  "--verify", "--json", "--block-offsets-out", offsets});
  ASSERT_EQ(lists.exit_code, 0) << lists.err;
  EXPECT_TRUE(lists.json()["ok"]);
  EXPECT_TRUE(std::filesystem::exists(offsets));
  const Outcome forward =
      flashjit({"run", spec_of("forward"), "--seqlen-q", "100", "--batch", "2", "--verify", "--json"});
  ASSERT_EQ(forward.exit_code, 0) << forward.err;
  EXPECT_TRUE(forward.json()["ok"]);
  const Outcome wrong =
      flashjit({"run", spec_of("forward"), "--seqlen-q", "100", "--block-offsets-out", offsets});
  EXPECT_EQ(wrong.exit_code, 3);
  EXPECT_THAT(wrong.err, HasSubstr("--block-offsets-out was given, but the spec does not write it"));
}

TEST(Formulas, MistakesNameTheirColumn) {
  const CommandLine flashjit;
  const Outcome wrong = flashjit(
      {"render", R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "score": ["score + slop[head]"]})",
       "--target", "x86-64-v3"});
  EXPECT_EQ(wrong.exit_code, 1);
  EXPECT_THAT(wrong.err, HasSubstr("score[0] \"score + slop[head]\", column 9: unknown name \"slop\""));
}

TEST(Formulas, AreDrawn) {
  const CommandLine flashjit;
  const Outcome drawn = flashjit({"mask", R"({"op": "forward", "dtype": "bf16", "head_dim": 16,
      "mask": ["key / 128 == position / 128 || key < ahead"], "scalars": {"ahead": "int32"}})",
                                  "--seqlen-q", "384", "--heads-q", "1", "--named", "ahead=10"});
  EXPECT_EQ(drawn.exit_code, 0) << drawn.err;
  EXPECT_THAT(drawn.out, HasSubstr("         0  ██····\n"
                                   "       128  ▒▒██··\n"
                                   "       256  ▒▒··██\n"));
  const Outcome rendered = flashjit({"render", formulas, "--target", "x86-64-v3"});
  EXPECT_THAT(rendered.out, HasSubstr("allowed[row, key] != 0"));
}

}  // namespace
}  // namespace flashjit::cli_test
