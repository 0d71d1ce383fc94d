// The device text of a formula's value.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "codegen/formulas/formula.hpp"

namespace flashjit {

class FormulaWriter {
 public:
  // A functor computes parts of its formula ahead: for each row those that no key changes, for each key those
  // that no row changes, or for each tile those that neither changes.
  enum class Ahead { row, key, tile };

  FormulaWriter(const AttentionSpec& spec, FormulaUse use, Ahead ahead = Ahead::row)
      : spec_(spec), use_(use), ahead_(ahead) {}

  std::string value(const FormulaNode& node) { return write(node).text; }
  // The values computed ahead, for RowValues.
  const std::vector<std::string>& ahead() const { return values_; }

 private:
  static constexpr std::size_t most_values = 8;

  struct Text {
    std::string text;
    int precedence;
  };
  static std::string bracketed(const Text& text, int precedence) {
    return text.precedence < precedence ? "(" + text.text + ")" : text.text;
  }
  std::string call(const std::string& function, const FormulaNode& node);
  bool changes(const FormulaNode& node) const;
  // Whether a kernel may hold it as a value and distances from it.
  bool stands_for_many(const FormulaNode& node) const;
  // "row.a", if there is room and if this is not computed ahead itself.
  bool kept(const std::string& text, Text& place);
  Text write(const FormulaNode& node);
  Text write_bare(const FormulaNode& node);
  Text write_operation(const FormulaNode& node);
  // Distances from a key are converted once for many keys: their magnitude is then that of the real.
  std::string real_of(const FormulaNode& node);
  Text fma(const FormulaNode& product, const char* sign, const FormulaNode& other, const char* other_sign);
  // A divisor that no key changes is inverted once.
  Text write_quotient(const FormulaNode& dividend, const FormulaNode& divisor);
  bool is_score() const { return use_ == FormulaUse::score; }

  const AttentionSpec& spec_;
  FormulaUse use_;
  Ahead ahead_;
  bool in_ahead_ = false;  // writing what is computed ahead
  std::vector<std::string> values_;
};

}  // namespace flashjit
