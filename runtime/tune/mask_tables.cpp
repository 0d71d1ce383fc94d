#include "runtime/tune/mask_tables.hpp"

#include <algorithm>
#include <random>
#include <utility>
#include <variant>

namespace flashjit {
namespace {

class Tables {
 public:
  explicit Tables(const Shape& shape) : shape_(shape) {}

  void operator()(const CausalMask&) {}
  void operator()(const SlidingWindowMask&) {}

  void operator()(const PaddingMask&) {
    add(&AttentionArgs::seqlens_q, {shape_.batch}, typical_lengths(shape_, shape_.seqlen_q, 1));
    add(&AttentionArgs::seqlens_k, {shape_.batch}, typical_lengths(shape_, shape_.seqlen_k, 2));
  }

  void operator()(const BlockSparseMask& mask) {
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
  }

  // Every row sees those before it, which is the most that a tree can show.
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
  }

  MaskTables take() { return std::move(tables_); }

 private:
  void add(std::optional<Tensor> AttentionArgs::* argument, std::vector<std::int64_t> sizes,
           std::vector<std::int32_t> values) {
    tables_.push_back({argument, std::move(sizes), std::move(values)});
  }

  const Shape shape_;
  MaskTables tables_;
};

}  // namespace

std::vector<std::int32_t> typical_lengths(const Shape& shape, int longest, std::uint64_t seed) {
  std::minstd_rand random(static_cast<unsigned>(seed));
  std::uniform_int_distribution<std::int32_t> length(longest / 4, longest);
  std::vector<std::int32_t> lengths(static_cast<std::size_t>(shape.batch));
  for (std::int32_t& one : lengths) one = length(random);
  lengths.front() = longest;
  return lengths;
}

MaskTables typical_mask_tables(const AttentionSpec& spec, const Shape& shape) {
  Tables tables(shape);
  for (const Mask& mask : spec.mask) std::visit(tables, mask);
  return tables.take();
}

void set_typical_mask_sizes(const AttentionSpec& spec, const Shape& shape, AttentionArgs& args) {
  for (const Mask& mask : spec.mask) {
    const auto* window = std::get_if<SlidingWindowMask>(&mask);
    if (!window) continue;
    args.window_left = shape.seqlen_k / 4;
    args.window_right = 0;
    if (window->sinks) args.num_sinks = std::min(4, shape.seqlen_k);
  }
}

}  // namespace flashjit
