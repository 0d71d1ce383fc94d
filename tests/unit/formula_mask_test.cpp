// Formulas as masks (templates/shared/formula_mask.h) against brute force: ranges never say all or nothing
// wrongly, walks miss nothing, and known masks are as exact as those written by hand. The functors here are
// as codegen renders them.
#include "shared/formula_mask.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "shared/block_lists.h"

namespace flashjit::device {

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

using Params = WithFormulas<ProblemParams>;
int evaluations;  // of formulas

// The functor's value, counted.
template <class Derived>
struct Counted : Formula {
  template <class At, class Row>
  static auto value(const At& at, const Row& row) {
    ++evaluations;
    return Derived::of(at, row);
  }
};
#define FORMULA(Name, expression)              \
  struct Name : Counted<Name> {                \
    template <class At, class Row>             \
    static auto of(const At& at, const Row&) { \
      return expression;                       \
    }                                          \
  };

struct table_prefix : Table<0, int> {};                       // [batch]
struct table_document : Table<1, uint8> {};                   // [batch, seqlen_k]
struct table_packed : Table<2, int8, Dimension::total_k> {};  // [total_k]
struct table_slope : Table<3, fp16> {};                       // [heads_q]
using Int = Integer<int>;

FORMULA(CausalFormula, at.key <= at.position)
FORMULA(Window, at.position - at.key < Int(5) && at.key <= at.position)
FORMULA(Symmetric, abs(at.key - at.position) < Int(4))
FORMULA(Prefix, at.key < at.read(table_prefix(), at.batch) || at.key <= at.position)
FORMULA(Dilated, at.key <= at.position && (at.position - at.key) % Int(4) == Int(0))
FORMULA(Blocks, at.row / Int(8) == at.key / Int(8))
FORMULA(Neighbourhood, abs(at.key % Int(6) - at.position % Int(6)) <= Int(1) &&
                           abs(at.key / Int(6) - at.position / Int(6)) <= Int(1))
FORMULA(Documents,
        at.read(table_document(), at.batch, at.key) == at.read(table_document(), at.batch, at.position))
FORMULA(Packed,
        at.read(table_packed(), at.key) == at.read(table_packed(), at.position) && at.key <= at.position)
FORMULA(Gap, at.key < Int(3) || at.key >= at.seqlen_k - Int(9))
FORMULA(Nothing, at.key < Int(0))
FORMULA(All, at.key >= Int(0))
FORMULA(Reals,
        to_real(at.key) * Real<float>(0.5f) < precise_sqrt(to_real(at.row * at.row)) + Real<float>(1.5f))
FORMULA(Chosen, select(at.row % Int(2) == Int(0), at.key, -at.key) < Int(3))
FORMULA(Powers, precise_exp(to_real(at.key - at.position)) < Real<float>(1.5f) &&
                    precise_log(to_real(at.key + Int(1))) > Real<float>(0.5f) &&
                    precise_tanh(to_real(at.key)) <= Real<float>(1.0f))
FORMULA(Wraps, at.key + Int(largest_int - 4) < Int(0))

struct HeadWindow : Counted<HeadWindow> {
  static constexpr bool reads_head = true;
  template <class At>
  static auto of_row(const At& at) {
    return row_values(at.position - (at.head + Int(1)) * Int(3), at.read(table_slope(), at.head));
  }
  template <class At, class Row>
  static auto of(const At& at, const Row& row) {
    return at.key <= at.position && at.key > row.a && row.b > Real<float>(0.0f);
  }
};

// Each row sees an interval of keys.
struct IntervalWindow : Formula {  // position - key < 5 && key <= position
  static constexpr bool interval = true;
  template <class At, class Tile>
  static auto begin(const At& at, const Tile&) {
    return bounded_sum(bounded_difference(at.position, Int(5)), Int(1));
  }
  template <class At, class Tile>
  static auto end(const At& at, const Tile&) {
    return bounded_sum(at.position, Int(1));
  }
};
struct IntervalPrefix : Formula {  // key < prefix[batch] || key <= position
  static constexpr bool interval = true;
  template <class At>
  static auto of_tile(const At& at) {
    return row_values(at.read(table_prefix(), at.batch));
  }
  template <class At, class Tile>
  static auto begin(const At&, const Tile&) {
    return Int(0);
  }
  template <class At, class Tile>
  static auto end(const At& at, const Tile& tile) {
    return maximum(tile.a, bounded_sum(at.position, Int(1)));
  }
};
template <int begin_after_row, int end_after_row>
struct FarInterval : Formula {  // row + begin_after_row <= key < row + end_after_row, where nothing wraps
  static constexpr bool interval = true;
  template <class At, class Tile>
  static auto begin(const At& at, const Tile&) {
    return bounded_sum(at.row, Int(begin_after_row));
  }
  template <class At, class Tile>
  static auto end(const At& at, const Tile&) {
    return bounded_difference(at.row, Int(-end_after_row));
  }
};

// A launch of three batch entries with tables.
struct Launch {
  std::vector<int> prefix = {7, 0, 30};
  std::vector<uint8> document;
  std::vector<int8> packed;
  std::vector<unsigned short> slope = {0x3c00, 0x3800, 0x0001};  // 1, 0.5, 2^-24
  Params params{};

