// Requests for kernels from anybody.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cache/kernel_key.hpp"
#include "codegen/families/search_space.hpp"
#include "codegen/render.hpp"
#include "runtime/build.hpp"
#include "tools/serve/compile_request.hpp"

namespace flashjit::serve {
namespace {

using ::testing::HasSubstr;

const char* const specs[] = {
    R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "mask": ["causal"]})",
    R"({"op": "forward", "dtype": "bf16", "head_dim": 128, "mask": ["key % 2 == 0"], "score": ["score * 1e-7"]})",
    R"({"op": "decode", "dtype": "bf16", "head_dim": 64, "paged": true})",
    R"({"op": "backward", "dtype": "bf16", "head_dim": 64})",
};

const nlohmann::json& good() {
  static const nlohmann::json request = [] {
    const AttentionSpec spec = AttentionSpec::from_json(specs[0]);
    const Target target = Target::parse("x86-64-v3");
    const KernelConfig config = heuristic_configs(spec, target).front();
    return nlohmann::json::parse(
        compile_request_text(spec, target, config, request_key(spec, render(spec, target, config)).digest()));
  }();
  return request;
}

std::pair<ErrorCode, std::string> refusal(const std::string& text) {
  try {
    parse_compile_request(text);
  } catch (const Error& error) {
    return {error.code(), error.message()};
  }
  return {ErrorCode::internal, "not refused"};
}

TEST(CompileRequest, IsReadAsItIsWritten) {
  for (const char* text : specs)
    for (const char* name : {"x86-64-v4", "sm_90a"}) {
      const AttentionSpec spec = AttentionSpec::from_json(text);
      const Target target = Target::parse(name);
      if (target.is_cuda() && spec.dtype == DType::fp32) continue;
      for (const KernelConfig& config : heuristic_configs(spec, target)) {
        const KernelSource source = render(spec, target, config);
        const CacheKey key = request_key(spec, source);
        const CompileRequest read =
            parse_compile_request(compile_request_text(spec, target, config, key.digest()));
        EXPECT_EQ(read.key, key) << text << name;
        EXPECT_EQ(read.source.text, source.text);
      }
    }
}

TEST(CompileRequest, OfAnotherFlashjitCountsIfItMeansTheSameKernel) {
  nlohmann::json request = good();
  request["version"] = "9.9.9";
  EXPECT_EQ(parse_compile_request(request.dump()).key.digest(), request["request"].get<std::string>());
  request["request"] = std::string(32, '0');
  EXPECT_EQ(refusal(request.dump()).first, ErrorCode::not_prebuilt);
  EXPECT_THAT(refusal(request.dump()).second, HasSubstr("the asker is flashjit \"9.9.9\", this is"));
  request.erase("request");
  EXPECT_EQ(refusal(request.dump()).first, ErrorCode::not_prebuilt);
  request["version"] = good()["version"];
  EXPECT_EQ(parse_compile_request(request.dump()).key.digest(), good()["request"].get<std::string>());
}

TEST(CompileRequest, IsRefusedInWords) {
  const auto with = [](const char* field, const nlohmann::json& value) {
    nlohmann::json request = good();
    request[field] = value;
    return request.dump();
  };
  const auto expect = [](const std::string& text, ErrorCode code, const char* part) {
    const auto [got, message] = refusal(text);
    EXPECT_EQ(got, code) << text;
    EXPECT_THAT(message, HasSubstr(part)) << text;
  };
  const ErrorCode argument = ErrorCode::invalid_argument;
  expect("", argument, "request for a kernel");
  expect("[]", argument, "no object");
  expect(with("verzion", 1), argument, "did you mean version?");
  expect(with("spec", "x"), argument, "no object \"spec\"");
  expect(with("target", 7), argument, "no text \"target\"");
  expect(with("config", nullptr), argument, "no object \"config\"");
  expect(with("config", {{"block_m", -1}}), argument, "config");
  expect(with("config", {{"block_m", 64}}), argument, "lacks a choice");
  expect(with("request", "short"), argument, "no digest");
  expect(with("version", 1), argument, "no text \"version\"");
  expect(with("target", "sm_1"), ErrorCode::invalid_argument, "sm_1");
  expect(with("spec", {{"op", "forward"}, {"dtype", "fp32"}, {"head_dim", 7}}), ErrorCode::invalid_spec,
         "head_dim");
  nlohmann::json config = good()["config"];
  config["block_n"] = 17;
  expect(with("config", config), ErrorCode::invalid_spec, "block_n 17");
  nlohmann::json large = good();
  large["target"] = "sm_80";
  large["spec"]["dtype"] = "bf16";
  large["config"]["block_m"] = large["config"]["block_n"] = 1024;
  expect(large.dump(), ErrorCode::invalid_spec, "does not fit");
  for (const char* choice : {"block_m", "block_n"})
    for (const int value : {0, 1, 2'147'483'647}) {
      config = good()["config"];
      config[choice] = value;
      expect(with("config", config), value == 0 ? argument : ErrorCode::invalid_spec, choice);
    }
  expect(std::string(most_request_bytes + 1, ' '), argument, "bytes");
}

}  // namespace
}  // namespace flashjit::serve
