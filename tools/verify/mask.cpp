#include "tools/verify/mask.hpp"

#include <algorithm>
#include <string>

#include "codegen/arguments.hpp"
#include "tools/verify/element.hpp"

namespace flashjit::verify {
namespace {

const Tensor& need(const std::optional<Tensor>& tensor, const char* name) {
  if (!tensor) throw Error(ErrorCode::invalid_argument, std::string("oracle: ") + name + " is missing");
  return *tensor;
}

// table[i, j, k], with as many indices as the table's rank. A dimension of size 1 holds for every index.
std::int32_t at(const std::optional<Tensor>& tensor, const char* name, std::initializer_list<int> index) {
  const Tensor& t = need(tensor, name);
  std::int64_t element = 0;
  int dim = 0;
  for (const int i : index) {
    if (t.shape[dim] != 1) element += i * t.strides[dim];
    ++dim;
  }
  return static_cast<const std::int32_t*>(t.data)[element];
}

bool bit_of(std::int32_t word, int bit) {
  return static_cast<std::uint32_t>(word) >> bit & 1;
}

int position_of(CausalAlign align, const Sequence& s, int row) {
  return align == CausalAlign::bottom_right ? row + s.seqlen_k - s.seqlen_q : row;
}

struct Element {
  const AttentionArgs& args;
  const Sequence& sequence;
  int head, row, key;

  bool seen_by(const CausalMask& mask) const { return key <= position_of(mask.align, sequence, row); }

  bool seen_by(const SlidingWindowMask& mask) const {
    if (mask.sinks && key < args.num_sinks.value_or(0)) return true;
    const std::int64_t distance = std::int64_t{key} - position_of(mask.align, sequence, row);
    return (!args.window_left || -distance <= *args.window_left) &&
           (!args.window_right || distance <= *args.window_right);
  }

  bool seen_by(const FormulaMask&) const {
    throw Error(ErrorCode::unsupported, "the oracle does not know formulas");
  }

  bool seen_by(const PaddingMask&) const { return true; }  // the sequence's lengths do the masking

  bool seen_by(const BlockSparseMask& mask) const {
    const int list = row / mask.block_m;
    const int begin = at(args.block_offsets, "block_offsets", {sequence.batch, head, list});
    const int end = at(args.block_offsets, "block_offsets", {sequence.batch, head, list + 1});
    for (int e = begin; e < end; ++e) {
      const auto* blocks = static_cast<const std::int32_t*>(need(args.block_indices, "block_indices").data);
      if (blocks[e] != key / mask.block_n) continue;
      const int bitmask =
          args.block_bitmask_of ? static_cast<const std::int32_t*>(args.block_bitmask_of->data)[e] : -1;
      if (bitmask < 0) return true;
      const int words = (mask.block_n + 31) / 32, column = key % mask.block_n;
      const auto* bits = static_cast<const std::int32_t*>(need(args.block_bitmasks, "block_bitmasks").data);
      return bit_of(bits[(std::int64_t{bitmask} * mask.block_m + row % mask.block_m) * words + column / 32],
                    column % 32);
    }
    return false;
  }

