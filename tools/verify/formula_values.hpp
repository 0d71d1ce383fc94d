// The numbers that the oracle's formulas compute with: integers and truths, reals of masks (float), reals of
// scores with a bound on a kernel's error (Bounded), and the same with a derivative (Dual). Each has the
// operations of a formula: binary, negative, absolute, function, floor_of, compare, convert, make, either.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "tools/verify/formula.hpp"

namespace flashjit::verify::formula_values {

using Op = FormulaOperation;

inline constexpr double infinity = std::numeric_limits<double>::infinity();

// `sure`: a kernel has the same value.
struct Integer {
  std::int32_t value = 0;
  bool sure = true;
};
struct Truth {
  bool value = false;
  bool sure = true;
};
// A real of a score, and a bound on a kernel's error.
struct Bounded {
  double value = 0, error = 0;
};

// --- integers wrap; division by 0 gives 0

inline std::int32_t wrapped(std::int64_t value) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(static_cast<std::uint64_t>(value)));
}
inline Integer binary(Op op, Integer a, Integer b) {
  const std::int64_t x = a.value, y = b.value;
  std::int64_t result = 0;
  switch (op) {
    case Op::add:
      result = x + y;
      break;
    case Op::subtract:
      result = x - y;
      break;
    case Op::multiply:
      result = x * y;
      break;
    case Op::divide:
      result = y == 0 ? 0 : x / y;
      break;
    case Op::remainder:
      result = y == 0 ? 0 : x % y;
      break;
    case Op::minimum:
      result = std::min(x, y);
      break;
    default:
      result = std::max(x, y);
  }
  return {wrapped(result), a.sure && b.sure};
}
inline Integer negative(Integer a) {
  return {wrapped(-std::int64_t{a.value}), a.sure};
}
inline Integer absolute(Integer a) {
  return a.value < 0 ? negative(a) : a;
}

inline std::int32_t saturated_floor(double value) {
  using Limits = std::numeric_limits<std::int32_t>;
  if (std::isnan(value)) return 0;
  return static_cast<std::int32_t>(std::clamp<double>(std::floor(value), Limits::min(), Limits::max()));
}

// --- reals of masks: float32, each operation rounded by itself

inline float binary(Op op, float a, float b) {
  switch (op) {
    case Op::add:
      return a + b;
    case Op::subtract:
      return a - b;
    case Op::multiply:
      return a * b;
    case Op::divide:
      return a / b;
    case Op::minimum:
      return std::fmin(a, b);
    default:
      return std::fmax(a, b);
  }
}
inline float negative(float a) {
  return -a;
}
inline float absolute(float a) {
  return std::fabs(a);
}
inline float function(Op op, float a, const FunctionErrors&) {
  switch (op) {
    case Op::exp:
      return std::exp(a);
    case Op::log:
      return std::log(a);
    case Op::tanh:
      return std::tanh(a);
    default:
      return std::sqrt(a);
  }
}
inline Integer floor_of(float a) {
  return {saturated_floor(a)};
}
inline bool holds(Op op, auto a, auto b) {
  switch (op) {
    case Op::less:
      return a < b;
    case Op::less_equal:
      return a <= b;
    case Op::greater:
      return a > b;
    case Op::greater_equal:
      return a >= b;
    case Op::equal:
      return a == b;
    default:
      return a != b;
  }
}
inline Truth compare(Op op, float a, float b) {
  return {holds(op, a, b)};
}
inline Truth compare(Op op, Integer a, Integer b) {
  return {holds(op, a.value, b.value), a.sure && b.sure};
}
inline void convert(Integer from, float& to) {
  to = static_cast<float>(from.value);
}
inline void make(double value, float& to) {
  to = static_cast<float>(value);
}
inline float either(float, float b) {  // conditions of masks are sure
  return b;
}
inline Integer either(Integer a, Integer b) {
  return {b.value, b.sure && a.sure && a.value == b.value};
}
inline Truth either(Truth a, Truth b) {
  return {b.value, b.sure && a.sure && a.value == b.value};
}

