#include "tools/verify/random_masks.hpp"

#include <algorithm>
#include <initializer_list>
#include <numeric>
#include <string>
#include <utility>

#include "codegen/arguments/table.hpp"
#include "templates/shared/platform.h"
#include "tools/verify/draw.hpp"

namespace flashjit::verify {
namespace {

class Maker {
 public:
  // Lengths are at most longest_sequence.
  Maker(const AttentionSpec& spec, const Shape& shape, std::uint64_t seed, const MaskDataOptions& options)
      : shape_(shape),
        options_(options),
        draw_(seed ^ 0x6d61736b),
        makes_lists_(info_of(spec.op).makes_lists),
        has_padding_(has<PaddingMask>(spec)),
        counts_keys_(counts_keys(spec)) {
    if (spec.offsets) make_offsets(spec);
    for (const Mask& mask : spec.mask) std::visit([&](const auto& m) { make(m); }, mask);
    if (counts_keys_) make_key_lengths();
    if (spec.paged) make_pages(spec);
    if (has_argument(spec, argument_of(&AttentionArgs::append_positions))) make_append_positions();
  }
  MaskData take() { return std::move(data_); }

 private:
  template <class Kind>
  static bool has(const AttentionSpec& spec) {
    return std::any_of(spec.mask.begin(), spec.mask.end(),
                       [](const Mask& m) { return std::holds_alternative<Kind>(m); });
  }

  // The last rows are the last keys, but a tree's come first. Hard: any near each other, or far from 0.
  void make_offsets(const AttentionSpec& spec) {
    const bool same = draw_.chance(0.3), lists = has<BlockSparseMask>(spec) || has<TreeMask>(spec);
    const int far = lists || draw_.chance(0.7) ? 0 : longest_sequence / 2;
    const int apart = has<TreeMask>(spec) ? 0 : shape_.seqlen_k - shape_.seqlen_q;
    for (int b = 0; b < shape_.batch; ++b) {
      std::int64_t row = std::max(apart, 0), key = std::max(-apart, 0);
      if (options_.hard) {
        key = far + draw_.between(0, shape_.seqlen_k + 40);
        row = std::max<std::int64_t>(key + draw_.between(-shape_.seqlen_q - 20, shape_.seqlen_k + 20), 0);
      }
      data_.row_offset.push_back(same && b > 0 ? data_.row_offset[0] : row);
      data_.key_offset.push_back(same && b > 0 ? data_.key_offset[0] : key);
    }
  }
  static int most(const std::vector<std::int64_t>& offsets) {
    return offsets.empty() ? 0 : static_cast<int>(*std::max_element(offsets.begin(), offsets.end()));
  }
  int whole_rows() const { return shape_.seqlen_q + most(data_.row_offset); }
  int whole_keys() const { return shape_.seqlen_k + most(data_.key_offset); }

  // Refuses tables that take gigabytes of memory or minutes to draw.
  static void require_moderate(const char* what, std::initializer_list<std::int64_t> sizes) {
    constexpr std::int64_t most = 1 << 28;
    if (const auto count = product_of(sizes); !count || *count > most)
      throw Error(ErrorCode::invalid_argument, std::string("more than ") + std::to_string(most) + " " + what +
                                                   " would have to be generated; a smaller shape would work");
  }

  // The first length is `longest`, the others between a quarter of it and all of it. Hard lengths are
  // anything, 0 included.
  std::vector<std::int32_t> lengths(int longest) {
    require_moderate("lengths", {shape_.batch});
    std::vector<std::int32_t> values;
    for (int b = 0; b < shape_.batch; ++b) {
      const bool zero = options_.hard && draw_.chance(0.2);
      const int shortest = options_.hard ? 0 : longest / 4;
      values.push_back(zero ? 0 : b == 0 && !options_.hard ? longest : draw_.between(shortest, longest));
    }
    return values;
  }

