#include "runtime/arguments/overlap.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string_view>

#include "codegen/arguments/table.hpp"
#include "codegen/spec/declarations.hpp"
#include "runtime/arguments/checks.hpp"

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
  bool gapless() const { return extent() == elements(); }
  // Whether each dimension's stride reaches beyond everything that the dimensions inside it span.
  bool lie_within_one_another() const {
    Wide inside = 1;
    for (int i = 0; i < count; ++i) {
      if (list[i].stride < inside) return false;
      inside += list[i].stride * (list[i].size - 1);
    }
    return true;
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
  bool touches(const Range& other) const { return begin < other.end && other.begin < end; }
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

// The least distance of an element from the first one that is at least `least`; -1 if there is none. The
// dimensions, innermost first, lie within one another.
Wide next_element(const Dimension* dimensions, int count, Wide least) {
  if (least <= 0) return 0;
  if (count == 0) return -1;
  const Dimension& outer = dimensions[count - 1];
  const Wide step = least / outer.stride;
  if (step >= outer.size) return -1;
  if (const Wide inside = next_element(dimensions, count - 1, least - step * outer.stride); inside >= 0)
    return step * outer.stride + inside;
  return step + 1 < outer.size ? (step + 1) * outer.stride : -1;
}

// Whether the tensor certainly has a byte in a range that it touches. A tensor has elements at both ends of
// its own range.
bool has_bytes_in(const Tensor& t, const Dimensions& dimensions, const Range& own, const Range& range) {
  if (range.has(own.begin) || range.has(own.end - 1)) return true;
  if (!dimensions.lie_within_one_another()) return false;
  const auto bytes = static_cast<std::int64_t>(size_of(t.dtype));
  const Wide least =
      (Wide{range.begin} - own.begin) / bytes;  // the element that holds the range's first byte
  return next_element(dimensions.list, dimensions.count, least) * bytes < Wide{range.end} - own.begin;
}

// Whether two tensors whose address ranges overlap certainly share memory.
[[gnu::noinline]] bool share_memory(const Tensor& a, const Tensor& b) {
  if (have_equal_strides(a, b)) return share_elements(a, b);
  const Dimensions of_a(a), of_b(b);
  const Range range_a = range_of(a), range_b = range_of(b);
  return (of_a.gapless() && has_bytes_in(b, of_b, range_b, range_a)) ||
         (of_b.gapless() && has_bytes_in(a, of_a, range_a, range_b));
}

// A tensor of a launch.
struct Used {
  std::string_view name;
  const Tensor* tensor;
  Range range;
  bool written;
};

// The tensors of a launch whose elements it reads or writes.
class UsedTensors {
 public:
  UsedTensors(const AttentionSpec& spec, const AttentionArgs& args, const Tensor* workspace) {
    // A launch that makes lists reads only the sizes of q and k.
    static constexpr ArgumentSet sizes_alone =
        bit_of(argument_of(&AttentionArgs::q)) | bit_of(argument_of(&AttentionArgs::k));
    if (workspace) add("workspace", *workspace, true);
    ArgumentSet left = given_arguments(args) & ~bit_of(argument_of(&AttentionArgs::workspace));
    if (info_of(spec.op).makes_lists) left &= ~sizes_alone;
    for (; left != 0; left &= left - 1) {
      const Argument& argument = arguments[std::countr_zero(left)];
      if (const TensorMember member = argument.tensor())
        add(argument.name, *(args.*member), argument.written_in(spec));
    }
    for (const NamedArgument& named : args.named)
      if (const auto* tensor = std::get_if<Tensor>(&named.value))
        add(named.name, *tensor,
            std::any_of(spec.tables.begin(), spec.tables.end(),
                        [&](const DeclaredTable& table) { return is_gradient_name(named.name, table); }));
  }

  const Used* begin() const { return all_; }
  const Used* end() const { return all_ + count_; }

 private:
  void add(std::string_view name, const Tensor& t, bool written) {
    std::construct_at(&all_[count_++], Used{name, &t, range_of(t), written});
  }

  static constexpr std::size_t most = num_arguments + 2 * most_tables;  // the workspace is an argument
  // A union: tensors that a launch does not have are not initialised, and so cost nothing.
  union {
    Used all_[most];
  };
  std::size_t count_ = 0;
};

// All rows that a copy_kv reads are in the workspace before one is written. `cache` stands before `source` in
// the table of arguments.
bool is_copied_within(const Used& cache, const Used& source) {
  using Args = AttentionArgs;
  const auto is_one_of = [](const Used& used, std::initializer_list<TensorMember> members) {
    return std::any_of(members.begin(), members.end(),
                       [&](TensorMember member) { return used.name == argument_of(member).name; });
  };
  return is_one_of(source, {&Args::k_from, &Args::v_from, &Args::k_scale_from, &Args::v_scale_from}) &&
         is_one_of(cache, {&Args::k, &Args::v, &Args::k_scale, &Args::v_scale});
}

// Each row of q is read before its row of q_out is written, so that q_out may be q. Likewise the output of a
// sum may be its first part.
bool may_be_same(const AttentionSpec& spec, const Used& a, const Used& b) {
  const auto are = [&](TensorMember first, TensorMember second) {
    return a.name == argument_of(first).name && b.name == argument_of(second).name;
  };
  const bool adds = spec.sum && are(&AttentionArgs::o, &AttentionArgs::parts_o);
  if (!adds && !are(&AttentionArgs::q, &AttentionArgs::q_out)) return false;
  if (size_of(a.tensor->dtype) != size_of(b.tensor->dtype)) return false;
  const int more = adds ? 1 : 0;  // dimensions
  for (int i = 0; i < a.tensor->rank; ++i)
    if (stride(*a.tensor, i) != stride(*b.tensor, i + more)) return false;
  return a.tensor->data == b.tensor->data;
}

}  // namespace

void require_distinct_rows(const char* name, const Tensor& t) {
  if (!lies_in_order(t)) require_distinct_in_any_order(name, t);
}

bool share_addresses(const Tensor& a, const Tensor& b) {
  return range_of(a).touches(range_of(b));
}

void require_outputs_apart(const AttentionSpec& spec, const AttentionArgs& args, const Tensor* workspace) {
  const UsedTensors all(spec, args, workspace);
  for (const Used& a : all)
    for (const Used* b = &a + 1; b != all.end(); ++b) {
      if (!(a.written || b->written) || !a.range.touches(b->range) || !share_memory(*a.tensor, *b->tensor) ||
          may_be_same(spec, a, *b) || is_copied_within(a, *b))
        continue;
      const Used &output = a.written ? a : *b, &other = a.written ? *b : a;
      refuse_argument(output.name, " and ", other.name, " share memory: ", output.name,
                      " is written while others still read; give it memory of its own");
    }
}

}  // namespace flashjit
