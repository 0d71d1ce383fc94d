// Sums of float32 that do not depend on the order of their terms: integers in fixed point, wide enough for
// every finite float32. So equal terms give equal bits, whoever adds them first.
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

// A sum: the first word's lower half is a float that adds up infinities and NaN. Word 1 + i counts units of
// 2^(28 i - 149). A term changes two words by less than 2^28 each, so 2^35 terms fit.
constexpr int exact_sum_words = 12, exact_sum_digit = 28;

// Calls add(word, amount) for the words that a finite term changes; returns false for any other term.
template <class Add>
FLASHJIT_FN bool add_to_digits(float term, const Add& add) {
  const u32 bits = __builtin_bit_cast(u32, term);
  const int exponent = static_cast<int>(bits >> 23 & 255);
  if (exponent == 255) return false;
  const i64 digits = exponent == 0 ? bits & 0x7fffff : (bits & 0x7fffff) | 0x800000;
  const int place = max(exponent, 1) - 1, word = place / exact_sum_digit;
  const i64 shifted = digits << (place - word * exact_sum_digit);
  constexpr i64 all = (i64{1} << exact_sum_digit) - 1;
  const i64 low = shifted & all, high = shifted >> exact_sum_digit;
  const bool negative = bits >> 31;
  if (low) add(1 + word, negative ? -low : low);
  if (high) add(2 + word, negative ? -high : high);
  return true;
}

// The sum, rounded to float32.
FLASHJIT_FN float exact_sum(const i64* words) {
  constexpr i64 all = (i64{1} << exact_sum_digit) - 1;
  i64 digits[exact_sum_words], carry = 0;
  for (int i = 1; i < exact_sum_words; ++i) {
    const i64 sum = words[i] + carry;
    digits[i] = sum & all;
    carry = sum >> exact_sum_digit;
  }
  double value = static_cast<double>(carry);
  for (int i = exact_sum_words - 1; i > 0; --i)
    value = value * (i64{1} << exact_sum_digit) + static_cast<double>(digits[i]);
  const float finite = static_cast<float>(value * 0x1p-149);
  return finite + __builtin_bit_cast(float, static_cast<u32>(words[0]));
}

}  // namespace flashjit::device
