// The masks that a spec may name. Values that change from launch to launch (window sizes,
// lengths, lists, trees) are not here but among the arguments (attention_args.hpp).
#pragma once

#include <compare>
#include <string>
#include <variant>

#include "error.hpp"

namespace flashjit {

enum class CausalAlign { bottom_right, top_left };

// Every mask is plain data with a `kind` and visit(name, field) for each
// of its fields. JSON, canonical text, hash and order follow from these.

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

// Each batch entry has its own lengths, seqlens_q and seqlens_k, and all other masks of the spec use
// them. Keys beyond seqlens_k are not seen, whatever they hold; rows beyond seqlens_q see nothing. With
// packed sequences, the lengths count the used rows and keys, which are the first ones of each sequence.
struct PaddingMask {
  static constexpr char kind[] = "padding";

  template <class Self, class Visit>
  static void for_each_field(Self&, Visit&&) {}
  auto operator<=>(const PaddingMask&) const = default;
};

// Lists say which blocks of block_m rows x block_n keys are seen, whole or by a bitmask.
// Block sizes are multiples of 16 up to 256; they need not be the sizes of a kernel's tiles.
struct BlockSparseMask {
  static constexpr char kind[] = "block_sparse";
  int block_m = 128, block_n = 128;
  bool per_head = false;  // each query head has its own lists

  template <class Self, class Visit>
  static void for_each_field(Self& self, Visit&& visit) {
    visit("block_m", self.block_m);
    visit("block_n", self.block_n);
    visit("per_head", self.per_head);
  }
  auto operator<=>(const BlockSparseMask&) const = default;
};

// Draft tokens of speculative decoding: a row sees every key
// of the prefix, and the new keys that its bitmask names.
struct TreeMask {
  static constexpr char kind[] = "tree";

  template <class Self, class Visit>
  static void for_each_field(Self&, Visit&&) {}
  auto operator<=>(const TreeMask&) const = default;
};

// Row i sees key j iff the formula is true of them (formulas.md), or a built-in name: "prefix_lm". A spec may
// have several.
struct FormulaMask {
  static constexpr char kind[] = "formula";
  std::string formula = {};

  template <class Self, class Visit>
  static void for_each_field(Self& self, Visit&& visit) {
    visit("formula", self.formula);
  }
  auto operator<=>(const FormulaMask&) const = default;
};

using Mask = std::variant<CausalMask, SlidingWindowMask, PaddingMask, BlockSparseMask, TreeMask, FormulaMask>;

FLASHJIT_API const char* to_string(CausalAlign) noexcept;

}  // namespace flashjit
