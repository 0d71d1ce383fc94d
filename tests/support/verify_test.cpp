// Tests the oracle itself: published examples by hand, its conversions
// for every 16-bit number, and planted defects that its bound must catch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <mutex>
#include <numeric>
#include <vector>

#include "runtime/dropout.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/mask.hpp"
#include "tools/verify/npy.hpp"
#include "tools/verify/random_masks.hpp"
#include "tools/verify/random_tensor.hpp"
#include "tools/verify/report.hpp"
#include "tools/verify/table.hpp"

namespace flashjit::verify {
namespace {

Tensor tensor_of(void* data, DType dtype, std::initializer_list<std::int64_t> shape) {
  Tensor t;
  t.data = data;
  t.dtype = dtype;
  for (const std::int64_t extent : shape) t.shape[t.rank++] = extent;
  std::int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) t.strides[i] = stride, stride *= t.shape[i];
  return t;
}

// One head of attention in fp32, row-major. rows() returns the oracle's rows in order.
struct Example {
  int seqlen_q, seqlen_k, head_dim, head_dim_v;
  std::vector<float> q, k, v;
  AttentionSpec spec = {};
  float scale = 1;
  AttentionArgs args = {};

  struct Row {
    double lse;
    std::vector<double> o;
  };

  std::vector<Row> rows(const OracleOptions& options = {}) {
    spec.dtype = DType::fp32;
    args.q = tensor_of(q.data(), DType::fp32, {1, seqlen_q, 1, head_dim});
    args.k = tensor_of(k.data(), DType::fp32, {1, seqlen_k, 1, head_dim});
    args.v = tensor_of(v.data(), DType::fp32, {1, seqlen_k, 1, head_dim_v});
    args.softmax_scale = scale;
    std::vector<Row> out(static_cast<std::size_t>(seqlen_q));
    oracle_of(spec, args, options).compute([&](const Expected& expected) {
      Row& row = out[static_cast<std::size_t>(expected.place[1])];
      if (expected.output == 0) {
        row.o.assign(expected.values.begin(), expected.values.end());
      } else {
        row.lse = expected.values[0];
      }
    });
    return out;
  }
};

std::vector<float> identity(int n) {
  std::vector<float> m(static_cast<std::size_t>(n) * n, 0.0f);
  for (int i = 0; i < n; ++i) m[static_cast<std::size_t>(i) * n + i] = 1;
  return m;
}

TEST(Oracle, StreamingSoftmaxOfFourScores) {
  // With the identity as V the output is the softmax itself. The
  // running sums are those of its prefixes, relative to their maximum.
  const std::vector<float> scores = {2, 5, 1, 4};
  const std::vector<double> sums = {1.0, 1.0498, 1.0681, 1.4360};
  for (int n = 1; n <= 4; ++n) {
    Example prefix{1, n, 1, 4, {1}, scores, identity(4)};
    const double max = *std::max_element(scores.begin(), scores.begin() + n);
    EXPECT_NEAR(std::exp(prefix.rows()[0].lse - max), sums[n - 1], 5e-5);
  }
  Example whole{1, 4, 1, 4, {1}, scores, identity(4)};
  const std::vector<double> expected = {0.0347, 0.6964, 0.0128, 0.2562};
  const auto row = whole.rows()[0];
  for (int c = 0; c < 4; ++c) EXPECT_NEAR(row.o[c], expected[c], 5e-5) << c;
}

TEST(Oracle, ThreeKeysOfTwoDimensions) {
  Example example{1, 3, 2, 2, {1, 0}, {.5f, .3f, .8f, -.2f, .1f, .7f}, {1, 0, 0, 1, .5f, .5f}};
  const auto row = example.rows()[0];
  EXPECT_NEAR(row.o[0], 0.4421, 5e-5);
  EXPECT_NEAR(row.o[1], 0.5579, 5e-5);
}

TEST(Oracle, TreeOfNineTokens) {
  const std::vector<int> parents = {-1, 0, 1, 1, 2, 2, 3, 3, 4};
  OracleOptions options;
  options.keep = [&](int, int, int row, int key) {
    while (row >= 0 && row != key) row = parents[row];
    return row == key;
  };
  Example example{
      9, 9, 1, 12, std::vector<float>(9, 1), std::vector<float>(9, 0), std::vector<float>(9 * 12, 0)};
  for (int i = 0; i < 9; ++i) example.v[static_cast<std::size_t>(i) * 12 + i] = 1;
  const auto rows = example.rows(options);
  const auto seen = [&](int row) {
    std::vector<int> keys;
    for (int c = 0; c < 9; ++c) {
      if (rows[row].o[c] > 0) keys.push_back(c);
    }
    return keys;
  };
  EXPECT_EQ(seen(8), (std::vector<int>{0, 1, 2, 4, 8}));
  EXPECT_EQ(seen(7), (std::vector<int>{0, 1, 3, 7}));
  EXPECT_NEAR(rows[8].o[4], 0.2, 1e-15);
  EXPECT_NEAR(rows[7].lse, std::log(4.0), 1e-15);
}

TEST(Oracle, CausalBothWays) {
  const auto kept = [](CausalAlign align, int seqlen_q, int seqlen_k) {
    Example example{seqlen_q,
                    seqlen_k,
                    1,
                    1,
                    std::vector<float>(seqlen_q, 0),
                    std::vector<float>(seqlen_k, 0),
                    std::vector<float>(seqlen_k, 1)};
    example.spec.mask = {CausalMask{align}};
    std::vector<int> counts;
    for (const auto& row : example.rows()) counts.push_back(static_cast<int>(std::lround(std::exp(row.lse))));
    return counts;
  };
  EXPECT_EQ(kept(CausalAlign::bottom_right, 3, 5), (std::vector<int>{3, 4, 5}));
  EXPECT_EQ(kept(CausalAlign::bottom_right, 5, 3), (std::vector<int>{0, 0, 1, 2, 3}));
  EXPECT_EQ(kept(CausalAlign::top_left, 3, 5), (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(kept(CausalAlign::top_left, 5, 3), (std::vector<int>{1, 2, 3, 3, 3}));
}

TEST(Oracle, NothingToAttendTo) {
  Example none{2, 0, 1, 3, {1, 2}, {}, {}};
  for (const auto& row : none.rows()) {
    EXPECT_EQ(row.lse, -std::numeric_limits<double>::infinity());
    EXPECT_EQ(row.o, (std::vector<double>{0, 0, 0}));
  }
}

TEST(Oracle, WhatIsNotKeptMayBeAnything) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  Example example{2, 3, 1, 1, {1, 1}, {0, 1, nan}, {1, 2, nan}};
  OracleOptions options;
  options.keep = [](int, int, int, int key) { return key < 2; };
  for (const auto& row : example.rows(options))
    EXPECT_NEAR(row.o[0], (1 + 2 * std::exp(1.0)) / (1 + std::exp(1.0)), 1e-12);
}

TEST(Oracle, DropoutByHand) {
  // Equal weights and the identity as V: the kept weights show with their factor; lse is unaffected.
  constexpr int n = 40;
  Example example{2, n, 1, n, std::vector<float>(2, 0), std::vector<float>(n, 0), identity(n)};
  example.spec.dropout = true;
  example.args.dropout_p = 0.25;
  example.args.dropout_seed = 3;
  example.args.dropout_offset = 4;
  const auto rows = example.rows();
  for (int row = 0; row < 2; ++row) {
    std::vector<std::uint8_t> keep(n);
    dropout_row({.p = 0.25, .seed = 3, .offset = 4}, 0, 0, row, keep);
    EXPECT_THAT(keep, testing::AllOf(testing::Contains(0), testing::Contains(1)));
    for (int c = 0; c < n; ++c) EXPECT_NEAR(rows[row].o[c], keep[c] / 0.75 / n, 1e-15);
    EXPECT_NEAR(rows[row].lse, std::log(n), 1e-14);
  }
}

// A batch of heads in any dtype, with an output computed in
// float64 with a planted defect and rounded like a kernel's.
struct Problem {
  DType dtype;
  int batch, seqlen, heads_q, heads_kv, head_dim;
  bool causal = false;
  std::vector<std::byte> q, k, v, o;
  std::vector<float> lse;
  AttentionSpec spec;
  AttentionArgs args;

  Problem(DType type, int b, int n, int hq, int hk, int d)
      : dtype(type), batch(b), seqlen(n), heads_q(hq), heads_kv(hk), head_dim(d) {
    const auto make = [&](std::vector<std::byte>& data, int heads, std::uint64_t seed) {
      data.resize(static_cast<std::size_t>(b) * n * heads * d * size_of(type));
      const Tensor t = tensor_of(data.data(), type, {b, n, heads, d});
      if (seed) fill_random(t, seed);
      return t;
    };
    spec.dtype = type;
    args.q = make(q, hq, 1);
    args.k = make(k, hk, 2);
    args.v = make(v, hk, 3);
    args.o = make(o, hq, 0);
    lse.resize(static_cast<std::size_t>(b) * hq * n);
    args.lse = tensor_of(lse.data(), DType::fp32, {b, hq, n});
  }

  // Writes the reference result with a defect: another scale, or other kept pairs.
  void compute(double scale_factor, const Keep& keep) {
    AttentionArgs defective = args;
    defective.softmax_scale = static_cast<float>(scale_factor / std::sqrt(head_dim));
    OracleOptions options;
    options.keep = keep;
    const Oracle oracle = oracle_of(spec, defective, options);
    oracle.compute([&](const Expected& expected) {
      const Tensor& to = *oracle.outputs[expected.output].actual;
      for (std::size_t i = 0; i < expected.values.size(); ++i) {
        store_element(to.data, to.dtype, expected.index + static_cast<std::int64_t>(i),
                      static_cast<float>(expected.values[i]));
      }
    });
  }

  Report report(bool with_lse = true) {
    AttentionSpec checked = spec;
    checked.lse = with_lse;
    return verify_outputs(checked, args);
  }
};

class Bound : public testing::TestWithParam<DType> {};

TEST_P(Bound, AcceptsTheRoundedTruth) {
  Problem problem(GetParam(), 2, 200, 4, 2, 64);
  problem.compute(1, {});
  const Report report = problem.report();
  EXPECT_TRUE(report.ok()) << report.str();
  EXPECT_EQ(report.rows, 2 * 200 * 4);
  EXPECT_GT(report.of("o").error, 0);
}

TEST_P(Bound, CatchesAScaleOffByOnePercent) {
  for (const int seqlen : {17, 128, 1000}) {
    Problem problem(GetParam(), 1, seqlen, 2, 1, 64);
    problem.compute(1.01, {});
    EXPECT_FALSE(problem.report(true).ok()) << seqlen;
    EXPECT_FALSE(problem.report(false).ok()) << seqlen << ", by the output alone";
  }
}

TEST_P(Bound, CatchesOneMissingKey) {
  for (const int seqlen : {17, 128, 1000}) {
    Problem problem(GetParam(), 1, seqlen, 2, 1, 64);
    problem.compute(1, [=](int, int, int, int key) { return key != seqlen - 1; });
    EXPECT_FALSE(problem.report(true).ok()) << seqlen;
    EXPECT_FALSE(problem.report(false).ok()) << seqlen << ", by the output alone";
  }
}

TEST_P(Bound, CatchesACausalEdgeOffByOne) {
  Problem problem(GetParam(), 1, 300, 2, 1, 64);
  problem.spec.mask = {CausalMask{}};
  problem.compute(1, [](int, int, int row, int key) { return key < row || key == 0; });
  EXPECT_FALSE(problem.report().ok());
  EXPECT_FALSE(problem.report(false).ok());
}

TEST_P(Bound, CatchesDropoutOfAnotherSeedOrProbability) {
  for (const int seqlen : {17, 300}) {
    Problem problem(GetParam(), 2, seqlen, 2, 1, 64);
    problem.spec.dropout = true;
    problem.args.dropout_p = 0.1;
    problem.args.dropout_seed = 1;
    problem.compute(1, {});
    EXPECT_TRUE(problem.report().ok());
    problem.args.dropout_seed = 2;
    EXPECT_FALSE(problem.report(false).ok()) << seqlen;
    problem.args.dropout_seed = 1;
    problem.args.dropout_offset = 1;
    EXPECT_FALSE(problem.report(false).ok()) << seqlen;
    problem.args.dropout_offset = 0;
    problem.args.dropout_p = 0.12;
    EXPECT_FALSE(problem.report(false).ok()) << seqlen;
  }
}

TEST_P(Bound, CatchesAnElementNeverWritten) {
  Problem problem(GetParam(), 1, 20, 2, 1, 64);
  problem.compute(1, {});
  store_element(problem.o.data(), GetParam(), (7 * 2 + 1) * 64 + 5, std::numeric_limits<float>::quiet_NaN());
  const Report report = problem.report();
  EXPECT_EQ(report.wrong, 1);
  EXPECT_EQ(report.of("o").where, "o: batch 0, row 7, head 1, dim 5");
  EXPECT_THAT(report.str(), testing::HasSubstr("1 elements beyond their bound"));
}

TEST_P(Bound, SampledRowsCoverBothEndsOfEveryHead) {
  Problem problem(GetParam(), 2, 500, 2, 2, 8);
  std::vector<std::pair<int, int>> ends;
  std::int64_t rows = 0;
  std::mutex mutex;
  OracleOptions options;
  options.max_rows = 100;
  oracle_of(problem.spec, problem.args, options).compute([&](const Expected& expected) {
    if (expected.output > 0) return;
    const std::lock_guard lock(mutex);
    ++rows;
    const auto [batch, row, head, column] = expected.place;
    if (row == 0 || row == 499) ends.emplace_back(batch * 2 + head, row);
  });
  EXPECT_EQ(rows, 100);
  EXPECT_EQ(ends.size(), 8u);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Bound, testing::Values(DType::bf16, DType::fp16, DType::fp32),
                         [](const auto& dtype) {
                           return dtype.param == DType::bf16   ? "bf16"
                                  : dtype.param == DType::fp16 ? "fp16"
                                                               : "fp32";
                         });

TEST(Element, EveryHalfSurvivesARoundTrip) {
  for (std::uint32_t h = 0; h < 0x10000; ++h) {
    const auto half = static_cast<std::uint16_t>(h);
    if ((h & 0x7c00) != 0x7c00 || (h & 0x3ff) == 0) {
      ASSERT_EQ(float_to_fp16(fp16_to_float(half)), half);
    } else {
      ASSERT_TRUE(std::isnan(fp16_to_float(half)));
    }
    if ((h & 0x7f80) != 0x7f80 || (h & 0x7f) == 0) {
      ASSERT_EQ(float_to_bf16(bf16_to_float(half)), half);
    } else {
      ASSERT_TRUE(std::isnan(bf16_to_float(half)));
    }
  }
}

// Values of the Open Compute Project's specification.
TEST(Element, ValuesOfEightBits) {
  EXPECT_EQ(e4m3.value(0x01), 0x1p-9f);
  EXPECT_EQ(e4m3.value(0x08), 0x1p-6f);
  EXPECT_EQ(e4m3.value(0xb8), -1);
  EXPECT_EQ(e4m3.value(0x7e), 448);
  EXPECT_TRUE(std::isnan(e4m3.value(0x7f)));
  EXPECT_EQ(e5m2.value(0x01), 0x1p-16f);
  EXPECT_EQ(e5m2.value(0x04), 0x1p-14f);
  EXPECT_EQ(e5m2.value(0xbc), -1);
  EXPECT_EQ(e5m2.value(0x7b), 57344);
  EXPECT_EQ(e5m2.value(0xfc), -INFINITY);
  EXPECT_TRUE(std::isnan(e5m2.value(0x7d)));
}

TEST(Element, RoundsToEightBits) {
  for (const Fp8& format : {e4m3, e5m2}) {
    int last = 0;
    while (format.value(static_cast<std::uint8_t>(last)) != format.largest) ++last;
    for (int h = 0; h < last; ++h) {
      const float below = format.value(static_cast<std::uint8_t>(h)),
                  above = format.value(static_cast<std::uint8_t>(h + 1)), middle = (below + above) / 2;
      ASSERT_EQ(format.bits(below), h);
      ASSERT_EQ(format.bits(middle), h % 2 == 0 ? h : h + 1);
      ASSERT_EQ(format.bits(std::nextafter(middle, below)), h);
      ASSERT_EQ(format.bits(std::nextafter(middle, above)), h + 1);
      ASSERT_EQ(format.bits(-middle), (h % 2 == 0 ? h : h + 1) | 0x80);
    }
    EXPECT_EQ(format.bits(INFINITY), last);
    EXPECT_EQ(format.bits(-2 * format.largest), last | 0x80);
    EXPECT_TRUE(std::isnan(format.value(format.bits(NAN))));
  }
  const auto as_int8 = [](float value) {
    signed char stored;
    store_element(&stored, DType::int8, 0, value);
    return load_element(&stored, DType::int8, 0);
  };
  EXPECT_EQ(as_int8(2.5f), 2);
  EXPECT_EQ(as_int8(-3.5f), -4);
  EXPECT_EQ(as_int8(1000), 127);
  EXPECT_EQ(as_int8(-INFINITY), -128);
  EXPECT_EQ(as_int8(NAN), 0);
}

TEST(Element, RoundsToNearestEven) {
  for (std::uint32_t h = 0; h < 0x7bff; ++h) {  // between each finite fp16 number and the next
    const float below = fp16_to_float(static_cast<std::uint16_t>(h)),
                above = fp16_to_float(static_cast<std::uint16_t>(h + 1));
    const float middle = (below + above) / 2;
    ASSERT_EQ(float_to_fp16(middle), h % 2 == 0 ? h : h + 1);
    ASSERT_EQ(float_to_fp16(std::nextafter(middle, below)), h);
    ASSERT_EQ(float_to_fp16(std::nextafter(middle, above)), h + 1);
    ASSERT_EQ(float_to_fp16(-middle), (h % 2 == 0 ? h : h + 1) | 0x8000);
  }
  for (std::uint32_t h = 0; h < 0x7f7f; ++h) {
    const auto middle = std::bit_cast<float>(h << 16 | 0x8000);
    ASSERT_EQ(float_to_bf16(middle), h % 2 == 0 ? h : h + 1);
    ASSERT_EQ(float_to_bf16(std::bit_cast<float>(h << 16 | 0x7fff)), h);
    ASSERT_EQ(float_to_bf16(std::bit_cast<float>(h << 16 | 0x8001)), h + 1);
  }
  EXPECT_EQ(float_to_fp16(65519.996f), 0x7bff);
  EXPECT_EQ(float_to_fp16(65520.0f), 0x7c00);
  EXPECT_EQ(float_to_fp16(std::numeric_limits<float>::infinity()), 0x7c00);
  EXPECT_TRUE(std::isnan(fp16_to_float(float_to_fp16(std::numeric_limits<float>::quiet_NaN()))));
  EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(std::numeric_limits<float>::quiet_NaN()))));
}