// --- reals of scores

// With a rounding of so much of the result. Infinity and NaN, of operands with finite errors, have none.
inline Bounded rounded(double value, double error, double relative, double absolute = 0x1p-126) {
  constexpr double largest = std::numeric_limits<float>::max();
  if (!std::isfinite(value)) return {value, 0};
  if (value == 0 && error == 0) return {value, 0};
  error += relative * (std::abs(value) + error) + absolute;
  return {value, std::abs(value) + error < largest ? error : infinity};
}
inline double gap(const Bounded& a) {  // an error counts only where the value is finite
  return std::isfinite(a.value) ? a.error : a.error > 0 ? infinity : 0;
}
inline Bounded binary(Op op, const Bounded& a, const Bounded& b) {
  const double x = a.value, y = b.value, ex = gap(a), ey = gap(b);
  if (ex == infinity || ey == infinity) return {x + y, infinity};
  constexpr double unit = 0x1p-23;
  switch (op) {
    case Op::add:
      return rounded(x + y, ex + ey, unit);
    case Op::subtract:
      return rounded(x - y, ex + ey, unit);
    case Op::multiply:
      // Infinity times a number that may be 0, or of either sign.
      if ((std::isinf(x) && ey > 0 && std::abs(y) <= ey) || (std::isinf(y) && ex > 0 && std::abs(x) <= ex))
        return {x * y, infinity};
      return rounded(x * y, std::abs(x) * ey + std::abs(y) * ex + ex * ey, unit);
    case Op::divide: {
      if (ex == 0 && ey == 0) return rounded(x / y, 0, 0x1p-21);
      const double nearest = std::abs(y) - ey;  // of the divisor to 0
      if (!(nearest > 0)) return {x / y, infinity};
      return rounded(x / y, (ex + std::abs(x / y) * ey) / nearest, 0x1p-21);
    }
    default: {
      const bool least = op == Op::minimum;
      if (std::isnan(x) || std::isnan(y)) return std::isnan(x) ? b : a;
      return {least ? std::min(x, y) : std::max(x, y), std::max(ex, ey)};
    }
  }
}
inline Bounded negative(const Bounded& a) {
  return {-a.value, a.error};
}
inline Bounded absolute(const Bounded& a) {
  return {std::abs(a.value), a.error};
}
inline Bounded function(Op op, const Bounded& a, const FunctionErrors& errors) {
  const double x = a.value, e = gap(a);
  if (e == infinity && op != Op::tanh) return {x, infinity};
  switch (op) {
    case Op::exp: {
      const double y = std::exp(x);
      return rounded(y, y * std::expm1(e),
                     errors.exp_relative + (std::isinf(x) ? 0 : errors.exp_operand * std::abs(x)));
    }
    case Op::log:
      if (e > 0 && !(x > e)) return {std::log(x), infinity};
      return rounded(std::log(x), e > 0 ? std::log(x / (x - e)) : 0, errors.log_relative,
                     errors.log_absolute + 0x1p-126);
    case Op::tanh: {
      if (std::isnan(x)) return {x, e};
      // Steepest where it is nearest to 0.
      const double nearest = std::max(std::abs(x) - e, 0.0),
                   slope = 1 - std::tanh(nearest) * std::tanh(nearest);
      return rounded(std::tanh(x), std::isinf(x) ? e : std::min(e * slope, 2.0), errors.tanh_relative,
                     errors.tanh_absolute + 0x1p-126);
    }
    default:
      if (e > 0 && !(x > e)) return {std::sqrt(x), infinity};
      return rounded(std::sqrt(x), e > 0 ? std::sqrt(x) - std::sqrt(x - e) : 0, errors.sqrt_relative);
  }
}
inline Integer floor_of(const Bounded& a) {
  const std::int32_t value = saturated_floor(a.value);
  const bool sure = a.error == 0 || (saturated_floor(a.value - a.error) == value &&
                                     saturated_floor(a.value + a.error) == value);
  return {value, sure};
}
inline Truth compare(Op op, const Bounded& a, const Bounded& b) {
  const double error = gap(a) + gap(b);
  return {holds(op, a.value, b.value), error == 0 || std::abs(a.value - b.value) > error};
}
inline void convert(Integer from, Bounded& to) {
  const double size = std::abs(static_cast<double>(from.value));
  to = {static_cast<double>(from.value), !from.sure ? infinity : size > 0x1p24 ? size * 0x1p-24 : 0};
}
inline void make(double value, Bounded& to) {
  to = {value, 0};
}
inline Bounded either(const Bounded& a, const Bounded& b) {
  const double error = std::abs(a.value - b.value) + std::max(gap(a), gap(b));
  return {b.value, a.value == b.value ? std::max(gap(a), gap(b)) : std::isnan(error) ? infinity : error};
}