  template <class Kind>
  void make(const Kind&) {
    static_assert(!Kind::reads_tables, "an overload says what its tables hold");
  }

  void make(const SlidingWindowMask& mask) {
    data_.window_left = options_.window_left.value_or(shape_.seqlen_k / 4);
    data_.window_right = options_.window_right.value_or(0);
    if (mask.sinks) data_.num_sinks = std::min(4, shape_.seqlen_k);
    if (!options_.hard) return;
    const auto size = [&]() -> std::optional<int> {
      if (draw_.chance(0.2)) return std::nullopt;
      return draw_.chance(0.2) ? 0 : draw_.between(0, shape_.seqlen_k);
    };
    data_.window_left = size();
    data_.window_right = size();
    if (mask.sinks) data_.num_sinks = draw_.chance(0.3) ? 0 : draw_.between(0, shape_.seqlen_k + 3);
  }

  void make(const PaddingMask&) {
    const bool queries = !options_.hard || counts_keys_ || draw_.chance(0.7);
    const bool keys = !counts_keys_ && (!queries || draw_.chance(0.8));
    if (queries) add(&AttentionArgs::seqlens_q, {shape_.batch}, lengths(shape_.seqlen_q));
    if (keys || (!options_.hard && !counts_keys_))
      add(&AttentionArgs::seqlens_k, {shape_.batch}, lengths(shape_.seqlen_k));
  }

  void make(const BlockSparseMask& mask) {
    if (makes_lists_) return;
    const int row_blocks = device::ceil_div(whole_rows(), mask.block_m);
    const int key_blocks = device::ceil_div(whole_keys(), mask.block_n);
    const int batch = options_.hard && draw_.chance(0.5) ? shape_.batch : 1;
    const int heads = mask.per_head ? shape_.num_heads_q : 1;
    require_moderate("blocks of lists", {batch, heads, row_blocks + 1, std::max(1, key_blocks)});
    const std::int64_t words = std::int64_t{mask.block_m} * ((mask.block_n + 31) / 32);
    std::vector<std::int32_t> offsets, indices, bitmask_of, bitmasks;
    int count = 0;
    for (int list = 0; list < batch * heads; ++list) {
      offsets.push_back(static_cast<std::int32_t>(indices.size()));
      for (int i = 0; i < row_blocks; ++i) {
        const double density = !options_.hard      ? options_.density
                               : draw_.chance(0.3) ? 0
                                                   : draw_.between(0, 4) / 4.0;
        for (int j = 0; j < key_blocks; ++j) {
          if (!draw_.chance(density)) continue;
          const bool partial = !mask.of_masks && draw_.chance(options_.hard ? 0.4 : options_.partial);
          indices.push_back(j);
          bitmask_of.push_back(partial ? count++ : mask.of_masks ? -2 : -1);
          for (std::int64_t word = 0; partial && word < words; ++word) bitmasks.push_back(draw_.word());
          require_moderate("words of bitmasks", {static_cast<std::int64_t>(bitmasks.size())});
        }
        offsets.push_back(static_cast<std::int32_t>(indices.size()));
      }
    }
    const auto listed = static_cast<std::int64_t>(indices.size());
    add(&AttentionArgs::block_offsets, {batch, heads, row_blocks + 1}, std::move(offsets));
    add(&AttentionArgs::block_indices, {listed}, std::move(indices));
    if (mask.of_masks) add(&AttentionArgs::block_bitmask_of, {listed}, bitmask_of);
    if (count == 0) return;
    add(&AttentionArgs::block_bitmask_of, {listed}, std::move(bitmask_of));
    add(&AttentionArgs::block_bitmasks, {count, mask.block_m, (mask.block_n + 31) / 32}, std::move(bitmasks));
  }

