// bench --serve answers every line, whatever it says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "tests/cli/command_line.hpp"

namespace flashjit::cli_test {
namespace {

using ::testing::HasSubstr;

std::string request(const std::string& spec, const std::string& shapes, const std::string& more = "") {
  return R"({"spec": )" + spec + R"(, "shapes": [)" + shapes + "]" + more + "}\n";
}

std::vector<nlohmann::json> serve(const CommandLine& flashjit, const std::string& requests,
                                  std::vector<std::string> options = {}) {
  options.insert(options.begin(), {"bench", "--serve", "--num-threads", "1", "--rounds", "2"});
  const Outcome outcome = flashjit(options, requests);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  std::vector<nlohmann::json> answers;
  std::istringstream lines(outcome.out);
  for (std::string line; std::getline(lines, line);)
    answers.push_back(nlohmann::json::parse(line, nullptr, false));
  return answers;
}

TEST(BenchServe, AnswersEveryRequestByALine) {
  const CommandLine flashjit;
  const std::string one = request(small_spec, R"({"seqlen_q": 32, "num_heads_q": 2})");
  const std::string two = request(
      small_spec, R"({"batch": 2, "seqlen_q": 16, "seqlen_k": 48}, {"seqlen_q": 64})", R"(, "rounds": 3)");
  const std::vector<nlohmann::json> answers = serve(flashjit, one + two + one);
  ASSERT_EQ(answers.size(), 3u);
  EXPECT_EQ(answers[0]["rows"].size(), 1u);
  ASSERT_EQ(answers[1]["rows"].size(), 2u);
  for (const nlohmann::json& answer : answers) {
    EXPECT_TRUE(answer["model"].is_string());
    EXPECT_TRUE(answer["target"].is_string());
    for (const nlohmann::json& row : answer["rows"]) {
      EXPECT_EQ(row["spec"]["head_dim"], 16);
      EXPECT_GT(row["ms"].get<double>(), 0);
      EXPECT_GT(row["tflops"].get<double>(), 0);
    }
  }
  const nlohmann::json& row = answers[1]["rows"][0];
  EXPECT_EQ(row["batch"], 2);
  EXPECT_EQ(row["seqlen_q"], 16);
  EXPECT_EQ(row["seqlen_k"], 48);
  EXPECT_EQ(answers[0]["rows"][0]["heads_q"], 2);
  EXPECT_EQ(answers[2]["rows"][0]["config"], answers[0]["rows"][0]["config"]);
}

TEST(BenchServe, LengthsOfACache) {
  const CommandLine flashjit;
  const auto paged = [](const std::string& lengths) {
    return request(R"({"op": "decode", "dtype": "fp32", "head_dim": 16, "paged": true})",
                   R"({"seqlen_q": 1, "num_heads_q": 2, "page_size": 8})", R"(, "lengths_k": )" + lengths);
  };
  const std::vector<nlohmann::json> answers =
      serve(flashjit, paged("[3, 40]") + paged("[]") + paged("[3, -1]") + paged("3"));
  ASSERT_EQ(answers.size(), 4u);
  const nlohmann::json& row = answers[0]["rows"][0];
  EXPECT_EQ(row["batch"], 2);
  EXPECT_EQ(row["seqlen_k"], 40);
  EXPECT_NEAR(row["decoded_gb_per_s"].get<double>() * row["ms"].get<double>() * 1e6, 43 * 2 * 128, 1);
  for (int i = 1; i < 4; ++i) {
    const auto message = answers[static_cast<std::size_t>(i)]["error"]["message"].get<std::string>();
    EXPECT_THAT(message, HasSubstr("lengths_k is not a list"));
  }
}

TEST(BenchServe, GoesOnAfterAnError) {
  const CommandLine flashjit;
  const std::string shape = R"({"seqlen_q": 16})";
  const std::pair<std::string, std::string> wrong[] = {
      {"nonsense\n", "JSON"},
      {"\n", "JSON"},
      {"[]\n", "not an object"},
      {R"({"shapes": [{"seqlen_q": 16}]})"
       "\n",
       "spec"},
      {"{\"spec\": " + small_spec + "}\n", "no shapes"},
      {request(small_spec, R"({"seqlen": 16})"), "seqlen_q"},
      {request(R"({"op": "forward", "dtype": "fp32"})", shape), "head_dim"},
      {request(small_spec, shape, R"(, "rounds": 0)"), "rounds"},
      {request(small_spec, shape, R"(, "rounds": "many")"), "rounds"},
      {request(small_spec, shape, R"(, "samples": 5)"), "samples"}};
  std::string requests;
  for (const auto& [line, word] : wrong) requests += line + line + request(small_spec, shape);
  const std::vector<nlohmann::json> answers = serve(flashjit, requests);
  ASSERT_EQ(answers.size(), 3 * std::size(wrong));
  for (std::size_t i = 0; i < std::size(wrong); ++i) {
    for (const nlohmann::json& answer : {answers[3 * i], answers[3 * i + 1]}) {
      const nlohmann::json error = answer.value("error", nlohmann::json::object());
      EXPECT_THAT(error.value("message", ""), HasSubstr(wrong[i].second)) << wrong[i].first;
      EXPECT_GT(error.value("exit_code", 0), 0) << wrong[i].first;
    }
    EXPECT_EQ(answers[3 * i + 2]["rows"].size(), 1u) << "after " << wrong[i].first;
  }
}

TEST(BenchServe, MasksAndDropoutAreThoseOfTheCommandLine) {
  const CommandLine flashjit;
  const std::string window =
      R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "mask": ["sliding_window"], "dropout": true})";
  const std::string requests =
      request(window, R"({"seqlen_q": 64})") + request(small_spec, R"({"seqlen_q": 64})");
  const auto work = [](const nlohmann::json& answer) {
    const nlohmann::json& row = answer["rows"].at(0);
    return row["tflops"].get<double>() * row["ms"].get<double>() * 1e9;
  };
  // Each pair of row and key takes 2 * (16 + 16) operations.
  const std::vector<nlohmann::json> narrow =
      serve(flashjit, requests, {"--window-left", "0", "--dropout-p", "0.5"});
  ASSERT_EQ(narrow.size(), 2u);
  EXPECT_NEAR(work(narrow[0]), 64 * 64, 1);
  EXPECT_THAT(narrow[1]["error"]["message"].get<std::string>(), HasSubstr("dropout")) << "its spec has none";
  EXPECT_THAT(serve(flashjit, requests, {"--dropout-p", "2"}).at(0)["error"].value("message", ""),
              HasSubstr("dropout_p"));
}

