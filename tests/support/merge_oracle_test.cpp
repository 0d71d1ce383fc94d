// Tests the oracle of merging: by hand, against float32 merges in
// several orders, and with planted defects that its bound must catch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numbers>
#include <vector>

#include "tools/verify/element.hpp"
#include "tools/verify/merge_oracle.hpp"
#include "tools/verify/random_tensor.hpp"
#include "tools/verify/report.hpp"

namespace flashjit::merge_test {
namespace {

using namespace verify;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr float log2_e = std::numbers::log2e_v<float>, ln_2 = std::numbers::ln2_v<float>;

// A row of a part, or of the merged result.
struct Partial {
  float lse = -infinity;
  std::vector<float> o;
};

using Parts = std::vector<Partial>;
using MergeRow = std::function<Partial(const Parts&)>;

// Merges two normalised rows into one.
Partial merge_two(const Partial& a, const Partial& b) {
  if (b.lse == -infinity) return a;
  if (a.lse == -infinity) return b;
  const float max = std::max(a.lse, b.lse);
  const float of_a = std::exp2((a.lse - max) * log2_e), of_b = std::exp2((b.lse - max) * log2_e);
  Partial merged{max + std::log2(of_a + of_b) * ln_2, a.o};
  for (std::size_t c = 0; c < a.o.size(); ++c) merged.o[c] = (of_a * a.o[c] + of_b * b.o[c]) / (of_a + of_b);
  return merged;
}

Partial one_after_the_other(const Parts& parts) {
  Partial merged{-infinity, std::vector<float>(parts[0].o.size())};
  for (const Partial& part : parts) merged = merge_two(merged, part);
  return merged;
}

Partial pairs_into_pairs(const Parts& parts) {
  Parts level = parts;
  for (Partial& part : level)
    if (part.lse == -infinity) part.o.assign(part.o.size(), 0.0f);
  for (; level.size() > 1; level.resize((level.size() + 1) / 2)) {
    for (std::size_t i = 0; i < level.size(); i += 2)
      level[i / 2] = i + 1 < level.size() ? merge_two(level[i], level[i + 1]) : level[i];
  }
  return level[0];
}

// The defects that a merge of all parts against their maximum may have.
struct Defect {
  float exponent = 1, first_weight = 1;  // factors on exponents and on the first weight
  bool unguarded = false;                // empty parts are multiplied by 0
  bool by_lse = false;  // weights are exp(l - lse) instead of divided by their sum: this is no defect
};

Partial all_at_once(const Parts& parts, const Defect& defect) {
  Partial merged{-infinity, std::vector<float>(parts[0].o.size())};
  float max = -infinity, sum = 0;
  for (const Partial& part : parts) max = std::max(max, part.lse);
  if (max == -infinity) return merged;
  const auto weight = [&](std::size_t i, float from) {
    return std::exp2((parts[i].lse - from) * log2_e * defect.exponent) * (i == 0 ? defect.first_weight : 1);
  };
  for (std::size_t i = 0; i < parts.size(); ++i) sum += weight(i, max);
  merged.lse = max + std::log2(sum) * ln_2;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].lse == -infinity && !defect.unguarded) continue;
    const float w = defect.by_lse ? weight(i, merged.lse) : weight(i, max) / sum;
    for (std::size_t c = 0; c < merged.o.size(); ++c) merged.o[c] += w * parts[i].o[c];
  }
  return merged;
}

MergeRow with(const Defect& defect) {
  return [=](const Parts& parts) { return all_at_once(parts, defect); };
}

Partial without_the_last(const Parts& parts) {
  return all_at_once({parts.begin(), parts.end() - 1}, {});
}

// Parts, and the result of a float32 merge. Part 1 of every third row is empty and holds NaN.
struct Problem {
  DType parts_dtype, o_dtype;
  int parts, batch = 2, seqlen_q = 9, heads = 2, head_dim_v = 16;
  std::vector<std::byte> parts_o, o;
  std::vector<float> parts_lse, lse;

