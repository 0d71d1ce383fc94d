// Ranges of formulas (templates/shared/formula_values.h) against every element: a range holds what any
// operands within the operands' ranges give, and is no wider than it must be where two elements decide it.
#include "shared/formula_values.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace flashjit::device {

// Where the test of masks defines them too, they are the same.
inline Real<float> precise_exp(Real<float> a) {
  return Real<float>(std::exp(a.v));
}
inline Real<float> precise_log(Real<float> a) {
  return Real<float>(std::log(a.v));
}
inline Real<float> precise_tanh(Real<float> a) {
  return Real<float>(std::tanh(a.v));
}
inline Real<float> precise_sqrt(Real<float> a) {
  return Real<float>(std::sqrt(a.v));
}

namespace {

constexpr int cases = 4000;

template <class T>
struct Set {
  std::vector<T> elements;
  Range<T> range;
};

class Ranges : public ::testing::Test {
 protected:
  std::mt19937 random_{20260301};

  template <class T>
  T any_of(std::initializer_list<T> values) {
    return values.begin()[random_() % values.size()];
  }
  float draw(float) {
    const float least = 0x1p-149f, largest = 0x1.fffffep127f;
    if (random_() % 2)
      return any_of({0.0f, -0.0f, 1.0f, -1.0f, 0.5f, -2.5f, 3.0f, least, -least, largest, -largest, 0x1p31f,
                     -0x1p31f, infinity, minus_infinity, std::nanf("")});
    return std::ldexp(static_cast<float>(random_() % 2001) / 1000 - 1, static_cast<int>(random_() % 12));
  }
  int draw(int) {
    if (random_() % 2) return any_of({0, 1, -1, 2, -3, 7, lowest_int, lowest_int + 1, largest_int});
    return static_cast<int>(random_() % 41) - 20;
  }
  // One to three elements, every other one from `others`, and the narrowest range that holds them.
  template <class T>
  Set<T> draw_set(const std::vector<T>& others = {}) {
    Set<T> set;
    for (auto left = random_() % 3 + 1; left > 0; --left)
      set.elements.push_back(others.empty() || random_() % 2 ? draw(T{}) : others[random_() % others.size()]);
    std::optional<Range<T>> range;
    bool nan = false;
    for (const T x : set.elements) {
      if (x != x)
        nan = true;
      else
        range = range ? Range<T>{std::min(range->low, x), std::max(range->high, x)} : Range<T>{x, x};
    }
    set.range = range.value_or(Range<T>{minus_infinity_of(T{}), infinity_of(T{})});
    set.range.nan = nan;
    return set;
  }
  static float minus_infinity_of(float) { return minus_infinity; }
  static int minus_infinity_of(int) { return lowest_int; }
  static float infinity_of(float) { return infinity; }
  static int infinity_of(int) { return largest_int; }

  template <class T>
  static bool holds(Range<T> range, T x) {
    return x != x ? range.nan : range.low <= x && x <= range.high;
  }
  static bool holds(Maybe known, bool x) { return x ? known.can_hold : known.can_fail; }
  template <class T>
  static bool is_point(Range<T> range, T x) {
    return x != x || (range.low == x && range.high == x && !range.nan);
  }
  // Where integers may wrap, ranges need not be exact.
  static bool is_small(int x) { return -1000 < x && x < 1000; }
  static bool is_small(float x) { return x == x; }
  static bool is_point(Maybe known, bool x) { return known.can_hold == x && known.can_fail != x; }

  template <class T>
  static std::string text(const Set<T>& set) {
    std::string text = "{";
    for (const T x : set.elements) text += " " + std::to_string(x);
    return text + " }";
  }

