// Sums whose bits do not depend on the order of their terms.
#include "shared/exact_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace flashjit::device {
namespace {

struct Sum {
  i64 words[exact_sum_words] = {};
  void add(float term) {
    const bool finite = add_to_digits(term, [&](int word, i64 amount) { words[word] += amount; });
    if (!finite)
      words[0] = __builtin_bit_cast(u32, __builtin_bit_cast(float, static_cast<u32>(words[0])) + term);
  }
};
float sum_of(const std::vector<float>& terms) {
  Sum sum;
  for (const float term : terms) sum.add(term);
  return exact_sum(sum.words);
}

TEST(ExactSum, OfOneTermIsTheTerm) {
  std::mt19937 random(1);
  for (int i = 0; i < 100000; ++i) {
    const float term = __builtin_bit_cast(float, static_cast<u32>(random()));
    if (std::isnan(term))
      EXPECT_TRUE(std::isnan(sum_of({term})));
    else
      ASSERT_EQ(sum_of({term}), term);
  }
  constexpr float largest = std::numeric_limits<float>::max(), least = 0x1p-149f;
  for (const float term : {0.0f, least, -least, 0x1p-126f, largest, -largest})
    EXPECT_EQ(sum_of({term}), term);
}

TEST(ExactSum, IsExactInAnyOrder) {
  constexpr float largest = std::numeric_limits<float>::max(),
                  infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(sum_of({1e30f, 1.0f, -1e30f}), 1);
  EXPECT_EQ(sum_of({largest, 0x1p-149f, -largest}), 0x1p-149f);
  EXPECT_EQ(sum_of({-0x1p-149f, 1, -1}), -0x1p-149f);
  EXPECT_EQ(sum_of({largest, largest}), infinity);
  EXPECT_EQ(sum_of({largest, largest, -largest}), largest);
  EXPECT_EQ(sum_of({infinity, -largest}), infinity);
  EXPECT_TRUE(std::isnan(sum_of({infinity, -infinity})));
  std::mt19937 random(2);
  for (int repeat = 0; repeat < 50; ++repeat) {
    std::vector<float> terms(1000);
    double exact = 0;  // multiples of 2^-20 below 2^20: float64 holds all sums
    for (float& term : terms) {
      term = std::ldexp(static_cast<float>(static_cast<int>(random() % 65536) - 32768),
                        static_cast<int>(random() % 24) - 20);
      exact += term;
    }
    const float sum = sum_of(terms);
    EXPECT_EQ(sum, static_cast<float>(exact));
    std::shuffle(terms.begin(), terms.end(), random);
    EXPECT_EQ(sum_of(terms), sum);
  }
}

}  // namespace
}  // namespace flashjit::device
