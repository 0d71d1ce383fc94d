// Keys inside a mask's hull that its rows do not see.
#pragma once

#include "shared/mask.h"

namespace flashjit::device {

// An interval of keys that none of the rows keeps, inside hull(Keys{}, rows); empty if there is none.
template <class Mask>
FLASHJIT_FN Span key_gap(const Mask&, Span) {
  return {0, 0};
}

// Between the first keys, which all rows see, and the window.
template <Align align>
struct SlidingWindowWithSinks;
template <Align align>
FLASHJIT_FN Span key_gap(const SlidingWindowWithSinks<align>& mask, Span rows) {
  return {mask.num_sinks, mask.window.hull(Keys{}, rows).begin};
}

template <class A, class B>
FLASHJIT_FN Span key_gap(const Both<A, B>& mask, Span rows) {
  const Span of_a = key_gap(mask.a, rows);
  return of_a.empty() ? key_gap(mask.b, rows) : of_a;
}

}  // namespace flashjit::device
