#include "runtime/arguments/masks.hpp"

#include <algorithm>
#include <climits>
#include <string>
#include <vector>

#include "codegen/spec/mask_rules.hpp"
#include "runtime/arguments/checks.hpp"
#include "runtime/arguments/pages.hpp"
#include "runtime/cuda/memory.hpp"

namespace flashjit {
namespace {

using device::ProblemParams;

template <TensorMember member>
const int* lengths(const AttentionSpec& spec, Device device, const AttentionArgs& args,
                   const ProblemParams& p) {
  if (!(args.*member)) return nullptr;
  const Tensor& t = require<member>(spec, args, device);
  const char* const name = argument_of(member).name;
  require_shape(name, t, 0, p.batch, "the batch");
  require_table(name, t);
  return static_cast<const int*>(t.data);
}

int window_size(const char* name, const std::optional<int>& given) {
  if (given && *given < 0)
    refuse_argument(name, " is ", *given,
                    ", it must be at least 0; without the argument the window has no end on that side");
  return given.value_or(INT_MAX);
}

void check_window(const AttentionArgs& args, ProblemParams& p) {
  p.window_left = window_size("window_left", args.window_left);
  p.window_right = window_size("window_right", args.window_right);
  const int num_sinks = args.num_sinks.value_or(0);
  if (num_sinks < 0) refuse_argument("num_sinks is ", num_sinks, ", it must be at least 0");
  p.num_sinks = num_sinks;
}

// Requires so many rows of a table. Packed launches also take tables
// made for longer sequences, which stay fixed while a graph is replayed.
void require_rows(const char* name, const Tensor& t, int dim, std::int64_t needed, bool varlen,
                  const AttentionArgs& args, const char* what) {
  if (!varlen) return require_shape(name, t, dim, needed, what);
  if (t.shape[dim] < needed)
    refuse_argument(name, " has shape ", shape_text(t), ": dimension ", dim, " must be at least ", needed,
                    ", ", what,
                    args.max_seqlen_q ? ""
                                      : "; without max_seqlen_q the longest sequence may have all packed "
                                        "rows, and a smaller max_seqlen_q would work");
}

// The stride of a dimension of size `size`; 0 for a dimension of size 1, which all share.
std::int64_t shared_or_own(const char* name, const Tensor& t, int dim, int size, const char* what) {
  if (t.shape[dim] == 1) return 0;
  require_shape(name, t, dim, size, what);
  return t.strides[dim];
}

void check_blocks(const BlockSparseMask& mask, const AttentionSpec& spec, const AttentionArgs& args,
                  Device device, ProblemParams& p) {
  const Tensor& offsets = require<&AttentionArgs::block_offsets>(spec, args, device);
  require_table("block_offsets", offsets);
  // Lists of the whole may end before the rows of a shard, which then see nothing.
  const bool of_whole = spec.offsets;
  if (of_whole && offsets.shape[2] < 1)
    refuse_argument("block_offsets has shape ", shape_text(offsets),
                    ": dimension 2 must be at least 1, one more than the query blocks of the whole");
  const int row_blocks = of_whole ? size(offsets, 2) - 1 : device::ceil_div(p.seqlen_q, mask.block_m);
  if (!of_whole)
    require_rows("block_offsets", offsets, 2, row_blocks + 1, spec.varlen, args,
                 "one more than the query blocks of the mask's block_m rows");
  p.blocks.offsets = static_cast<const int*>(offsets.data);
  p.blocks.row_blocks = row_blocks;
  p.blocks.batch_stride = shared_or_own("block_offsets", offsets, 0, p.batch, "1 or the batch");
  if (!mask.per_head)
    require_shape("block_offsets", offsets, 1, 1, "since the spec's block_sparse has \"per_head\": false");
  p.blocks.head_stride = shared_or_own("block_offsets", offsets, 1, p.num_heads_q, "1 or num_heads_q");

  const Tensor& blocks = require<&AttentionArgs::block_indices>(spec, args, device);
  require_table("block_indices", blocks);
  p.blocks.blocks = static_cast<const int*>(blocks.data);
  p.blocks.num_blocks = size(blocks, 0);
  if (!mask.of_masks && args.block_bitmask_of.has_value() != args.block_bitmasks.has_value())
    refuse_argument(
        "block_bitmask_of and block_bitmasks belong together: "
        "give both, or neither if every listed block is seen whole");
  if (mask.of_masks && !args.block_bitmask_of)
    refuse_argument(
        "block_bitmask_of is missing: with \"of_masks\": true it says which blocks the other masks test; "
        "make_block_lists writes it");
  if (!args.block_bitmask_of) return;
  const Tensor& bitmask_of = require<&AttentionArgs::block_bitmask_of>(spec, args, device);
  require_shape("block_bitmask_of", bitmask_of, 0, p.blocks.num_blocks, "as block_indices");
  require_table("block_bitmask_of", bitmask_of);
  p.blocks.bitmask_of = static_cast<const int*>(bitmask_of.data);
  if (!args.block_bitmasks) return;
  const Tensor& bitmasks = require_bitmasks(spec, mask, args, device);
  p.blocks.bitmasks = static_cast<const device::u32*>(bitmasks.data);
  p.blocks.num_bitmasks = size(bitmasks, 0);
}

// Whether the launch is given the lists of its block_sparse mask, and does not make them.
bool reads_lists(const AttentionSpec& spec) {
  return argument_of(&AttentionArgs::block_offsets).role_in(spec) == Role::table;
}

void check_tree(const AttentionSpec& spec, const AttentionArgs& args, Device device, ProblemParams& p) {
  const Tensor& bits = require<&AttentionArgs::tree_bits>(spec, args, device);
  if (spec.offsets && !args.prefix_lengths)
    refuse_argument(
        "prefix_lengths is missing: with offsets a launch does not know the lengths of the whole; the keys "
        "of the whole before the tree, as int32 [batch], would work");
  if (!spec.offsets)
    require_rows("tree_bits", bits, 1, p.seqlen_q, spec.varlen, args, "the longest seqlen_q");
  require_table("tree_bits", bits);
  p.tree.words = static_cast<const device::u32*>(bits.data);
  p.tree.batch_stride = shared_or_own("tree_bits", bits, 0, p.batch, "1 or the batch");
  p.tree.row_stride = bits.shape[2];
  p.tree.rows = size(bits, 1);
  p.tree.words_per_row = size(bits, 2);
  p.tree.prefix_lengths = lengths<&AttentionArgs::prefix_lengths>(spec, device, args, p);
}

void check_packed_lengths(const char* name, const int* cu_seqlens, int batch, int total, int max_seqlen,
                          const char* max_name) {
  check_running_totals(name, cu_seqlens, batch, total);
  for (int b = 0; b < batch; ++b)
    if (const int length = cu_seqlens[b + 1] - cu_seqlens[b]; length > max_seqlen)
      refuse_argument(name, " gives sequence ", b, " a length of ", length, ", longer than ", max_name, " = ",
                      max_seqlen);
}

void check_lengths(const char* name, const int* given, int batch, int longest, const char* longest_name) {
  for (int b = 0; given && b < batch; ++b)
    if (given[b] < 0 || given[b] > longest)
      refuse_argument(name, "[", b, "] is ", given[b], ", it must be between 0 and ", longest_name, " = ",
                      longest);
}

// Checks the numbers of used rows of packed sequences.
void check_used_lengths(const char* name, const int* given, int batch, const int* cu_seqlens) {
  for (int b = 0; given && b < batch; ++b)
    if (const int all = cu_seqlens[b + 1] - cu_seqlens[b]; given[b] < 0 || given[b] > all)
      refuse_argument(name, "[", b, "] is ", given[b],
                      ", it must be between 0 and the packed sequence's length, ", all);
}

// Without prefix_lengths a tree's rows are the last keys.
void check_prefixes(const ProblemParams& p) {
  for (int b = 0; b < p.batch; ++b) {
    const int rows = p.seqlens_q      ? p.seqlens_q[b]
                     : p.cu_seqlens_q ? p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b]
                                      : p.seqlen_q;
    const int keys = p.seqlens_k      ? p.seqlens_k[b]
                     : p.cu_seqlens_k ? p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b]
                                      : p.seqlen_k;
    if (keys > 0 && keys < rows)
      refuse_argument(
          "prefix_lengths is missing: without it a tree's rows are the last keys of their batch "
          "entry, but entry ",
          b, " has ", rows, " rows and ", keys,
          " keys; prefix_lengths, or at least as many keys, would work");
  }
}