  bool seen_by(const TreeMask&) const {
    const int prefix = args.prefix_lengths ? at(args.prefix_lengths, "prefix_lengths", {sequence.batch})
                                           : sequence.seqlen_k - sequence.seqlen_q;
    if (key < prefix) return true;
    const int column = key - std::max(prefix, 0);
    const Tensor& bits = need(args.tree_bits, "tree_bits");
    if (row >= bits.shape[1] || column / 32 >= bits.shape[2]) return false;
    const std::int64_t batch = bits.shape[0] == 1 ? 0 : sequence.batch;
    const auto* words = static_cast<const std::int32_t*>(bits.data);
    return bit_of(words[batch * bits.strides[0] + row * bits.strides[1] + column / 32], column % 32);
  }
};

// Half-open.
struct Interval {
  std::int64_t begin, end;
};
Interval intersect(Interval a, Interval b) {
  return {std::max(a.begin, b.begin), std::max(std::max(a.begin, b.begin), std::min(a.end, b.end))};
}

template <class Kind>
const Kind* find(const AttentionSpec& spec) {
  for (const Mask& mask : spec.mask)
    if (const auto* found = std::get_if<Kind>(&mask)) return found;
  return nullptr;
}

// Whether kept_keys() knows the intervals that the mask keeps; it counts other masks by the element.
bool has_known_intervals(const Mask& mask) {
  return std::holds_alternative<CausalMask>(mask) || std::holds_alternative<SlidingWindowMask>(mask) ||
         std::holds_alternative<PaddingMask>(mask) || std::holds_alternative<BlockSparseMask>(mask);
}

// How many keys a row keeps: counted by intervals if the masks allow it, else key by key.
std::int64_t kept_keys(const AttentionSpec& spec, const AttentionArgs& args, const Sequence& s, int head,
                       int row) {
  std::vector<Interval> intervals = {{0, s.seqlen_k}};
  if (const auto* window = find<SlidingWindowMask>(spec)) {
    const std::int64_t position = position_of(window->align, s, row);
    const Interval around = {args.window_left ? position - *args.window_left : 0,
                             args.window_right ? position + *args.window_right + 1 : s.seqlen_k};
    const Interval sinks = {0, window->sinks ? args.num_sinks.value_or(0) : 0};
    intervals = {intersect(sinks, intervals[0]), intersect(around, {sinks.end, s.seqlen_k})};
  }
  if (const auto* causal = find<CausalMask>(spec)) {
    for (Interval& i : intervals) i = intersect(i, {0, position_of(causal->align, s, row) + 1});
  }
  const bool known = std::all_of(spec.mask.begin(), spec.mask.end(), has_known_intervals);
  const auto count = [&](Interval i, bool certain) {
    if (certain && known) return i.end - i.begin;
    std::int64_t sum = 0;
    for (std::int64_t key = i.begin; key < i.end; ++key)
      sum += sees(spec, args, s, head, row, static_cast<int>(key));
    return sum;
  };
  const auto* blocks = find<BlockSparseMask>(spec);
  std::int64_t sum = 0;
  for (const Interval& i : intervals) {
    if (!blocks) {
      sum += count(i, true);
      continue;
    }
    const int list = row / blocks->block_m;
    const int end = at(args.block_offsets, "block_offsets", {s.batch, head, list + 1});
    for (int e = at(args.block_offsets, "block_offsets", {s.batch, head, list}); e < end; ++e) {
      const std::int64_t block = at(args.block_indices, "block_indices", {e});
      const bool whole = !args.block_bitmask_of || at(args.block_bitmask_of, "block_bitmask_of", {e}) < 0;
      sum += count(intersect(i, {block * blocks->block_n, (block + 1) * blocks->block_n}), whole);
    }
  }
  return sum;
}

}  // namespace

std::vector<Sequence> sequences_of(const AttentionSpec& spec, const AttentionArgs& args) {
  const Tensor& q = need(args.q, "q");
  const Tensor& k = need(args.k, "k");
  std::vector<Sequence> sequences;
  const std::int64_t batch = spec.varlen ? need(args.cu_seqlens_q, "cu_seqlens_q").shape[0] - 1 : q.shape[0];
  for (int b = 0; b < batch; ++b) {
    struct Range {
      int begin, length;
    };
    const auto range = [&](const std::optional<Tensor>& starts, const char* name, const Tensor& t,
                           bool packed) -> Range {
      if (!packed) return {0, static_cast<int>(t.shape[1])};
      const auto* at = static_cast<const std::int32_t*>(need(starts, name).data);
      return {at[b], at[b + 1] - at[b]};
    };
    const auto used = [&](const std::optional<Tensor>& given, const char* name, int all) {
      return given ? at(given, name, {b}) : all;
    };
    const Range rows = range(args.cu_seqlens_q, "cu_seqlens_q", q, spec.varlen);
    const KeyLayout layout = key_layout(spec);
    Range keys = range(args.cu_seqlens_k, "cu_seqlens_k", k, layout == KeyLayout::packed);
    if (layout == KeyLayout::paged)
      keys.length *= static_cast<int>(need(args.page_table, "page_table").shape[1]);
    sequences.push_back({.batch = b,
                         .seqlen_q = used(args.seqlens_q, "seqlens_q", rows.length),
                         .seqlen_k = used(args.seqlens_k, "seqlens_k", keys.length),
                         .rows = rows.length,
                         .q_begin = rows.begin,
                         .k_begin = keys.begin});
  }
  return sequences;
}

double kept_pairs(const AttentionSpec& spec, const AttentionArgs& args) {
  const Tensor& q = need(args.q, "q");
  const auto heads = static_cast<int>(q.shape[q.rank - 2]);
  const auto* blocks = find<BlockSparseMask>(spec);
  const int different = blocks && blocks->per_head ? heads : std::min(heads, 1);
  double sum = 0;
  for (const Sequence& s : sequences_of(spec, args))
    for (int head = 0; head < different; ++head)
      for (int row = 0; row < s.seqlen_q; ++row)
        sum += static_cast<double>(kept_keys(spec, args, s, head, row));
  return different == 0 ? 0 : sum * heads / different;
}

double read_keys(const AttentionSpec& spec, const AttentionArgs& args) {
  const Tensor& k = need(args.k, "k");
  double keys = 0;
  for (const Sequence& s : sequences_of(spec, args)) {
    for (int key = 0; key < s.seqlen_k; ++key) {
      bool read = false;
      for (int row = s.seqlen_q; row-- > 0 && !read;) read = sees(spec, args, s, 0, row, key);
      keys += read;
    }
  }
  return keys * static_cast<double>(k.shape[k.rank - 2]);
}

bool sees(const AttentionSpec& spec, const AttentionArgs& args, const Sequence& sequence, int head, int row,
          int key) {
  if (row >= sequence.seqlen_q || key >= sequence.seqlen_k) return false;
  const Element element{args, sequence, head, row, key};
  return std::all_of(spec.mask.begin(), spec.mask.end(), [&](const Mask& mask) {
    return std::visit([&](const auto& m) { return element.seen_by(m); }, mask);
  });
}

}  // namespace flashjit::verify
