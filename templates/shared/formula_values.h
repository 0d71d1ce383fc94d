// The values and operators of formulas. codegen renders a formula once, as an expression over these types.
// The same text is computed for one element, for many at a time (cpu/formula.h), and on ranges: a range holds
// every value that an operand may have, and the result holds every value that the formula may have.
//
//   Integer<V>   int32 that wraps. V: int, Range<int>, or the lanes of a target
//   Real<V>      float32. V: float, Range<float>, or lanes
//   Truth<V>     V: bool, Maybe, or lanes
//
// Operands may mix one element with ranges or lanes. Operators on reals round to nearest, each by itself:
// masks mean the same on every target. Scores may use fma() and quotient(), which round less or differently.
// exp, log, tanh, sqrt, quotient and inverse of single elements, and the precise_ ones, are each target's
// own.
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

constexpr float infinity = __builtin_bit_cast(float, 0x7f800000u);
constexpr int lowest_int = -2147483647 - 1, largest_int = 2147483647;

template <class T>
struct Range {
  T low, high;
  bool nan = false;  // of reals: the value may be NaN
};
// A condition as far as it is known.
struct Maybe {
  bool can_hold, can_fail;
  FLASHJIT_FN constexpr bool certain() const { return !can_fail; }
};

template <class V>
struct Integer {
  V v;
  FLASHJIT_FN constexpr explicit Integer(V value) : v(value) {}
};
template <class V>
struct Real {
  V v;
  FLASHJIT_FN constexpr explicit Real(V value) : v(value) {}
};
template <class V>
struct Truth {
  V v;
  FLASHJIT_FN constexpr explicit Truth(V value) : v(value) {}
};

// --- one element

FLASHJIT_FN constexpr int plus(int a, int b) {
  return static_cast<int>(static_cast<u32>(a) + static_cast<u32>(b));
}
FLASHJIT_FN constexpr int minus(int a, int b) {
  return static_cast<int>(static_cast<u32>(a) - static_cast<u32>(b));
}
FLASHJIT_FN constexpr int times(int a, int b) {
  return static_cast<int>(static_cast<u32>(a) * static_cast<u32>(b));
}
FLASHJIT_FN constexpr int over(int a, int b) {
  return b == 0 ? 0 : b == -1 ? minus(0, a) : a / b;
}
FLASHJIT_FN constexpr int remainder_of(int a, int b) {
  return b == 0 || b == -1 ? 0 : a % b;
}
FLASHJIT_FN constexpr int magnitude(int a) {
  return a < 0 ? minus(0, a) : a;
}

