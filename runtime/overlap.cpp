#include "runtime/overlap.hpp"

#include <algorithm>
#include <cstdint>

#include "runtime/argument_checks.hpp"

namespace flashjit {
namespace {

// 128 bits hold every sum of sizes times strides.
__extension__ using Wide = __int128;

struct Dimension {
  Wide stride;
  std::int64_t size;
};

// A tensor's dimensions with more than one index, innermost first.
struct Dimensions {
  Dimension list[Tensor::max_rank];
  int count = 0;
  bool empty = false;

  explicit Dimensions(const Tensor& t) {
    for (int i = t.rank - 1; i >= 0; --i) {
      empty = empty || t.shape[i] == 0;
      if (t.shape[i] > 1) insert({std::max<Wide>(t.strides[i], -Wide{t.strides[i]}), t.shape[i]});
    }
  }

  // The number of elements from the first to the last one in memory, with gaps.
  Wide extent() const {
    Wide last = 0;
    for (int i = 0; i < count; ++i) last += list[i].stride * (list[i].size - 1);
    return last + 1;
  }
  Wide elements() const {
    Wide product = 1;
    for (int i = 0; i < count; ++i) product *= list[i].size;
    return product;
  }

 private:
  void insert(Dimension d) {
    int i = count++;
    for (; i > 0 && list[i - 1].stride > d.stride; --i) list[i] = list[i - 1];
    list[i] = d;
  }
};

// A tensor's addresses, from its first byte to just beyond its last.
// Empty if 64 bits do not hold them, which no real memory reaches.
struct Range {
  std::int64_t begin, end;
  bool has(std::int64_t address) const { return begin <= address && address < end; }
};
Range range_of(const Tensor& t) {
  const auto bytes = static_cast<std::int64_t>(size_of(t.dtype));
  std::int64_t before = 0, after = 1;  // in elements
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] == 0) return {0, 0};
    if (t.shape[i] == 1) continue;
    std::int64_t span = 0;
    std::int64_t& side = t.strides[i] < 0 ? before : after;
    if (__builtin_mul_overflow(t.strides[i], t.shape[i] - 1, &span) ||
        __builtin_add_overflow(side, span, &side))
      return {0, 0};
  }
  const auto at = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(t.data));
  Range range{};
  if (__builtin_mul_overflow(before, bytes, &before) || __builtin_add_overflow(at, before, &range.begin) ||
      __builtin_mul_overflow(after, bytes, &after) || __builtin_add_overflow(at, after, &range.end))
    return {0, 0};
  return range;
}

// A dimension of two tensors with equal strides.
struct Axis {
  Wide stride;
  std::int64_t most, least;  // bounds on the steps along it between an element of each
};
// Whether steps along the axes, innermost first, add up to `distance` elements. Each axis lies within
// the next one, so there are only two numbers of steps to try along the outermost axis.
bool meet(const Axis* axes, int count, Wide distance) {
  if (count == 0) return distance == 0;
  const Axis& outer = axes[count - 1];
  Wide steps = distance / outer.stride;
  if (distance % outer.stride < 0) --steps;
  for (int i = 0; i < 2; ++i, ++steps)
    if (outer.least <= steps && steps <= outer.most && meet(axes, count - 1, distance - steps * outer.stride))
      return true;
  return false;
}

bool have_equal_strides(const Tensor& a, const Tensor& b) {
  if (a.rank != b.rank || size_of(a.dtype) != size_of(b.dtype)) return false;
  for (int i = 0; i < a.rank; ++i)
    if ((a.shape[i] > 1 || b.shape[i] > 1) && (a.strides[i] != b.strides[i] || a.strides[i] <= 0))
      return false;
  return true;
}

// Whether two tensors of equal strides share an element. The output's dimensions lie within one another.
bool share_elements(const Tensor& output, const Tensor& input) {
  Axis axes[Tensor::max_rank];
  int count = 0;
  for (int i = 0; i < output.rank; ++i) {
    if (output.shape[i] <= 1 && input.shape[i] <= 1) continue;
    int at = count++;
    for (; at > 0 && axes[at - 1].stride > output.strides[i]; --at) axes[at] = axes[at - 1];
    axes[at] = {output.strides[i], input.shape[i] - 1, 1 - output.shape[i]};
  }
  const Wide bytes = static_cast<Wide>(reinterpret_cast<std::uintptr_t>(output.data)) -
                     static_cast<Wide>(reinterpret_cast<std::uintptr_t>(input.data));
  const auto element = static_cast<Wide>(size_of(output.dtype));
  return bytes % element == 0 && meet(axes, count, bytes / element);
}

// Whether each dimension's stride is beyond everything that the dimensions after
// it span: a row-major tensor, with gaps or without. False if 64 bits cannot tell.
bool lies_in_order(const Tensor& t) {
  std::int64_t inner = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    if (t.shape[i] == 0) return true;
    if (t.shape[i] == 1) continue;
    std::int64_t span = 0;
    if (t.strides[i] < inner || __builtin_mul_overflow(t.strides[i], t.shape[i] - 1, &span) ||
        __builtin_add_overflow(inner, span, &inner))
      return false;
  }
  return true;
}

[[gnu::noinline]] void require_distinct_in_any_order(const char* name, const Tensor& t) {
  const Dimensions dimensions(t);
  if (dimensions.empty) return;
  Wide inner = 1;  // elements that the dimensions before span
  for (int i = 0; i < dimensions.count; ++i) {
    const Dimension& d = dimensions.list[i];
    if (d.stride < inner)
      refuse_argument(name, " is written, but its dimension of size ", d.size, " has stride ",
                      static_cast<std::int64_t>(d.stride),
                      ", less than what lies within: rows would overwrite each other");
    inner += d.stride * (d.size - 1);
  }
}

// Whether two tensors whose address ranges overlap certainly share memory.
[[gnu::noinline]] bool share_memory(const Tensor& output, const Tensor& input) {
  if (have_equal_strides(output, input)) return share_elements(output, input);
  const auto gapless = [](const Tensor& t) {
    const Dimensions dimensions(t);
    return dimensions.extent() == dimensions.elements();
  };
  // A tensor has elements at both ends of its range, so a
  // tensor without gaps contains them if it contains the ends.
  const Range a = range_of(output), b = range_of(input);
  return (gapless(output) && (a.has(b.begin) || a.has(b.end - 1))) ||
         (gapless(input) && (b.has(a.begin) || b.has(a.end - 1)));
}

}  // namespace

void require_distinct_rows(const char* name, const Tensor& t) {
  if (!lies_in_order(t)) require_distinct_in_any_order(name, t);
}

void require_apart(const char* name, const Tensor& output,
                   std::initializer_list<std::pair<const char*, const Tensor*>> inputs) {
  const Range of_output = range_of(output);
  for (const auto& [input_name, input] : inputs) {
    const Range of_input = range_of(*input);
    if (of_output.begin < of_input.end && of_input.begin < of_output.end && share_memory(output, *input))
      refuse_argument(name, " and ", input_name, " share memory: ", name,
                      " is written while others still read; give it memory of its own");
  }
}

}  // namespace flashjit
