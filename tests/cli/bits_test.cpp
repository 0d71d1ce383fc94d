// flashjit bits, and the promises of runtime/equal_bits.md on a CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/cli/command_line.hpp"

namespace flashjit::cli_test {
namespace {

using ::testing::HasSubstr;

std::vector<std::string> bits_of(const std::string& spec, const std::vector<std::string>& more = {}) {
  return std::vector<std::string>{"bits", spec, "--heads-q", "4", "--heads-kv", "2", "--json"} + more;
}

TEST(Bits, AreThoseThatBatchInvariantPromises) {
  const CommandLine flashjit;
  const std::string causal = R"("mask": ["causal"], "batch_invariant": true})";
  struct Kind {
    std::string spec;
    std::vector<std::string> options;
    std::vector<std::string> launches;  // some of them
  };
  const std::vector<std::string> cuts = {"batch entry 2 alone", "batch entry 0, rows 70 to 208",
                                         "batch entry 0, rows 209 to 209", "one key/value head", "3 threads"};
  const std::vector<std::string> prompt = {"--seqlen-q", "210", "--seqlen-k", "300"};
  const Kind kinds[] = {
      {R"({"op": "forward", "dtype": "fp32", "head_dim": 16, )" + causal, prompt, cuts},
      {R"({"op": "forward", "dtype": "bf16", "head_dim": 24, "varlen": true, )" + causal, prompt, cuts},
      {R"({"op": "forward", "dtype": "bf16", "head_dim": 16, "paged": true, "varlen": true, )" + causal,
       prompt,
       {"pages of 32 keys, in another order"}},
      {R"({"op": "forward", "dtype": "bf16", "head_dim": 16, "paged": true, "varlen": true, "mask": ["sliding_window", "causal"], "batch_invariant": true})",
       {"--seqlen-q", "30", "--seqlen-k", "200"},
       {"pages of 32 keys, in another order"}},
      {R"({"op": "forward", "dtype": "bf16", "head_dim": 16, "score": ["softcap"], )" + causal, prompt, cuts},
      {R"({"op": "backward", "dtype": "fp32", "head_dim": 16, )" + causal, prompt, cuts},
      {R"({"op": "backward", "dtype": "bf16", "head_dim": 16, "varlen": true, )" + causal, prompt, cuts},
      {R"({"op": "decode", "dtype": "bf16", "head_dim": 16, "paged": true, )" + causal,
       {"--seqlen-q", "9", "--seqlen-k", "3000"},
       {"batch entry 1 alone", "batch entry 0, rows 3 to 7", "one key/value head"}}};
  for (const Kind& kind : kinds) {
    SCOPED_TRACE(kind.spec);
    const Outcome run = flashjit(bits_of(kind.spec, kind.options));
    ASSERT_EQ(run.exit_code, 0) << run.out << run.err;
    std::vector<std::string> found;
    const nlohmann::json json = run.json();
    for (const auto& launch : json["launches"]) {
      EXPECT_EQ(launch["changed"], 0) << launch;
      EXPECT_GT(launch["rows"], 0) << launch;
      found.push_back(launch["launch"]);
    }
    EXPECT_THAT(found, ::testing::IsSupersetOf(kind.launches));
  }
}

// Without the field few rows take another way than many, and threads divide their keys.
TEST(Bits, OfOthersMayChange) {
  const CommandLine flashjit;
  const std::string spec = R"({"op": "forward", "dtype": "fp32", "head_dim": 64, "mask": ["causal"]})";
  const Outcome run = flashjit(bits_of(spec, {"--seqlen-q", "210", "--configs", "0"}));
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const nlohmann::json json = run.json();
  int changed = 0;
  for (const auto& launch : json["launches"]) changed += launch["changed"].get<int>();
  EXPECT_GT(changed, 0) << run.out;
  EXPECT_EQ(json["launches"][0]["changed"], 0);

  const Outcome text = flashjit({"bits", small_spec, "--seqlen-q", "40", "--configs", "1"});
  EXPECT_THAT(text.out, HasSubstr("batch entry 2 alone"));
}

// Without the field rows with other neighbours may change, so that the launches are seen to differ.
TEST(Bits, AreComparedAmongRandomNeighbours) {
  const CommandLine flashjit;
  const auto run_with = [&](const std::string& field) {
    return flashjit(
        bits_of(R"({"op": "forward", "dtype": "fp32", "head_dim": 64, "mask": ["causal"])" + field,
                {"--batch", "5", "--seqlen-q", "120", "--configs", "0", "--random", "40"}));
  };
  for (const bool invariant : {true, false}) {
    SCOPED_TRACE(invariant);
    const Outcome run =
        run_with(std::string(R"(, "varlen": true)") + (invariant ? R"(, "batch_invariant": true})" : "}"));
    ASSERT_EQ(run.exit_code, 0) << run.out << run.err;
    int changed = -1;
    const nlohmann::json json = run.json();
    for (const auto& launch : json["launches"])
      if (launch["launch"].get<std::string>().starts_with("40 random launches: "))
        changed = launch["changed"];
    if (invariant)
      EXPECT_EQ(changed, 0) << run.out;
    else
      EXPECT_GT(changed, 0) << run.out;
  }
  const Outcome padded = run_with("}");
  EXPECT_EQ(padded.exit_code, 3);
  EXPECT_THAT(padded.err + padded.out, HasSubstr("--random takes parts of packed prompts"));
}

TEST(Bits, AreComparedInRandomPages) {
  const CommandLine flashjit;
  const Outcome run = flashjit(bits_of(
      R"({"op": "forward", "dtype": "bf16", "head_dim": 16, "mask": ["causal"], "varlen": true, "paged": true, "batch_invariant": true})",
      {"--batch", "5", "--seqlen-q", "40", "--seqlen-k", "120", "--configs", "0", "--random", "12"}));
  ASSERT_EQ(run.exit_code, 0) << run.out << run.err;
  EXPECT_THAT(run.out, HasSubstr(" launches in other pages"));
  EXPECT_THAT(run.out, ::testing::Not(HasSubstr(", 0 launches in other pages")));
}

// A prefill has the bits of a decode by the forward of one row. Without the field few rows take another way.
TEST(Bits, OfAPrefillAreThoseOfDecodedRows) {
  const CommandLine flashjit;
  struct Kind {
    std::string fields;
    bool invariant;
  };
  const std::string plain = R"("dtype": "fp32", "head_dim": 64)",
                    pages = R"("dtype": "bf16", "head_dim": 16, "varlen": true, "paged": true)";
  for (const Kind& kind : {Kind{plain, true}, {pages, true}, {plain, false}}) {
    SCOPED_TRACE(kind.fields);
    const Outcome run =
        flashjit(bits_of(R"({"op": "forward", "mask": ["causal"], )" + kind.fields +
                             (kind.invariant ? R"(, "batch_invariant": true})" : "}"),
                         {"--seqlen-q", "60", "--seqlen-k", "2000", "--configs", "0", "--decode", "10"}));
    ASSERT_EQ(run.exit_code, 0) << run.out << run.err;
    const nlohmann::json json = run.json();
    int rows = 0, changed = 0;
    for (const auto& launch : json["launches"])
      if (launch["launch"] == "the last rows one by one") rows = launch["rows"], changed = launch["changed"];
    // No row twice; a packed sequence may have fewer.
    EXPECT_GT(rows, 4 * 10) << run.out;
    EXPECT_LE(rows, 3 * 4 * 10) << run.out;
    EXPECT_EQ(changed > 0, !kind.invariant) << run.out;
  }
  const Outcome full = flashjit(
      bits_of(R"({"op": "forward", "dtype": "bf16", "head_dim": 16})", {"--seqlen-q", "9", "--decode", "2"}));
  EXPECT_EQ(full.exit_code, 3);
  EXPECT_THAT(full.err + full.out, HasSubstr("--decode launches rows of a prompt one by one"));
}

TEST(Bits, SayWhatTheyDoNotTry) {
  const CommandLine flashjit;
  const Outcome run = flashjit(bits_of(
      R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "dropout": true, "batch_invariant": true})",
      {"--seqlen-q", "40"}));
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(run.json()["not_in_parts"], "dropout goes by batch entry, head and row");
  const Outcome merge = flashjit({"bits", R"({"op": "merge", "dtype": "bf16", "head_dim": 64})"});
  EXPECT_NE(merge.exit_code, 0);
  EXPECT_THAT(merge.err, HasSubstr("op forward, backward or decode would work"));
}

}  // namespace
}  // namespace flashjit::cli_test
