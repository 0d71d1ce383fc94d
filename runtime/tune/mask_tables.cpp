#include "runtime/tune/mask_tables.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>
#include <variant>

#include "codegen/arguments/table.hpp"
#include "runtime/arguments/checks.hpp"

namespace flashjit {
namespace {

using Lengths = std::vector<std::int32_t>;

// Lengths of sequences: the first is `longest`, the others lie between a quarter of
// it and all of it. If `total` is not 0, the others share the rest of it instead.
Lengths typical_lengths(int batch, int longest, std::int64_t total, unsigned seed) {
  std::minstd_rand random(seed);
  std::uniform_int_distribution<std::int32_t> length(longest / 4, longest);
  Lengths lengths(static_cast<std::size_t>(batch));
  for (std::int32_t& one : lengths) one = length(random);
  lengths.front() = longest;
  std::int64_t left = total - longest;
  for (std::size_t i = 1; total > 0 && i < lengths.size(); ++i) {
    const auto others = static_cast<std::int64_t>(lengths.size() - i);
    lengths[i] = static_cast<std::int32_t>(std::clamp<std::int64_t>(left / others, 0, longest));
    left -= lengths[i];
  }
  return lengths;
}

// The starts of packed sequences.
Lengths starts_of(const Lengths& lengths) {
  Lengths starts = {0};
  for (const std::int32_t length : lengths) {
    if (starts.back() > 0x7fffffff - length)
      refuse_argument(lengths.size(),
                      " packed sequences have more than 2147483647 rows in all; a smaller batch would work");
    starts.push_back(starts.back() + length);
  }
  return starts;
}

class Tables {
 public:
  Tables(const AttentionSpec& spec, const Shape& shape)
      : shape_(shape),
        makes_lists_(info_of(spec.op).makes_lists),
        needs_prefixes_(spec.offsets),
        lengths_q_(typical_lengths(shape.batch, shape.seqlen_q, shape.total_q, 1)),
        lengths_k_(typical_lengths(shape.batch, shape.seqlen_k, shape.total_k, 2)) {
    if (spec.paged) add_pages();
    if (has_argument(spec, argument_of(&AttentionArgs::append_positions))) add_positions();
    if (!spec.varlen) return;
    const std::int64_t starts = std::int64_t{shape.batch} + 1;
    add(&AttentionArgs::cu_seqlens_q, {starts}, starts_of(lengths_q_));
    if (key_layout(spec) == KeyLayout::packed)
      add(&AttentionArgs::cu_seqlens_k, {starts}, starts_of(lengths_k_));
  }

  // named_tables.hpp has the tables of formulas.
  template <class Kind>
  void operator()(const Kind&) {
    static_assert(!Kind::reads_tables, "an overload says what its tables hold");
  }

  void operator()(const PaddingMask&) {
    add(&AttentionArgs::seqlens_q, {shape_.batch}, lengths_q_);
    add(&AttentionArgs::seqlens_k, {shape_.batch}, lengths_k_);
  }

  void operator()(const BlockSparseMask& mask) {
    if (makes_lists_) return;
    const int row_blocks = (shape_.seqlen_q - 1) / mask.block_m + 1;
    const int key_blocks = (shape_.seqlen_k - 1) / mask.block_n + 1;
    const int heads = mask.per_head ? shape_.num_heads_q : 1;
    std::vector<std::int32_t> offsets, indices;
    std::minstd_rand random(3);
    for (int head = 0; head < heads; ++head) {
      offsets.push_back(static_cast<std::int32_t>(indices.size()));
      for (int i = 0; i < row_blocks; ++i) {
        for (int j = 0; j < key_blocks; ++j) {
          if (random() % 4 == 0 || j == i) indices.push_back(j);
        }
        offsets.push_back(static_cast<std::int32_t>(indices.size()));
      }
    }
    const auto listed = static_cast<std::int64_t>(indices.size());
    add(&AttentionArgs::block_offsets, {1, heads, row_blocks + 1}, std::move(offsets));
    add(&AttentionArgs::block_indices, {listed}, std::move(indices));
    // Which ones another mask keeps whole depends on its tables.
    if (mask.of_masks)
      add(&AttentionArgs::block_bitmask_of, {listed},
          std::vector<std::int32_t>(static_cast<std::size_t>(listed), -2));
  }

