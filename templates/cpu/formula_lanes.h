// The operators of formulas on vectors (shared/formula_values.h). Vectors belong to no namespace, so these
// must stand before the templates that call them.
#pragma once

#include "cpu/vector.h"

namespace flashjit::device {

FLASHJIT_FN IntVec plus(IntVec a, IntVec b) {
  return reinterpret_cast<IntVec>(reinterpret_cast<WordVec>(a) + reinterpret_cast<WordVec>(b));
}
FLASHJIT_FN IntVec minus(IntVec a, IntVec b) {
  return reinterpret_cast<IntVec>(reinterpret_cast<WordVec>(a) - reinterpret_cast<WordVec>(b));
}
FLASHJIT_FN IntVec times(IntVec a, IntVec b) {
  return reinterpret_cast<IntVec>(reinterpret_cast<WordVec>(a) * reinterpret_cast<WordVec>(b));
}
// By float64, whose quotients of int32 round to the right integer.
FLASHJIT_FN IntVec over(IntVec a, IntVec b) {
  using Doubles = double __attribute__((vector_size(8 * lanes)));
  const IntVec special = (b == 0) | (b == -1);
  const Doubles quotient =
      __builtin_convertvector(a, Doubles) / __builtin_convertvector(special ? splat(1) : b, Doubles);
  const IntVec whole = __builtin_convertvector(quotient, IntVec);
  return special ? (b == 0 ? IntVec{} : minus(IntVec{}, a)) : whole;
}
FLASHJIT_FN IntVec remainder_of(IntVec a, IntVec b) {
  return b == 0 ? IntVec{} : minus(a, times(over(a, b), b));
}
FLASHJIT_FN IntVec over_group(IntVec heads, int heads_of_kv) {
  return over(heads, splat(heads_of_kv));
}
FLASHJIT_FN IntVec magnitude(IntVec a) {
  return a < 0 ? minus(IntVec{}, a) : a;
}
FLASHJIT_FN Vec plus(Vec a, Vec b) {
  return a + b;
}
FLASHJIT_FN Vec minus(Vec a, Vec b) {
  return a - b;
}
// Rounded by itself: the compiler contracts no inline assembly.
FLASHJIT_FN Vec times(Vec a, Vec b) {
  Vec product = a * b;
  asm("" : "+v"(product));
  return product;
}
FLASHJIT_FN Vec over(Vec a, Vec b) {
  return a / b;
}
FLASHJIT_FN Vec magnitude(Vec a) {
  return __builtin_elementwise_abs(a);
}
FLASHJIT_FN Vec fused(Vec a, Vec b, Vec c) {
  return fma(a, b, c);
}
FLASHJIT_FN IntVec floor_of(Vec a) {
  const IntVec fits = (a >= -2147483648.0f) & (a < 2147483648.0f);
  const IntVec whole = __builtin_convertvector(__builtin_elementwise_floor(fits ? a : Vec{}), IntVec);
  return a >= 2147483648.0f ? splat(0x7fffffff) : a < -2147483648.0f ? splat(-0x7fffffff - 1) : whole;
}
FLASHJIT_FN Vec real_of(IntVec a) {
  return __builtin_convertvector(a, Vec);
}
FLASHJIT_FN IntVec lesser(IntVec a, IntVec b) {
  return b < a ? b : a;
}
FLASHJIT_FN IntVec greater(IntVec a, IntVec b) {
  return a < b ? b : a;
}
FLASHJIT_FN Vec lesser(Vec a, Vec b) {
  return (a != a) | (b < a) ? b : a;
}
FLASHJIT_FN Vec greater(Vec a, Vec b) {
  return (a != a) | (a < b) ? b : a;
}
FLASHJIT_FN IntVec is_less(IntVec a, IntVec b) {
  return a < b;
}
FLASHJIT_FN IntVec is_less(Vec a, Vec b) {
  return a < b;
}
FLASHJIT_FN IntVec is_at_most(IntVec a, IntVec b) {
  return a <= b;
}
FLASHJIT_FN IntVec is_at_most(Vec a, Vec b) {
  return a <= b;
}
FLASHJIT_FN IntVec is_equal(IntVec a, IntVec b) {
  return a == b;
}
FLASHJIT_FN IntVec is_equal(Vec a, Vec b) {
  return a == b;
}
FLASHJIT_FN IntVec both(IntVec a, IntVec b) {
  return a & b;
}
FLASHJIT_FN IntVec either(IntVec a, IntVec b) {
  return a | b;
}
FLASHJIT_FN IntVec opposite(IntVec a) {
  return ~a;
}
FLASHJIT_FN IntVec choose(IntVec condition, IntVec a, IntVec b) {
  return condition ? a : b;
}
FLASHJIT_FN Vec choose(IntVec condition, Vec a, Vec b) {
  return condition ? a : b;
}

}  // namespace flashjit::device
