#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <initializer_list>
#include <optional>

namespace flashjit {

// The most rows or keys of a sequence. With this limit the sum of
// two positions and a block fits an int, which kernels compute with.
constexpr int longest_sequence = 1 << 30;

// The product of non-negative sizes; nothing if it does not fit 64 bits.
template <class Sizes = std::initializer_list<std::int64_t>>
constexpr std::optional<std::int64_t> product_of(const Sizes& sizes) {
  std::int64_t product = 1;
  bool fits = true, zero = false;
  for (const std::int64_t size : sizes) {
    zero = zero || size == 0;
    fits = fits && !__builtin_mul_overflow(product, size, &product);
  }
  return zero ? std::optional<std::int64_t>(0) : fits ? std::optional(product) : std::nullopt;
}

// The sizes of one problem that matter to the choice of a config, all at least 0. num_heads_q is a multiple
// of num_heads_kv, which is 0 only where num_heads_q is, too.
struct Shape {
  int batch = 1;
  int seqlen_q = 1, seqlen_k = 1;  // the longest of the batch
  int num_heads_q = 1, num_heads_kv = 1;
  int page_size = 0;                      // keys of a page; 0: contiguous
  std::int64_t total_q = 0, total_k = 0;  // packed rows and keys of all sequences; 0: batch x seqlen
  bool operator==(const Shape&) const = default;
};

// Shapes of one bucket get the same config and share a tune record. A bucket is named by its largest shape:
// - seqlen_q and seqlen_k are rounded up to powers of two;
//   0 counts as 1, and longest_sequence is the maximum.
// - Batch entries and query heads are both independent problems, so only their product
//   counts. The product is rounded up to a power of two, but not beyond 2^20 query rows:
//   thousands of tiles keep any device busy, and more tiles only repeat the same work.
// - The number of query heads that share a key/value head decides how much stays in a cache. num_heads_q
//   is this number, rounded up to a power of two; num_heads_kv is 1; batch is the rest of the product.
// - Packed sequences are seldom all as long as the longest. If both totals
//   are given, the batch counts as the number of longest sequences that hold
//   as many rows, or as many keys if that is more. A bucket has no totals.
// - Each page size is a bucket of its own.
inline Shape bucket(const Shape& s) {
  constexpr std::int64_t enough_rows = 1 << 20;
  const auto up = [](std::int64_t n) {
    n = std::clamp<std::int64_t>(n, 1, longest_sequence);
    return static_cast<int>(std::bit_ceil(static_cast<std::uint64_t>(n)));
  };
  std::int64_t batch = s.batch;
  if (s.total_q > 0 && s.total_k > 0) {
    const auto longest_ones = [](std::int64_t total, int seqlen) {
      const std::int64_t length = std::max(seqlen, 1);
      return total / length + (total % length != 0);
    };
    batch =
        std::min(batch, std::max(longest_ones(s.total_q, s.seqlen_q), longest_ones(s.total_k, s.seqlen_k)));
  }
  Shape b{.seqlen_q = up(s.seqlen_q), .seqlen_k = up(s.seqlen_k), .page_size = s.page_size};
  const int most_heads = up(enough_rows / b.seqlen_q);
  const int heads = std::min(up(batch * s.num_heads_q), most_heads);
  b.num_heads_q = std::min(up(s.num_heads_q / std::max(s.num_heads_kv, 1)), heads);
  b.batch = heads / b.num_heads_q;
  return b;
}

}  // namespace flashjit