TEST(RandomTensor, DependsOnSeedAndPositionOnly) {
  std::vector<float> dense(6 * 8), padded(6 * 11, 77.0f);
  Tensor a = tensor_of(dense.data(), DType::fp32, {2, 3, 8});
  Tensor b = tensor_of(padded.data(), DType::fp32, {2, 3, 8});
  b.strides = {33, 11, 1};
  fill_random(a, 5);
  fill_random(b, 5);
  for (int row = 0; row < 6; ++row) {
    for (int c = 0; c < 8; ++c) ASSERT_EQ(dense[row * 8 + c], padded[row * 11 + c]);
    for (int c = 8; c < 11; ++c) ASSERT_EQ(padded[row * 11 + c], 77.0f) << "padding written";
  }
  std::vector<float> other(6 * 8);
  fill_random(tensor_of(other.data(), DType::fp32, {2, 3, 8}), 6);
  EXPECT_NE(dense, other);
}

TEST(RandomTensor, BellShapedWithOutliersAndLongRows) {
  std::vector<float> x(1 << 16);
  const Tensor t = tensor_of(x.data(), DType::fp32, {1 << 10, 1 << 6});
  const auto variance = [&] {
    return std::inner_product(x.begin(), x.end(), x.begin(), 0.0) / static_cast<double>(x.size());
  };
  const auto largest = [&] {
    return std::abs(
        *std::max_element(x.begin(), x.end(), [](float a, float b) { return std::abs(a) < std::abs(b); }));
  };
  fill_random(t, 1, {.outlier_every = 0, .long_row_every = 0});
  EXPECT_NEAR(variance(), 1, 0.02);
  EXPECT_NEAR(std::accumulate(x.begin(), x.end(), 0.0) / static_cast<double>(x.size()), 0, 0.02);
  EXPECT_LT(largest(), 3.5);
  EXPECT_EQ(std::count(x.begin(), x.end(), 0.0f), 0);
  fill_random(t, 1);
  EXPECT_GT(variance(), 1.2);
  EXPECT_GT(largest(), 12);
}

