#include "tools/verify/mask.hpp"

#include <algorithm>
#include <string>

#include "codegen/arguments/table.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/formula.hpp"

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
  return align == CausalAlign::bottom_right ? position_of(s, row) : row;
}

// `row` and `key` are those of the whole.
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

  bool seen_by(const FormulaMask&) const { return true; }  // SeenKeys computes formulas
  bool seen_by(const PaddingMask&) const { return true; }  // the sequence's lengths do the masking

  bool seen_by(const BlockSparseMask& mask) const {
    const int list = row / mask.block_m;
    if (sequence.is_shard && list + 1 >= need(args.block_offsets, "block_offsets").shape[2]) return false;
    const int begin = at(args.block_offsets, "block_offsets", {sequence.batch, head, list});
    const int end = at(args.block_offsets, "block_offsets", {sequence.batch, head, list + 1});
    for (int e = begin; e < end; ++e) {
      const auto* blocks = static_cast<const std::int32_t*>(need(args.block_indices, "block_indices").data);
      if (blocks[e] != key / mask.block_n) continue;
      const int bitmask =
          args.block_bitmask_of ? static_cast<const std::int32_t*>(args.block_bitmask_of->data)[e] : -1;
      if (bitmask < 0) return true;  // or the other masks decide
      const int words = (mask.block_n + 31) / 32, column = key % mask.block_n;
      const auto* bits = static_cast<const std::int32_t*>(need(args.block_bitmasks, "block_bitmasks").data);
      return bit_of(bits[(std::int64_t{bitmask} * mask.block_m + row % mask.block_m) * words + column / 32],
                    column % 32);
    }
    return false;
  }

  bool seen_by(const TreeMask&) const {
    if (sequence.is_shard) need(args.prefix_lengths, "prefix_lengths");
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
std::int64_t kept_keys(const AttentionSpec& spec, const AttentionArgs& args, const SeenKeys& sees,
                       const Sequence& s, int head, int row) {
  std::vector<Interval> intervals = {{0, s.seqlen_k}};
  if (s.is_shard) {
    std::vector<char> seen(static_cast<std::size_t>(s.seqlen_k));
    sees.row(s, head, row, 0, seen);
    return std::count(seen.begin(), seen.end(), 1);
  }
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
    std::vector<char> seen(static_cast<std::size_t>(i.end - i.begin));
    sees.row(s, head, row, static_cast<int>(i.begin), seen);
    return static_cast<std::int64_t>(std::count(seen.begin(), seen.end(), 1));
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
    const auto offset = [&](const std::optional<Tensor>& given, const char* name) {
      if (!spec.offsets) return 0;
      const Tensor& t = need(given, name);
      return static_cast<int>(static_cast<const std::int64_t*>(t.data)[b * t.strides[0]]);
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
                         .k_begin = keys.begin,
                         .is_shard = spec.offsets,
                         .row_offset = offset(args.row_offset, "row_offset"),
                         .key_offset = offset(args.key_offset, "key_offset")});
  }
  return sequences;
}

double kept_pairs(const AttentionSpec& spec, const AttentionArgs& args) {
  const Tensor& q = need(args.q, "q");
  const auto heads = static_cast<int>(q.shape[q.rank - 2]);
  const auto* blocks = find<BlockSparseMask>(spec);
  const SeenKeys sees(spec, args);
  const bool by_head =
      (blocks && blocks->per_head) || (sees.formulas() && sees.formulas()->masks_differ_by_head());
  const int different = by_head ? heads : std::min(heads, 1);
  double sum = 0;
  for (const Sequence& s : sequences_of(spec, args)) {
    // Formulas take nanoseconds a pair: of many pairs they are computed for every so many rows.
    constexpr std::int64_t most_pairs = 1 << 27;
    const std::int64_t pairs = std::int64_t{s.seqlen_q} * s.seqlen_k;
    const int step = sees.formulas() ? static_cast<int>(pairs / most_pairs) + 1 : 1;
    for (int head = 0; head < different; ++head) {
      std::int64_t kept = 0, rows = 0;
      for (int row = step / 2; row < s.seqlen_q; row += step, ++rows)
        kept += kept_keys(spec, args, sees, s, head, row);
      if (rows > 0) sum += static_cast<double>(kept) * s.seqlen_q / static_cast<double>(rows);
    }
  }
  return different == 0 ? 0 : sum * heads / different;
}

double read_keys(const AttentionSpec& spec, const AttentionArgs& args) {
  const Tensor& k = need(args.k, "k");
  const SeenKeys sees(spec, args);
  std::int64_t keys = 0;
  std::vector<char> read, seen;
  for (const Sequence& s : sequences_of(spec, args)) {
    std::int64_t read_here = 0;
    read.assign(static_cast<std::size_t>(s.seqlen_k), 0);
    for (int row = s.seqlen_q; row-- > 0 && read_here < s.seqlen_k;) {
      seen.resize(read.size());
      sees.row(s, 0, row, 0, seen);
      for (std::size_t i = 0; i < read.size(); ++i) read[i] |= seen[i];
      read_here = std::count(read.begin(), read.end(), 1);
    }
    keys += read_here;
  }
  return static_cast<double>(keys) * static_cast<double>(k.shape[k.rank - 2]);
}

SeenKeys::SeenKeys(const AttentionSpec& spec, const AttentionArgs& args) : spec_(spec), args_(args) {
  if (find<FormulaMask>(spec)) formulas_ = std::make_shared<Formulas>(spec, args);
}

void SeenKeys::row(const Sequence& sequence, int head, int row, int first_key, std::span<char> seen) const {
  for (std::size_t i = 0; i < seen.size(); ++i) {
    const int key = first_key + static_cast<int>(i);
    const Element element{args_, sequence, head, row + sequence.row_offset, key + sequence.key_offset};
    seen[i] = row < sequence.seqlen_q && key < sequence.seqlen_k &&
              std::all_of(
                  spec_.mask.begin(), spec_.mask.end(),
                  [&](const Mask& mask) {
                    return std::visit([&](const auto& m) { return element.seen_by(m); }, mask);
                  });
  }
  if (formulas_ && row < sequence.seqlen_q) formulas_->mask(sequence, head, row, first_key, seen);
}

bool SeenKeys::operator()(const Sequence& sequence, int head, int row, int key) const {
  char seen = 0;
  this->row(sequence, head, row, key, {&seen, 1});
  return seen != 0;
}

bool sees(const AttentionSpec& spec, const AttentionArgs& args, const Sequence& sequence, int head, int row,
          int key) {
  return SeenKeys(spec, args)(sequence, head, row, key);
}

}  // namespace flashjit::verify
