// Division by a number that the host knows, without the time that a division takes.
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

// The upper 64 bits of a product.
FLASHJIT_FN u64 high_product(u64 a, u64 b) {
#if defined(__CUDACC__)
  return __umul64hi(a, b);
#else
  __extension__ using Wide = unsigned __int128;
  return static_cast<u64>(static_cast<Wide>(a) * b >> 64);
#endif
}

// Granlund, Montgomery 1994: `inverse`, 2^64 / size rounded up, is too large by less than 1. So n * inverse /
// 2^64 is too large by less than n / 2^64, and its integer part is right while n * size <= 2^64.
struct Divisor {
  u64 size;
  u64 inverse;  // 0: size is 1 or 0

  FLASHJIT_FN u64 quotient(u64 n) const { return inverse ? high_product(n, inverse) : n; }
};

}  // namespace flashjit::device