class Npy : public testing::Test {
 protected:
  void TearDown() override { std::remove(path.c_str()); }
  void write(const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }
  std::string refusal() {
    try {
      read_npy(path);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_THAT(error.message(), testing::StartsWith(path + ": "));
      return error.message();
    }
    return "accepted";
  }
  const std::string path = testing::TempDir() + "flashjit_npy_test_" + std::to_string(getpid()) + ".npy";
};

TEST_F(Npy, WrittenTensorsReadBack) {
  std::vector<std::uint16_t> half(24);
  for (const DType dtype : {DType::fp16, DType::bf16}) {
    Tensor t = tensor_of(half.data(), dtype, {2, 3, 4});
    fill_random(t, 9);
    write_npy(path, t);
    const NpyArray array = read_npy(path);
    EXPECT_EQ(array.descr, dtype == DType::fp16 ? "<f2" : "<f4");
    EXPECT_EQ(array.shape, (std::vector<std::int64_t>{2, 3, 4}));
    const auto back = elements_as(array, dtype);
    EXPECT_EQ(std::memcmp(back.data(), half.data(), back.size()), 0);
  }
  std::int8_t bytes[] = {-128, 0, 127, 5};
  for (const DType dtype : {DType::int8, DType::uint8}) {
    write_npy(path, tensor_of(bytes, dtype, {2, 2}));
    EXPECT_EQ(read_npy(path).descr, dtype == DType::int8 ? "|i1" : "|u1");
    EXPECT_EQ(std::memcmp(elements_as(read_npy(path), dtype).data(), bytes, sizeof bytes), 0);
    EXPECT_THROW(elements_as(read_npy(path), DType::fp32), Error);
  }
  Tensor transposed = tensor_of(half.data(), DType::fp16, {4, 6});
  transposed.strides = {1, 4, 0, 0};
  write_npy(path, transposed);
  const auto back = elements_as(read_npy(path), DType::fp16);
  std::uint16_t second;
  std::memcpy(&second, back.data() + 2, 2);
  EXPECT_EQ(second, half[4]);
}

