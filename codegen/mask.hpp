// The masks that a spec may name. What varies from launch to launch (sizes of windows, lengths, lists, trees)
// is not here: runtime/flashjit.hpp has the arguments.
#pragma once

#include <compare>
#include <variant>

#include "error.hpp"

namespace flashjit {

enum class CausalAlign { bottom_right, top_left };

// Every mask is plain data with a `kind` and visit(name, field) for each of its fields: JSON, canonical text,
// hash and order follow.

// Row i sees key j iff j <= i + seqlen_k - seqlen_q (bottom_right) or j <= i (top_left).
struct CausalMask {
  static constexpr char kind[] = "causal";
  CausalAlign align = CausalAlign::bottom_right;

  template <class Self, class Visit>
  static void for_each_field(Self& self, Visit&& visit) {
    visit("align", self.align);
  }
  auto operator<=>(const CausalMask&) const = default;
};

// Row i sees key j iff p - window_left <= j <= p + window_right, where p is i + seqlen_k - seqlen_q or i as
// above; with sinks also iff j < num_sinks.
struct SlidingWindowMask {
  static constexpr char kind[] = "sliding_window";
  CausalAlign align = CausalAlign::bottom_right;
  bool sinks = false;

  template <class Self, class Visit>
  static void for_each_field(Self& self, Visit&& visit) {
    visit("align", self.align);
    visit("sinks", self.sinks);
  }
  auto operator<=>(const SlidingWindowMask&) const = default;
};

// Batch entries have lengths of their own, which all other masks of the spec go by. Keys from seqlens_k on
// are not seen, whatever they hold; rows from seqlens_q on see nothing. Of packed sequences these are the
// rows and keys that are used, the first ones of each.
struct PaddingMask {
  static constexpr char kind[] = "padding";

  template <class Self, class Visit>
  static void for_each_field(Self&, Visit&&) {}
  auto operator<=>(const PaddingMask&) const = default;
};

// Lists say which blocks of block_m rows x block_n keys are seen, whole or by a bitmask. Block sizes are
// multiples of 16 up to 256, and need not be those of any tile.
struct BlockSparseMask {
  static constexpr char kind[] = "block_sparse";
  int block_m = 128, block_n = 128;
  bool per_head = false;  // query heads have lists of their own

  template <class Self, class Visit>
  static void for_each_field(Self& self, Visit&& visit) {
    visit("block_m", self.block_m);
    visit("block_n", self.block_n);
    visit("per_head", self.per_head);
  }
  auto operator<=>(const BlockSparseMask&) const = default;
};

// Draft tokens of speculative decoding: rows see every key of the prefix, and of the new keys those that
// their bitmask names.
struct TreeMask {
  static constexpr char kind[] = "tree";

  template <class Self, class Visit>
  static void for_each_field(Self&, Visit&&) {}
  auto operator<=>(const TreeMask&) const = default;
};

using Mask = std::variant<CausalMask, SlidingWindowMask, PaddingMask, BlockSparseMask, TreeMask>;

FLASHJIT_API const char* to_string(CausalAlign) noexcept;

}  // namespace flashjit
