// Formulas of masks and scores, computed from their trees: the second of two evaluations, which shares
// nothing with templates/. Masks are computed in the language's own int32 and float32. Scores are computed in
// float64, each with a bound on the error of a kernel that computes it in float32:
//
// - A raw score, scale * q.k, has the error that the caller gives: forward_bound.hpp, 2.
// - An operation's result has the largest change that the operands' errors allow, plus a rounding:
//     + - *                 2^-23 |result|, twice float32's, since kernels may fuse a multiplication and an
//                           addition; at least 2^-126, below which numbers count as zeros
//     /                     2^-21 |result|: a quotient by a reciprocal
//     conversion            2^-24 |result| beyond 2^24
//     functions             the table of FunctionErrors
// - A condition whose operands differ by less than their errors may go either way: ?: then covers both
//   values. floor() of a number that is so near to an integer, and an index that depends on such a condition,
//   make the error infinite: nobody can tell the result.
// - So does a result beyond float32 that is not infinite in float64, and a result that may be NaN.
//
// Derivatives are computed by dual numbers: each operation carries the derivative of its result, with a bound
// of its own by the same rules. Kernels compute another formula for the same derivative, in another order:
// they get twice the bound and 2^-20 of the derivative. A choice that is not sure covers the derivatives of
// both values. Where there is none, the derivative is the one that codegen/formulas/derivatives.hpp chooses.
#pragma once

#include <span>
#include <vector>

#include "codegen/formulas/formula.hpp"
#include "runtime/flashjit.hpp"
#include "tools/verify/mask.hpp"

namespace flashjit::verify {

// A kernel's functions. `relative` counts the result, `operand` the operand's magnitude.
struct FunctionErrors {
  double exp_relative, exp_operand;     // the exponent is a rounded product
  double log_relative, log_absolute;    // a result near 0
  double tanh_relative, tanh_absolute;  // on GPUs a polynomial (templates/cuda/formula.cuh)
  double sqrt_relative;
};
inline constexpr FunctionErrors fast_functions = {0x1p-20, 0x1p-22, 0x1p-20, 0x1p-20,
                                                  0x1p-20, 0x1p-16, 0x1p-20};
inline constexpr FunctionErrors precise_functions = {0x1p-21, 0, 0x1p-21, 0, 0x1p-21, 0, 0x1p-22};

// The formulas of a spec on the data of a launch.
class Formulas {
 public:
  // Both must outlive the object. Tables are in host memory. Throws invalid_argument if one is missing.
  Formulas(const AttentionSpec& spec, const AttentionArgs& args);

  bool has_masks() const { return !masks_.empty(); }
  bool has_scores() const { return !scores_.empty(); }
  bool masks_differ_by_head() const;

  // Clears seen[j] if a formula says that the row does not see key first_key + j.
  void mask(const Sequence& sequence, int head, int row, int first_key, std::span<char> seen) const;
  // Replaces raw scores of the keys from first_key on, and bounds on their errors, by the final ones.
  void score(const Sequence& sequence, int head, int row, int first_key, std::span<double> scores,
             std::span<double> errors) const;

  // Derivatives of the final scores, for each key.
  struct ByElement {
    std::size_t table;
    std::vector<std::int64_t> places;  // row-major; -1: nobody can tell
    std::vector<double> values, errors;
  };
  struct Derivatives {
    std::vector<double> by_score, errors;  // by the raw score
    std::vector<ByElement> by_elements;    // of tables that have gradients; one for each read of a formula
  };
  Derivatives derivatives(const Sequence& sequence, int head, int row, int first_key,
                          std::span<const double> raw_scores, std::span<const double> raw_errors) const;

 private:
  const AttentionSpec& spec_;
  const AttentionArgs& args_;
  std::vector<FormulaNode> masks_, scores_;
  std::vector<Tensor> tables_;
  std::vector<double> scalars_;
};

}  // namespace flashjit::verify
