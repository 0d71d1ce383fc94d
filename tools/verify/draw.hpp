// Seeded numbers, the same on every platform and standard library.
#pragma once

#include <cstdint>

#include "tools/verify/random_tensor.hpp"

namespace flashjit::verify {

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : seed_(seed) {}
  std::uint64_t bits() { return random_bits(seed_, count_++); }
  // In [first, last].
  int between(int first, int last) {
    return first + static_cast<int>(bits() % (static_cast<std::uint64_t>(last - first) + 1));
  }
  bool chance(double p) { return static_cast<double>(bits() >> 11) * 0x1p-53 < p; }
  std::int32_t word() { return static_cast<std::int32_t>(bits()); }

 private:
  std::uint64_t seed_, count_ = 0;
};

}  // namespace flashjit::verify
