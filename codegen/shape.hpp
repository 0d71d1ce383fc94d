#pragma once

#include <bit>

namespace flashjit {

// The sizes of one problem, as far as they matter to the choice of a config.
struct Shape {
  int batch = 1;
  int seqlen_q = 1, seqlen_k = 1;  // the longest of the batch
  int num_heads_q = 1, num_heads_kv = 1;
  bool operator==(const Shape&) const = default;
};

// Shapes of one bucket get the same config: every size rounded up to a power of two (0 counts as 1).
inline Shape bucket(const Shape& s) {
  const auto up = [](int n) {
    return n <= 1 ? 1 : n > (1 << 30) ? 1 << 30 : static_cast<int>(std::bit_ceil(static_cast<unsigned>(n)));
  };
  return {up(s.batch), up(s.seqlen_q), up(s.seqlen_k), up(s.num_heads_q), up(s.num_heads_kv)};
}

}  // namespace flashjit