  // A random tree in which parents come before their children. With `hard`, some batch entries have their own
  // prefix length.
  void make(const TreeMask&) {
    const int batch = options_.hard && draw_.chance(0.5) ? 1 : shape_.batch;
    const int rows = whole_rows(), words = device::ceil_div(rows, 32);
    require_moderate("words of trees", {batch, rows, words});
    std::vector<std::int32_t> bits(static_cast<std::size_t>(batch) * rows * words);
    for (int b = 0; b < batch; ++b) {
      std::int32_t* const tree = bits.data() + static_cast<std::size_t>(b) * rows * words;
      for (int i = 0; i < rows; ++i) {
        std::int32_t* const row = tree + static_cast<std::size_t>(i) * words;
        const int parent = i == 0 || draw_.chance(0.1) ? -1 : draw_.between(std::max(0, i - 4), i - 1);
        if (parent >= 0) std::copy_n(tree + static_cast<std::size_t>(parent) * words, words, row);
        row[i / 32] |= static_cast<std::int32_t>(1u << i % 32);
      }
    }
    add(&AttentionArgs::tree_bits, {batch, rows, words}, std::move(bits));
    if (!data_.row_offset.empty() || (options_.hard && !has_padding_ && draw_.chance(0.5)))
      add(&AttentionArgs::prefix_lengths, {shape_.batch}, lengths(whole_keys()));
  }

  // Without hard ones all keys are used.
  void make_key_lengths() {
    std::vector<std::int32_t> values = options_.lengths_k;
    if (values.empty() && options_.hard && draw_.chance(0.8)) values = lengths(shape_.seqlen_k);
    if (!values.empty()) add(&AttentionArgs::seqlens_k, {shape_.batch}, std::move(values));
  }

  // The new tokens are the last that the cache has room for.
  void make_append_positions() {
    add(&AttentionArgs::append_positions, {shape_.batch},
        std::vector<std::int32_t>(static_cast<std::size_t>(shape_.batch),
                                  std::max(shape_.seqlen_k - shape_.seqlen_q, 0)));
  }

  // Pages in random order. Hard ones: entries that nobody may read hold anything.
  void make_pages(const AttentionSpec& spec) {
    const std::int64_t of_entry = argument_table::pages_of(shape_),
                       page_size = argument_table::page_size_of(shape_);
    require_moderate("pages", {shape_.batch, of_entry});
    if (!options_.hard && !options_.lengths_k.empty()) {
      make_pages_of_lengths(of_entry, page_size);
      return;
    }
    std::vector<std::int32_t> pages(static_cast<std::size_t>(shape_.batch * of_entry));
    std::iota(pages.begin(), pages.end(), 0);
    for (std::size_t i = pages.size(); i > 1; --i) std::swap(pages[i - 1], pages[draw_.bits() % i]);
    const std::vector<std::int32_t>* lengths_k = nullptr;
    for (const MaskTable& table : data_.tables)
      if (table.argument == &AttentionArgs::seqlens_k) lengths_k = &table.values;
    for (std::int64_t b = 0; options_.hard && b < shape_.batch; ++b) {
      const std::int64_t length = lengths_k ? (*lengths_k)[static_cast<std::size_t>(b)] : shape_.seqlen_k;
      std::int64_t first = 0, sinks = 0;  // keys in [sinks, first) are before every row's window
      for (const Mask& mask : spec.mask) {
        const auto* window = std::get_if<SlidingWindowMask>(&mask);
        const bool is_shard = !data_.row_offset.empty();
        if (!window || (window->align != CausalAlign::bottom_right && !is_shard) || !data_.window_left)
          continue;
        const auto entry = static_cast<std::size_t>(b);
        first = is_shard ? data_.row_offset[entry] - data_.key_offset[entry] : length - shape_.seqlen_q;
        first -= *data_.window_left;
        sinks = data_.num_sinks.value_or(0) - (is_shard ? data_.key_offset[entry] : 0);
      }
      for (std::int64_t page = 0; page < of_entry; ++page) {
        const std::int64_t begin = page * page_size, end = begin + page_size;
        if (begin < length && (end > first || begin < sinks)) continue;
        pages[static_cast<std::size_t>(b * of_entry + page)] = draw_.chance(0.3) ? -1 : draw_.word();
      }
    }
    add(&AttentionArgs::page_table, {shape_.batch, of_entry}, std::move(pages));
  }