TEST_F(Npy, ReadsWhatNumPyWrites) {
  std::string header = "{'descr': '<i4', 'fortran_order': False, 'shape': (3,), }";
  header.resize(117, ' ');
  const std::int32_t data[] = {0, 7, -3};
  write("\x93NUMPY\x01" + std::string(1, '\0') + "\x76" + std::string(1, '\0') + header + "\n" +
        std::string(reinterpret_cast<const char*>(data), sizeof data));
  const NpyArray array = read_npy(path);
  EXPECT_EQ(array.shape, (std::vector<std::int64_t>{3}));
  EXPECT_EQ(load_element(elements_as(array, DType::int32).data(), DType::int32, 2), -3);
  EXPECT_THROW(elements_as(array, DType::bf16), Error);
}

TEST_F(Npy, RefusesWhatItCannotRead) {
  EXPECT_THAT(refusal(), testing::HasSubstr("cannot be read"));
  write("hello");
  EXPECT_THAT(refusal(), testing::HasSubstr("no .npy file"));
  const auto file = [](const std::string& header, std::size_t bytes) {
    return "\x93NUMPY\x01" + std::string(1, '\0') + static_cast<char>(header.size()) + std::string(1, '\0') +
           header + std::string(bytes, 'x');
  };
  write(file("{'descr': '<f8', 'fortran_order': False, 'shape': (2,), }", 16));
  EXPECT_THAT(refusal(), testing::HasSubstr("'<f8'"));
  write(file("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 2), }", 16));
  EXPECT_THAT(refusal(), testing::HasSubstr("Fortran order"));
  write(file("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }", 15));
  EXPECT_THAT(refusal(), testing::HasSubstr("holds 15 bytes"));
  write(file("{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296, 8), }", 16));
  EXPECT_THAT(refusal(), testing::HasSubstr("beyond all memory"));
  write(file("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }", 16));
  EXPECT_NE(refusal(), "accepted");
  write(file("{'descr': '<f4', 'shape': (1,), }", 4));
  EXPECT_THAT(refusal(), testing::HasSubstr("fortran_order"));
  write(file("{", 0).substr(0, 9));
  EXPECT_THAT(refusal(), testing::HasSubstr("ends within its header"));
}