  Problem(DType of_parts, DType of_o, int n, float lse_scale = 1)
      : parts_dtype(of_parts), o_dtype(of_o), parts(n) {
    const std::size_t rows = static_cast<std::size_t>(batch) * seqlen_q * heads;
    parts_o.resize(n * rows * head_dim_v * size_of(of_parts));
    parts_lse.resize(n * rows);
    o.resize(rows * head_dim_v * size_of(of_o));
    lse.resize(rows);
    const std::int64_t all = n * static_cast<std::int64_t>(rows);
    fill_random(Tensor::contiguous(parts_o.data(), of_parts, {}, {all, head_dim_v}), 1);
    fill_random(Tensor::contiguous(parts_lse.data(), DType::fp32, {}, {1, all}), 2, {.scale = lse_scale});
    if (n > 1)
      for (std::size_t row = 0; row < rows; row += 3) empty_part(1, row);
  }

  std::size_t rows() const { return lse.size(); }
  // `row` counts in the order of lse: [batch, head, row].
  std::int64_t o_row(std::size_t row) const {
    const std::size_t of_batch = static_cast<std::size_t>(heads) * seqlen_q;
    return static_cast<std::int64_t>(
        ((row / of_batch * seqlen_q + row % seqlen_q) * heads + row % of_batch / seqlen_q));
  }
  void set_o(int part, std::size_t row, int c, float value) {
    const std::int64_t at = (part * static_cast<std::int64_t>(rows()) + o_row(row)) * head_dim_v + c;
    store_element(parts_o.data(), parts_dtype, at, value);
  }
  float& part_lse(int part, std::size_t row) { return parts_lse[part * rows() + row]; }
  void empty_part(int part, std::size_t row) {
    part_lse(part, row) = -infinity;
    for (int c = 0; c < head_dim_v; ++c) set_o(part, row, c, nan);
  }

  Partial partial(int part, std::size_t row) const {
    Partial p{parts_lse[part * rows() + row], {}};
    for (int c = 0; c < head_dim_v; ++c) {
      p.o.push_back(static_cast<float>(
          load_element(parts_o.data(), parts_dtype,
                       (part * static_cast<std::int64_t>(rows()) + o_row(row)) * head_dim_v + c)));
    }
    return p;
  }

  Report report_of(const MergeRow& merge) {
    for (std::size_t row = 0; row < rows(); ++row) {
      Parts of_row;
      for (int part = 0; part < parts; ++part) of_row.push_back(partial(part, row));
      const Partial merged = merge(of_row);
      lse[row] = merged.lse;
      for (int c = 0; c < head_dim_v; ++c)
        store_element(o.data(), o_dtype, o_row(row) * head_dim_v + c, merged.o[c]);
    }
    return report();
  }
  Report report(bool with_lse = true, const OracleOptions& options = {}) {
    const std::int64_t n = seqlen_q, h = heads, d = head_dim_v;
    std::optional<Tensor> of_lse;
    if (with_lse) of_lse = Tensor::contiguous(lse.data(), DType::fp32, {}, {batch, h, n});
    return compare(merge_oracle({.parts = parts,
                                 .batch = batch,
                                 .seqlen_q = seqlen_q,
                                 .heads = heads,
                                 .head_dim_v = head_dim_v,
                                 .o = parts_o.data(),
                                 .o_dtype = parts_dtype,
                                 .o_strides = {batch * n * h * d, n * h * d, h * d, d},
                                 .lse = parts_lse.data(),
                                 .lse_strides = {batch * h * n, h * n, n, 1}},
                                Tensor::contiguous(o.data(), o_dtype, {}, {batch, n, h, d}), of_lse,
                                options));
  }
};

// The dtypes of the parts and of o.
class MergeOracle : public testing::TestWithParam<std::pair<DType, DType>> {
 protected:
  Problem problem(int parts, float lse_scale = 1) const {
    return {GetParam().first, GetParam().second, parts, lse_scale};
  }
};

TEST_P(MergeOracle, AcceptsAnyOrderAndGrouping) {
  for (const int parts : {1, 2, 3, 8, 128}) {
    for (const float lse_scale : {0.01f, 1.0f, 30.0f, 1e4f}) {
      Problem of = problem(parts, lse_scale);
      for (const MergeRow& merge : {MergeRow(one_after_the_other), MergeRow(pairs_into_pairs), with({})}) {
        const Report report = of.report_of(merge);
        EXPECT_TRUE(report.ok()) << parts << " parts, lse of " << lse_scale << ": " << report.str();
        EXPECT_EQ(report.rows, 2 * 9 * 2);
      }
      if (lse_scale <= 30) {
        EXPECT_TRUE(of.report_of(with({.by_lse = true})).ok()) << parts;
      }
    }
  }
}

