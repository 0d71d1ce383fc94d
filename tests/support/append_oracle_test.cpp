// The oracle of append_kv: an example by hand, and defects that its bound catches.
#include "tools/verify/append_oracle.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "tools/verify/element.hpp"
#include "tools/verify/report.hpp"

namespace flashjit::verify {
namespace {

// Two tokens of one head, of which slots name rows 3 and 0 of a cache of 4 rows. Pairs are columns i and i
// + 4.
struct AppendLaunch {
  static constexpr int tokens = 2, rows = 4, dim = 8;
  std::vector<float> k_new, v_new, k, v;
  std::vector<std::int64_t> slots = {3, 0};
  std::vector<std::int32_t> positions = {0, 1'000'003};
  AttentionSpec spec;
  AttentionArgs args;

  AppendLaunch() : k_new(tokens * dim), v_new(tokens * dim), k(rows * dim, NAN), v(rows * dim, NAN) {
    for (int i = 0; i < tokens * dim; ++i) {
      k_new[static_cast<std::size_t>(i)] = 1 + 0.25f * static_cast<float>(i % 5);
      v_new[static_cast<std::size_t>(i)] = static_cast<float>(i);
    }
    spec.op = Operation::append_kv;
    spec.dtype = DType::fp32;
    spec.head_dim = dim;
    spec.rotary = Rotary{};
    spec = spec.validated();
    const auto tensor = [](auto& data, DType dtype, std::initializer_list<std::int64_t> sizes) {
      return Tensor::contiguous(data.data(), dtype, {}, sizes);
    };
    args.k_new = tensor(k_new, DType::fp32, {1, tokens, 1, dim});
    args.v_new = tensor(v_new, DType::fp32, {1, tokens, 1, dim});
    args.k = tensor(k, DType::fp32, {1, rows, 1, dim});
    args.v = tensor(v, DType::fp32, {1, rows, 1, dim});
    args.slots = tensor(slots, DType::int64, {1, tokens});
    args.rotary_positions = tensor(positions, DType::int32, {1, tokens});
    write();
  }
  // As a kernel in float32 does, with angles reduced in double. `shift` of a position is a planted defect.
  void write(double shift = 0) {
    for (int t = 0; t < tokens; ++t)
      for (int i = 0; i < dim / 2; ++i) {
        const double angle =
            (positions[static_cast<std::size_t>(t)] + shift) * std::pow(10000.0, -2.0 * i / dim);
        const auto c = static_cast<float>(std::cos(angle)), s = static_cast<float>(std::sin(angle));
        const auto from = static_cast<std::size_t>(t * dim + i),
                   to = static_cast<std::size_t>((t == 0 ? 3 : 0) * dim + i);
        const float x = k_new[from], y = k_new[from + dim / 2];
        k[to] = x * c - y * s;
        k[to + dim / 2] = x * s + y * c;
        v[to] = v_new[from];
        v[to + dim / 2] = v_new[from + dim / 2];
      }
  }
  Report report() const { return verify_outputs(spec, args); }
};

TEST(AppendOracle, PlainComputationIsRight) {
  const AppendLaunch launch;
  const Report report = launch.report();
  EXPECT_TRUE(report.ok()) << report.str();
  EXPECT_EQ(report.rows, 2);
}

// Position 0 turns nothing. A quarter turn by tables: (x, y) becomes (-y, x).
TEST(AppendOracle, ByHand) {
  AppendLaunch launch;
  for (std::size_t c = 0; c < 8; ++c) EXPECT_EQ(launch.k[3 * 8 + c], launch.k_new[c]);
  std::vector<float> cosines(4, 0), sines(4, 1);
  launch.spec.rotary = Rotary{.tables = DType::fp32};
  launch.args.rotary_cos = Tensor::contiguous(cosines.data(), DType::fp32, {}, {1, 4});
  launch.args.rotary_sin = Tensor::contiguous(sines.data(), DType::fp32, {}, {1, 4});
  for (int t = 0; t < 2; ++t)
    for (std::size_t i = 0; i < 4; ++i) {
      const std::size_t from = static_cast<std::size_t>(t) * 8 + i, to = (t == 0 ? 24u : 0u) + i;
      launch.k[to] = -launch.k_new[from + 4];
      launch.k[to + 4] = launch.k_new[from];
    }
  EXPECT_TRUE(launch.report().ok()) << launch.report().str();
}

TEST(AppendOracle, CatchesDefects) {
  AppendLaunch launch;
  launch.write(1e-5);
  EXPECT_GT(launch.report().wrong, 0) << "a position off by 1e-5";
  launch.write();
  EXPECT_TRUE(launch.report().ok());
  launch.v[3 * 8] = std::nextafter(launch.v[3 * 8] + 1, 9.0f) - 1;
  EXPECT_GT(launch.report().wrong, 0) << "a value that is not the new one";
  launch.write();
  std::swap(launch.slots[0], launch.slots[1]);
  EXPECT_GT(launch.report().wrong, 0) << "rows at each other's places";
}

// Scales of tokens and 8-bit elements: what a careful float32 computation writes is right; scales or elements
// that are off by one step are not, nor is rounding by cutting.
TEST(AppendOracle, QuantisedCaches) {
  for (const DType kv_dtype : {DType::int8, DType::fp8_e4m3, DType::fp8_e5m2}) {
    constexpr int dim = 64, tokens = 4;
    const float largest = kv_dtype == DType::int8 ? 127 : kv_dtype == DType::fp8_e4m3 ? 448 : 57344;
    std::vector<float> rows(tokens * dim), scales(tokens);
    std::vector<std::uint16_t> rounded(rows.size());
    std::vector<std::byte> k(rows.size()), v(rows.size());
    std::vector<std::int64_t> slots = {0, 1, 2, 3};
    for (std::size_t i = 0; i < rows.size(); ++i) {
      rounded[i] = float_to_bf16(std::sin(static_cast<float>(i * i)) * (i < dim ? 0 : 3));  // row 0 is zeros
      rows[i] = bf16_to_float(rounded[i]);
    }
    AttentionSpec spec;
    spec.op = Operation::append_kv;
    spec.head_dim = dim;
    spec.kv_dtype = kv_dtype;
    spec.kv_scale = KvScale::token_head;
    spec = spec.validated();
    AttentionArgs args;
    args.k_new = args.v_new = Tensor::contiguous(rounded.data(), DType::bf16, {}, {1, tokens, 1, dim});
    args.k = Tensor::contiguous(k.data(), kv_dtype, {}, {1, tokens, 1, dim});
    args.v = Tensor::contiguous(v.data(), kv_dtype, {}, {1, tokens, 1, dim});
    args.k_scale = args.v_scale = Tensor::contiguous(scales.data(), DType::fp32, {}, {1, tokens, 1});
    args.slots = Tensor::contiguous(slots.data(), DType::int64, {}, {1, tokens});
    const auto write = [&](float stretch, bool cuts) {
      for (std::size_t i = 0; i < rows.size(); ++i) {
        if (i % dim == 0) {
          float top = 0;
          for (std::size_t c = 0; c < dim; ++c) top = std::max(top, std::abs(rows[i + c]));
          scales[i / dim] = std::max(top / largest * stretch, 0x1p-126f);
        }
        float x = rows[i] / scales[i / dim];
        if (cuts) x *= kv_dtype == DType::int8 ? 0.99f : 0.97f;
        for (std::byte* const cache : {k.data(), v.data()})
          store_element(cache, kv_dtype, static_cast<std::int64_t>(i), x);
      }
    };
    write(1, false);
    const Report report = verify_outputs(spec, args);
    EXPECT_TRUE(report.ok()) << to_string(kv_dtype) << report.str();
    EXPECT_EQ(report.of("k_scale").verdict, Verdict::right);
    write(1 + 0x1p-20f, false);
    EXPECT_EQ(verify_outputs(spec, args).of("v_scale").verdict, Verdict::wrong) << to_string(kv_dtype);
    write(1, true);
    EXPECT_GT(verify_outputs(spec, args).wrong, 0) << to_string(kv_dtype);
    write(1, false);
    k[dim + 3] = static_cast<std::byte>(static_cast<unsigned char>(k[dim + 3]) + 1);
    EXPECT_EQ(verify_outputs(spec, args).wrong, 1) << to_string(kv_dtype);
  }
}

// Nobody can tell what a row holds that two tokens write.
TEST(AppendOracle, LeavesSharedRowsOut) {
  AppendLaunch launch;
  launch.slots[0] = 0;
  EXPECT_EQ(launch.report().rows, 0);
}

}  // namespace
}  // namespace flashjit::verify
