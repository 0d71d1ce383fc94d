#include "tests/support/covering_array.hpp"

#include <algorithm>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <utility>

#include "tools/verify/random_tensor.hpp"

namespace flashjit::testing_support {
namespace {

class Generator {
 public:
  Generator(const std::vector<int>& sizes, std::uint64_t seed,
            const std::function<bool(const Row&)>& is_possible)
      : sizes_(sizes), seed_(seed), is_possible_(is_possible), array_{{}, Triples(sizes)} {
    if (!is_possible_(Row(sizes.size()))) throw std::logic_error("the row of zeros is not possible");
    for (const int size : sizes) {
      first_.push_back(values_);
      values_ += size;
    }
    find_pairs();
  }

  CoveringArray run() {
    std::vector<Triples::Triple> missing;
    array_.covered.for_each([&](const Triples::Triple& t) {
      if (agree(t[0], t[1]) && agree(t[0], t[2]) && agree(t[1], t[2])) missing.push_back(t);
    });
    for (std::size_t i = missing.size(); i > 1; --i) std::swap(missing[i - 1], missing[below(i)]);
    for (const Triples::Triple& triple : missing) {
      if (array_.covered.has(triple)) continue;
      if (std::optional<Row> row = best_row(triple)) {
        array_.covered.add(*row);
        array_.rows.push_back(std::move(*row));
      }
    }
    sort_by_gain();
    return std::move(array_);
  }

 private:
  using Value = std::array<int, 2>;
  static constexpr int unset = -1;
  static constexpr int candidates = 4;    // rows of which the best is taken
  static constexpr int completions = 60;  // random ones that are tried before values count as impossible

  std::size_t below(std::size_t n) { return verify::random_bits(seed_, count_++) % n; }
  std::size_t id(const Value& v) const { return static_cast<std::size_t>(first_[v[0]] + v[1]); }
  bool agree(const Value& a, const Value& b) const { return pairs_[id(a) * values_ + id(b)]; }

  // A possible row with these values: the others are 0, those of `like`, or drawn, most of them 0.
  template <class Values>
  std::optional<Row> complete(const Values& values, const std::vector<Row>& like) {
    const auto with = [&](Row row) -> std::optional<Row> {
      for (const Value& v : values) row[v[0]] = v[1];
      return is_possible_(row) ? std::optional(std::move(row)) : std::nullopt;
    };
    if (auto row = with(Row(sizes_.size()))) return row;
    for (const Row& one : like)
      if (auto row = with(one)) return row;
    for (int i = 0; i < completions; ++i) {
      Row drawn(sizes_.size());
      for (std::size_t axis = 0; axis < drawn.size(); ++axis)
        if (below(2) == 0) drawn[axis] = static_cast<int>(below(static_cast<std::size_t>(sizes_[axis])));
      if (auto row = with(std::move(drawn))) return row;
    }
    return {};
  }

  // Which values of two axes are in a possible row.
  void find_pairs() {
    pairs_.assign(static_cast<std::size_t>(values_) * values_, false);
    witnesses_.resize(values_);
    const int axes = static_cast<int>(sizes_.size());
    for (int axis = 0; axis < axes; ++axis)
      for (int value = 0; value < sizes_[axis]; ++value) {
        const Value v = {axis, value};
        witnesses_[id(v)] = complete(std::array<Value, 1>{v}, {});
      }
    for (int a = 0; a < axes; ++a)
      for (int b = a + 1; b < axes; ++b)
        for (int i = 0; i < sizes_[a]; ++i)
          for (int j = 0; j < sizes_[b]; ++j) {
            const Value v = {a, i}, w = {b, j};
            if (!witnesses_[id(v)] || !witnesses_[id(w)]) continue;
            const bool possible =
                complete(std::array<Value, 2>{v, w}, {*witnesses_[id(v)], *witnesses_[id(w)]}).has_value();
            pairs_[id(v) * values_ + id(w)] = pairs_[id(w) * values_ + id(v)] = possible;
          }
  }

  std::optional<Row> best_row(const Triples::Triple& triple) {
    std::optional<Row> best;
    std::size_t most = 0;
    for (int i = 0; i < candidates; ++i) {
      std::optional<Row> row = greedy_row(triple);
      if (!row || !is_possible_(*row)) continue;
      if (const std::size_t gain = array_.covered.lacks(*row); gain > most) {
        most = gain;
        best = std::move(row);
      }
    }
    if (best) return best;
    std::vector<Row> like;
    for (const Value& v : triple) like.push_back(*witnesses_[id(v)]);
    return complete(triple, like);
  }

