#include "tools/verify/block_lists_oracle.hpp"

#include <algorithm>

#include "tools/verify/element.hpp"
#include "tools/verify/layout.hpp"
#include "tools/verify/mask.hpp"
#include "tools/verify/rows.hpp"

namespace flashjit::verify {
namespace {

struct Lists {
  AttentionSpec masks;  // without the lists
  AttentionArgs args;
  OracleOptions options;
  BlockSparseMask blocks;
  std::vector<Sequence> sequences;  // those with lists of their own
  int heads;
  std::int64_t row_blocks, key_blocks;
};

// A block keeps nothing (0), some pairs (-2) or all (-1).
using Kept = std::vector<double>;

// Finds out what the blocks of a list keep; a task's rows are numbers of lists.
struct Worker {
  const Lists& lists;
  std::vector<Kept>& kept;

  void run(const RowTask& task) const {
    const SeenKeys sees(lists.masks, lists.args);
    const Sequence& sequence = lists.sequences[static_cast<std::size_t>(task.sequence)];
    std::vector<char> seen(static_cast<std::size_t>(sequence.seqlen_k));
    for (const int list : task.rows) {
      Kept& of_list = kept[static_cast<std::size_t>(
          (std::int64_t{task.sequence} * lists.heads + task.head) * lists.row_blocks + list)];
      of_list.assign(static_cast<std::size_t>(lists.key_blocks), 0);
      std::vector<int> pairs(of_list.size());
      const int first = list * lists.blocks.block_m,
                end = std::min(first + lists.blocks.block_m, sequence.seqlen_q);
      for (int row = first; row < end; ++row) {
        sees.row(sequence, task.head, row, 0, seen);
        for (std::size_t key = 0; key < seen.size(); ++key)
          pairs[key / static_cast<std::size_t>(lists.blocks.block_n)] += seen[key];
      }
      for (std::size_t block = 0; block < pairs.size(); ++block) {
        const int keys = std::min(lists.blocks.block_n,
                                  sequence.seqlen_k - static_cast<int>(block) * lists.blocks.block_n);
        if (pairs[block] > 0) of_list[block] = pairs[block] == (end - first) * keys ? -1 : -2;
      }
    }
  }
};

void visit(const Lists& lists, const std::vector<Kept>& kept, const Tensor& offsets, const Visit& visit) {
  const std::vector<double> exact(static_cast<std::size_t>(std::max<std::int64_t>(lists.key_blocks, 1)));
  for (std::size_t group = 0; group < lists.sequences.size() * static_cast<std::size_t>(lists.heads);
       ++group) {
    const auto batch = static_cast<std::int64_t>(group) / lists.heads,
               head = static_cast<std::int64_t>(group) % lists.heads;
    std::int64_t place = static_cast<std::int64_t>(group) * lists.row_blocks * lists.key_blocks;
    for (std::int64_t list = 0; list <= lists.row_blocks; ++list) {
      const auto begin = static_cast<double>(place);
      visit({.place = {batch, head, list},
             .index = batch * offsets.strides[0] + head * offsets.strides[1] + list * offsets.strides[2],
             .values = {&begin, 1},
             .bounds = {exact.data(), 1}});
      if (list == lists.row_blocks) break;
      const Kept& of_list =
          kept[group * static_cast<std::size_t>(lists.row_blocks) + static_cast<std::size_t>(list)];
      std::vector<double> blocks, bitmasks;
      for (std::size_t block = 0; block < of_list.size(); ++block)
        if (of_list[block] != 0)
          blocks.push_back(static_cast<double>(block)), bitmasks.push_back(of_list[block]);
      const auto show = [&](std::size_t output, const std::vector<double>& values) {
        visit({.output = output,
               .place = {place},
               .index = place,
               .values = values,
               .bounds = {exact.data(), values.size()}});
      };
      show(1, blocks);
      show(2, bitmasks);
      place += static_cast<std::int64_t>(blocks.size());
    }
  }
}

}  // namespace

Oracle block_lists_oracle(const AttentionSpec& spec, const AttentionArgs& args,
                          const OracleOptions& options) {
  const Tensor& offsets = need(args.block_offsets, "block_offsets", 3);
  Lists lists{.masks = spec,
              .args = args,
              .options = options,
              .blocks = {},
              .sequences = sequences_of(spec, args),
              .heads = static_cast<int>(offsets.shape[1]),
              .row_blocks = offsets.shape[2] - 1,
              .key_blocks = 0};
  lists.options.max_rows = 0;  // where a list begins depends on all before it
  for (const Mask& mask : spec.mask)
    if (const auto* blocks = std::get_if<BlockSparseMask>(&mask)) lists.blocks = *blocks;
  std::erase_if(lists.masks.mask,
                [](const Mask& mask) { return std::holds_alternative<BlockSparseMask>(mask); });
  const KeyLayout layout = key_layout(spec);
  std::int64_t longest = layout == KeyLayout::packed ? args.k->shape[0] : args.k->shape[1];
  if (layout == KeyLayout::packed && args.max_seqlen_k)
    longest = std::min<std::int64_t>(longest, *args.max_seqlen_k);
  if (layout == KeyLayout::paged) longest *= need(args.page_table, "page_table", 2).shape[1];
  lists.key_blocks = (longest + lists.blocks.block_n - 1) / lists.blocks.block_n;
  lists.sequences.resize(static_cast<std::size_t>(offsets.shape[0]));
  const auto sizes = [](const Tensor& t) {
    return std::vector<std::int64_t>(t.shape.begin(), t.shape.begin() + t.rank);
  };
  const Tensor &indices = need(args.block_indices, "block_indices", 1),
               &bitmask_of = need(args.block_bitmask_of, "block_bitmask_of", 1);
  return {{{"block_offsets", sizes(offsets), offsets, {"batch", "head", "list"}},
           {"block_indices", sizes(indices), indices, {"entry"}},
           {"block_bitmask_of", sizes(bitmask_of), bitmask_of, {"entry"}}},
          [lists, offsets](const Visit& to) {
            std::vector<Kept> kept(lists.sequences.size() *
                                   static_cast<std::size_t>(lists.heads * lists.row_blocks));
            const std::vector<int> lists_of(lists.sequences.size(), static_cast<int>(lists.row_blocks));
            run_tasks(row_tasks(lists_of, lists.heads, 4, lists.options), lists.options,
                      [&] { return Worker{lists, kept}; });
            visit(lists, kept, offsets, to);
          }};
}

void fill_block_lists(const AttentionSpec& spec, const AttentionArgs& args) {
  const Oracle oracle = block_lists_oracle(spec, args, {});
  oracle.compute([&](const Expected& expected) {
    const Tensor& to = *oracle.outputs[expected.output].actual;
    for (std::size_t i = 0; i < expected.values.size(); ++i)
      store_element(to.data, to.dtype, expected.index + static_cast<std::int64_t>(i), expected.values[i]);
  });
}

}  // namespace flashjit::verify
