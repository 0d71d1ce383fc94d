// The order in which blocks of a backward's grid take keys, and walk query rows.
#pragma once

#include "shared/mask.h"

namespace flashjit::device {

// The keys of a block of the grid: block `block` of the keys of `head`, counted over all batch entries. Where
// a mask makes work differ, `section` heads together begin with their first keys, which most rows see with a
// causal mask, so that the longest work never comes last. The rows of a section fit a second-level cache.
template <class Mask, bool together = makes_work_differ<Mask>>
struct KeyBlock {
  u32 block, head;

  // Heads that are taken together, of `section` that may be.
  FLASHJIT_FN static u32 heads_of(u32 section) { return together ? section : 1; }

  FLASHJIT_FN KeyBlock(u32 place, u32 blocks, u32 heads, u32 section) {
    section = heads_of(section);
    const u32 first = place / (section * blocks) * section, in_section = place - first * blocks;
    const u32 heads_here = min(section, heads - first);
    block = in_section / heads_here;
    head = first + in_section - block * heads_here;
  }
};

// The blocks of query rows that may see `keys`. Blocks of the grid that share a head run at the same time. If
// they walked the same way, they would add to the same rows of dQ at once. So for masks of intervals a walk
// goes upwards from the first row that sees the keys, and if that is row 0 from a row that goes by the keys.
// Where they add in a fixed order it goes down from the last row instead.
enum class RowOrder { apart, down };
template <class Mask, int block_m, RowOrder order = RowOrder::apart, bool intervals = key_intervals<Mask>>
class RowWalk {
 public:
  // Rows outside `within`, which begins and ends with a block, are left out.
  FLASHJIT_FN RowWalk(const Mask& mask, Span keys, Span within = {0, 0x7fffffff}) : mask_(mask), keys_(keys) {
    const Span rows = keys.empty() ? Span{0, 0} : intersect(mask.hull(Queries{}, keys), within);
    first_ = max(rows.begin, 0) / block_m;
    end_ = rows.empty() ? first_ : (rows.end - 1) / block_m + 1;
    left_ = end_ - first_;
    next_ = first_ == 0 && left_ > 0 ? keys.begin / block_m % left_ : first_;
  }
  FLASHJIT_FN int first() const { return first_; }
  FLASHJIT_FN int count() const { return left_; }  // of the blocks that are left
  FLASHJIT_FN bool next(Block& block) {
    if (left_ == 0) return false;
    --left_;
    block.index = order == RowOrder::down ? first_ + left_ : next_;
    // Else what is computed from it has registers of its own from block to block.
    if constexpr (order == RowOrder::down) asm volatile("" : "+r"(block.index));
    block.whole = mask_.whole(block_span(block.index, block_m), keys_);
    if (++next_ == end_) next_ = first_;
    return true;
  }

 private:
  const Mask& mask_;
  Span keys_;
  int first_, end_, next_, left_;
};
template <class Mask, int block_m>
class RowWalk<Mask, block_m, RowOrder::apart, false> : public BlockWalk<Queries, Mask> {
 public:
  FLASHJIT_FN RowWalk(const Mask& mask, Span keys, Span within = {0, 0x7fffffff})
      : BlockWalk<Queries, Mask>(mask, keys, block_m, within) {}
};

}  // namespace flashjit::device