// Where a shard begins in the whole.
void check_position_offsets(const ProblemParams& p, const device::OffsetParams& offsets) {
  const auto check = [&](const char* name, const device::i64* at, device::i64 stride, int length,
                         const char* what) {
    const std::int64_t most = longest_sequence - length;
    for (int b = 0; b < p.batch; ++b)
      if (at[b * stride] < 0 || at[b * stride] > most)
        refuse_argument(name, "[", b, "] is ", at[b * stride], ", it must be between 0 and ", most, ": the ",
                        length, " ", what, " of the launch end before place ", longest_sequence,
                        " of the whole");
  };
  check("row_offset", offsets.row, offsets.row_stride, p.seqlen_q, "rows");
  check("key_offset", offsets.key, offsets.key_stride, p.seqlen_k, "keys");
}

// Checks the lists of one batch entry and head.
class ListCheck {
 public:
  ListCheck(const device::BlockLists& lists, bool of_masks, int key_blocks, int batch, int head)
      : lists_(lists),
        least_(of_masks ? -2 : -1),
        offsets_(lists.offsets + batch * lists.batch_stride + head * lists.head_stride),
        key_blocks_(key_blocks),
        batch_(batch),
        head_(head) {}

  void operator()() const {
    for (int i = 0; i < lists_.row_blocks; ++i) {
      const int begin = offsets_[i], end = offsets_[i + 1];
      if (begin < 0 || end < begin || end > lists_.num_blocks)
        refuse_argument("block_offsets: ", list(i), " goes from ", begin, " to ", end,
                        "; offsets ascend from 0 to the ", lists_.num_blocks, " of block_indices");
      int before = -1;
      for (int e = begin; e < end; ++e) {
        const int block = lists_.blocks[e];
        if (block <= before || block >= key_blocks_) refuse_block(i, e, block, before);
        before = block;
        const int bitmask = lists_.bitmask_of ? lists_.bitmask_of[e] : -1;
        if (bitmask < least_ || bitmask >= lists_.num_bitmasks) refuse_bitmask(e, bitmask);
      }
    }
  }

