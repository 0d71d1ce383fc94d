// The masks that a spec may name. Values that change from launch to launch (window sizes,
// lengths, lists, trees) are not here but among the arguments (attention_args.hpp).
#pragma once

#include <array>
#include <compare>
#include <string>
#include <variant>
#include <vector>

#include "../base/error.hpp"
#include "field_values.hpp"

namespace flashjit {

enum class CausalAlign { bottom_right, top_left };
inline constexpr std::array causal_aligns = {CausalAlign::bottom_right, CausalAlign::top_left};
FLASHJIT_API const char* to_string(CausalAlign) noexcept;

// Every mask is plain data with a `kind`, whether its test reads tables of the launch, and visit(name, field,
// values) for each of its fields. Of an integer
// the values are a Range, of an enumeration a list; a bool has none. JSON, refusals, canonical text, hash and
// order follow from these.

// Row i sees key j iff j <= i + seqlen_k - seqlen_q (bottom_right) or j <= i (top_left).
struct CausalMask {
  static constexpr char kind[] = "causal";
  static constexpr bool reads_tables = false;
  CausalAlign align = CausalAlign::bottom_right;

  template <class Self, class Visit>
  static void for_each_field(Self& self, Visit&& visit) {
    visit("align", self.align, causal_aligns);
  }
  auto operator<=>(const CausalMask&) const = default;
};

// Row i sees key j iff p - window_left <= j <= p + window_right, where p is i + seqlen_k - seqlen_q or i as
// above; with sinks also iff j < num_sinks.
struct SlidingWindowMask {
  static constexpr char kind[] = "sliding_window";
  static constexpr bool reads_tables = false;
  CausalAlign align = CausalAlign::bottom_right;
  bool sinks = false;

  template <class Self, class Visit>
  static void for_each_field(Self& self, Visit&& visit) {
    visit("align", self.align, causal_aligns);
    visit("sinks", self.sinks);
  }
  auto operator<=>(const SlidingWindowMask&) const = default;
};

// Each batch entry has its own lengths, seqlens_q and seqlens_k, and all other masks of the spec use
// them. Keys beyond seqlens_k are not seen, whatever they hold; rows beyond seqlens_q see nothing. With
// packed sequences, the lengths count the used rows and keys, which are the first ones of each sequence.
struct PaddingMask {
  static constexpr char kind[] = "padding";
  static constexpr bool reads_tables = false;

  template <class Self, class Visit>
  static void for_each_field(Self&, Visit&&) {}
  auto operator<=>(const PaddingMask&) const = default;
};

// Lists say which blocks of block_m rows x block_n keys are seen, whole or by a bitmask.
// Block sizes need not be the sizes of a kernel's tiles.
struct BlockSparseMask {
  static constexpr char kind[] = "block_sparse";
  static constexpr bool reads_tables = true;
  static constexpr Range block_sizes = {.first = 16, .last = 256, .step = 16};
  int block_m = 128, block_n = 128;
  bool per_head = false;  // each query head has its own lists
  // The lists were made of the spec's other masks, as op make_block_lists makes them: those test no block
  // that is listed whole.
  bool of_masks = false;

  template <class Self, class Visit>
  static void for_each_field(Self& self, Visit&& visit) {
    visit("block_m", self.block_m, block_sizes);
    visit("block_n", self.block_n, block_sizes);
    visit("per_head", self.per_head);
    visit("of_masks", self.of_masks);
  }
  auto operator<=>(const BlockSparseMask&) const = default;
};

// Draft tokens of speculative decoding: a row sees every key
// of the prefix, and the new keys that its bitmask names.
struct TreeMask {
  static constexpr char kind[] = "tree";
  static constexpr bool reads_tables = true;

  template <class Self, class Visit>
  static void for_each_field(Self&, Visit&&) {}
  auto operator<=>(const TreeMask&) const = default;
};

// Row i sees key j iff the formula is true of them (formulas.md), or a built-in name: "prefix_lm". A spec may
// have several.
struct FormulaMask {
  static constexpr char kind[] = "formula";
  static constexpr bool reads_tables = false;  // those that the spec declares are read by its formulas
  std::string formula = {};
  // How many rows and keys a sequence of a neighbourhood may have, since its formula says nothing of others.
  // 0: any. Specs that differ in it have the same kernels, so it is in no text and no comparison.
  std::int64_t places = 0;

  // Rows and keys are the places of an array of this shape, of 1 to 3 dimensions, the last one fastest. A row
  // sees the window of so many keys along each dimension that is nearest around its own place and within the
  // array; with a dilation d, the nearest among keys that lie a multiple of d away (NATTEN, Hassani et al.
  // 2023). Throws invalid_spec. A kernel for longer sequences than the array has places is refused.
  static FLASHJIT_API FormulaMask neighbourhood(const std::vector<int>& shape, const std::vector<int>& window,
                                                const std::vector<int>& dilation = {});

  template <class Self, class Visit>
  static void for_each_field(Self& self, Visit&& visit) {
    visit("formula", self.formula);
  }
  auto operator<=>(const FormulaMask& other) const { return formula <=> other.formula; }
  bool operator==(const FormulaMask& other) const { return formula == other.formula; }
};

using Mask = std::variant<CausalMask, SlidingWindowMask, PaddingMask, BlockSparseMask, TreeMask, FormulaMask>;

}  // namespace flashjit