  // In random order, and only as many as the lengths take: one long sequence among short ones. Entries beyond
  // a length are -1.
  void make_pages_of_lengths(std::int64_t of_entry, std::int64_t page_size) {
    std::vector<std::int32_t> pages(static_cast<std::size_t>(shape_.batch * of_entry), -1), ids;
    std::vector<std::size_t> used;
    for (std::size_t b = 0; b < options_.lengths_k.size(); ++b)
      for (std::int64_t page = 0; page * page_size < options_.lengths_k[b]; ++page) {
        used.push_back(b * static_cast<std::size_t>(of_entry) + static_cast<std::size_t>(page));
        ids.push_back(static_cast<std::int32_t>(ids.size()));
      }
    for (std::size_t i = 0; i < used.size(); ++i) {
      std::swap(ids[i], ids[i + draw_.bits() % (ids.size() - i)]);
      pages[used[i]] = ids[i];
    }
    add(&AttentionArgs::page_table, {shape_.batch, of_entry}, std::move(pages));
  }

  void add(std::optional<Tensor> AttentionArgs::* argument, std::vector<std::int64_t> shape,
           std::vector<std::int32_t> values) {
    data_.tables.push_back({argument, std::move(shape), std::move(values)});
  }

  Shape shape_;
  MaskDataOptions options_;
  Draw draw_;
  bool makes_lists_, has_padding_, counts_keys_;  // seqlens_k may be given without padding
  MaskData data_;
};

}  // namespace

void MaskData::fit_lengths(const AttentionSpec& spec, const Shape& shape, const AttentionArgs& starts) {
  bool has_prefixes = false;
  std::vector<std::int32_t> rows, keys;  // of the batch entries
  for (int b = 0; b < shape.batch; ++b) {
    const auto length = [&](const std::optional<Tensor>& of, int longest) {
      const auto* at = of ? static_cast<const std::int32_t*>(of->data) : nullptr;
      return at ? at[b + 1] - at[b] : longest;
    };
    rows.push_back(length(starts.cu_seqlens_q, shape.seqlen_q));
    keys.push_back(length(starts.cu_seqlens_k, shape.seqlen_k));
  }
  for (MaskTable& table : tables) {
    has_prefixes |= table.argument == &AttentionArgs::prefix_lengths;
    std::vector<std::int32_t>* const lengths = table.argument == &AttentionArgs::seqlens_q   ? &rows
                                               : table.argument == &AttentionArgs::seqlens_k ? &keys
                                                                                             : nullptr;
    if (!lengths) continue;
    for (std::size_t b = 0; b < lengths->size(); ++b)
      (*lengths)[b] = table.values[b] = std::min(table.values[b], (*lengths)[b]);
  }
  const auto is_tree = [](const Mask& mask) { return std::holds_alternative<TreeMask>(mask); };
  if (has_prefixes || std::none_of(spec.mask.begin(), spec.mask.end(), is_tree)) return;
  bool are_short = false;
  std::vector<std::int32_t> prefixes;
  for (std::size_t b = 0; b < rows.size(); ++b) {
    are_short |= keys[b] < rows[b];
    prefixes.push_back(std::max(keys[b] - rows[b], 0));
  }
  if (are_short) tables.push_back({&AttentionArgs::prefix_lengths, {shape.batch}, std::move(prefixes)});
}

void MaskData::set_sizes(AttentionArgs& args) const {
  args.window_left = window_left;
  args.window_right = window_right;
  args.num_sinks = num_sinks;
}

MaskData random_mask_data(const AttentionSpec& spec, const Shape& shape, std::uint64_t seed,
                          const MaskDataOptions& options) {
  return Maker(spec, shape, seed, options).take();
}

}  // namespace flashjit::verify
