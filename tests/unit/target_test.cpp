#include "codegen/base/target.hpp"

#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "expect_error.h"

namespace flashjit {
namespace {

TEST(Target, ParsesWhatItPrints) {
  std::set<std::string> names;
  for (const Target& target : Target::all()) {
    EXPECT_EQ(Target::parse(target.str()), target);
    names.insert(target.str());
  }
  EXPECT_EQ(names, (std::set<std::string>{"sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120",
                                          "x86-64-v3", "x86-64-v4", "x86-64-v4+amx", "x86-64-v4+bf16"}));
}

TEST(Target, Limits) {
  const std::pair<const char*, int> kilobytes[] = {{"sm_80", 163}, {"sm_86", 99},   {"sm_89", 99},
                                                   {"sm_90", 227}, {"sm_90a", 227}, {"sm_100", 227},
                                                   {"sm_120", 99}};
  for (const auto& [name, limit] : kilobytes)
    EXPECT_EQ(Target::parse(name).max_shared_memory(), limit * 1024) << name;
  EXPECT_EQ(Target::parse("x86-64-v3").vector_bytes(), 32);
  EXPECT_EQ(Target::parse("x86-64-v4").vector_bytes(), 64);
}

TEST(Target, ForComputeCapability) {
  const std::pair<std::pair<int, int>, const char*> best[] = {
      {{8, 0}, "sm_80"},  {{8, 6}, "sm_86"},   {{8, 7}, "sm_86"},   {{8, 8}, "sm_86"},   {{8, 9}, "sm_89"},
      {{9, 0}, "sm_90a"}, {{10, 0}, "sm_100"}, {{10, 3}, "sm_100"}, {{12, 0}, "sm_120"}, {{12, 1}, "sm_120"}};
  for (const auto& [version, name] : best) {
    EXPECT_EQ(Target::for_compute_capability(version.first, version.second).str(), name);
  }
  EXPECT_TRUE(Target::parse("sm_90").runs_on(9, 0));
  EXPECT_TRUE(Target::parse("sm_90a").runs_on(9, 0));
  EXPECT_FALSE(Target::parse("sm_90a").runs_on(9, 1));
  EXPECT_FALSE(Target::parse("sm_90a").runs_on(10, 0));
  EXPECT_FALSE(Target::parse("x86-64-v3").runs_on(8, 0));
  expect_error(ErrorCode::target_unavailable, {"7.5", "older than 8.0"},
               [] { Target::for_compute_capability(7, 5); });
  expect_error(ErrorCode::target_unavailable, {"11.0", "10.x and 12.x"},
               [] { Target::for_compute_capability(11, 0); });
  expect_error(ErrorCode::target_unavailable, {"20.0"}, [] { Target::for_compute_capability(20, 0); });
}

TEST(Target, CpusRunOlderCode) {
  const Target v3 = Target::parse("x86-64-v3"), v4 = Target::parse("x86-64-v4"),
               amx = Target::parse("x86-64-v4+amx"), bf16 = Target::parse("x86-64-v4+bf16");
  EXPECT_TRUE(v3.runs(v3) && v4.runs(v3) && amx.runs(v3) && amx.runs(v4) && amx.runs(amx));
  EXPECT_FALSE(v3.runs(v4) || v3.runs(amx) || v4.runs(amx));
  EXPECT_TRUE(bf16.runs(v3) && bf16.runs(v4) && bf16.runs(bf16));
  EXPECT_FALSE(v4.runs(bf16) || amx.runs(bf16) || bf16.runs(amx));
  EXPECT_FALSE(amx.runs(Target::parse("sm_80")) || Target::parse("sm_90").runs(v3));
  EXPECT_EQ(amx.vector_bytes(), 64);
}

TEST(Target, Lesser) {
  const auto lesser = [](const char* name) {
    std::string names;
    for (const Target& target : Target::parse(name).lesser()) names += target.str() + " ";
    return names;
  };
  EXPECT_EQ(lesser("sm_90a"), "sm_90 ");
  EXPECT_EQ(lesser("sm_89"), "sm_86 sm_80 ");
  EXPECT_EQ(lesser("sm_80"), "");
  EXPECT_EQ(lesser("sm_120"), "");
  EXPECT_EQ(lesser("x86-64-v4+amx"), "x86-64-v4 x86-64-v3 ");
  EXPECT_EQ(lesser("x86-64-v4+bf16"), "x86-64-v4 x86-64-v3 ");
  EXPECT_EQ(lesser("x86-64-v4"), "x86-64-v3 ");
  EXPECT_EQ(lesser("x86-64-v3"), "");
}

TEST(Target, UnknownNames) {
  const std::pair<const char*, const char*> meant[] = {{"sm_87", "sm_86?"},
                                                       {"sm_103", "sm_100?"},
                                                       {"sm_121a", "sm_120?"},
                                                       {"sm80", "sm_80?"},
                                                       {"SM_90", "sm_90?"},
                                                       {"x86_64-v3", "x86-64-v3?"},
                                                       {"x86-64-v5", "x86-64-v"},
                                                       {"x86-64-v4-amx", "x86-64-v4+amx?"},
                                                       {"natve", "native"},
                                                       {"cuda", "is not one of"},
                                                       {"", "is not one of"},
                                                       {"sm_", "is not one of"},
                                                       {"sm_99999999999999999999", "is not one of"}};
  for (const auto& [name, suggestion] : meant) {
    const std::string text = name;
    expect_error(ErrorCode::invalid_argument, {name, suggestion}, [&] { Target::parse(text); });
  }
}

TEST(Target, KnownButUnsupported) {
  expect_error(ErrorCode::unsupported, {"x86-64-v2", "x86-64-v3 would work"},
               [] { Target::parse("x86-64-v2"); });
}

TEST(Target, Native) {
  try {
    EXPECT_FALSE(Target::native().is_cuda());
    EXPECT_EQ(Target::parse("native"), Target::native());
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::target_unavailable);
    GTEST_SKIP() << error.what();
  }
}

}  // namespace
}  // namespace flashjit