  explicit Launch(int seqlen_k) {
    for (int i = 0; i < 3 * seqlen_k; ++i) document.push_back(static_cast<uint8>(i % seqlen_k / 7));
    document.push_back(0);
    for (int i = 0; i < 3 * seqlen_k; ++i) packed.push_back(static_cast<int8>(i / 11 - 5));
    packed.push_back(0);
    params.num_heads_q = 3;
    params.num_heads_kv = 1;
    auto* const tables = params.formulas.tables;
    tables[0] = {prefix.data(), {1}, {3}};
    tables[1] = {document.data(), {seqlen_k, 1}, {3, seqlen_k}};
    tables[2] = {packed.data(), {1}, {3 * seqlen_k}};
    tables[3] = {slope.data(), {1}, {3}};
  }
};

Problem problem(int batch, int head, int seqlen_q, int seqlen_k) {
  Problem p{};
  p.batch = batch;
  p.head_q = head;
  p.seqlen_q = p.rows = seqlen_q;
  p.seqlen_k = seqlen_k;
  p.first_q = batch * seqlen_q;
  p.first_k = batch * seqlen_k;
  return p;
}

using Kept = std::function<bool(int row, int key)>;

bool any(Span rows, Span keys, const Kept& kept) {
  for (int i = rows.begin; i < rows.end; ++i)
    for (int j = keys.begin; j < keys.end; ++j)
      if (kept(i, j)) return true;
  return false;
}
bool all(Span rows, Span keys, const Kept& kept) {
  return !any(rows, keys, [&](int i, int j) { return !kept(i, j); });
}

enum class Exact { neither, skips, both };  // whether skipped blocks, and whole ones, are all that there are

// Walks with blocks of 16 or more; every element is compared.
template <class F>
void check(Exact exact, const std::function<bool(const Launch&, const Problem&, int row, int key)>& meant) {
  using Mask = Intersect<Bounds, FormulaMask<F, Params>>;
  static_assert(Mask::row_intervals == F::interval && has_formula<Mask> != F::interval);
  constexpr std::pair<int, int> lengths[] = {{1, 70}, {40, 40}, {33, 90}, {50, 20}, {5, 0}};
  for (const auto& [seqlen_q, seqlen_k] : lengths) {
    const Launch launch(seqlen_k);
    for (int batch = 0; batch < 3; ++batch) {
      SCOPED_TRACE("seqlen_q " + std::to_string(seqlen_q) + ", seqlen_k " + std::to_string(seqlen_k) +
                   ", batch " + std::to_string(batch));
      const Problem p = problem(batch, batch, seqlen_q, seqlen_k);
      const Mask mask(launch.params, p);
      const Kept kept = [&](int row, int key) {
        return row < p.seqlen_q && key < p.seqlen_k && meant(launch, p, row, key);
      };
      for (int row = 0; row < seqlen_q; ++row) {
        u32 words[2];
        mask.tile().template bits<64>(row, 0, words);
        for (int key = 0; key < seqlen_k; ++key) {
          ASSERT_EQ(mask.keep(row, key), kept(row, key)) << row << ", " << key;
          if (key >= 64) continue;
          ASSERT_EQ(words[key / 32] >> key % 32 & 1, kept(row, key)) << row << ", " << key;
        }
      }
      for (const int rows : {1, 16, 24}) {
        for (int begin = 0; begin < seqlen_q; begin += rows) {
          const Span across = {begin, min(begin + rows, seqlen_q)};
          const Span hull = searched_hull(mask, across);
          for (int key = 0; key < seqlen_k; ++key)
            ASSERT_TRUE(hull.contains(key) || !any(across, {key, key + 1}, kept)) << key;
          for (const int size : {16, 48}) {
            BlockWalk<Keys, Mask> walk(mask, across, size);
            Block block{};
            int before = ceil_div(seqlen_k, size);
            const auto skipped = [&](int index) {
              for (--before; before > index; --before)
                ASSERT_FALSE(any(across, block_span(before, size), kept)) << "missed block " << before;
            };
            while (walk.next(block)) {
              skipped(block.index);
              const Span keys = block_span(block.index, size);
              const bool is_whole = all(across, keys, kept);
              ASSERT_TRUE(is_whole || !block.whole) << "block " << block.index;
              ASSERT_TRUE(exact != Exact::both || block.whole == is_whole) << "block " << block.index;
              ASSERT_TRUE(exact == Exact::neither || any(across, keys, kept)) << "needless " << block.index;
            }
            skipped(-1);
            // The same as make_block_lists asks for it.
            for (int key = 0; key < seqlen_k; key += size) {
              const Span keys = {key, min(key + size, seqlen_k)};
              const Maybe pairs = known_pairs(mask, across, keys);
              const bool is_whole = all(across, keys, kept);
              ASSERT_TRUE(pairs.can_hold || !any(across, keys, kept)) << "keys from " << key;
              ASSERT_TRUE(pairs.can_fail || is_whole) << "keys from " << key;
              ASSERT_TRUE(exact != Exact::both || pairs.can_fail != is_whole) << "keys from " << key;
            }
          }
        }
        // Blocks of rows that see some keys.
        for (int begin = 0; begin < seqlen_k; begin += 16) {
          const Span across = {begin, min(begin + 16, seqlen_k)};
          BlockWalk<Queries, Mask> walk(mask, across, 16);
          std::vector<bool> visited(static_cast<std::size_t>(ceil_div(seqlen_q, 16)));
          for (Block block; walk.next(block);) {
            visited[static_cast<std::size_t>(block.index)] = true;
            ASSERT_TRUE(!block.whole || all(block_span(block.index, 16), across, kept));
          }
          for (int index = 0; index < ceil_div(seqlen_q, 16); ++index)
            ASSERT_TRUE(visited[static_cast<std::size_t>(index)] ||
                        !any(block_span(index, 16), across, kept));
        }
      }
    }
  }
}

int position(const Problem& p, int row) {
  return row + p.seqlen_k - p.seqlen_q;
}

TEST(FormulaMask, Causal) {
  check<CausalFormula>(Exact::both,
                       [](auto&, const Problem& p, int row, int key) { return key <= position(p, row); });
}
TEST(FormulaMask, Windows) {
  check<Window>(Exact::both, [](auto&, const Problem& p, int row, int key) {
    return position(p, row) - key < 5 && key <= position(p, row);
  });
  check<Symmetric>(Exact::both, [](auto&, const Problem& p, int row, int key) {
    return std::abs(key - position(p, row)) < 4;
  });
}
TEST(FormulaMask, PrefixByATableOfTheBatch) {
  check<Prefix>(Exact::skips, [](const Launch& launch, const Problem& p, int row, int key) {
    return key < launch.prefix[static_cast<std::size_t>(p.batch)] || key <= position(p, row);
  });
}
TEST(FormulaMask, IntervalsOfEachRow) {
  check<IntervalWindow>(Exact::both, [](auto&, const Problem& p, int row, int key) {
    return position(p, row) - key < 5 && key <= position(p, row);
  });
  check<IntervalPrefix>(Exact::both, [](const Launch& launch, const Problem& p, int row, int key) {
    return key < launch.prefix[static_cast<std::size_t>(p.batch)] || key <= position(p, row);
  });
  const auto all = [](auto&, const Problem&, int, int) { return true; };
  const auto nothing = [](auto&, const Problem&, int, int) { return false; };
  check<FarInterval<lowest_int, largest_int>>(Exact::both, all);
  check<FarInterval<-100, largest_int - 1>>(Exact::both, all);
  check<FarInterval<largest_int, largest_int>>(Exact::both, nothing);
  check<FarInterval<lowest_int, -largest_int>>(Exact::both, nothing);
}
TEST(FormulaMask, DilatedAndBlocks) {
  check<Dilated>(Exact::neither, [](auto&, const Problem& p, int row, int key) {
    return key <= position(p, row) && (position(p, row) - key) % 4 == 0;
  });
  check<Blocks>(Exact::both, [](auto&, const Problem&, int row, int key) { return row / 8 == key / 8; });
}
TEST(FormulaMask, Neighbourhood) {
  check<Neighbourhood>(Exact::neither, [](auto&, const Problem& p, int row, int key) {
    const int at = position(p, row);
    return std::abs(key % 6 - at % 6) <= 1 && std::abs(key / 6 - at / 6) <= 1;
  });
}
TEST(FormulaMask, TablesOfKeys) {
  check<Documents>(Exact::neither, [](const Launch& launch, const Problem& p, int row, int key) {
    const auto of = [&](int i) {
      const int clamped = std::min(std::max(i, 0), p.seqlen_k - 1);
      return launch.document[static_cast<std::size_t>(p.batch * p.seqlen_k + clamped)];
    };
    return of(key) == of(position(p, row));
  });
  check<Packed>(Exact::neither, [](const Launch& launch, const Problem& p, int row, int key) {
    const auto of = [&](int i) {
      return launch.packed[static_cast<std::size_t>(p.first_k + std::min(std::max(i, 0), p.seqlen_k - 1))];
    };
    return key <= position(p, row) && of(key) == of(position(p, row));
  });
}
TEST(FormulaMask, EdgesOfTheLanguage) {
  check<Gap>(Exact::both,
             [](auto&, const Problem& p, int, int key) { return key < 3 || key >= p.seqlen_k - 9; });
  check<Nothing>(Exact::both, [](auto&, const Problem&, int, int) { return false; });
  check<All>(Exact::both, [](auto&, const Problem&, int, int) { return true; });
  check<Reals>(Exact::neither, [](auto&, const Problem&, int row, int key) {
    return static_cast<float>(key) * 0.5f < static_cast<float>(row) + 1.5f;
  });
  check<Chosen>(Exact::neither,
                [](auto&, const Problem&, int row, int key) { return (row % 2 == 0 ? key : -key) < 3; });
  check<Powers>(Exact::neither, [](auto&, const Problem& p, int row, int key) {
    return key <= position(p, row) && key >= 1;
  });
  check<Wraps>(Exact::neither, [](auto&, const Problem&, int, int key) { return key > 4; });
}
TEST(FormulaMask, HeadsHaveWindowsOfTheirOwn) {
  static_assert(Intersect<Bounds, FormulaMask<HeadWindow, Params>>::per_head);
  check<HeadWindow>(Exact::both, [](auto&, const Problem& p, int row, int key) {
    const int at = position(p, row);
    return key <= at && key > at - (p.head_q + 1) * 3;
  });
  // Several heads at once: nothing of any of them is missed.
  const Launch launch(64);
  FormulaMask<HeadWindow, Params> mask(launch.params, problem(0, 0, 64, 64));
  see_heads(mask, {0, 3});
  EXPECT_EQ(searched_hull(mask, {40, 41}).begin, 32);
  EXPECT_TRUE(mask.whole({40, 41}, {38, 40}));
  EXPECT_FALSE(mask.whole({40, 41}, {37, 40}));
  see_heads(mask, {1, 3});
  EXPECT_TRUE(mask.whole({40, 41}, {35, 40}));
}

// The search through what a formula skips takes a logarithm of steps, also where another mask keeps it.
TEST(FormulaMask, FewEvaluationsForLongSkippedStretches) {
  const int seqlen = 1 << 20;
  const Launch launch(8);
  const Problem p = problem(0, 0, seqlen, seqlen);
  using Mask = Intersect<Bounds, Causal<Align::bottom_right>, FormulaMask<Gap, Params>>;
  const Mask mask(launch.params, p);
  evaluations = 0;
  BlockWalk<Keys, Mask> walk(mask, {seqlen - 128, seqlen}, 128);
  Block block;
  ASSERT_TRUE(walk.next(block));
  EXPECT_EQ(block.index, seqlen / 128 - 1);
  ASSERT_TRUE(walk.next(block));
  EXPECT_EQ(block.index, 0);
  EXPECT_FALSE(walk.next(block));
  EXPECT_LT(evaluations, 100);

  const FormulaMask<CausalFormula, Params> causal(launch.params, p);
  evaluations = 0;
  decltype(causal)::Cursor<Keys> cursor;
  EXPECT_EQ(causal.previous(Keys{}, {0, 128}, seqlen, cursor), 127);
  EXPECT_LT(evaluations, 60);
  evaluations = 0;
  EXPECT_EQ(causal.previous(Keys{}, {seqlen - 128, seqlen}, seqlen, cursor), seqlen - 1);
  EXPECT_EQ(evaluations, 1);
}

// The results of operators on ranges hold those of every pair of elements, at the ends of int32, too.
TEST(FormulaRanges, HoldEveryElement) {
  const unsigned seed = 20261123;
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const auto any_end = [&] {
    constexpr int ends[] = {lowest_int, lowest_int + 1, -1, 0, 1, largest_int - 1, largest_int};
    return random() % 3 ? static_cast<int>(random() % 41) - 20 : ends[random() % 7];
  };
  const auto span = [&] {
    const int low = any_end();
    return Range<int>{low, static_cast<int>(min(i64{low} + static_cast<int>(random() % 7), i64{largest_int})),
                      false};
  };
  for (int repeat = 0; repeat < 4000; ++repeat) {
    const Range<int> a = span(), b = span();
    const auto holds = [&](const char* name, auto range, auto element) {
      if (name[0] == '?') return;
      ASSERT_LE(range.low, element) << name << ' ' << a.low << ".." << a.high << ' ' << b.low << ".."
                                    << b.high;
      ASSERT_GE(range.high, element) << name << ' ' << a.low << ".." << a.high << ' ' << b.low << ".."
                                     << b.high;
    };
    const auto may = [&](Maybe maybe, bool is) { ASSERT_TRUE(is ? maybe.can_hold : maybe.can_fail); };
    for (i64 i = a.low; i <= a.high; ++i) {
      for (i64 j = b.low; j <= b.high; ++j) {
        const int x = static_cast<int>(i), y = static_cast<int>(j);
        holds("+", plus(a, b), plus(x, y));
        holds("-", minus(a, b), minus(x, y));
        holds("*", times(a, b), times(x, y));
        holds("/", over(a, b), over(x, y));
        holds("%", remainder_of(a, b), remainder_of(x, y));
        holds("abs", magnitude(a), magnitude(x));
        holds("min", lesser(a, b), lesser(x, y));
        holds("max", greater(a, b), greater(x, y));
        may(is_less(a, b), x < y);
        may(is_at_most(a, b), x <= y);
        may(is_equal(a, b), x == y);
        const float u = static_cast<float>(x) / 4, v = static_cast<float>(y) / 4;
        const Range<float> of_u = over(real_of(a), point(4.0f)), of_v = over(real_of(b), point(4.0f));
        holds("+", plus(of_u, of_v), plus(u, v));
        holds("-", minus(of_u, of_v), minus(u, v));
        holds("*", times(of_u, of_v), times(u, v));
        if (v != 0) holds("/", over(of_u, of_v), over(u, v));
        holds("floor", floor_of(of_u), floor_of(u));
        may(is_less(of_u, of_v), u < v);
        if (HasFatalFailure()) return;
      }
    }
  }
  EXPECT_TRUE(over(point(1.0f), point(0.0f)).nan);
  EXPECT_TRUE(times(point(0.0f), Range<float>{0, infinity}).nan);
  EXPECT_EQ(floor_of(not_a_number), 0);
  EXPECT_EQ(floor_of(3e9f), largest_int);
  EXPECT_EQ(floor_of(-3e9f), lowest_int);
  EXPECT_EQ(floor_of(-0.5f), -1);
}

// Every fp16 number has its value, the small ones included.
TEST(FormulaTables, ElementsOfFp16) {
  for (u32 bits = 0; bits < 0x10000; ++bits) {
    const float value = table_element(fp16{static_cast<unsigned short>(bits)});
    const int exponent = static_cast<int>(bits >> 10 & 31), digits = static_cast<int>(bits & 1023);
    double expected = exponent == 0 ? std::ldexp(digits, -24) : std::ldexp(1024 + digits, exponent - 25);
    if (exponent == 31) expected = digits ? NAN : INFINITY;
    if (bits >> 15) expected = -expected;
    if (std::isnan(expected))
      EXPECT_TRUE(std::isnan(value));
    else
      ASSERT_EQ(value, expected) << bits;
  }
}

}  // namespace
}  // namespace flashjit::device