// Rounded by itself, whatever the compiler may contract.
FLASHJIT_FN float plus(float a, float b) {
#if defined(__CUDACC__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
FLASHJIT_FN float times(float a, float b) {
#if defined(__CUDACC__)
  return __fmul_rn(a, b);
#else
  float product = a * b;
#if defined(__x86_64__)
  asm("" : "+x"(product));
#endif
  return product;
#endif
}
FLASHJIT_FN float minus(float a, float b) {
  return plus(a, -b);
}
FLASHJIT_FN float over(float a, float b) {
#if defined(__CUDACC__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}
FLASHJIT_FN float magnitude(float a) {
#if defined(__CUDACC__)
  return fabsf(a);
#else
  return __builtin_fabsf(a);
#endif
}
FLASHJIT_FN float fused(float a, float b, float c) {
#if defined(__CUDACC__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}
// Saturates; NaN gives 0.
FLASHJIT_FN int floor_of(float a) {
#if defined(__CUDACC__)
  return __float2int_rd(a);
#else
  if (!(a >= -2147483648.0f)) return a != a ? 0 : lowest_int;
  if (a >= 2147483648.0f) return largest_int;
  const int truncated = static_cast<int>(a);
  return truncated - (static_cast<float>(truncated) > a);
#endif
}
FLASHJIT_FN float real_of(int a) {
  return static_cast<float>(a);
}

// A NaN gives the other operand.
FLASHJIT_FN float lesser(float a, float b) {
  return a != a || b < a ? b : a;
}
FLASHJIT_FN float greater(float a, float b) {
  return a != a || a < b ? b : a;
}
FLASHJIT_FN int lesser(int a, int b) {
  return min(a, b);
}
FLASHJIT_FN int greater(int a, int b) {
  return max(a, b);
}
FLASHJIT_FN bool is_less(int a, int b) {
  return a < b;
}
FLASHJIT_FN bool is_less(float a, float b) {
  return a < b;
}
FLASHJIT_FN bool is_at_most(int a, int b) {
  return a <= b;
}
FLASHJIT_FN bool is_at_most(float a, float b) {
  return a <= b;
}
FLASHJIT_FN bool is_equal(int a, int b) {
  return a == b;
}
FLASHJIT_FN bool is_equal(float a, float b) {
  return a == b;
}
FLASHJIT_FN bool both(bool a, bool b) {
  return a & b;
}
FLASHJIT_FN bool either(bool a, bool b) {
  return a | b;
}
FLASHJIT_FN bool opposite(bool a) {
  return !a;
}
FLASHJIT_FN int choose(bool condition, int a, int b) {
  return condition ? a : b;
}
FLASHJIT_FN float choose(bool condition, float a, float b) {
  return condition ? a : b;
}
FLASHJIT_FN bool choose(bool condition, bool a, bool b) {
  return condition ? a : b;
}

// --- ranges

FLASHJIT_FN Range<int> any_int() {
  return {lowest_int, largest_int, false};
}
FLASHJIT_FN Range<float> any_real() {
  return {minus_infinity, infinity, true};
}
FLASHJIT_FN Range<int> point(int a) {
  return {a, a, false};
}
FLASHJIT_FN Range<float> point(float a) {
  return a != a ? any_real() : Range<float>{a, a, false};
}
FLASHJIT_FN Maybe point(bool a) {
  return {a, !a};
}
FLASHJIT_FN Range<int> within_int(i64 low, i64 high) {
  if (low < lowest_int || high > largest_int) return any_int();  // it wraps
  return {static_cast<int>(low), static_cast<int>(high), false};
}
FLASHJIT_FN Range<int> plus(Range<int> a, Range<int> b) {
  return within_int(i64{a.low} + b.low, i64{a.high} + b.high);
}
FLASHJIT_FN Range<int> minus(Range<int> a, Range<int> b) {
  return within_int(i64{a.low} - b.high, i64{a.high} - b.low);
}
FLASHJIT_FN Range<int> times(Range<int> a, Range<int> b) {
  const i64 p = i64{a.low} * b.low, q = i64{a.low} * b.high, r = i64{a.high} * b.low,
            s = i64{a.high} * b.high;
  return within_int(min(min(p, q), min(r, s)), max(max(p, q), max(r, s)));
}
FLASHJIT_FN Range<int> over(Range<int> a, Range<int> b) {
  if (b.low == b.high) {  // the usual case
    if (b.low == -1) return minus(point(0), a);
    const int p = over(a.low, b.low), q = over(a.high, b.low);
    return {min(p, q), max(p, q), false};
  }
  if (a.low == lowest_int && b.low < 0) return any_int();  // lowest_int / -1 wraps
  const i64 largest = max(-i64{a.low}, i64{a.high});
  return {a.low < 0 || b.low < 0 ? static_cast<int>(max(-largest, i64{lowest_int})) : 0,
          a.high > 0 || b.low < 0 ? static_cast<int>(min(largest, i64{largest_int})) : 0, false};
}
FLASHJIT_FN Range<int> remainder_of(Range<int> a, Range<int> b) {
  if (b.low == b.high) {
    const int d = b.low;
    if (d == 0 || d == -1) return point(0);
    if (a.low / d == a.high / d) return {a.low % d, a.high % d, false};  // within one period
  }
  const i64 of_b = max(max(i64{b.high}, -i64{b.low}) - 1, i64{0});
  return {static_cast<int>(max(min(i64{a.low}, i64{0}), -of_b)),
          static_cast<int>(min(max(i64{a.high}, i64{0}), of_b)), false};
}
FLASHJIT_FN Range<int> magnitude(Range<int> a) {
  if (a.low == lowest_int) return any_int();  // it wraps
  return {a.low > 0 ? a.low : a.high < 0 ? -a.high : 0, max(-a.low, a.high), false};
}

FLASHJIT_FN bool infinite(Range<float> a) {
  return a.low == minus_infinity || a.high == infinity;
}
FLASHJIT_FN bool holds_zero(Range<float> a) {
  return a.low <= 0 && a.high >= 0;
}
FLASHJIT_FN Range<float> plus(Range<float> a, Range<float> b) {
  const float low = plus(a.low, b.low), high = plus(a.high, b.high);
  if (low != low || high != high) return any_real();
  const bool opposed =
      (a.high == infinity && b.low == minus_infinity) || (a.low == minus_infinity && b.high == infinity);
  return {low, high, a.nan || b.nan || opposed};
}
FLASHJIT_FN Range<float> minus(Range<float> a, Range<float> b) {
  return plus(a, Range<float>{-b.high, -b.low, b.nan});
}
FLASHJIT_FN Range<float> span_of(float p, float q, float r, float s, bool nan) {
  if (p != p || q != q || r != r || s != s) return any_real();
  return {min(min(p, q), min(r, s)), max(max(p, q), max(r, s)), nan};
}
FLASHJIT_FN Range<float> times(Range<float> a, Range<float> b) {
  const bool nan = a.nan || b.nan || (holds_zero(a) && infinite(b)) || (holds_zero(b) && infinite(a));
  return span_of(times(a.low, b.low), times(a.low, b.high), times(a.high, b.low), times(a.high, b.high), nan);
}
FLASHJIT_FN Range<float> over(Range<float> a, Range<float> b) {
  if (holds_zero(b) || (infinite(a) && infinite(b))) return any_real();
  return span_of(over(a.low, b.low), over(a.low, b.high), over(a.high, b.low), over(a.high, b.high),
                 a.nan || b.nan);
}
FLASHJIT_FN Range<float> magnitude(Range<float> a) {
  return {a.low > 0 ? a.low : a.high < 0 ? -a.high : 0, greater(-a.low, a.high), a.nan};
}
FLASHJIT_FN Range<int> floor_of(Range<float> a) {
  const int low = floor_of(a.low), high = floor_of(a.high);
  return {a.nan ? min(low, 0) : low, a.nan ? max(high, 0) : high, false};
}
FLASHJIT_FN Range<float> real_of(Range<int> a) {
  return {real_of(a.low), real_of(a.high), false};
}
// A NaN leaves the other operand, whatever it is.
template <class T>
FLASHJIT_FN Range<T> lesser(Range<T> a, Range<T> b) {
  return {min(a.low, b.low), a.nan || b.nan ? max(a.high, b.high) : min(a.high, b.high), a.nan && b.nan};
}
template <class T>
FLASHJIT_FN Range<T> greater(Range<T> a, Range<T> b) {
  return {a.nan || b.nan ? min(a.low, b.low) : max(a.low, b.low), max(a.high, b.high), a.nan && b.nan};
}
template <class T>
FLASHJIT_FN Maybe is_less(Range<T> a, Range<T> b) {
  return {a.low < b.high, a.nan || b.nan || a.high >= b.low};
}
template <class T>
FLASHJIT_FN Maybe is_at_most(Range<T> a, Range<T> b) {
  return {a.low <= b.high, a.nan || b.nan || a.high > b.low};
}
template <class T>
FLASHJIT_FN Maybe is_equal(Range<T> a, Range<T> b) {
  return {a.low <= b.high && b.low <= a.high, a.nan || b.nan || a.low != b.high || b.low != a.high};
}
FLASHJIT_FN Maybe both(Maybe a, Maybe b) {
  return {a.can_hold && b.can_hold, a.can_fail || b.can_fail};
}
FLASHJIT_FN Maybe either(Maybe a, Maybe b) {
  return {a.can_hold || b.can_hold, a.can_fail && b.can_fail};
}
FLASHJIT_FN Maybe opposite(Maybe a) {
  return {a.can_fail, a.can_hold};
}
template <class T>
FLASHJIT_FN Range<T> choose(Maybe condition, Range<T> a, Range<T> b) {
  if (!condition.can_fail) return a;
  if (!condition.can_hold) return b;
  return {min(a.low, b.low), max(a.high, b.high), a.nan || b.nan};
}
FLASHJIT_FN Maybe choose(Maybe condition, Maybe a, Maybe b) {
  if (!condition.can_fail) return a;
  if (!condition.can_hold) return b;
  return {a.can_hold || b.can_hold, a.can_fail || b.can_fail};
}

// --- one element beside ranges or lanes

struct Single {};
struct Ranges {};
template <class V>
struct FormOf {
  using type = Single;
};
template <class T>
struct FormOf<Range<T>> {
  using type = Ranges;
};
template <>
struct FormOf<Maybe> {
  using type = Ranges;
};
// The form of an operation's result: that of any operand that is no single element.
template <class Form, class Other>
struct Stronger {
  using type = Form;
};
template <class Other>
struct Stronger<Single, Other> {
  using type = Other;
};
template <class A, class... Rest>
struct CommonForm {
  using type = typename Stronger<typename FormOf<A>::type, typename CommonForm<Rest...>::type>::type;
};
template <class A>
struct CommonForm<A> {
  using type = typename FormOf<A>::type;
};
template <class V>
FLASHJIT_FN constexpr V in_form(Single, V v) {
  return v;
}
template <class T>
FLASHJIT_FN constexpr Range<T> in_form(Ranges, Range<T> v) {
  return v;
}
FLASHJIT_FN constexpr Maybe in_form(Ranges, Maybe v) {
  return v;
}
FLASHJIT_FN Range<int> in_form(Ranges, int v) {
  return point(v);
}
FLASHJIT_FN Range<float> in_form(Ranges, float v) {
  return point(v);
}
FLASHJIT_FN Maybe in_form(Ranges, bool v) {
  return point(v);
}

// --- operators

template <class V>
FLASHJIT_FN Integer<V> integer(V v) {
  return Integer<V>(v);
}
template <class V>
FLASHJIT_FN Real<V> real(V v) {
  return Real<V>(v);
}
template <class V>
FLASHJIT_FN Truth<V> truth(V v) {
  return Truth<V>(v);
}

#define FLASHJIT_FORMULA_OPERATOR(Operand, result, name, function)       \
  template <class A, class B>                                            \
  FLASHJIT_FN auto name(Operand<A> a, Operand<B> b) {                    \
    using Form = typename CommonForm<A, B>::type;                        \
    return result(function(in_form(Form{}, a.v), in_form(Form{}, b.v))); \
  }
#define FLASHJIT_FORMULA_COMPARISONS(Operand)                       \
  FLASHJIT_FORMULA_OPERATOR(Operand, truth, operator<, is_less)     \
  FLASHJIT_FORMULA_OPERATOR(Operand, truth, operator<=, is_at_most) \
  FLASHJIT_FORMULA_OPERATOR(Operand, truth, operator==, is_equal)   \
  template <class A, class B>                                       \
  FLASHJIT_FN auto operator>(Operand<A> a, Operand<B> b) {          \
    return b < a;                                                   \
  }                                                                 \
  template <class A, class B>                                       \
  FLASHJIT_FN auto operator>=(Operand<A> a, Operand<B> b) {         \
    return b <= a;                                                  \
  }                                                                 \
  template <class A, class B>                                       \
  FLASHJIT_FN auto operator!=(Operand<A> a, Operand<B> b) {         \
    return !(a == b);                                               \
  }

template <class V>
FLASHJIT_FN auto operator!(Truth<V> a) {
  return truth(opposite(a.v));
}
FLASHJIT_FORMULA_OPERATOR(Truth, truth, operator&&, both)
FLASHJIT_FORMULA_OPERATOR(Truth, truth, operator||, either)
FLASHJIT_FORMULA_COMPARISONS(Integer)
FLASHJIT_FORMULA_COMPARISONS(Real)
FLASHJIT_FORMULA_OPERATOR(Integer, integer, operator+, plus)
FLASHJIT_FORMULA_OPERATOR(Integer, integer, operator-, minus)
FLASHJIT_FORMULA_OPERATOR(Integer, integer, operator*, times)
FLASHJIT_FORMULA_OPERATOR(Integer, integer, operator/, over)
FLASHJIT_FORMULA_OPERATOR(Integer, integer, operator%, remainder_of)
FLASHJIT_FORMULA_OPERATOR(Integer, integer, minimum, lesser)
FLASHJIT_FORMULA_OPERATOR(Integer, integer, maximum, greater)
FLASHJIT_FORMULA_OPERATOR(Real, real, operator+, plus)
FLASHJIT_FORMULA_OPERATOR(Real, real, operator-, minus)
FLASHJIT_FORMULA_OPERATOR(Real, real, operator*, times)
FLASHJIT_FORMULA_OPERATOR(Real, real, operator/, over)
FLASHJIT_FORMULA_OPERATOR(Real, real, minimum, lesser)
FLASHJIT_FORMULA_OPERATOR(Real, real, maximum, greater)
#undef FLASHJIT_FORMULA_COMPARISONS
#undef FLASHJIT_FORMULA_OPERATOR

template <class V>
FLASHJIT_FN auto operator-(Integer<V> a) {
  return Integer<int>(0) - a;
}
template <class V>
FLASHJIT_FN auto operator-(Real<V> a) {
  return Real<float>(-1.0f) * a;
}
template <class V>
FLASHJIT_FN auto abs(Integer<V> a) {
  return integer(magnitude(a.v));
}
template <class V>
FLASHJIT_FN auto abs(Real<V> a) {
  return real(magnitude(a.v));
}
template <class V>
FLASHJIT_FN auto floor(Real<V> a) {
  return integer(floor_of(a.v));
}
template <class V>
FLASHJIT_FN auto to_real(Integer<V> a) {
  return real(real_of(a.v));
}
// An element stands for itself; other forms stand for several elements.
template <class V>
FLASHJIT_FN auto whole(Integer<V> a) {
  return a;
}
// a * b + c, rounded once
template <class A, class B, class C>
FLASHJIT_FN auto fma(Real<A> a, Real<B> b, Real<C> c) {
  using Form = typename CommonForm<A, B, C>::type;
  return real(fused(in_form(Form{}, a.v), in_form(Form{}, b.v), in_form(Form{}, c.v)));
}
template <template <class> class Value, class C, class A, class B>
FLASHJIT_FN auto select(Truth<C> condition, Value<A> a, Value<B> b) {
  using Form = typename CommonForm<C, A, B>::type;
  auto chosen = choose(in_form(Form{}, condition.v), in_form(Form{}, a.v), in_form(Form{}, b.v));
  return Value<decltype(chosen)>(chosen);
}

// Each function grows with its operand. Targets round it differently, by less than 2^-15 of the result or of
// 1. `least` and `most` bound its results.
template <class Function>
FLASHJIT_FN Range<float> growing(Range<float> a, float least, float most, const Function& function) {
  const float low = function(a.low), high = function(a.high);
  const float below = magnitude(low) * 0x1p-15f + 0x1p-15f, above = magnitude(high) * 0x1p-15f + 0x1p-15f;
  return {magnitude(low) < infinity ? greater(low - below, least)
          : low == infinity         ? 0x1p126f
                                    : least,
          magnitude(high) < infinity ? lesser(high + above, most) : most, a.nan};
}
// For operands from 0 on.
template <class Function>
FLASHJIT_FN Range<float> growing_from_0(Range<float> a, float least, const Function& function) {
  Range<float> r = growing({greater(a.low, 0.0f), greater(a.high, 0.0f), a.nan}, least, infinity, function);
  r.nan = r.nan || a.low < 0;
  return r;
}
template <class T>
FLASHJIT_FN auto precise_exp(Real<Range<T>> a) {
  return real(growing(a.v, 0, infinity, [](T x) { return precise_exp(Real<T>(x)).v; }));
}
template <class T>
FLASHJIT_FN auto precise_tanh(Real<Range<T>> a) {
  return real(growing(a.v, -1, 1, [](T x) { return precise_tanh(Real<T>(x)).v; }));
}
template <class T>
FLASHJIT_FN auto precise_log(Real<Range<T>> a) {
  return real(growing_from_0(a.v, minus_infinity, [](T x) { return precise_log(Real<T>(x)).v; }));
}
template <class T>
FLASHJIT_FN auto precise_sqrt(Real<Range<T>> a) {
  return real(growing_from_0(a.v, 0, [](T x) { return precise_sqrt(Real<T>(x)).v; }));
}

}  // namespace flashjit::device