 private:
  std::string list(int i) const {
    return "the list of query block " + std::to_string(i) + " (batch " + std::to_string(batch_) + ", head " +
           std::to_string(head_) + ")";
  }
  [[noreturn]] void refuse_block(int i, int e, int block, int before) const {
    if (block < 0 || block >= key_blocks_)
      refuse_argument("block_indices[", e, "] in ", list(i), " is ", block, ", it must be between 0 and ",
                      key_blocks_ - 1, ", the last key block");
    refuse_argument("block_indices[", e, "] in ", list(i), " is ", block, " after ", before,
                    "; a list ascends and names no block twice");
  }

  [[noreturn]] void refuse_bitmask(int e, int bitmask) const {
    refuse_argument("block_bitmask_of[", e, "] is ", bitmask, ", it must be -1", least_ == -2 ? ", -2" : "",
                    " or the index of one of the ", lists_.num_bitmasks, " block_bitmasks");
  }

  const device::BlockLists& lists_;
  const int least_;  // number of a block without a bitmask
  const int* const offsets_;
  const int key_blocks_, batch_, head_;
};

// are_longer: the lists may be those of longer sequences.
void check_blocks_data(const BlockSparseMask& mask, const ProblemParams& p, bool are_longer) {
  const device::BlockLists& lists = p.blocks;
  if (p.batch == 0 || p.num_heads_q == 0) return;
  // They may name blocks beyond these sequences.
  const int key_blocks = are_longer ? INT_MAX : device::ceil_div(p.seqlen_k, mask.block_n);
  for (int b = 0; b < (lists.batch_stride ? p.batch : 1); ++b)
    for (int h = 0; h < (lists.head_stride ? p.num_heads_q : 1); ++h)
      ListCheck(lists, mask.of_masks, key_blocks, b, h)();
}

}  // namespace

