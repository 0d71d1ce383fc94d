#include "runtime/parallel/layout.hpp"

#include <algorithm>

#include "codegen/formulas/formula_traits.hpp"
#include "codegen/spec/mask_rules.hpp"
#include "runtime/arguments/checks.hpp"

namespace flashjit {
namespace {

int chunks_of_all(SequenceLayout layout, int size) {
  return layout == SequenceLayout::zigzag ? 2 * size : size;
}

void require_divisible(const char* name, int seqlen, SequenceLayout layout, int size) {
  const int chunks = chunks_of_all(layout, size);
  if (seqlen % chunks == 0) return;
  refuse_argument(name, " is ", seqlen, ", and layout ", to_string(layout), " divides it into ", chunks,
                  " equal chunks; a multiple of ", chunks, " would work");
}

[[noreturn]] void refuse(const std::string& what, const char* would_work) {
  throw Error(ErrorCode::unsupported,
              what + " is not supported by attention over several ranks; " + would_work + " would work");
}

void check_spec(const AttentionSpec& spec, const Shape& whole) {
  if (info_of(spec.op).few_rows || !info_of(spec.op).attends || info_of(spec.op).writes_gradients)
    refuse(std::string("op ") + to_string(spec.op), "op forward, whose backward follows from it,");
  if (!spec.lse) refuse("lse false", "leaving it out");
  if (spec.offsets) refuse("offsets", "leaving it out, since the object gives them,");
  if (spec.varlen) refuse("varlen", "a mask such as document[key] == document[position]");
  if (spec.paged) refuse("paged", "k and v in contiguous tensors");
  if (spec.v_in_k) refuse("v_in_k", "v as a tensor of its own");
  if (spec.sink_logits) refuse("sink_logits", "leaving it out");
  if (find_mask<PaddingMask>(spec.mask)) refuse("mask padding", "a mask such as key < used[batch]");
  for (const DeclaredTable& table : spec.tables)
    if (table.grad) refuse("table " + table.name + " with a gradient", "\"grad\": false");
  const bool plain = spec.mask.empty() && spec.score.empty() && !spec.dropout;
  if (whole.seqlen_q != whole.seqlen_k && !plain)
    refuse_argument("seqlen_q is ", whole.seqlen_q, " and seqlen_k ", whole.seqlen_k,
                    ": with masks, scores or dropout the ranks of a group take as many rows as keys; equal "
                    "lengths would work");
}

// Why the heads cannot be divided; empty if they can.
std::string why_no_heads(const AttentionSpec& spec, const Shape& whole, int size) {
  if (whole.num_heads_kv % size != 0)
    return std::to_string(whole.num_heads_kv) + " key/value heads are no multiple of " +
           std::to_string(size) + " ranks";
  return why_heads_differ(spec);
}

}  // namespace

const char* to_string(SequenceLayout layout) noexcept {
  switch (layout) {
    case SequenceLayout::contiguous:
      return "contiguous";
    case SequenceLayout::zigzag:
      return "zigzag";
    case SequenceLayout::heads:
      return "heads";
    case SequenceLayout::best:
      break;
  }
  return "best";
}

std::vector<SequenceChunk> sequence_chunks(SequenceLayout layout, int seqlen, int rank, int size) {
  if (size < 1 || rank < 0 || rank >= size)
    refuse_argument("rank ", rank, " of ", size, ": ranks count from 0 to the size of the group");
  if (layout == SequenceLayout::best)
    refuse_argument("layout best has no chunks of its own; that of ParallelAttention::layout() would work");
  if (seqlen < 0) refuse_argument("seqlen is ", seqlen, ", it must be at least 0");
  require_divisible("seqlen", seqlen, layout, size);
  const int length = seqlen / chunks_of_all(layout, size);
  std::vector<SequenceChunk> chunks = {{rank * length, length}};
  if (layout == SequenceLayout::zigzag) chunks.push_back({(2 * size - 1 - rank) * length, length});
  return chunks;
}

ChosenLayout choose_layout(const AttentionSpec& spec, const Shape& whole, SequenceLayout asked, int size) {
  check_spec(spec, whole);
  ChosenLayout chosen{asked, "it was asked for"};
  if (asked == SequenceLayout::best) {
    const bool balances = find_mask<CausalMask>(spec.mask) || masks_have_diagonal(spec);
    if (!balances) {
      chosen = {SequenceLayout::contiguous, "no mask makes later rows see more keys"};
    } else if (whole.seqlen_q % (2 * size) == 0) {
      chosen = {SequenceLayout::zigzag, "later rows see more keys, and each rank has early and late ones"};
    } else {
      chosen = {SequenceLayout::contiguous, std::to_string(whole.seqlen_q) + " rows have no " +
                                                std::to_string(2 * size) + " equal chunks for zigzag"};
    }
  }
  if (chosen.layout == SequenceLayout::heads)
    if (const std::string why = why_no_heads(spec, whole, size); !why.empty())
      throw Error(ErrorCode::unsupported, "layout heads is not supported here, since " + why +
                                              "; layout contiguous or zigzag would work");
  require_divisible("seqlen_q", whole.seqlen_q, chosen.layout, size);
  require_divisible("seqlen_k", whole.seqlen_k, chosen.layout, size);
  return chosen;
}

std::string why_heads_differ(const AttentionSpec& spec) {
  if (spec.dropout) return "dropout goes by the number of a head in the whole";
  if (formulas_read(spec, FormulaName::head) || formulas_read(spec, FormulaName::head_kv))
    return "a formula reads head or head_kv";
  const auto* blocks = find_mask<BlockSparseMask>(spec.mask);
  if (blocks && blocks->per_head) return "each head has block lists of its own";
  return {};
}

bool may_see(const AttentionSpec& spec, const AttentionArgs& args, const SequenceChunk& rows,
             const SequenceChunk& keys) {
  if (rows.length == 0 || keys.length == 0) return false;
  const std::int64_t last_row = std::int64_t{rows.begin} + rows.length - 1,
                     last_key = std::int64_t{keys.begin} + keys.length - 1;
  if (find_mask<CausalMask>(spec.mask) && keys.begin > last_row) return false;
  const auto* window = find_mask<SlidingWindowMask>(spec.mask);
  if (!window || (window->sinks && keys.begin < args.num_sinks.value_or(0))) return true;
  return !(args.window_left && last_key < rows.begin - std::int64_t{*args.window_left}) &&
         !(args.window_right && keys.begin > last_row + *args.window_right);
}

}  // namespace flashjit