TEST_P(MergeOracle, CatchesAMissingPart) {
  for (const int parts : {2, 8, 128}) {
    Problem of = problem(parts);
    EXPECT_FALSE(of.report_of(without_the_last).ok()) << parts;
    EXPECT_FALSE(of.report(false).ok()) << parts << ", by the output alone";
  }
}

TEST_P(MergeOracle, CatchesAScaleOffByOnePercent) {
  for (const int parts : {2, 8}) {
    for (const Defect& defect : {Defect{.exponent = 1.01f}, Defect{.first_weight = 1.01f}}) {
      Problem of = problem(parts);
      EXPECT_FALSE(of.report_of(with(defect)).ok()) << parts;
      EXPECT_FALSE(of.report(false).ok()) << parts << ", by the output alone";
    }
  }
}

TEST_P(MergeOracle, CatchesAnEmptyPartThatIsNotLeftOut) {
  Problem of = problem(4);
  const Report report = of.report_of(with({.unguarded = true}));
  EXPECT_EQ(report.wrong, 12 * 16);
  EXPECT_EQ(report.of("o").where.substr(0, 11), "o: batch 0,");
}

TEST_P(MergeOracle, AllPartsEmptyAreAnEmptyRow) {
  Problem of = problem(3);
  for (int part = 0; part < 3; ++part) of.empty_part(part, 7);
  EXPECT_TRUE(of.report_of(one_after_the_other).ok());
  EXPECT_EQ(of.lse[7], -infinity);
  of.lse[7] = -1e30f;
  EXPECT_EQ(of.report().wrong, 1);
  of.lse[7] = -infinity;
  store_element(of.o.data(), of.o_dtype, of.o_row(7) * 16 + 3, 1e-4f);
  EXPECT_EQ(of.report().of("o").where, "o: batch 0, row 7, head 0, dim 3");
}

TEST_P(MergeOracle, ALseThatIsNoNumberMakesTheRowNaN) {
  for (const float value : {nan, infinity}) {
    Problem of = problem(3);
    of.report_of(with({}));
    of.part_lse(2, 10) = value;
    EXPECT_EQ(of.report().wrong, 17);
    of.lse[10] = nan;
    for (int c = 0; c < 16; ++c) store_element(of.o.data(), of.o_dtype, of.o_row(10) * 16 + c, nan);
    EXPECT_TRUE(of.report().ok());
  }
}

TEST_P(MergeOracle, NaNAndInfinityOfAPartStayInTheirColumns) {
  Problem of = problem(3);
  of.set_o(0, 10, 5, infinity), of.set_o(2, 10, 6, nan);
  const Report right = of.report_of(with({}));
  EXPECT_TRUE(right.ok()) << right.str();
  store_element(of.o.data(), of.o_dtype, of.o_row(10) * 16 + 5, 0);
  EXPECT_EQ(of.report().wrong, 1);
  of.part_lse(0, 10) = -200;  // its weight may be 0
  of.report_of(with({}));
  store_element(of.o.data(), of.o_dtype, of.o_row(10) * 16 + 5, 0);
  EXPECT_EQ(of.report().wrong, 0);
  EXPECT_EQ(of.report().undecided, 1);
}

// Here float32 has no digit below 1024: the larger lse decides; with equal ones either part may win.
TEST_P(MergeOracle, LseOfTenBillion) {
  Problem of = problem(2);
  for (std::size_t row = 0; row < of.rows(); ++row) {
    of.part_lse(0, row) = 1e10f;
    of.part_lse(1, row) = row % 3 == 0 ? 1e10f : 1.001e10f;
    for (int c = 0; c < 16; ++c) of.set_o(0, row, c, 0), of.set_o(1, row, c, static_cast<float>(c));
  }
  const Report report = of.report_of(with({}));
  EXPECT_TRUE(report.ok()) << report.str();
  const auto wrong = [&](std::size_t row, float value) {
    of.report_of(with({}));
    store_element(of.o.data(), of.o_dtype, of.o_row(row) * 16 + 8, value);
    return of.report().wrong;
  };
  EXPECT_EQ(wrong(1, 8.1f), 1) << "one part leads";
  EXPECT_EQ(wrong(0, 8), 0);
  EXPECT_EQ(wrong(0, 0), 0);
  EXPECT_EQ(wrong(0, 9), 1) << "beyond both parts";
}

