// Tests every constant of the error bound. The bound is derived here a second time, from
// the descriptions in error_bound.hpp and forward_bound.hpp, with literal numbers. A result
// one step of its dtype beyond the bound is wrong; a result one step within it is right.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numbers>
#include <string>
#include <vector>

#include "runtime/dropout.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/report.hpp"

namespace flashjit::verify {
namespace {

using Real = long double;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

// One query row of one head.
struct Row {
  DType dtype, o_dtype;
  int keys, head_dim, columns;
  float scale = 1;
  double dropout_p = 0;
  bool repeated_scores = false;
  double largest_score = HUGE_VAL;
  std::vector<std::byte> q, k, v, o;
  float lse = 0;

  Row(DType type, int n, int dim, int dim_v)
      : dtype(type), o_dtype(type), keys(n), head_dim(dim), columns(dim_v) {
    q.resize(dim * size_of(type));
    k.resize(static_cast<std::size_t>(n) * dim * size_of(type));
    v.resize(static_cast<std::size_t>(n) * dim_v * size_of(type));
    o.resize(dim_v * size_of(DType::fp32));
  }

  void set_q(int d, double value) { store_element(q.data(), dtype, d, static_cast<float>(value)); }
  void set_k(int key, int d, double value) {
    store_element(k.data(), dtype, key * head_dim + d, static_cast<float>(value));
  }
  void set_v(int key, int c, double value) {
    store_element(v.data(), dtype, key * columns + c, static_cast<float>(value));
  }
  // Sets all columns. Later columns have larger values, so that the
  // bound falls at other places among the numbers of the dtype.
  void set_values(int key, double value) {
    for (int c = 0; c < columns; ++c) set_v(key, c, value * (16 + c) / 16);
  }
  // Sets the scores. The rows of Q and K are otherwise at right angles; their lengths matter only for errors.
  void set_scores(const std::vector<double>& scores, double length_q, double length_k) {
    set_q(0, 1), set_q(1, length_q);
    for (int key = 0; key < keys; ++key) set_k(key, 0, scores[key]), set_k(key, 2, length_k);
  }

