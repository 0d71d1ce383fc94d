// The oracle of copy_kv: an example by hand, and defects that it catches.
#include "tools/verify/copy_oracle.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "tools/verify/report.hpp"

namespace flashjit::verify {
namespace {

// A source has 2 pages of 3 rows. Its slots 4 and 0 go to rows 1 and 2 of a cache of 2 pages of 2 rows; a
// third one goes nowhere, and two go to one place.
TEST(CopyOracle, ByHand) {
  constexpr int dim = 8;
  std::vector<float> k_from(std::size_t{6} * dim), v_from(k_from), k(std::size_t{4} * dim, -1), v(k);
  for (std::size_t i = 0; i < k_from.size(); ++i) {
    k_from[i] = static_cast<float>(i);
    v_from[i] = static_cast<float>(i) / 2;
  }
  std::vector<std::int64_t> from = {4, 0, 6, 5, 1, -1}, to = {1, 2, 0, 3, 3, 0};
  const AttentionSpec spec =
      AttentionSpec{.op = Operation::copy_kv, .dtype = DType::fp32, .head_dim = dim}.validated();
  const auto floats = [](std::vector<float>& data, std::int64_t rows) {
    return Tensor::contiguous(data.data(), DType::fp32, {}, {2, rows, 1, dim});
  };
  AttentionArgs args;
  args.k_from = floats(k_from, 3);
  args.v_from = floats(v_from, 3);
  args.k = floats(k, 2);
  args.v = floats(v, 2);
  args.from_slots = Tensor::contiguous(from.data(), DType::int64, {}, {6});
  args.to_slots = Tensor::contiguous(to.data(), DType::int64, {}, {6});
  EXPECT_EQ(verify_outputs(spec, args).wrong, 4 * dim);
  for (std::size_t c = 0; c < dim; ++c) {
    k[dim + c] = static_cast<float>(4 * dim + c);
    k[2 * dim + c] = static_cast<float>(c);
    v[dim + c] = static_cast<float>(4 * dim + c) / 2;
    v[2 * dim + c] = static_cast<float>(c) / 2;
  }
  const Report right = verify_outputs(spec, args);
  EXPECT_TRUE(right.ok()) << right.str();
  EXPECT_EQ(right.rows, 2) << "of the first output";
  for (std::vector<float>* cache : {&k, &v}) {
    (*cache)[dim + 3] += 0x1p-10f;
    EXPECT_EQ(verify_outputs(spec, args).wrong, 1);
    (*cache)[dim + 3] -= 0x1p-10f;
  }
}

}  // namespace
}  // namespace flashjit::verify