const Tensor& require_bitmasks(const AttentionSpec& spec, const BlockSparseMask& mask,
                               const AttentionArgs& args, Device device) {
  const Tensor& bitmasks = require<&AttentionArgs::block_bitmasks>(spec, args, device);
  require_shape("block_bitmasks", bitmasks, 1, mask.block_m, "the mask's block_m");
  require_shape("block_bitmasks", bitmasks, 2, device::ceil_div(mask.block_n, 32),
                "ceil(block_n / 32) words of 32 keys");
  require_table("block_bitmasks", bitmasks);
  return bitmasks;
}

void check_mask_arguments(const AttentionSpec& spec, Device device, const AttentionArgs& args,
                          ProblemParams& p) {
  if (!args.seqlens_q && !args.seqlens_k && find_mask<PaddingMask>(spec.mask))
    refuse_argument(
        "seqlens_k and seqlens_q are missing: "
        "the spec's padding mask needs one or both, as int32 [batch]");
  p.seqlens_q = lengths<&AttentionArgs::seqlens_q>(spec, device, args, p);
  p.seqlens_k = lengths<&AttentionArgs::seqlens_k>(spec, device, args, p);
  if (find_mask<SlidingWindowMask>(spec.mask)) check_window(args, p);
  const auto* blocks = find_mask<BlockSparseMask>(spec.mask);
  if (blocks && reads_lists(spec)) check_blocks(*blocks, spec, args, device, p);
  if (find_mask<TreeMask>(spec.mask)) check_tree(spec, args, device, p);
}

void check_running_totals(const char* name, const int* cu_seqlens, int batch, int total) {
  if (cu_seqlens[0] != 0) refuse_argument(name, "[0] is ", cu_seqlens[0], ", it must be 0");
  for (int b = 0; b < batch; ++b)
    if (cu_seqlens[b + 1] < cu_seqlens[b])
      refuse_argument(name, " decreases at entry ", b + 1, " (", cu_seqlens[b], " to ", cu_seqlens[b + 1],
                      "): it holds running totals of the lengths");
  if (cu_seqlens[batch] > total)
    refuse_argument(name, " ends at ", cu_seqlens[batch], ", beyond the ", total,
                    " packed rows of the tensor");
}

void check_running_totals_on(Device device, const char* name, const int* cu_seqlens, int batch, int total) {
  const cuda::Context context(device.index);
  cuda::synchronize(context);
  std::vector<int> copy(static_cast<std::size_t>(batch) + 1);
  cuda::copy_to_host(context, copy.data(), cu_seqlens, copy.size() * sizeof(int));
  check_running_totals(name, copy.data(), batch, total);
}