  Report report() {
    AttentionSpec spec;
    spec.dtype = dtype;
    spec.dropout = dropout_p > 0;
    AttentionArgs args;
    args.q = Tensor::contiguous(q.data(), dtype, {}, {1, 1, 1, head_dim});
    args.k = Tensor::contiguous(k.data(), dtype, {}, {1, keys, 1, head_dim});
    args.v = Tensor::contiguous(v.data(), dtype, {}, {1, keys, 1, columns});
    args.o = Tensor::contiguous(o.data(), o_dtype, {}, {1, 1, 1, columns});
    args.lse = Tensor::contiguous(&lse, DType::fp32, {}, {1, 1, 1});
    args.softmax_scale = scale;
    if (spec.dropout) args.dropout_p = dropout_p, args.dropout_seed = 5;
    OracleOptions options;
    options.num_threads = 1;
    options.repeated_scores = repeated_scores;
    options.largest_score = largest_score;
    return verify_outputs(spec, args, options);
  }
};

// A row's results and the allowed errors.
struct Allowed {
  std::vector<Real> o, o_bound;
  Real lse, lse_bound;
};

struct Constants {
  Real exp, weight, floor, output, output_floor;
};
Constants constants_of(DType dtype, DType o_dtype) {
  Constants u = {1 / 2097152.L, 0, 0x1p-126L, 1 / 16777216.L, 0x1p-149L};
  if (dtype == DType::bf16) u.exp = 1 / 8192.L, u.weight = 1 / 256.L;
  if (dtype == DType::fp16) u.exp = 1 / 8192.L, u.weight = 1 / 2048.L, u.floor = 1 / 33554432.L;
  if (o_dtype == DType::bf16) u.output = 1 / 256.L, u.output_floor = 0x1p-134L;
  if (o_dtype == DType::fp16) u.output = 1 / 2048.L, u.output_floor = 1 / 33554432.L;
  return u;
}

Real of_sum(int n) {
  return (2 * std::sqrt(Real(n)) + 4) / 8388608;
}

Allowed allowed(const Row& row) {
  const Constants u = constants_of(row.dtype, row.o_dtype);
  const int n = row.keys;
  const auto at = [&](const std::vector<std::byte>& data, int i) -> Real {
    return load_element(data.data(), row.dtype, i);
  };
  std::vector<Real> s(n), p(n), d(n), h(n);
  Real squares_q = 0, top = -HUGE_VALL;
  for (int i = 0; i < row.head_dim; ++i) squares_q += at(row.q, i) * at(row.q, i);
  std::vector<Real> lengths(n);
  for (int j = 0; j < n; ++j) {
    Real squares_k = 0;
    for (int i = 0; i < row.head_dim; ++i) {
      const Real k = at(row.k, j * row.head_dim + i);
      s[j] += row.scale * at(row.q, i) * k;
      squares_k += k * k;
    }
    lengths[j] = row.scale * std::sqrt(squares_q * squares_k);
    top = std::max(top, s[j]);
  }
  Real sum = 0, top_least = -HUGE_VALL, top_most = -HUGE_VALL, least = 0, most = 0, w = 0, floors = 0;
  for (int j = 0; j < n; ++j) {
    d[j] = of_sum(row.head_dim) * lengths[j] + (std::abs(s[j]) + std::abs(top)) / 4194304 + u.exp;
    sum += std::exp(s[j] - top);
    top_least = std::max(top_least, s[j] - d[j]);
    top_most = std::max(top_most, s[j] + d[j]);
  }
  for (int j = 0; j < n; ++j) {
    least += std::exp(s[j] - d[j] - top_least);
    most += std::exp(s[j] + d[j] - top_most);
  }
  for (int j = 0; j < n; ++j) {
    p[j] = std::exp(s[j] - top) / sum;
    w += p[j] * (std::exp(d[j]) - 1 + of_sum(n));
    h[j] = std::min<Real>(1, std::exp(s[j] + d[j] - top_least) / least);
    floors += std::min(h[j], u.floor);
  }
  std::vector<std::uint8_t> keep(n, 1);
  Real factor = 1;
  if (row.dropout_p > 0) {
    dropout_row({.p = row.dropout_p, .seed = 5, .offset = 0}, 0, 0, 0, keep);
    factor = 1 / (1 - row.dropout_p);
  }
  Allowed result;
  result.lse = top + std::log(sum);
  const Real growth = w < 0.25L ? std::log(1 + w) : top_most + std::log(most) - result.lse + of_sum(n);
  result.lse_bound = growth + (std::abs(result.lse) + 1) / 4194304;
  for (int c = 0; c < row.columns; ++c) {
    Real o = 0, magnitude = 0, worst = 0, squares = 0;
    for (int j = 0; j < n; ++j) {
      const Real v = keep[j] ? at(row.v, j * row.columns + c) : 0;
      const Real rounding = std::max(u.weight * p[j], std::min(p[j], u.floor / sum)) * std::abs(v);
      o += p[j] * v;
      magnitude += p[j] * (std::exp(d[j]) - 1 + of_sum(n)) * std::abs(v);
      worst += rounding;
      squares += rounding * rounding;
    }
    Real error = HUGE_VALL;
    if (w < 1)
      error =
          (magnitude + w * std::abs(o)) / (1 - w) + (row.repeated_scores ? worst : 4 * std::sqrt(squares));
    if (!(w < 0.25L)) {
      Real contenders = 0, others = 0;
      for (int j = 0; j < n; ++j) {
        const Real away = std::abs((keep[j] ? at(row.v, j * row.columns + c) : 0) - o);
        if (h[j] >= Real(1) / n) {
          contenders = std::max(contenders, away);
        } else {
          others += (h[j] + std::min(h[j], u.floor)) * away;
        }
      }
      const Real spread = contenders + others;
      error = std::min(error, spread + (2 * of_sum(n) + u.weight + floors) * (spread + std::abs(o)));
    }
    o *= factor;
    error = error * factor + 0x1p-126L * (1 + factor * n / sum);
    result.o.push_back(o);
    result.o_bound.push_back(error + u.output * (std::abs(o) + error) + u.output_floor);
  }
  return result;
}

// The numbers of a dtype in their order; both zeros have one place.
float number_at(DType dtype, std::int64_t place) {
  const std::uint64_t magnitude = static_cast<std::uint64_t>(std::abs(place));
  const float value = dtype == DType::bf16   ? bf16_to_float(static_cast<std::uint16_t>(magnitude))
                      : dtype == DType::fp16 ? fp16_to_float(static_cast<std::uint16_t>(magnitude))
                                             : std::bit_cast<float>(static_cast<std::uint32_t>(magnitude));
  return place < 0 ? -value : value;
}
// The place of the largest number that is not above the limit.
std::int64_t place_below(DType dtype, Real limit) {
  std::int64_t low = -0x7bff, high = 0x7bff;  // the range of fp16
  if (dtype == DType::bf16) low = -0x7f7f, high = 0x7f7f;
  if (dtype == DType::fp32) low = -0x7f7fffff, high = 0x7f7fffff;
  while (low < high) {
    const std::int64_t middle = low + (high - low + 1) / 2;
    if (number_at(dtype, middle) <= limit) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Sets every column and lse as far from the exact results
// as allowed, on either side, and then one step further.
void expect_that_the_bound_is_derived(Row row) {
  const Allowed exact = allowed(row);
  for (const int side : {1, -1}) {
    for (const int beyond : {0, 1}) {
      const auto edge = [&](DType dtype, Real value, Real bound) {
        return number_at(dtype, side * (place_below(dtype, side * value + bound) + beyond));
      };
      for (int c = 0; c < row.columns; ++c)
        store_element(row.o.data(), row.o_dtype, c, edge(row.o_dtype, exact.o[c], exact.o_bound[c]));
      row.lse = static_cast<float>(exact.lse);
      const Report o = row.report();
      EXPECT_EQ(o.wrong, beyond * row.columns) << "o, side " << side << ": " << o.str();
      for (int c = 0; c < row.columns; ++c)
        store_element(row.o.data(), row.o_dtype, c, static_cast<float>(exact.o[c]));
      row.lse = edge(DType::fp32, exact.lse, exact.lse_bound);
      const Report lse = row.report();
      EXPECT_EQ(lse.wrong, beyond) << "lse, side " << side << ": " << lse.str();
    }
  }
}

class BoundOf : public testing::TestWithParam<DType> {
 protected:
  Row row(int keys, int head_dim = 64) const { return {GetParam(), keys, head_dim, 16}; }
};

TEST_P(BoundOf, OneKey) {
  for (const int head_dim : {8, 256}) {
    for (const double score : {0.0, 1.0, -40.0, 1000.0}) {
      Row one = row(1, head_dim);
      one.set_scores({score}, 0, 0);
      one.set_values(0, 1);
      expect_that_the_bound_is_derived(one);
    }
  }
}

// Rounding depends on the output's dtype, not on the inputs'.
TEST_P(BoundOf, AnOutputOfFloat32) {
  for (const int keys : {1, 16}) {
    Row many = row(keys);
    many.o_dtype = DType::fp32;
    for (int key = 0; key < keys; ++key) many.set_values(key, 1 + key % 5);
    expect_that_the_bound_is_derived(many);
  }
}

TEST_P(BoundOf, SumsThatCancel) {
  for (const int keys : {2, 16, 4096}) {
    Row many = row(keys);
    for (int key = 0; key < keys; ++key) many.set_values(key, key % 2 ? 1 : -1);
    expect_that_the_bound_is_derived(many);
    many.repeated_scores = true;
    expect_that_the_bound_is_derived(many);
    many.dropout_p = 0.25;
    expect_that_the_bound_is_derived(many);
    many.repeated_scores = false;
    expect_that_the_bound_is_derived(many);
  }
}

TEST_P(BoundOf, LongRowsAtRightAngles) {
  for (const int head_dim : {8, 64, 256}) {
    Row two = row(3, head_dim);
    two.scale = 0.5;
    two.set_scores({0, 2, -1}, 50, 60);
    two.set_values(0, 1), two.set_values(1, -0.125), two.set_values(2, 3);
    expect_that_the_bound_is_derived(two);
  }
}

TEST_P(BoundOf, WeightsNearTheFloor) {
  for (const double score : {-15.0, -17.0, -18.0, -60.0, -80.0, -87.0}) {
    Row two = row(2);
    two.set_scores({0, score}, 0, 0);
    two.set_values(1, GetParam() == DType::fp16 ? 30000 : 1e37);
    expect_that_the_bound_is_derived(two);
  }
}

TEST_P(BoundOf, TheSmallestNumbers) {
  Row zeros = row(2);
  expect_that_the_bound_is_derived(zeros);
  zeros.dropout_p = 0.5;
  expect_that_the_bound_is_derived(zeros);
}

TEST_P(BoundOf, Dropout) {
  Row many = row(64);
  many.dropout_p = 0.5;
  std::vector<double> scores(64);
  for (int key = 0; key < 64; ++key) {
    scores[key] = key % 7 * 0.5;
    many.set_values(key, 1 + key % 5);
  }
  many.set_scores(scores, 3, 4);
  expect_that_the_bound_is_derived(many);
}

// The lengths make scores' errors about 0.1, 0.4, 1 and 10.
TEST_P(BoundOf, WideRows) {
  for (const double length : {200.0, 400.0, 600.0, 2000.0}) {
    for (const bool equal_values : {false, true}) {
      for (const double dropout_p : {0.0, 0.5}) {
        Row wide = row(64);
        wide.dropout_p = dropout_p;
        std::vector<double> scores(64);
        for (int key = 0; key < 64; ++key) {
          scores[key] = key % 8 ? -key % 8 * 2.0 : 4;
          wide.set_values(key, equal_values ? 1 : key % 9 - 4);
        }
        wide.set_scores(scores, length, length);
        expect_that_the_bound_is_derived(wide);
      }
    }
  }
  Row contenders = row(64);  // the last of them is far off
  std::vector<double> scores(64);
  for (int key = 0; key < 64; ++key)
    scores[key] = -key / 16.0, contenders.set_values(key, key % 2 ? key : -key);
  contenders.set_scores(scores, 500, 500);
  expect_that_the_bound_is_derived(contenders);
  Row floors = row(4096);
  for (int key = 0; key < 4096; ++key) floors.set_values(key, 1);
  floors.set_scores(std::vector<double>(4096, 0.0), 400, 400);
  expect_that_the_bound_is_derived(floors);
}

// float32 products times 1e10 have no digit left below 1, but the largest still decides.
TEST_P(BoundOf, ScoresOfTenBillion) {
  Row leads = row(16);
  leads.scale = 1e10f;
  std::vector<double> scores(16);
  for (int key = 0; key < 16; ++key)
    scores[key] = key == 5 ? 3 : 1 + key * 0.0625, leads.set_values(key, key - 8.5);
  leads.set_scores(scores, 2, 2);
  expect_that_the_bound_is_derived(leads);
  const Allowed decided = allowed(leads);
  for (int c = 0; c < leads.columns; ++c) {
    EXPECT_EQ(decided.o[c], load_element(leads.v.data(), leads.dtype, 5 * leads.columns + c));
    EXPECT_LT(decided.o_bound[c], std::abs(decided.o[c]) / 60) << "as tight as of one key";
  }

  Row two = row(16);
  two.scale = 1e10f;
  scores[6] = 3;
  for (int key = 0; key < 16; ++key) two.set_values(key, key - 8.5);
  two.set_scores(scores, 2, 2);
  expect_that_the_bound_is_derived(two);
  const Allowed between = allowed(two);
  for (int c = 0; c < two.columns; ++c) {
    const double a = load_element(two.v.data(), two.dtype, 5 * two.columns + c),
                 b = load_element(two.v.data(), two.dtype, 6 * two.columns + c);
    EXPECT_LT(between.o_bound[c], 1.1 * std::abs(a - b));
  }
}

// Products beyond float32: the result is still known, and NaN is no wrong answer.
TEST_P(BoundOf, ScoresBeyondFloat32) {
  Row row = this->row(2);
  row.scale = 1e38f;
  row.set_scores({100, -100}, 0, 0);
  row.set_values(0, 2), row.set_values(1, 1);
  for (int c = 0; c < row.columns; ++c) row.set_v(0, c, 2), store_element(row.o.data(), row.o_dtype, c, 2);
  row.lse = infinity;
  EXPECT_EQ(row.report().verdict(), Verdict::right);
  row.lse = nan;
  EXPECT_EQ(row.report().undecided, 1);
  EXPECT_EQ(row.report().verdict(), Verdict::undecided);
  EXPECT_FALSE(row.report().ok());
  row.lse = -infinity;
  EXPECT_EQ(row.report().verdict(), Verdict::wrong);
  row.lse = infinity;
  for (int c = 0; c < row.columns; ++c) store_element(row.o.data(), row.o_dtype, c, nan);
  EXPECT_EQ(row.report().undecided, row.columns);
  store_element(row.o.data(), row.o_dtype, 3, 1);
  const Report report = row.report();
  EXPECT_EQ(report.wrong, 1);
  EXPECT_EQ(report.undecided, row.columns - 1);
  EXPECT_EQ(report.verdict(), Verdict::wrong);
  EXPECT_EQ(report.of("o").where, "o: batch 0, row 0, head 0, dim 3") << "what is wrong comes first";
  EXPECT_THAT(report.str(), testing::HasSubstr("15 elements that cannot be told"));
}

// If float32 has no score of a row above -infinity, the row may count as empty.
TEST_P(BoundOf, ScoresBelowFloat32) {
  Row row = this->row(2);
  row.scale = 1e38f;
  row.set_values(0, 2), row.set_values(1, 2);
  row.lse = -infinity;
  for (const double other : {-200., -1e-3}) {  // float32 holds a score of -1e35
    row.set_scores({-100, other}, 0, 0);
    for (int c = 0; c < row.columns; ++c) store_element(row.o.data(), row.o_dtype, c, 0);
    EXPECT_EQ(row.report().verdict(), other == -200 ? Verdict::undecided : Verdict::wrong);
    store_element(row.o.data(), row.o_dtype, 3, 1);
    EXPECT_EQ(row.report().verdict(), Verdict::wrong);
  }
}

// NaN is excused beyond the scores that the kernel promises to handle, and wrong within them.
TEST_P(BoundOf, ScoresBeyondTheKernels) {
  for (const float scale : {0.99f, 1.01f}) {
    Row row = this->row(1);
    row.scale = scale * static_cast<float>(std::numbers::ln2);
    row.largest_score = 0x1p26;
    row.set_scores({-0x1p13}, 0, 0);
    row.set_q(0, 0x1p13);
    row.set_values(0, 2);
    row.lse = nan;
    for (int c = 0; c < row.columns; ++c) store_element(row.o.data(), row.o_dtype, c, nan);
    EXPECT_EQ(row.report().verdict(), scale > 1 ? Verdict::undecided : Verdict::wrong);
    row.largest_score = HUGE_VAL;
    EXPECT_EQ(row.report().verdict(), Verdict::wrong);
  }
}

TEST_P(BoundOf, NaNWhereTheScoreIsNoNumber) {
  for (const float value : {nan, infinity}) {
    Row row = this->row(3);
    row.set_scores({0, value, 1}, 0, 0);
    EXPECT_EQ(row.report().wrong, row.columns + 1) << "zeros";
    for (int c = 0; c < row.columns; ++c) store_element(row.o.data(), row.o_dtype, c, nan);
    row.lse = nan;
    EXPECT_EQ(row.report().verdict(), Verdict::right);
    row.lse = infinity;
    EXPECT_EQ(row.report().wrong, 1);
  }
}

TEST_P(BoundOf, AScoreOfMinusInfinityWeighsNothing) {
  Row row = this->row(2);
  row.set_scores({0, -infinity}, 0, 0);
  row.set_values(0, 1), row.set_values(1, 7);
  for (int c = 0; c < row.columns; ++c)
    store_element(row.o.data(), row.o_dtype, c, static_cast<float>(load_element(row.v.data(), row.dtype, c)));
  EXPECT_EQ(row.report().verdict(), Verdict::right);
  row.set_v(1, 4, infinity);
  EXPECT_EQ(row.report().undecided, 1) << "V there is to be finite";
  row.set_k(0, 0, -infinity), row.set_v(1, 4, 0);
  for (int c = 0; c < row.columns; ++c) store_element(row.o.data(), row.o_dtype, c, 0);
  row.lse = -infinity;
  EXPECT_EQ(row.report().verdict(), Verdict::right) << "an empty row";
}

TEST_P(BoundOf, NaNAndInfinityOfVStayInTheirColumns) {
  Row row = this->row(3);
  row.lse = std::log(3.0f);
  row.set_v(0, 1, infinity), row.set_v(1, 2, -infinity), row.set_v(2, 3, nan);
  row.set_v(0, 4, infinity), row.set_v(1, 4, -infinity);
  EXPECT_EQ(row.report().wrong, 4) << "zeros";
  const float expected[] = {0, infinity, -infinity, nan, nan};
  for (int c = 0; c < 5; ++c) store_element(row.o.data(), row.o_dtype, c, expected[c]);
  EXPECT_EQ(row.report().verdict(), Verdict::right) << row.report().str();
  store_element(row.o.data(), row.o_dtype, 1, -infinity);
  store_element(row.o.data(), row.o_dtype, 2, nan);
  store_element(row.o.data(), row.o_dtype, 3, infinity);
  EXPECT_EQ(row.report().wrong, 3);
  // A weight that may have become 0.
  row.set_k(2, 0, -200), row.set_q(0, 1);
  row.lse = std::log(2.0f);
  store_element(row.o.data(), row.o_dtype, 1, infinity),
      store_element(row.o.data(), row.o_dtype, 2, -infinity);
  const Report report = row.report();
  EXPECT_EQ(report.wrong, 0);
  EXPECT_EQ(report.undecided, 1);
  EXPECT_EQ(report.of("o").where, "o: batch 0, row 0, head 0, dim 3");
}

TEST_P(BoundOf, AnInfinityOfVThatIsDroppedDecidesNothing) {
  Row row = this->row(40);
  row.dropout_p = 0.5;
  row.lse = std::log(40.0f);
  std::vector<std::uint8_t> keep(40);
  dropout_row({.p = 0.5, .seed = 5, .offset = 0}, 0, 0, 0, keep);
  const auto first = [&](int kept) {
    return static_cast<int>(std::find(keep.begin(), keep.end(), kept) - keep.begin());
  };
  row.set_v(first(0), 1, infinity), row.set_v(first(1), 2, infinity);
  store_element(row.o.data(), row.o_dtype, 2, infinity);
  const Report report = row.report();
  EXPECT_EQ(report.wrong, 0) << report.str();
  EXPECT_EQ(report.undecided, 1) << report.str();
}

// Dropout makes the result twice the dtype's largest number.
TEST_P(BoundOf, AResultBeyondItsDtypeIsInfinite) {
  Row row = this->row(1);
  std::vector<std::uint8_t> keep(1);
  row.dropout_p = 0.5;
  dropout_row({.p = 0.5, .seed = 5, .offset = 0}, 0, 0, 0, keep);
  ASSERT_EQ(keep[0], 1);
  const float largest = row.dtype == DType::fp16 ? 65504 : 3e38f;
  for (int c = 0; c < row.columns; ++c)
    row.set_v(0, c, largest), store_element(row.o.data(), row.o_dtype, c, infinity);
  EXPECT_EQ(row.report().verdict(), Verdict::right) << row.report().str();
  store_element(row.o.data(), row.o_dtype, 0, -infinity),
      store_element(row.o.data(), row.o_dtype, 1, largest);
  EXPECT_EQ(row.report().wrong, 2);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, BoundOf, testing::Values(DType::bf16, DType::fp16, DType::fp32),
                         [](const auto& dtype) { return std::string(to_string(dtype.param)); });

}  // namespace
}  // namespace flashjit::verify
