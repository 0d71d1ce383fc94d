// The hooks for formulas on scores and for sink logits. A kernel calls Spec::Score for each block of scores,
// before its masks, and Spec::Sinks at the end of its rows. Each target passes scores in its own form, with
// their rows and keys.
#pragma once

#include "shared/problem.h"

namespace flashjit::device {

// Leaves scores as they are: products of q and k, without the scale.
struct PlainScore {
  static constexpr bool changes = false;
  static constexpr bool tilts = false, bounds = false;
  // The factor of scores in the exponents of their weights.
  template <class Params>
  FLASHJIT_FN static float scale_log2(const Params& params) {
    return params.scale_log2;
  }

  // GPUs' kernels.
  struct OfRows {};
  template <class Params>
  FLASHJIT_FN PlainScore(const Params&, const Problem&) {}
  template <class Rows, class Heads>
  FLASHJIT_FN static OfRows of_rows(const Rows&, const Heads&) {
    return {};
  }
  template <int columns, class... Block>
  FLASHJIT_FN static void modify(const Block&...) {}
};

struct NoSinks {
  static constexpr bool exist = false;
};

// Where the launch's rows and keys begin in their sequences: at 0. shared/offsets.h has the offsets of a
// shard.
struct NoOffsets {
  static constexpr bool exist = false;
  template <class Params>
  FLASHJIT_FN static int of_rows(const Params&, int) {
    return 0;
  }
  template <class Params>
  FLASHJIT_FN static int of_keys(const Params&, int) {
    return 0;
  }
};

// Turns gradients by final scores into those by products of q and k. formula_gradient.h of each target has
// the version for formulas. changes: the two differ, or elements of tables have gradients.
template <class Score>
struct ScoreGradient {
  static constexpr bool changes = false;
};

// The state that a kernel's thread keeps for it.
struct NoTerms {};
template <class Gradient, bool exact, bool exist = Gradient::changes>
struct TermsOf {
  using type = NoTerms;
};
template <class Gradient, bool exact>
struct TermsOf<Gradient, exact, true> {
  using type = typename Gradient::template Terms<exact>;
};

template <class Params>
struct WithGradients;  // shared/formula_params.h
// Whether params have gradients of what formulas read.
template <class Params>
inline constexpr bool has_gradients = false;
template <class Params>
inline constexpr bool has_gradients<WithGradients<Params>> = true;

}  // namespace flashjit::device
