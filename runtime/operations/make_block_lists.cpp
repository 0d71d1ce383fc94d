#include <algorithm>
#include <climits>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "codegen/spec/mask_rules.hpp"
#include "runtime/arguments/attention.hpp"
#include "runtime/arguments/checks.hpp"
#include "runtime/arguments/masks.hpp"
#include "runtime/operations/operations.hpp"
#include "runtime/step_params.hpp"
#include "templates/shared/block_lists_params.h"

namespace flashjit {
namespace {

// Whether a formula's canonical text, which names every index, has the word. A launch may not parse it, since
// that takes memory.
bool has_word(std::string_view formula, std::string_view word) {
  const auto is_part = [](char c) {
    return c == '_' || (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
  };
  for (std::size_t at = formula.find(word); at != std::string_view::npos; at = formula.find(word, at + 1)) {
    const std::size_t end = at + word.size();
    if ((at == 0 || !is_part(formula[at - 1])) && (end == formula.size() || !is_part(formula[end])))
      return true;
  }
  return false;
}

// Whether masks differ between batch entries, whatever their tables hold.
bool differs_by_batch(const AttentionSpec& spec) {
  return spec.varlen || std::any_of(spec.mask.begin(), spec.mask.end(), [](const Mask& mask) {
           const auto* formula = std::get_if<FormulaMask>(&mask);
           return std::holds_alternative<PaddingMask>(mask) || std::holds_alternative<TreeMask>(mask) ||
                  (formula && has_word(formula->formula, "batch"));
         });
}

struct MakeBlockLists {
  struct Params {
    device::BlockListsParams lists{};
    std::optional<device::FormulaParams> formulas{};
  };
  struct Checked {
    Params params{};
    Shape shape{};
    bool empty = false;
  };

  static Checked check(const AttentionSpec& spec, Device device, const AttentionArgs& args) {
    check_presence(spec, args);
    Checked checked;
    device::BlockListsParams& p = checked.params.lists;
    check_heads(require<&AttentionArgs::q>(spec, args, device),
                require<&AttentionArgs::k>(spec, args, device), p);
    check_sequences(spec, device, args, longest_sequence, p);
    if (!spec.varlen) require_shape("k", *args.k, 0, p.batch, "q's batch");
    check_mask_arguments(spec, device, args, p);
    checked.params.formulas = check_formula_arguments(spec, device, args, p, 1);
    check_data(spec, device, p, {}, {});
    check_lists(spec, device, args, p);
    checked.shape = {.batch = static_cast<int>(p.groups / std::max(p.list_heads, 1)),
                     .seqlen_q = p.row_blocks * find_mask<BlockSparseMask>(spec.mask)->block_m,
                     .seqlen_k = p.seqlen_k,
                     .num_heads_q = p.list_heads,
                     .num_heads_kv = p.num_heads_kv};
    checked.empty = p.groups == 0;
    return checked;
  }

  // The counts of each list, and what each of its key blocks keeps.
  static std::size_t workspace_bytes(const PlannedKernel& kernel, const Shape& shape) {
    const std::size_t lists = lists_of(kernel.spec, shape);
    constexpr std::size_t unit = 256;  // workspaces are aligned to it
    const std::size_t bytes =
        lists * (sizeof(device::ListCounts) + sizeof(device::Keeps) * key_blocks(kernel.spec, shape));
    return (bytes + unit - 1) / unit * unit;
  }

  static void plan_cuda(const PlannedKernel& kernel, const Params& params, void* workspace, Launch& launch) {
    const std::int64_t lists = params.lists.groups * params.lists.row_blocks;
    add(kernel, find, params, workspace, launch).grid = {
        .x = static_cast<unsigned>(std::max<std::int64_t>(lists, 1))};
    StepLaunch& write_step = add(kernel, write, params, workspace, launch);
    write_step.grid = {.x = static_cast<unsigned>(std::max<std::int64_t>(lists + params.lists.groups, 1)),
                       .y = params.lists.group_bitmasks > 0 ? device::block_lists_writers : 1u};
    write_step.dependent = true;
  }

  static void plan_cpu(const PlannedKernel& kernel, const Params& params, void* workspace, Launch& launch) {
    const auto add_items = [&](const char* function, std::int64_t items, std::int64_t worthwhile) {
      StepLaunch& step = add(kernel, function, params, workspace, launch);
      step.items.count = items;
      step.items.pieces =
          items == 0 ? 0
                     : std::clamp<std::int64_t>(items / worthwhile, 1, 4 * std::int64_t{kernel.parallelism});
    };
    const std::int64_t lists = params.lists.groups * params.lists.row_blocks;
    // Lists that take some 10 us: at least 100 ns for each block.
    add_items(find, lists, std::max(100 / std::max(params.lists.key_blocks, 1), 1));
    add_items(write, lists + params.lists.groups, params.lists.group_bitmasks > 0 ? 1 : 16);
  }

 private:
  static std::size_t key_blocks(const AttentionSpec& spec, const Shape& shape) {
    const auto block_n = static_cast<std::size_t>(find_mask<BlockSparseMask>(spec.mask)->block_n);
    return (static_cast<std::size_t>(shape.seqlen_k) + block_n - 1) / block_n;
  }
  static std::size_t lists_of(const AttentionSpec& spec, const Shape& shape) {
    const auto* blocks = find_mask<BlockSparseMask>(spec.mask);
    const auto block_m = static_cast<std::size_t>(blocks->block_m);
    return static_cast<std::size_t>(shape.batch) *
           static_cast<std::size_t>(blocks->per_head ? shape.num_heads_q : 1) *
           ((static_cast<std::size_t>(shape.seqlen_q) + block_m - 1) / block_m);
  }

  static constexpr char find[] = "flashjit_find_blocks", write[] = "flashjit_write_blocks";

  static StepLaunch& add(const PlannedKernel& kernel, const char* function, const Params& params,
                         void* workspace, Launch& launch) {
    StepLaunch& step = add_step(kernel, launch, function);
    auto& p =
        make_params<device::BlockListsParams>(step, params.lists, {.formulas = if_any(params.formulas)});
    p.counts = static_cast<device::ListCounts*>(workspace);
    p.found = reinterpret_cast<device::Keeps*>(p.counts + p.groups * p.row_blocks);
    return step;
  }

  static void check_lists(const AttentionSpec& spec, Device device, const AttentionArgs& args,
                          device::BlockListsParams& p) {
    const BlockSparseMask& mask = *find_mask<BlockSparseMask>(spec.mask);
    const Tensor& offsets = require<&AttentionArgs::block_offsets>(spec, args, device);
    require_table("block_offsets", offsets);
    if (offsets.shape[0] != p.batch && (offsets.shape[0] != 1 || differs_by_batch(spec)))
      refuse_argument("block_offsets has shape ", shape_text(offsets), ": dimension 0 must be ", p.batch,
                      differs_by_batch(spec) ? ", the batch, since the masks differ between batch entries"
                                             : " or 1, the batch or 1");
    p.list_heads = mask.per_head ? p.num_heads_q : 1;
    require_shape("block_offsets", offsets, 1, p.list_heads,
                  mask.per_head ? "num_heads_q" : "since the spec's block_sparse has \"per_head\": false");
    const int needed = device::ceil_div(p.seqlen_q, mask.block_m) + 1;
    constexpr char lists[] = "one more than the query blocks of the mask's block_m rows";
    if (!spec.varlen) require_shape("block_offsets", offsets, 2, needed, lists);
    if (offsets.shape[2] < needed)
      refuse_argument("block_offsets has shape ", shape_text(offsets), ": dimension 2 must be at least ",
                      needed, ", ", lists);
    p.offsets = static_cast<int*>(offsets.data);
    p.offsets_batch_stride = stride(offsets, 0);
    p.offsets_head_stride = stride(offsets, 1);
    p.groups = offsets.shape[0] * p.list_heads;
    p.row_blocks = size(offsets, 2) - 1;
    p.key_blocks = device::ceil_div(p.seqlen_k, mask.block_n);

    const auto most = product_of({p.groups, p.row_blocks, p.key_blocks});
    if (!most || *most > INT_MAX)
      refuse_argument("block_offsets has shape ", shape_text(offsets), ": ", p.groups, " x ", p.row_blocks,
                      " lists of ", p.key_blocks, " key blocks each are more than ", INT_MAX,
                      " blocks; larger blocks or a smaller batch would work");
    const Tensor& indices = require<&AttentionArgs::block_indices>(spec, args, device);
    if (!args.block_bitmask_of)
      refuse_argument("block_bitmask_of is missing: it says which of the blocks the masks keep whole");
    const Tensor& bitmask_of = require<&AttentionArgs::block_bitmask_of>(spec, args, device);
    for (const auto& [name, t] : {std::pair{"block_indices", &indices}, {"block_bitmask_of", &bitmask_of}}) {
      require_table(name, *t);
      if (t->shape[0] < *most)
        refuse_argument(name, " has ", t->shape[0], " elements, it must have at least ", *most,
                        ": every list may hold all ", p.key_blocks,
                        " key blocks; most_listed_blocks() says how many");
    }
    p.indices = static_cast<int*>(indices.data);
    p.bitmask_of = static_cast<int*>(bitmask_of.data);
    if (!args.block_bitmasks) return;
    const Tensor& bitmasks = require_bitmasks(spec, mask, args, device);
    p.bitmasks = static_cast<device::u32*>(bitmasks.data);
    p.group_bitmasks = p.groups == 0 ? 0 : static_cast<int>(size(bitmasks, 0) / p.groups);
  }
};

}  // namespace

const OperationRuntime make_block_lists_runtime = operation_runtime<MakeBlockLists>;

}  // namespace flashjit
