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

// Those with more than one index, the innermost first.
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

  // Elements from the first to the last in memory.
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

// Addresses from the first byte to beyond the last.
struct Range {
  Wide begin, end;
  bool has(Wide address) const { return begin <= address && address < end; }
};
Range range_of(const Tensor& t) {
  const auto bytes = static_cast<std::int64_t>(size_of(t.dtype));
  Wide begin = static_cast<Wide>(reinterpret_cast<std::uintptr_t>(t.data)), end = begin + bytes;
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] == 0) return {begin, begin};
    const Wide step = Wide{t.strides[i]} * (t.shape[i] - 1) * bytes;
    (step < 0 ? begin : end) += step;
  }
  return {begin, end};
}

// Whether indices of both meet at a distance of so many elements: `sizes` of the two along dimensions that
// lie within one another, so that the larger of those that are left decides all but one step.
struct Axis {
  Wide stride;
  std::int64_t most, least;  // by how many steps along it elements of the two may differ
};
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

// Both have equal strides, and those of the output lie within one another.
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

}  // namespace

void require_distinct_rows(const char* name, const Tensor& t) {
  const Dimensions dimensions(t);
  if (dimensions.empty) return;
  Wide inner = 1;  // elements from the first to the last of the dimensions before
  for (int i = 0; i < dimensions.count; ++i) {
    const Dimension& d = dimensions.list[i];
    if (d.stride < inner)
      refuse(name, " is written, but its dimension of size ", d.size, " has stride ",
             static_cast<std::int64_t>(d.stride),
             ", less than what lies within: rows would overwrite each other");
    inner += d.stride * (d.size - 1);
  }
}

void require_apart(const char* name, const Tensor& output, const char* input_name, const Tensor& input) {
  const Range a = range_of(output), b = range_of(input);
  if (std::max(a.begin, b.begin) >= std::min(a.end, b.end)) return;
  const auto refuse_both = [&] {
    refuse(name, " and ", input_name, " share memory: ", name,
           " is written while others still read; give it memory of its own");
  };
  if (have_equal_strides(output, input)) {
    if (share_elements(output, input)) refuse_both();
    return;
  }
  const auto gapless = [](const Tensor& t) {
    const Dimensions dimensions(t);
    return dimensions.extent() == dimensions.elements();
  };
  // A tensor has elements at both ends of its range.
  if ((gapless(output) && (a.has(b.begin) || a.has(b.end - 1))) ||
      (gapless(input) && (b.has(a.begin) || b.has(a.end - 1))))
    refuse_both();
}

}  // namespace flashjit