// --- reals of scores with a derivative

struct Dual {
  Bounded value, slope;
};
inline bool is_zero(const Bounded& a) {
  return a.value == 0 && a.error == 0;
}
// A slope of 0 stays 0, whatever it is multiplied by: the operand does not change.
inline Bounded times(const Bounded& a, const Bounded& slope) {
  return is_zero(slope) ? slope : binary(Op::multiply, a, slope);
}
inline Bounded plus(const Bounded& a, const Bounded& b) {
  return is_zero(a) ? b : is_zero(b) ? a : binary(Op::add, a, b);
}
inline Bounded over(const Bounded& slope, const Bounded& a) {
  return is_zero(slope) ? slope : binary(Op::divide, slope, a);
}
inline Dual binary(Op op, const Dual& a, const Dual& b) {
  const Bounded value = binary(op, a.value, b.value);
  switch (op) {
    case Op::add:
      return {value, plus(a.slope, b.slope)};
    case Op::subtract:
      return {value, plus(a.slope, negative(b.slope))};
    case Op::multiply:
      return {value, plus(times(b.value, a.slope), times(a.value, b.slope))};
    case Op::divide:
      return {value, over(plus(a.slope, negative(times(value, b.slope))), b.value)};
    default: {
      const Truth less =
          op == Op::minimum ? compare(Op::less, b.value, a.value) : compare(Op::less, a.value, b.value);
      const bool second = std::isnan(a.value.value) || less.value;
      const Bounded &chosen = second ? b.slope : a.slope, &other = second ? a.slope : b.slope;
      return {value, less.sure || std::isnan(a.value.value) ? chosen : either(other, chosen)};
    }
  }
}
inline Dual negative(const Dual& a) {
  return {negative(a.value), negative(a.slope)};
}
inline Dual absolute(const Dual& a) {
  const Bounded zero{}, slope = a.value.value < 0 ? negative(a.slope) : a.value.value > 0 ? a.slope : zero;
  const bool sure = compare(Op::less, a.value, zero).sure;
  return {absolute(a.value), sure ? slope : either(negative(slope), either(zero, slope))};
}
inline Dual function(Op op, const Dual& a, const FunctionErrors& errors) {
  const Bounded value = function(op, a.value, errors), one{1, 0}, half{0.5, 0};
  switch (op) {
    case Op::exp:
      return {value, times(value, a.slope)};
    case Op::log:
      return {value, over(a.slope, a.value)};
    case Op::tanh:
      return {value, times(binary(Op::subtract, one, binary(Op::multiply, value, value)), a.slope)};
    default:
      if (is_zero(value) || std::isnan(value.value)) return {value, {}};
      return {value, over(times(half, a.slope), value)};
  }
}
inline Integer floor_of(const Dual& a) {
  return floor_of(a.value);
}
inline Truth compare(Op op, const Dual& a, const Dual& b) {
  return compare(op, a.value, b.value);
}
inline void convert(Integer from, Dual& to) {
  to = {};
  convert(from, to.value);
}
inline void make(double value, Dual& to) {
  to = {{value, 0}, {}};
}
inline Dual either(const Dual& a, const Dual& b) {
  return {either(a.value, b.value), either(a.slope, b.slope)};
}

}  // namespace flashjit::verify::formula_values