TEST_P(MergeOracle, LseThatFloat32HasNotInBaseTwo) {
  Problem of = problem(1);
  of.report_of(with({}));
  of.part_lse(0, 4) = of.lse[4] = 3e38f;
  EXPECT_TRUE(of.report().ok()) << of.report().str();
  of.lse[4] = nan;
  EXPECT_EQ(of.report().verdict(), verify::Verdict::undecided);
  of.part_lse(0, 4) = -3e38f;
  of.lse[4] = -infinity;
  for (int c = 0; c < 16; ++c) store_element(of.o.data(), of.o_dtype, of.o_row(4) * 16 + c, 0);
  EXPECT_EQ(of.report().verdict(), verify::Verdict::undecided);
  of.part_lse(0, 4) = 3e38f;
  EXPECT_EQ(of.report().verdict(), verify::Verdict::wrong);
}

TEST_P(MergeOracle, SampledRows) {
  Problem of = problem(2);
  of.report_of(with({}));
  OracleOptions options;
  options.max_rows = 8;
  EXPECT_EQ(of.report(true, options).rows, 8);
}

// Derives the bound a second time, from the description in merge_oracle.hpp.
// Row 1 of n parts has an lse of 3; half of the parts hold 1.5 and half -0.25.
TEST_P(MergeOracle, BoundOfEqualParts) {
  for (const int n : {2, 6}) {
    Problem of = problem(n);
    for (int part = 0; part < n; ++part)
      of.part_lse(part, 1) = 3, of.set_o(part, 1, 0, part % 2 ? 1.5f : -0.25f);
    of.report_of(with({}));
    const bool exact_dtype = of.o_dtype == DType::fp32;  // other dtypes' steps are larger than the error
    const double lse = 3 + std::log(n), of_sums = (2 * std::sqrt(n) + 4) / 8388608;
    const double e = std::exp(n * (1 / 2097152. + (3 + lse + 1) / 4194304)) - 1 + of_sums;
    const double error = ((1.5 + 0.25) / 2 * e + e * 0.625) / (1 - e);
    const double bound = error + (0.625 + error) / 16777216;
    for (const double share : {-1.05, -0.95, 0.95, 1.05}) {
      if (exact_dtype)
        store_element(of.o.data(), of.o_dtype, of.o_row(1) * 16, static_cast<float>(0.625 + share * bound));
      of.lse[1] = static_cast<float>(lse + share * (std::log(1 + e) + (lse + 1) / 4194304));
      const Report report = of.report();
      EXPECT_EQ(report.wrong, std::abs(share) < 1 ? 0 : exact_dtype ? 2 : 1) << report.str();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Dtypes, MergeOracle,
    testing::Values(std::pair{DType::fp32, DType::fp32}, std::pair{DType::fp32, DType::bf16},
                    std::pair{DType::fp16, DType::fp16}, std::pair{DType::bf16, DType::bf16},
                    std::pair{DType::bf16, DType::fp32}),
    [](const auto& dtypes) {
      return std::string(to_string(dtypes.param.first)) + "_into_" + to_string(dtypes.param.second);
    });

TEST(MergeOracleByHand, TwoParts) {
  const float parts_o[] = {1, 2, 5, 6}, parts_lse[] = {std::log(3.0f), 0};
  Tensor o = Tensor::contiguous(nullptr, DType::fp32, {}, {1, 1, 1, 2});
  Tensor lse = Tensor::contiguous(nullptr, DType::fp32, {}, {1, 1, 1});
  const Oracle oracle =
      merge_oracle({2, 1, 1, 1, 2, parts_o, DType::fp32, {2, 2, 2, 2}, parts_lse, {1, 1, 1, 1}}, o, lse);
  oracle.compute([&](const Expected& expected) {
    if (expected.output == 0) {
      EXPECT_NEAR(expected.values[0], 2, 1e-7);
      EXPECT_NEAR(expected.values[1], 3, 1e-7);
    } else {
      EXPECT_NEAR(expected.values[0], std::log(4.0), 1e-7);
    }
  });
}

}  // namespace
}  // namespace flashjit::merge_test