TEST(BenchServe, OnAGpu) {
  const CommandLine flashjit;
  const std::vector<std::string> on_gpu = {"bench", "--serve", "--device", "cuda:0"};
  if (flashjit(on_gpu).exit_code != 0) GTEST_SKIP() << flashjit(on_gpu).err;
  const std::string spec = R"({"op": "forward", "dtype": "bf16", "head_dim": 64})";
  const std::vector<nlohmann::json> answers =
      serve(flashjit,
            request(spec, R"({"seqlen_q": 512}, {"batch": 0, "seqlen_q": 1})") +
                request(spec, R"({"batch": 4, "seqlen_q": 2048, "num_heads_q": 8})"),
            {"--device", "cuda:0"});
  ASSERT_EQ(answers.size(), 2u);
  EXPECT_TRUE(answers[0].contains("error")) << "no batch";
  EXPECT_GT(answers[1]["rows"].at(0)["ms"].get<double>(), 0);
}

TEST(BenchServe, TakesNoSpecFromTheCommandLine) {
  const CommandLine flashjit;
  for (const std::vector<std::string>& more :
       {std::vector<std::string>{small_spec}, {"--seqlens", "16"}, {"--configs", "all"}, {"--compile"}}) {
    std::vector<std::string> arguments = {"bench", "--serve"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Outcome outcome = flashjit(arguments);
    EXPECT_EQ(outcome.exit_code, 64) << more.front();
    EXPECT_EQ(outcome.out, "");
  }
  EXPECT_THAT(flashjit({"bench"}).err, HasSubstr("SPEC"));
  EXPECT_EQ(flashjit({"bench"}).exit_code, 64);
  EXPECT_EQ(flashjit({"bench", "--serve", "--target", "sm_90", "--device", "cpu"}).exit_code, 4);
}

}  // namespace
}  // namespace flashjit::cli_test