TEST(Table, AlignsNumbersRightAndTextLeft) {
  Table table({"name", "µs"});
  table.add({"a", "1.5"});
  table.add({"long", "100"});
  EXPECT_EQ(table.str(),
            "name   µs\n"
            "----  ---\n"
            "a     1.5\n"
            "long  100\n");
}

// kept_pairs() counts by intervals and lists; the test counts pair by pair.
TEST(Mask, KeptPairs) {
  using enum CausalAlign;
  const std::vector<std::vector<Mask>> lists = {
      {},
      {CausalMask{}},
      {CausalMask{top_left}, PaddingMask{}},
      {SlidingWindowMask{}},
      {CausalMask{}, SlidingWindowMask{bottom_right, true}},
      {BlockSparseMask{16, 32}, PaddingMask{}},
      {BlockSparseMask{32, 16, true}, CausalMask{}},
      {TreeMask{}, PaddingMask{}},
      {CausalMask{}, SlidingWindowMask{bottom_right, true}, BlockSparseMask{16, 16}},
      {TreeMask{}, CausalMask{}, BlockSparseMask{16, 16}}};
  for (const auto& masks : lists) {
    const AttentionSpec spec{.head_dim = 8, .mask = masks};
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
      const Shape shape{.batch = 2, .seqlen_q = 40, .seqlen_k = 60, .num_heads_q = 4, .num_heads_kv = 2};
      MaskData data = random_mask_data(spec, shape, seed, {.hard = true});
      AttentionArgs args;
      args.q = Tensor{.rank = 4, .shape = {2, 40, 4, 8}};
      args.k = Tensor{.rank = 4, .shape = {2, 60, 2, 8}};
      for (MaskTable& table : data.tables) args.*table.argument = table.view();
      data.set_sizes(args);
      std::int64_t pairs = 0;
      for (const Sequence& s : sequences_of(spec, args))
        for (int head = 0; head < 4; ++head)
          for (int row = 0; row < 40; ++row)
            for (int key = 0; key < 60; ++key) pairs += sees(spec, args, s, head, row, key);
      EXPECT_EQ(kept_pairs(spec, args), static_cast<double>(pairs))
          << "masks " << spec.mask.size() << ", seed " << seed;
    }
  }
}

}  // namespace
}  // namespace flashjit::verify
