#include "tools/verify/block_lists_oracle.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>

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
  std::size_t words;                // of a bitmask's row
  std::int64_t group_bitmasks = 0;  // of the first blocks of a group that are kept in part
};

// A block of a list keeps nothing (0), some pairs (-2) or all (-1). Blocks that keep some have bitmasks, if
// there are any.
struct Kept {
  std::vector<double> blocks;
  std::vector<std::vector<std::uint32_t>> bitmasks;
};

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
      const auto block_m = static_cast<std::size_t>(lists.blocks.block_m),
                 block_n = static_cast<std::size_t>(lists.blocks.block_n);
      of_list.blocks.assign(static_cast<std::size_t>(lists.key_blocks), 0);
      std::vector<int> pairs(of_list.blocks.size());
      std::vector<std::vector<std::uint32_t>> bitmasks(pairs.size(),
                                                       std::vector<std::uint32_t>(block_m * lists.words));
      const int first = list * lists.blocks.block_m,
                end = std::min(first + lists.blocks.block_m, sequence.seqlen_q);
      for (int row = first; row < end; ++row) {
        sees.row(sequence, task.head, row, 0, seen);
        for (std::size_t key = 0; key < seen.size(); ++key) {
          if (!seen[key]) continue;
          ++pairs[key / block_n];
          bitmasks[key / block_n][static_cast<std::size_t>(row - first) * lists.words + key % block_n / 32] |=
              std::uint32_t{1} << key % block_n % 32;
        }
      }
      for (std::size_t block = 0; block < pairs.size(); ++block) {
        const int keys = std::min(lists.blocks.block_n,
                                  sequence.seqlen_k - static_cast<int>(block) * lists.blocks.block_n);
        if (pairs[block] == 0) continue;
        of_list.blocks[block] = pairs[block] == (end - first) * keys ? -1 : -2;
        if (of_list.blocks[block] == -2 && lists.group_bitmasks > 0)
          of_list.bitmasks.push_back(std::move(bitmasks[block]));
      }
    }
  }
};

void visit(const Lists& lists, const std::vector<Kept>& kept, const Tensor& offsets, const Visit& visit) {
  const std::vector<double> exact(std::max(static_cast<std::size_t>(lists.key_blocks), lists.words));
  for (std::size_t group = 0; group < lists.sequences.size() * static_cast<std::size_t>(lists.heads);
       ++group) {
    const auto batch = static_cast<std::int64_t>(group) / lists.heads,
               head = static_cast<std::int64_t>(group) % lists.heads;
    std::int64_t place = static_cast<std::int64_t>(group) * lists.row_blocks * lists.key_blocks;
    std::int64_t bitmask = static_cast<std::int64_t>(group) * lists.group_bitmasks;
    const std::int64_t end_of_bitmasks = bitmask + lists.group_bitmasks;
    for (std::int64_t list = 0; list <= lists.row_blocks; ++list) {
      const auto begin = static_cast<double>(place);
      visit({.place = {batch, head, list},
             .index = batch * offsets.strides[0] + head * offsets.strides[1] + list * offsets.strides[2],
             .values = {&begin, 1},
             .bounds = {exact.data(), 1}});
      if (list == lists.row_blocks) break;
      const Kept& of_list =
          kept[group * static_cast<std::size_t>(lists.row_blocks) + static_cast<std::size_t>(list)];
      std::vector<double> blocks, bitmask_of;
      std::size_t in_part = 0;
      for (std::size_t block = 0; block < of_list.blocks.size(); ++block) {
        if (of_list.blocks[block] == 0) continue;
        blocks.push_back(static_cast<double>(block)), bitmask_of.push_back(of_list.blocks[block]);
        if (of_list.blocks[block] == -1) continue;
        if (bitmask == end_of_bitmasks) continue;
        const std::vector<std::uint32_t>& bits = of_list.bitmasks[in_part++];
        bitmask_of.back() = static_cast<double>(bitmask);
        for (std::size_t row = 0; row < bits.size() / lists.words; ++row) {
          std::vector<double> words;
          for (std::size_t i = 0; i < lists.words; ++i)
            words.push_back(static_cast<std::int32_t>(bits[row * lists.words + i]));
          visit({.output = 3,
                 .place = {bitmask, static_cast<std::int64_t>(row)},
                 .index = (bitmask * lists.blocks.block_m + static_cast<std::int64_t>(row)) *
                          static_cast<std::int64_t>(lists.words),
                 .values = words,
                 .bounds = {exact.data(), words.size()}});
        }
        ++bitmask;
      }
      const auto show = [&](std::size_t output, const std::vector<double>& values) {
        visit({.output = output,
               .place = {place},
               .index = place,
               .values = values,
               .bounds = {exact.data(), values.size()}});
      };
      show(1, blocks);
      show(2, bitmask_of);
      place += static_cast<std::int64_t>(blocks.size());
    }
  }
}

}  // namespace