  // Sets the other axes in random order, each to the value that makes most new triples with two that are set.
  std::optional<Row> greedy_row(const Triples::Triple& triple) {
    Row row(sizes_.size(), unset);
    std::vector<Value> set(triple.begin(), triple.end());
    for (const Value& v : set) row[v[0]] = v[1];
    std::vector<int> order(sizes_.size());
    std::iota(order.begin(), order.end(), 0);
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[below(i)]);
    for (const int axis : order) {
      if (row[axis] != unset) continue;
      int best = unset;
      std::size_t most = 0, equals = 0;
      for (int value = 0; value < sizes_[axis]; ++value) {
        const Value v = {axis, value};
        if (!std::all_of(set.begin(), set.end(), [&](const Value& other) { return agree(v, other); }))
          continue;
        const std::size_t gain = new_triples(v, set);
        if (best == unset || gain > most) {
          best = value, most = gain, equals = 1;
        } else if (gain == most && below(++equals) == 0) {
          best = value;
        }
      }
      if (best == unset) return {};
      row[axis] = best;
      set.push_back({axis, best});
    }
    return row;
  }

  std::size_t new_triples(const Value& v, const std::vector<Value>& set) const {
    std::size_t count = 0;
    for (std::size_t i = 0; i < set.size(); ++i)
      for (std::size_t j = i + 1; j < set.size(); ++j) {
        Triples::Triple triple = {v, set[i], set[j]};
        std::sort(triple.begin(), triple.end());
        count += !array_.covered.has(triple);
      }
    return count;
  }

  // So that a part of the rows, from the first one on, covers as much as it can.
  void sort_by_gain() {
    std::vector<Row> rest = std::move(array_.rows), sorted;
    Triples covered(sizes_);
    std::vector<std::size_t> gains(rest.size(), static_cast<std::size_t>(-1));  // at most
    while (!rest.empty()) {
      std::size_t best = 0;
      for (;;) {  // gains only fall, so the first one that is still the greatest is it
        best = static_cast<std::size_t>(std::max_element(gains.begin(), gains.end()) - gains.begin());
        const std::size_t gain = covered.lacks(rest[best]);
        const bool is_last = gain == gains[best];
        gains[best] = gain;
        if (is_last) break;
      }
      if (gains[best] == 0) break;  // the others add nothing
      covered.add(rest[best]);
      sorted.push_back(std::move(rest[best]));
      rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(best));
      gains.erase(gains.begin() + static_cast<std::ptrdiff_t>(best));
    }
    array_.rows = std::move(sorted);
  }

  const std::vector<int>& sizes_;
  const std::uint64_t seed_;
  const std::function<bool(const Row&)>& is_possible_;
  std::uint64_t count_ = 0;
  int values_ = 0;
  std::vector<int> first_;
  std::vector<bool> pairs_;
  std::vector<std::optional<Row>> witnesses_;
  CoveringArray array_;
};

}  // namespace

Triples::Triples(std::vector<int> sizes) : sizes_(std::move(sizes)) {
  for (const int size : sizes_) {
    first_.push_back(static_cast<int>(values_));
    values_ += static_cast<std::size_t>(size);
  }
  has_.resize(values_ * values_ * values_);
}

std::size_t Triples::place(const Triple& t) const {
  return (place(t[0][0], t[0][1]) * values_ + place(t[1][0], t[1][1])) * values_ + place(t[2][0], t[2][1]);
}

bool Triples::has(const Triple& triple) const {
  return has_[place(triple)];
}

bool Triples::add(const Triple& triple) {
  const std::size_t at = place(triple);
  const bool is_new = !has_[at];
  has_[at] = true;
  count_ += is_new;
  return is_new;
}

void Triples::for_each_of(const Row& row, const auto& visit) {
  const int axes = static_cast<int>(row.size());
  for (int a = 0; a < axes; ++a)
    for (int b = a + 1; b < axes; ++b)
      for (int c = b + 1; c < axes; ++c) visit(Triple{{{a, row[a]}, {b, row[b]}, {c, row[c]}}});
}

std::size_t Triples::add(const Row& row) {
  std::size_t added = 0;
  for_each_of(row, [&](const Triple& triple) { added += add(triple); });
  return added;
}

std::size_t Triples::lacks(const Row& row) const {
  std::size_t count = 0;
  for_each_of(row, [&](const Triple& triple) { count += !has(triple); });
  return count;
}

void Triples::for_each(const std::function<void(const Triple&)>& visit) const {
  const int axes = static_cast<int>(sizes_.size());
  for (int a = 0; a < axes; ++a)
    for (int b = a + 1; b < axes; ++b)
      for (int c = b + 1; c < axes; ++c)
        for (int i = 0; i < sizes_[a]; ++i)
          for (int j = 0; j < sizes_[b]; ++j)
            for (int k = 0; k < sizes_[c]; ++k) visit({{{a, i}, {b, j}, {c, k}}});
}

CoveringArray covering_array(const std::vector<int>& sizes, std::uint64_t seed,
                             const std::function<bool(const Row&)>& is_possible) {
  return Generator(sizes, seed, is_possible).run();
}

}  // namespace flashjit::testing_support
