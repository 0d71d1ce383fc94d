// A fixture whose tests take a sample of their cases.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "tests/support/sample_seed.hpp"

namespace flashjit::testing_support {

class SampledTest : public testing::Test {
 protected:
  explicit SampledTest(std::uint64_t one_in) : one_in_(one_in) {}

  // Whether the test's next case is in the sample: one of each `one_in` in a row, and each with
  // FLASHJIT_TEST_ALL=1. The seed decides which one, anew for the next ones: loops of tests have periods.
  bool has_turn() {
    const std::uint64_t place = cases_++;
    const testing::TestInfo* const test = testing::UnitTest::GetInstance()->current_test_info();
    const std::string name = std::string(test->test_suite_name()) + "." + test->name();
    const bool has = test_all() || place % one_in_ == drawn(name, place / one_in_, one_in_);
    taken_ += has;
    return has;
  }

  void TearDown() override {
    if (cases_ > 0 && taken_ == 0)
      GTEST_SKIP() << "the seed draws none of " << cases_ << " cases; FLASHJIT_TEST_ALL=1 takes all";
  }

 private:
  const std::uint64_t one_in_;
  std::uint64_t cases_ = 0, taken_ = 0;
};

}  // namespace flashjit::testing_support
