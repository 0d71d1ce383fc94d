// run --verify on the user's own tensors with NaN and infinity.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <limits>

#include "tests/cli/command_line.hpp"

namespace flashjit::cli_test {
namespace {

using ::testing::HasSubstr;

// Changes the last element of an fp32 .npy file.
void overwrite_last_float(const std::string& path, float value) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(-static_cast<std::streamoff>(sizeof value), std::ios::end);
  file.write(reinterpret_cast<const char*>(&value), sizeof value);
}

// V holds a NaN. A row that sees it is NaN. A row in which
// it is dropped, or has next to no weight, cannot be judged.
TEST(Verification, SaysWhatItCannotTell) {
  const CommandLine flashjit;
  const std::string in = flashjit.folder() + "/in";
  const std::string spec = R"({"op": "forward", "dtype": "fp32", "head_dim": 8, "dropout": true})";
  ASSERT_EQ(flashjit({"generate", spec, "--out", in, "--seqlen-q", "8", "--heads-q", "1"}).exit_code, 0);
  const auto with = [&](const std::vector<std::string>& dropout_p) {
    std::vector<std::string> arguments = {"run", spec,          "--verify", "--q",         in + "/q.npy",
                                          "--k", in + "/k.npy", "--v",      in + "/v.npy", "--dropout-p"};
    arguments.insert(arguments.end(), dropout_p.begin(), dropout_p.end());
    return arguments;
  };
  EXPECT_EQ(flashjit(with({"0.5"})).exit_code, 0);
  overwrite_last_float(in + "/v.npy", std::numeric_limits<float>::quiet_NaN());
  EXPECT_EQ(flashjit(with({"0"})).exit_code, 0) << "a NaN that all rows see";

  const Outcome text = flashjit(with({"0.5"}));
  EXPECT_EQ(text.exit_code, 21);
  EXPECT_THAT(text.out, HasSubstr("CANNOT TELL"));
  EXPECT_THAT(text.err, HasSubstr("elements that cannot be told"));
  const Outcome outcome = flashjit(with({"0.5", "--json"}));
  EXPECT_EQ(outcome.exit_code, 21);
  const nlohmann::json json = nlohmann::json::parse(outcome.out);
  EXPECT_FALSE(json["ok"].get<bool>());
  EXPECT_EQ(json["verification"]["verdict"], "undecided");
  EXPECT_EQ(json["verification"]["wrong"], 0);
  EXPECT_GT(json["verification"]["undecided"].get<int>(), 0);
}

// With a score of +infinity the row's o and lse are NaN.
TEST(Verification, IsNaNWhereAScoreIsInfinite) {
  const CommandLine flashjit;
  const std::string in = flashjit.folder() + "/in";
  const std::string spec = R"({"op": "forward", "dtype": "fp32", "head_dim": 8, "mask": ["causal"]})";
  ASSERT_EQ(flashjit({"generate", spec, "--out", in, "--seqlen-q", "40", "--heads-q", "1"}).exit_code, 0);
  overwrite_last_float(in + "/q.npy", std::numeric_limits<float>::infinity());
  overwrite_last_float(in + "/k.npy", std::numeric_limits<float>::infinity());
  const nlohmann::json json = flashjit({"run", spec, "--verify", "--json", "--q", in + "/q.npy", "--k",
                                        in + "/k.npy", "--v", in + "/v.npy"})
                                  .json();
  EXPECT_TRUE(json["ok"].get<bool>());
  EXPECT_EQ(json["verification"]["verdict"], "right");
}

}  // namespace
}  // namespace flashjit::cli_test