  // `exact`: elements give an element, and not a range around it.
  template <class A, class Function>
  void check(const char* name, const Function& function, bool exact) {
    for (int i = 0; i < cases; ++i) {
      const Set<A> a = draw_set<A>();
      const auto range = function(a.range);
      for (const A x : a.elements) {
        const auto y = function(x);
        ASSERT_TRUE(holds(range, y)) << name << " of " << text(a) << ": " << x << " gives " << y;
        if (exact && is_small(x) && a.elements.size() == 1) {
          ASSERT_TRUE(is_point(range, y)) << name << " of " << text(a);
        }
      }
    }
  }
  template <class T, class Function>
  void check_two(const char* name, const Function& function, bool exact) {
    for (int i = 0; i < cases; ++i) {
      const Set<T> a = draw_set<T>(), b = draw_set<T>(a.elements);
      const auto range = function(a.range, b.range);
      for (const T x : a.elements)
        for (const T y : b.elements) {
          const auto z = function(x, y);
          ASSERT_TRUE(holds(range, z))
              << name << " of " << text(a) << " and " << text(b) << ": " << x << ", " << y << " give " << z;
          if (exact && is_small(x) && is_small(y) && a.elements.size() == 1 && b.elements.size() == 1) {
            ASSERT_TRUE(is_point(range, z)) << name << " of " << text(a) << " and " << text(b);
          }
        }
    }
  }
};

#define CALL(function) [](auto... operands) { return function(operands...); }

TEST_F(Ranges, OfReals) {
  check_two<float>("plus", CALL(plus), true);
  check_two<float>("minus", CALL(minus), true);
  check_two<float>("times", CALL(times), true);
  check_two<float>("over", CALL(over), false);
  check_two<float>("lesser", CALL(lesser), true);
  check_two<float>("greater", CALL(greater), true);
  check_two<float>("is_less", CALL(is_less), true);
  check_two<float>("is_at_most", CALL(is_at_most), true);
  check_two<float>("is_equal", CALL(is_equal), true);
  check<float>("magnitude", CALL(magnitude), true);
  check<float>("floor", CALL(floor_of), true);
}

TEST_F(Ranges, OfIntegers) {
  check_two<int>("plus", CALL(plus), true);
  check_two<int>("minus", CALL(minus), true);
  check_two<int>("times", CALL(times), true);
  check_two<int>("over", CALL(over), true);
  check_two<int>("remainder", CALL(remainder_of), true);
  check_two<int>("lesser", CALL(lesser), true);
  check_two<int>("greater", CALL(greater), true);
  check_two<int>("is_less", CALL(is_less), true);
  check_two<int>("is_at_most", CALL(is_at_most), true);
  check_two<int>("is_equal", CALL(is_equal), true);
  check<int>("magnitude", CALL(magnitude), true);
  check<int>("real", CALL(real_of), true);
}

TEST_F(Ranges, OfFunctions) {
  check<float>("exp", [](auto a) { return precise_exp(real(a)).v; }, false);
  check<float>("log", [](auto a) { return precise_log(real(a)).v; }, false);
  check<float>("tanh", [](auto a) { return precise_tanh(real(a)).v; }, false);
  check<float>("sqrt", [](auto a) { return precise_sqrt(real(a)).v; }, false);
}

TEST_F(Ranges, OfConditions) {
  const Maybe values[] = {{true, false}, {false, true}, {true, true}};
  for (const Maybe a : values)
    for (const Maybe b : values)
      for (const bool x : {false, true})
        for (const bool y : {false, true}) {
          if (!holds(a, x) || !holds(b, y)) continue;
          EXPECT_TRUE(holds(both(a, b), both(x, y)));
          EXPECT_TRUE(holds(either(a, b), either(x, y)));
          EXPECT_TRUE(holds(opposite(a), opposite(x)));
          for (const Maybe c : values) {
            const Maybe chosen = choose(c, a, b);
            for (const bool z : {false, true})
              if (holds(c, z)) {
                EXPECT_TRUE(holds(chosen, choose(z, x, y)));
              }
            if (c.can_hold && c.can_fail) continue;
            const Maybe only = c.can_hold ? a : b;
            EXPECT_TRUE(chosen.can_hold == only.can_hold && chosen.can_fail == only.can_fail);
          }
          if (a.can_hold && a.can_fail) continue;
          EXPECT_TRUE(is_point(opposite(a), opposite(x)));
          if (b.can_hold && b.can_fail) continue;
          EXPECT_TRUE(is_point(both(a, b), both(x, y)));
          EXPECT_TRUE(is_point(either(a, b), either(x, y)));
        }
  for (int i = 0; i < cases; ++i) {
    const Set<float> a = draw_set<float>(), b = draw_set<float>(a.elements);
    for (const Maybe c : values)
      for (const bool z : {false, true}) {
        if (!holds(c, z)) continue;
        const Range<float> chosen = choose(c, a.range, b.range);
        for (const float x : a.elements)
          for (const float y : b.elements) ASSERT_TRUE(holds(chosen, choose(z, x, y)));
        if (c.can_hold && c.can_fail) continue;
        const Range<float> only = c.can_hold ? a.range : b.range;
        ASSERT_TRUE(chosen.low == only.low && chosen.high == only.high && chosen.nan == only.nan);
      }
  }
}

}  // namespace
}  // namespace flashjit::device