void check_tables(const AttentionSpec& spec, const ProblemParams& p, const device::PageTable& pages,
                  const device::OffsetParams* offsets) {
  if (spec.varlen) {
    check_packed_lengths("cu_seqlens_q", p.cu_seqlens_q, p.batch, p.total_q, p.seqlen_q, "max_seqlen_q");
    check_used_lengths("seqlens_q", p.seqlens_q, p.batch, p.cu_seqlens_q);
  } else {
    check_lengths("seqlens_q", p.seqlens_q, p.batch, p.seqlen_q, "seqlen_q");
  }
  if (p.cu_seqlens_k) {
    check_packed_lengths("cu_seqlens_k", p.cu_seqlens_k, p.batch, p.total_k, p.seqlen_k, "max_seqlen_k");
    check_used_lengths("seqlens_k", p.seqlens_k, p.batch, p.cu_seqlens_k);
  } else {
    check_lengths("seqlens_k", p.seqlens_k, p.batch, p.seqlen_k,
                  spec.paged ? "page_table's max_pages x page_size" : "seqlen_k");
  }
  if (find_mask<TreeMask>(spec.mask) && !p.tree.prefix_lengths) check_prefixes(p);
  if (spec.offsets)
    check_lengths("prefix_lengths", p.tree.prefix_lengths, p.batch, longest_sequence, "the longest sequence");
  else
    check_lengths("prefix_lengths", p.tree.prefix_lengths, p.batch, p.seqlen_k, "seqlen_k");
  const auto* blocks = find_mask<BlockSparseMask>(spec.mask);
  if (blocks && reads_lists(spec)) check_blocks_data(*blocks, p, spec.varlen || spec.offsets);
  if (offsets) check_position_offsets(p, *offsets);
  if (spec.paged) check_page_ids(spec, p, pages, offsets);
}

void check_tables_on(Device device, const AttentionSpec& spec, const ProblemParams& params,
                     const device::PageTable& page_table, const device::OffsetParams* given) {
  const cuda::Context context(device.index);
  cuda::synchronize(context);
  ProblemParams p = params;
  device::PageTable pages = page_table;
  std::vector<std::vector<int>> copies;
  const auto fetch = [&](const int*& pointer, std::int64_t count) {
    if (!pointer) return;
    copies.emplace_back(static_cast<std::size_t>(count));
    cuda::copy_to_host(context, copies.back().data(), pointer, copies.back().size() * sizeof(int));
    pointer = copies.back().data();
  };
  fetch(p.cu_seqlens_q, p.batch + 1);
  fetch(p.cu_seqlens_k, p.batch + 1);
  fetch(p.seqlens_q, p.batch);
  fetch(p.seqlens_k, p.batch);
  fetch(p.tree.prefix_lengths, p.batch);
  const std::int64_t of_heads =
      p.blocks.row_blocks + std::int64_t{1} + (p.num_heads_q - 1) * p.blocks.head_stride;
  if (p.batch > 0 && p.num_heads_q > 0)
    fetch(p.blocks.offsets, of_heads + (p.batch - 1) * p.blocks.batch_stride);
  fetch(p.blocks.blocks, p.blocks.num_blocks);
  fetch(p.blocks.bitmask_of, p.blocks.num_blocks);
  const std::int64_t of_entry = spec.paged ? device::ceil_div(p.seqlen_k, pages.page_size) : 0;
  if (of_entry > 0 && p.batch > 0) fetch(pages.table, of_entry + (p.batch - 1) * pages.table_stride);
  std::vector<device::i64> of_entries[2];
  device::OffsetParams offsets{};
  const auto fetch_offsets = [&](const device::i64* at, device::i64 given_stride, const device::i64*& to,
                                 device::i64& stride, std::vector<device::i64>& copy) {
    copy.resize(static_cast<std::size_t>(p.batch));
    for (std::size_t b = 0; b < copy.size(); ++b)
      cuda::copy_to_host(context, &copy[b], at + static_cast<device::i64>(b) * given_stride, sizeof copy[b]);
    to = copy.data();
    stride = 1;
  };
  if (given) {
    fetch_offsets(given->row, given->row_stride, offsets.row, offsets.row_stride, of_entries[0]);
    fetch_offsets(given->key, given->key_stride, offsets.key, offsets.key_stride, of_entries[1]);
  }
  check_tables(spec, p, pages, given ? &offsets : nullptr);
}

}  // namespace flashjit
