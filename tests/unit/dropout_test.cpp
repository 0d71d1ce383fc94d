// Dropout's bit function: published answers of its generator, golden vectors
// that fix it for good, and whether the drops look random along every axis.
#include "runtime/dropout.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <iostream>
#include <limits>
#include <string>
#include <vector>

#include "expect_error.h"
#include "shared/dropout.h"

namespace flashjit {
namespace {

using device::u32;

u32 value(std::uint64_t seed, std::uint64_t offset, int batch, int head, int row, int key) {
  const device::Words words = device::dropout_key(seed, offset);
  const device::RowWords of_row = device::dropout_row_words(words, row, head, batch);
  return of_row.multiplier * device::dropout_column_words(words, key / 4, batch).x[key % 4] + of_row.addend;
}

TEST(Dropout, PhiloxKnownAnswers) {  // from the authors' Random123, ten rounds
  const auto expect = [](u32 key0, u32 key1, device::Words counter, std::array<u32, 4> answer) {
    const device::Words words = device::philox(key0, key1, counter);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(words.x[i], answer[i]) << i;
  };
  constexpr u32 ones = 0xffffffff;
  expect(0, 0, {{0, 0, 0, 0}}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  expect(ones, ones, {{ones, ones, ones, ones}}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  expect(0xa4093822, 0x299f31d0, {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

// These must never change: training that continues with another version must drop the same weights.
TEST(Dropout, GoldenVectors) {
  struct Golden {
    std::uint64_t seed, offset;
    int batch, head, row, key;
    u32 value;
  };
  constexpr Golden goldens[] = {
      {0x0, 0x0, 0, 0, 0, 0, 0x68fa9ce1},
      {0x0, 0x0, 0, 0, 0, 1, 0xd89d8df4},
      {0x0, 0x0, 0, 0, 0, 3, 0x3c31978d},
      {0x0, 0x0, 0, 0, 1, 0, 0x4202e9a2},
      {0x0, 0x0, 0, 1, 0, 0, 0xd64e5e08},
      {0x0, 0x0, 1, 0, 0, 0, 0xf4df9446},
      {0x1, 0x0, 0, 0, 0, 0, 0x27046e1b},
      {0x0, 0x1, 0, 0, 0, 0, 0x91ca124b},
      {0x100000000, 0x0, 0, 0, 0, 0, 0xd6985346},
      {0x0, 0x100000000, 0, 0, 0, 0, 0xba722562},
      {0x2a, 0x7, 3, 31, 8191, 8190, 0x39b317fc},
      {0x123456789abcdef, 0xfedcba9876543210, 17, 5, 1000, 4097, 0xe5326550},
      {0xffffffffffffffff, 0xffffffffffffffff, 65535, 127, 2147483646, 2147483646, 0xc7edc627},
      {0x1352901, 0x3, 0, 2, 63, 64, 0x1bb94d33},
  };
  for (const Golden& g : goldens) {
    EXPECT_EQ(value(g.seed, g.offset, g.batch, g.head, g.row, g.key), g.value);
    if (g.key > 10000) continue;
    // The public function, with thresholds just below and just above this value.
    std::vector<std::uint8_t> keep(static_cast<std::size_t>(g.key) + 1);
    const auto is_kept = [&](double threshold) {
      dropout_row({.p = threshold * 0x1p-32, .seed = g.seed, .offset = g.offset}, g.batch, g.head, g.row,
                  keep);
      return keep.back() == 1;
    };
    EXPECT_TRUE(is_kept(g.value));
    EXPECT_FALSE(is_kept(g.value + 1.0));
  }
}

TEST(Dropout, ProbabilitiesAreRoundedTo32Bits) {
  EXPECT_EQ(dropout_threshold(0), 0u);
  EXPECT_EQ(dropout_threshold(0x1p-33 * 0.99), 0u);
  EXPECT_EQ(dropout_threshold(0.5), 1u << 31);
  EXPECT_EQ(dropout_threshold(0.1), 429496730u);
  EXPECT_EQ(dropout_threshold(1 - 0x1p-32), 0xffffffffu);
  EXPECT_EQ(dropout_threshold(1 - 0x1p-40), std::uint64_t{1} << 32);
  EXPECT_EQ(dropout_threshold(1), std::uint64_t{1} << 32);
  EXPECT_EQ(dropout_scale(0), 1.0);
  EXPECT_EQ(dropout_scale(0.5), 2.0);
  EXPECT_EQ(dropout_scale(0.1), 0x1p32 / (0x1p32 - 429496730));
  EXPECT_EQ(dropout_scale(1 - 0x1p-32), 0x1p32);
  EXPECT_EQ(dropout_scale(1), 0.0);
}

TEST(Dropout, MaskIsItsRows) {
  const Shape shape{.batch = 2, .seqlen_q = 3, .seqlen_k = 7, .num_heads_q = 4};
  const Dropout dropout{.p = 0.4, .seed = 5, .offset = 6};
  std::vector<std::uint8_t> mask(dropout_mask_size(shape)), row(7);
  ASSERT_EQ(mask.size(), 2u * 4 * 3 * 7);
  dropout_mask(dropout, shape, mask);
  for (int i = 0; i < 2 * 4 * 3; ++i) {
    dropout_row(dropout, i / 12, i / 3 % 4, i % 3, row);
    EXPECT_TRUE(std::equal(row.begin(), row.end(), mask.begin() + i * 7)) << i;
  }
  dropout_mask({.p = 0}, shape, mask);
  EXPECT_EQ(std::count(mask.begin(), mask.end(), 1), std::ssize(mask));
  dropout_mask({.p = 1}, shape, mask);
  EXPECT_EQ(std::count(mask.begin(), mask.end(), 0), std::ssize(mask));
}

TEST(Dropout, BadInput) {
  std::vector<std::uint8_t> keep(8);
  for (const double p :
       {-0.001, 1.001, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    expect_error(ErrorCode::invalid_argument, {"dropout_p", "between 0 and 1"},
                 [&] { dropout_threshold(p); });
    expect_error(ErrorCode::invalid_argument, {"dropout_p"}, [&] { dropout_row({.p = p}, 0, 0, 0, keep); });
    expect_error(ErrorCode::invalid_argument, {"dropout_p"}, [&] { dropout_scale(p); });
  }
  expect_error(ErrorCode::invalid_argument, {"dropout_p is -1e-09"}, [] { dropout_threshold(-1e-9); });
  expect_error(ErrorCode::invalid_argument, {"keep has 8 elements", "6"},
               [&] { dropout_mask({}, {.seqlen_q = 2, .seqlen_k = 3}, keep); });
  expect_error(ErrorCode::invalid_argument, {"-2"}, [] { dropout_mask_size({.batch = -2}); });
}

// ---- statistics ----
// Seeds are fixed, so results do not vary. Limits are five standard deviations of independent elements.

constexpr std::uint64_t seeds[] = {1, 0x9e3779b97f4a7c15, 20261121};
constexpr int rows = 256, keys = 512;
constexpr double limit = 5;

using Mask = std::vector<std::uint8_t>;  // [rows][keys]

Mask mask_of(const Dropout& dropout, int batch = 0, int head = 0, int first_row = 0) {
  Mask mask(static_cast<std::size_t>(rows) * keys);
  for (int row = 0; row < rows; ++row)
    dropout_row(dropout, batch, head, first_row + row,
                std::span(mask).subspan(static_cast<std::size_t>(row) * keys, keys));
  return mask;
}

// Converts a kept flag to a value with mean 0 and variance 1.
struct Standard {
  double p;
  double operator()(std::uint8_t kept) const { return (kept - (1 - p)) / std::sqrt(p * (1 - p)); }
};

void expect_small(double sum, double terms, const std::string& what) {
  EXPECT_LT(std::abs(sum) / std::sqrt(terms), limit) << what;
}

// Expects that elements at the same place in two masks are independent.
void expect_independent(const Mask& a, const Mask& b, double p, const std::string& what) {
  const Standard standard{p};
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += standard(a[i]) * standard(b[i]);
  expect_small(sum, static_cast<double>(a.size()), what);
}

template <class Body>
void for_each_seed_and_p(Body&& body) {
  for (const std::uint64_t seed : seeds) {
    for (const double p : {0.01, 0.1, 0.5, 0.9}) {
      const std::string name = "seed " + std::to_string(seed) + ", p " + std::to_string(p);
      SCOPED_TRACE(name);
      body(Dropout{.p = p, .seed = seed, .offset = 3});
    }
    std::cout << "seed " << seed << std::endl;
  }
}

TEST(DropoutStatistics, RatesOfAllOfRowsAndOfColumns) {
  for_each_seed_and_p([](const Dropout& dropout) {
    const Standard standard{dropout.p};
    const Mask mask = mask_of(dropout);
    double all = 0;
    std::vector<double> of_row(rows), of_key(keys);
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < keys; ++j) {
        const double x = standard(mask[static_cast<std::size_t>(i) * keys + j]);
        all += x, of_row[i] += x, of_key[j] += x;
      }
    }
    expect_small(all, double{rows} * keys, "rate");
    // Chi-square with one degree of freedom for each sum: mean n, variance 2 n.
    const auto expect_alike = [](const std::vector<double>& sums, double terms, const char* what) {
      double chi = 0;
      for (const double sum : sums) chi += sum * sum / terms - 1;
      expect_small(chi, 2 * static_cast<double>(sums.size()), what);
    };
    expect_alike(of_row, keys, "rates of rows");
    expect_alike(of_key, rows, "rates of columns");
  });
}

TEST(DropoutStatistics, NeighboursWithinAMask) {
  for_each_seed_and_p([](const Dropout& dropout) {
    const Standard standard{dropout.p};
    const Mask mask = mask_of(dropout);
    for (const auto& [down, right] : {std::pair{0, 1},
                                      {0, 2},
                                      {0, 3},
                                      {0, 4},
                                      {0, 8},
                                      {0, 64},
                                      {1, 0},
                                      {8, 0},
                                      {16, 0},
                                      {64, 0},
                                      {1, 1},
                                      {1, 4}}) {
      double pairs = 0, rectangles = 0, terms = 0;
      for (int i = 0; i + down < rows; ++i) {
        for (int j = 0; j + right < keys; ++j) {
          const auto at = [&](int row, int key) {
            return standard(mask[static_cast<std::size_t>(row) * keys + key]);
          };
          pairs += at(i, j) * at(i + down, j + right);
          rectangles += at(i, j) * at(i + down, j + right) * at(i + down, j) * at(i, j + right);
          ++terms;
        }
      }
      const std::string what = std::to_string(down) + " down, " + std::to_string(right) + " right";
      expect_small(pairs, terms, what);
      if (down && right) expect_small(rectangles, terms, "rectangle " + what);
    }
  });
}

TEST(DropoutStatistics, MasksOfOtherHeadsBatchesSeedsAndOffsets) {
  for_each_seed_and_p([](const Dropout& dropout) {
    const Mask mask = mask_of(dropout);
    const auto expect = [&](const Mask& other, const char* what) {
      expect_independent(mask, other, dropout.p, what);
    };
    for (const int n : {1, 2, 31}) {
      expect(mask_of(dropout, 0, n), "head");
      expect(mask_of(dropout, n, 0), "batch");
      expect(mask_of(dropout, n, n), "head and batch");
      expect(mask_of(dropout, 0, 0, n), "row");
    }
    for (const std::uint64_t change : {std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{1} << 31,
                                       std::uint64_t{1} << 32, std::uint64_t{1} << 63}) {
      Dropout other = dropout;
      other.seed ^= change;
      expect(mask_of(other), "seed");
      other = dropout;
      other.offset ^= change;
      expect(mask_of(other), "offset");
    }
  });
}

// The values' first, middle and last bytes are uniform, not only the bits that a usual p looks at.
TEST(DropoutStatistics, ValuesAreUniform) {
  for (const std::uint64_t seed : seeds) {
    const device::Words philox_key = device::dropout_key(seed, 0);
    for (const int shift : {0, 12, 24}) {
      std::array<double, 256> counts{};
      for (int row = 0; row < rows; ++row) {
        const device::RowWords words = device::dropout_row_words(philox_key, row, 1, 0);
        for (int quad = 0; quad < keys / 4; ++quad) {
          const device::Words columns = device::dropout_column_words(philox_key, quad, 0);
          for (const u32 b : columns.x) ++counts[(words.multiplier * b + words.addend) >> shift & 0xff];
        }
      }
      double chi = 0;
      constexpr double expected = double{rows} * keys / 256;
      for (const double count : counts) chi += (count - expected) * (count - expected) / expected - 1;
      expect_small(chi, 2 * 255, "byte at " + std::to_string(shift) + ", seed " + std::to_string(seed));
    }
  }
}

}  // namespace
}  // namespace flashjit