Oracle make_block_lists_oracle(const AttentionSpec& spec, const AttentionArgs& args,
                               const OracleOptions& options) {
  const Tensor& offsets = need(args.block_offsets, "block_offsets", 3);
  Lists lists{.masks = spec,
              .args = args,
              .options = options,
              .blocks = {},
              .sequences = sequences_of(spec, args),
              .heads = static_cast<int>(offsets.shape[1]),
              .row_blocks = offsets.shape[2] - 1,
              .key_blocks = 0,
              .words = 0};
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
  lists.words = static_cast<std::size_t>((lists.blocks.block_n + 31) / 32);
  lists.key_blocks = (longest + lists.blocks.block_n - 1) / lists.blocks.block_n;
  lists.sequences.resize(static_cast<std::size_t>(offsets.shape[0]));
  const auto sizes = [](const Tensor& t) {
    return std::vector<std::int64_t>(t.shape.begin(), t.shape.begin() + t.rank);
  };
  const Tensor &indices = need(args.block_indices, "block_indices", 1),
               &bitmask_of = need(args.block_bitmask_of, "block_bitmask_of", 1);
  std::vector<Output> outputs = {{"block_offsets", sizes(offsets), offsets, {"batch", "head", "list"}},
                                 {"block_indices", sizes(indices), indices, {"entry"}},
                                 {"block_bitmask_of", sizes(bitmask_of), bitmask_of, {"entry"}}};
  const std::int64_t groups = offsets.shape[0] * lists.heads;
  if (args.block_bitmasks && groups > 0) {
    const Tensor& bitmasks = *args.block_bitmasks;
    lists.group_bitmasks = bitmasks.shape[0] / groups;
    outputs.push_back({"block_bitmasks", sizes(bitmasks), bitmasks, {"bitmask", "row", "word"}});
  }
  return {std::move(outputs), [lists, offsets](const Visit& to) {
            std::vector<Kept> kept(lists.sequences.size() *
                                   static_cast<std::size_t>(lists.heads * lists.row_blocks));
            const std::vector<int> lists_of(lists.sequences.size(), static_cast<int>(lists.row_blocks));
            run_tasks(row_tasks(lists_of, lists.heads, 4, lists.options), lists.options,
                      [&] { return Worker{lists, kept}; });
            visit(lists, kept, offsets, to);
          }};
}

void fill_block_lists(const AttentionSpec& spec, const AttentionArgs& args) {
  const Oracle oracle = make_block_lists_oracle(spec, args, {});
  oracle.compute([&](const Expected& expected) {
    auto* const to = static_cast<std::int32_t*>(oracle.outputs[expected.output].actual->data);
    for (std::size_t i = 0; i < expected.values.size(); ++i)
      to[expected.index + static_cast<std::int64_t>(i)] = static_cast<std::int32_t>(expected.values[i]);
  });
}

}  // namespace flashjit::verify
