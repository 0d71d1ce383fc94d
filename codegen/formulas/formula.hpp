// Formulas: masks and scores that a user writes as C expressions, parsed and typed. formulas.md has the
// language.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "codegen/spec/dtype.hpp"

namespace flashjit {

struct AttentionSpec;

inline constexpr std::size_t most_characters = 4096;  // of a formula's text, and of its canonical text
inline constexpr int most_levels = 64;                // of its tree; also of brackets inside each other

enum class FormulaType { boolean, integer, real };
// fp32, fp16 and bf16 are reals, the others integers.
FormulaType type_of(DType dtype);

// Names that every formula knows; score: in formulas of scores only.
enum class FormulaName { score, row, key, position, head, head_kv, batch, seqlen_q, seqlen_k };

enum class FormulaOperation {
  // one operand
  negate,
  invert,   // of a boolean
  to_real,  // of an integer; the parser adds it where C would convert
  absolute,
  exp,
  log,
  tanh,
  sqrt,
  floor,  // an integer
  // two
  add,
  subtract,
  multiply,
  divide,
  remainder,
  less,
  less_equal,
  greater,
  greater_equal,
  equal,
  not_equal,
  both,    // &&
  either,  // ||
  minimum,
  maximum,
  // three: condition, value if true, value if false
  select,
};

struct FormulaNode {
  enum class Kind { integer, real, name, scalar, table, operation };
  Kind kind;
  FormulaType type;
  std::int32_t integer = 0;
  double real = 0;  // rounded to float32; may be infinite
  FormulaName name = {};
  int declared = 0;  // index of the scalar or table among those of the spec
  FormulaOperation operation = {};
  // An operation's operands; a table's indices, one for each dimension, left-out `batch` and heads filled in.
  std::vector<FormulaNode> operands = {};
};

enum class FormulaUse { mask, score };

// The formula of a mask is a boolean, of a score a real. Throws invalid_spec: what is wrong, at which column,
// and what would work.
FormulaNode parse_formula(std::string_view text, FormulaUse use, const AttentionSpec& declarations);

// Canonical text: equal for formulas that differ in spacing and redundant brackets only.
std::string formula_text(const FormulaNode& formula, const AttentionSpec& declarations);

}  // namespace flashjit
