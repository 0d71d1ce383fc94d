// The sentence of a tuning report that says why a config was chosen.
#include <gtest/gtest.h>

#include "tools/command/tune_reason.hpp"

namespace flashjit::command {
namespace {

// A record of a race: the heuristic config 48x64, and 48x256 in turns with it.
TuneRecord record_of(std::vector<double> heuristic_ms, std::vector<double> other_ms) {
  TuneRecord record;
  record.heuristic.block_m = record.chosen.block_m = 48;
  record.heuristic.block_n = 64;
  record.chosen.block_n = 256;
  record.shape.seqlen_q = record.shape.seqlen_k = 1000;
  record.complete = true;
  record.candidates = {{.config = record.heuristic, .samples_ms = std::move(heuristic_ms)},
                       {.config = record.chosen, .samples_ms = std::move(other_ms)}};
  return record;
}

const Target target = Target::parse("x86-64-v3");

TEST(TuneReason, AWinner) {
  // Five rounds of selection, then three; the other config loses one of these.
  TuneRecord record = record_of({2, 2, 2, 2, 2, 2, 2, 2}, {1, 1, 1, 1, 1, 1, 3, 1});
  EXPECT_EQ(
      why_chosen(record, target),
      "48x256 won: it takes 50.0% less time than the heuristic config 48x64 and was faster in 2 of 3 rounds "
      "after the selection; it has block_n 256 instead of 64, so that a query tile visits up to 4 key "
      "blocks, "
      "not 16.");
  record.complete = false;
  EXPECT_TRUE(why_chosen(record, target).ends_with("not 16, but the race ended early."));
}

TEST(TuneReason, TheHeuristicConfigStays) {
  TuneRecord record = record_of({2, 2}, {3, 3});
  record.chosen = record.heuristic;
  EXPECT_EQ(
      why_chosen(record, target),
      "The heuristic config 48x64 stays: no other config was faster beyond noise (the closest, 48x256, took "
      "50.0% more time in 2 samples).");
  // A config that dropped out has samples of other rounds: its time is not compared with those of all.
  record.candidates.back() = {.config = record.candidates.back().config,
                              .verdict = Verdict::dropped,
                              .reason = "334% behind the best after 3 rounds",
                              .samples_ms = {9, 3, 7}};
  EXPECT_EQ(
      why_chosen(record, target),
      "The heuristic config 48x64 stays: no other config was faster beyond noise (the closest, 48x256, took "
      "50.0% more time in 3 samples and dropped out).");
  record.candidates.pop_back();
  EXPECT_EQ(why_chosen(record, target), "The heuristic config 48x64 stays: no other config was measured.");
  record.candidates.front().samples_ms.clear();
  EXPECT_EQ(why_chosen(record, target), "Nothing was measured.");
}

TEST(TuneReason, Noise) {
  TuneRecord record = record_of({2, 20, 3, 9, 5}, {3, 8, 25, 4, 6});
  record.chosen = record.heuristic;
  EXPECT_NE(why_chosen(record, target)
                .find("Beware: the machine is too noisy to choose well: 5 samples of one "
                      "config range from 2 to 20 ms"),
            std::string::npos)
      << why_chosen(record, target);
}

}  // namespace
}  // namespace flashjit::command