  // Every row sees all rows before it, the most that a tree allows.
  void operator()(const TreeMask&) {
    const int rows = shape_.seqlen_q, words = (rows - 1) / 32 + 1;
    std::vector<std::int32_t> bits(static_cast<std::size_t>(rows) * static_cast<std::size_t>(words));
    for (int row = 0; row < rows; ++row) {
      std::int32_t* const of_row =
          bits.data() + static_cast<std::size_t>(row) * static_cast<std::size_t>(words);
      std::fill_n(of_row, row / 32, -1);
      of_row[row / 32] = static_cast<std::int32_t>(0xffffffffu >> (31 - row % 32));
    }
    add(&AttentionArgs::tree_bits, {1, rows, words}, std::move(bits));
    if (needs_prefixes_)
      add(&AttentionArgs::prefix_lengths, {shape_.batch},
          Lengths(static_cast<std::size_t>(shape_.batch), std::max(shape_.seqlen_k - rows, 0)));
  }

  MaskTables take() { return std::move(tables_); }

 private:
  // The new tokens are the last that the cache has room for.
  void add_positions() {
    Lengths positions(static_cast<std::size_t>(shape_.batch));
    for (std::int32_t& one : positions) one = std::max(shape_.seqlen_k - shape_.seqlen_q, 0);
    add(&AttentionArgs::append_positions, {shape_.batch}, std::move(positions));
  }

  // In random order, as a cache has them that has been in use for some time.
  void add_pages() {
    const std::int64_t of_entry = argument_table::pages_of(shape_);
    Lengths pages(static_cast<std::size_t>(shape_.batch * of_entry));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), std::minstd_rand(4));
    add(&AttentionArgs::page_table, {shape_.batch, of_entry}, std::move(pages));
  }

  void add(TensorMember argument, std::vector<std::int64_t> sizes, std::vector<std::int32_t> values) {
    tables_.push_back({argument, std::move(sizes), std::move(values)});
  }

  const Shape shape_;
  const bool makes_lists_, needs_prefixes_;
  const Lengths lengths_q_, lengths_k_;
  MaskTables tables_;
};

}  // namespace

MaskTables typical_tables(const AttentionSpec& spec, const Shape& shape) {
  Tables tables(spec, shape);
  for (const Mask& mask : spec.mask) std::visit(tables, mask);
  return tables.take();
}

bool is_places(const Argument& argument) {
  constexpr TensorMember places[] = {&AttentionArgs::from_slots, &AttentionArgs::to_slots,
                                     &AttentionArgs::row_offset, &AttentionArgs::key_offset};
  return std::find(std::begin(places), std::end(places), argument.tensor()) != std::end(places);
}

std::vector<std::int64_t> typical_places(const Argument& given, const AttentionSpec& spec,
                                         const Shape& shape) {
  const bool of_rows = given.tensor() == &AttentionArgs::row_offset;
  if (of_rows || given.tensor() == &AttentionArgs::key_offset) {
    const int own = of_rows ? shape.seqlen_q : shape.seqlen_k,
              other = of_rows ? shape.seqlen_k : shape.seqlen_q;
    const int offset = find_mask<TreeMask>(spec.mask) ? 0 : std::max(other - own, 0);
    return std::vector<std::int64_t>(static_cast<std::size_t>(shape.batch), offset);
  }
  const bool are_sources = given.tensor() == &AttentionArgs::from_slots;
  const std::int64_t rows = std::int64_t{shape.batch} * shape.seqlen_q,
                     places = are_sources ? rows : std::int64_t{shape.batch} * shape.seqlen_k;
  std::vector<std::int64_t> all(static_cast<std::size_t>(std::max(rows, places)), -1);
  std::iota(all.begin(), all.begin() + places, 0);
  std::shuffle(all.begin(), all.end(), std::minstd_rand(are_sources ? 5 : 6));
  all.resize(static_cast<std::size_t>(rows));
  return all;
}

Shape with_totals(Shape shape, const MaskTables& tables) {
  for (const MaskTable& table : tables) {
    if (table.argument == &AttentionArgs::cu_seqlens_q) shape.total_q = table.values.back();
    if (table.argument == &AttentionArgs::cu_seqlens_k) shape.total_k = table.values.back();
  }
  return shape;
}

void set_typical_numbers(const AttentionSpec& spec, const Shape& shape, AttentionArgs& args) {
  if (has_argument(spec, argument_of(&AttentionArgs::max_seqlen_q))) {
    args.max_seqlen_q = shape.seqlen_q;
    if (key_layout(spec) == KeyLayout::packed) args.max_seqlen_k = shape.seqlen_k;
  }
  if (spec.dropout) {
    args.dropout_p = 0.1;
    args.dropout_seed = 1;
  }
  for (const Mask& mask : spec.mask) {
    const auto* window = std::get_if<SlidingWindowMask>(&mask);
    if (!window) continue;
    args.window_left = shape.seqlen_k / 4;
    args.window_right = 0;
    if (window->sinks) args.num_sinks = std::min(4, shape.seqlen_k);
  }
}

}  // namespace flashjit
