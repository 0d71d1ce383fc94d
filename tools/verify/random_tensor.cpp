#include "tools/verify/random_tensor.hpp"

#include <algorithm>
#include <thread>
#include <vector>

#include "tools/verify/element.hpp"

namespace flashjit::verify {
namespace {

// SplitMix64's finaliser (Steele, Lea, Flood 2014).
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The sum of four uniform variables, mean 0, variance 1, at most 3.47 in size and never 0.
float bell(std::uint64_t bits) {
  const int sum =
      static_cast<int>((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
  return static_cast<float>(2 * sum + 1 - 4 * 0xffff) * (1 / 75674.4f);
}

bool one_of(int every, std::uint64_t bits) {
  return every > 0 && bits % static_cast<std::uint64_t>(every) == 0;
}

void fill_row(const Tensor& tensor, std::int64_t row, std::int64_t columns, std::uint64_t seed,
              const RandomOptions& options) {
  std::int64_t offset = 0;
  for (std::int64_t i = tensor.rank - 2, rest = row; i >= 0; rest /= tensor.shape[i], --i) {
    offset += rest % tensor.shape[i] * tensor.strides[i];
  }
  const bool is_long =
      one_of(options.long_row_every, random_bits(seed ^ 0x726f77, static_cast<std::uint64_t>(row)));
  const float row_scale = options.scale * (is_long ? 4.0f : 1.0f);
  for (std::int64_t column = 0; column < columns; ++column) {
    const std::uint64_t bits = random_bits(seed, static_cast<std::uint64_t>(row * columns + column));
    const float value = row_scale * bell(bits) * (one_of(options.outlier_every, mix(bits)) ? 8.0f : 1.0f);
    store_element(tensor.data, tensor.dtype, offset + column * tensor.strides[tensor.rank - 1], value);
  }
}

}  // namespace

std::uint64_t random_bits(std::uint64_t seed, std::uint64_t counter) {
  return mix(mix(seed + 0x9e3779b97f4a7c15u) + counter * 0x9e3779b97f4a7c15u);
}

void fill_random(const Tensor& tensor, std::uint64_t seed, const RandomOptions& options) {
  std::int64_t rows = 1;
  for (int i = 0; i + 1 < tensor.rank; ++i) rows *= tensor.shape[i];
  const std::int64_t columns = tensor.rank > 0 ? tensor.shape[tensor.rank - 1] : 0;
  const auto fill = [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last; ++row) fill_row(tensor, row, columns, seed, options);
  };
  constexpr std::int64_t worth_a_thread = 1 << 18;  // elements: about a millisecond
  const auto threads = std::clamp<std::int64_t>(rows * columns / worth_a_thread, 1,
                                                std::max(1u, std::thread::hardware_concurrency()));
  std::vector<std::jthread> helpers;
  for (std::int64_t i = 1; i < threads; ++i)
    helpers.emplace_back(fill, rows * i / threads, rows * (i + 1) / threads);
  fill(0, rows / threads);
}

}  // namespace flashjit::verify
