#include "formula_functors.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <vector>

#include "declarations.hpp"

// A namespace of its own: operations have names of C's functions.
namespace flashjit::device_text {
namespace {

using Kind = FormulaNode::Kind;
using enum FormulaOperation;

template <class Test>
bool any(const FormulaNode& node, const Test& test) {
  return test(node) || std::any_of(node.operands.begin(), node.operands.end(),
                                   [&](const FormulaNode& operand) { return any(operand, test); });
}

// Whether it differs between the keys of a row.
bool varies(const FormulaNode& node) {
  return reads(node, FormulaName::key) || reads(node, FormulaName::score);
}

bool is_function(FormulaOperation operation) {
  constexpr FormulaOperation functions[] = {exp, log, tanh, sqrt, divide, remainder};
  return std::find(std::begin(functions), std::end(functions), operation) != std::end(functions);
}

// Whether computing it once for a row is worth a register.
bool is_costly(const FormulaNode& formula) {
  return any(formula, [](const FormulaNode& node) {
    return node.kind == Kind::table || (node.kind == Kind::operation && is_function(node.operation));
  });
}

// The largest magnitude of an integer if positions and lengths are below 2^29; larger than 2^30: unknown.
std::int64_t magnitude(const FormulaNode& node) {
  constexpr std::int64_t of_names = 1 << 29, unknown = std::int64_t{1} << 40;
  if (node.kind == Kind::integer) return std::abs(std::int64_t{node.integer});
  if (node.kind == Kind::name) return node.name == FormulaName::key ? 1 : of_names;
  if (node.kind != Kind::operation) return unknown;
  if (node.operation == add || node.operation == subtract)
    return std::min(magnitude(node.operands[0]) + magnitude(node.operands[1]), unknown);
  return node.operation == negate ? magnitude(node.operands[0]) : unknown;
}
// Whether the difference of its values at neighbouring keys is theirs, so that a kernel may convert one of
// them to float32 and add the distance: nothing wraps in between.
bool is_distance(const FormulaNode& node) {
  return magnitude(node) <= (std::int64_t{1} << 30);
}

std::string real_literal(double value) {
  if (std::isinf(value)) return value > 0 ? "infinity" : "minus_infinity";
  char digits[32];
  std::string text(digits, std::to_chars(digits, digits + sizeof digits, static_cast<float>(value)).ptr);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text + "f";
}

struct BinaryText {
  FormulaOperation operation;
  const char* symbol;
  int precedence;
};
constexpr BinaryText binary_texts[] = {
    {either, "||", 1},   {both, "&&", 2},       {equal, "==", 3},   {not_equal, "!=", 3},
    {less, "<", 4},      {less_equal, "<=", 4}, {greater, ">", 4},  {greater_equal, ">=", 4},
    {add, "+", 5},       {subtract, "-", 5},    {multiply, "*", 6}, {divide, "/", 6},
    {remainder, "%", 6},
};
constexpr int unary_precedence = 7, primary = 8;

const char* name_text(FormulaName name) {
  switch (name) {
    case FormulaName::score:
      return "score";
    case FormulaName::row:
      return "row";
    case FormulaName::key:
      return "key";
    case FormulaName::position:
      return "position";
    case FormulaName::head:
      return "head";
    case FormulaName::head_kv:
      return "head_kv";
    case FormulaName::batch:
      return "batch";
    case FormulaName::seqlen_q:
      return "seqlen_q";
    case FormulaName::seqlen_k:
      break;
  }
  return "seqlen_k";
}

class Writer {
 public:
  Writer(const AttentionSpec& spec, FormulaUse use) : spec_(spec), use_(use) {}

  std::string value(const FormulaNode& node) { return write(node).text; }
  // The values that no key changes, for RowValues.
  const std::vector<std::string>& of_row() const { return of_row_; }

 private:
  static constexpr std::size_t most_of_row = 8;

  struct Text {
    std::string text;
    int precedence;
  };
  static std::string bracketed(const Text& text, int precedence) {
    return text.precedence < precedence ? "(" + text.text + ")" : text.text;
  }
  std::string call(const std::string& function, const FormulaNode& node) {
    std::string text = function + "(";
    for (std::size_t i = 0; i < node.operands.size(); ++i)
      text += (i == 0 ? "" : ", ") + write(node.operands[i]).text;
    return text + ")";
  }

  // "row.a", if there is room and if this is not of_row itself.
  bool kept(const std::string& text, Text& place) {
    const auto found = std::find(of_row_.begin(), of_row_.end(), text);
    const std::size_t index = static_cast<std::size_t>(found - of_row_.begin());
    if (found == of_row_.end()) {
      if (of_row_.size() == most_of_row) return false;
      of_row_.push_back(text);
    }
    place = {std::string("row.") + static_cast<char>('a' + index), primary};
    return true;
  }

  Text write(const FormulaNode& node) {
    if (!in_row_ && !varies(node) && is_costly(node)) {
      in_row_ = true;
      const Text whole = write_bare(node);
      in_row_ = false;
      Text place;
      return kept(whole.text, place) ? place : whole;
    }
    return write_bare(node);
  }

  Text write_bare(const FormulaNode& node) {
    switch (node.kind) {
      case Kind::integer:
        if (node.integer == INT32_MIN) return {"Integer(lowest_int)", primary};
        return {"Integer(" + std::to_string(node.integer) + ")", primary};
      case Kind::real:
        return {"Real(" + real_literal(node.real) + ")", primary};
      case Kind::name:
        return {std::string("at.") + name_text(node.name), primary};
      case Kind::scalar:
        return {"at.read(scalar_" + spec_.scalars[static_cast<std::size_t>(node.declared)].name + "())",
                primary};
      case Kind::table: {
        std::string text =
            "at.read(table_" + spec_.tables[static_cast<std::size_t>(node.declared)].name + "()";
        for (const FormulaNode& index : node.operands) text += ", " + write(index).text;
        return {text + ")", primary};
      }
      case Kind::operation:
        break;
    }
    return write_operation(node);
  }

  bool is_score() const { return use_ == FormulaUse::score; }
  static bool is(const FormulaNode& node, FormulaOperation operation) {
    return node.kind == Kind::operation && node.operation == operation;
  }

  Text write_operation(const FormulaNode& node) {
    const FormulaNode& first = node.operands.front();
    if (is_score() && node.type == FormulaType::real) {
      if (node.operation == divide) return write_quotient(first, node.operands[1]);
      if (node.operation == add && is(node.operands[1], multiply))
        return fma(node.operands[1], "", first, "");
      if (node.operation == add && is(first, multiply)) return fma(first, "", node.operands[1], "");
      if (node.operation == subtract && is(node.operands[1], multiply))
        return fma(node.operands[1], "-", first, "");
      if (node.operation == subtract && is(first, multiply)) return fma(first, "", node.operands[1], "-");
    }
    for (const BinaryText& op : binary_texts) {
      if (op.operation != node.operation) continue;
      // Compilers warn of && inside || without brackets.
      const int left = op.operation == either ? 3 : op.precedence;
      return {bracketed(write(first), left) + " " + op.symbol + " " +
                  bracketed(write(node.operands[1]), op.precedence + 1),
              op.precedence};
    }
    switch (node.operation) {
      case negate:
        return {"-" + bracketed(write(first), primary), unary_precedence};
      case invert:
        return {"!" + bracketed(write(first), primary), unary_precedence};
      case to_real:
        return {real_of(first), primary};
      case absolute:
        return {call("abs", node), primary};
      case floor:
        return {call("floor", node), primary};
      case minimum:
        return {call("minimum", node), primary};
      case maximum:
        return {call("maximum", node), primary};
      case select:
        return {call("select", node), primary};
      default:
        break;
    }
    const char* const name = node.operation == exp    ? "exp"
                             : node.operation == log  ? "log"
                             : node.operation == tanh ? "tanh"
                                                      : "sqrt";
    const bool fast = is_score() && !spec_.precise;
    return {call(fast ? name : std::string("precise_") + name, node), primary};
  }

  // Distances from a key are converted once for many keys: their magnitude is then that of the real.
  std::string real_of(const FormulaNode& node) {
    if (is_score() && is(node, absolute) && is_distance(node.operands[0]))
      return "abs(to_real(" + write(node.operands[0]).text + "))";
    if (!is_score() || is_distance(node) || !varies(node)) return "to_real(" + write(node).text + ")";
    return "to_real(whole(" + write(node).text + "))";
  }

  Text fma(const FormulaNode& product, const char* sign, const FormulaNode& other, const char* other_sign) {
    const auto signed_text = [&](const char* s, const FormulaNode& node) {
      return *s ? s + bracketed(write(node), primary) : write(node).text;
    };
    return {"fma(" + signed_text(sign, product.operands[0]) + ", " + write(product.operands[1]).text + ", " +
                signed_text(other_sign, other) + ")",
            primary};
  }

  // A divisor that no key changes is inverted once.
  Text write_quotient(const FormulaNode& dividend, const FormulaNode& divisor) {
    Text inverse;
    if (divisor.kind == Kind::real && std::isnormal(static_cast<float>(1 / divisor.real))) {
      inverse = {"Real(" + real_literal(1 / divisor.real) + ")", primary};
    } else if (!varies(divisor) && !in_row_) {
      in_row_ = true;
      const std::string text = "inverse(" + write_bare(divisor).text + ")";
      in_row_ = false;
      if (!kept(text, inverse)) inverse = {text, primary};
    } else {
      return {"quotient(" + write(dividend).text + ", " + write(divisor).text + ")", primary};
    }
    return {bracketed(write(dividend), 6) + " * " + inverse.text, 6};
  }

  const AttentionSpec& spec_;
  FormulaUse use_;
  bool in_row_ = false;  // writing what no key changes
  std::vector<std::string> of_row_;
};

std::string functor_text(const std::string& name, const std::string& words, FormulaUse use,
                         const AttentionSpec& spec) {
  const FormulaNode formula = parse_formula(words, use, spec);
  Writer writer(spec, use);
  const std::string value = writer.value(formula);
  std::string text = "// " + words + "\nstruct " + name + " : Formula {\n";
  if (reads(formula, FormulaName::head)) text += "  static constexpr bool reads_head = true;\n";
  if (any(formula, [](const FormulaNode& node) { return node.kind == Kind::table && varies(node); }))
    text += "  static constexpr bool loads = true;\n";
  if (!writer.of_row().empty()) {
    std::string values;
    for (const std::string& one : writer.of_row()) values += (values.empty() ? "" : ", ") + one;
    text +=
        "  template <class At>\n  FLASHJIT_FN static auto of_row(const At& at) {\n    return row_values(" +
        values + ");\n  }\n";
  }
  const char* const at = value.find("at.") == std::string::npos ? "" : " at";
  const char* const row = value.find("row.") == std::string::npos ? "" : " row";
  return text + "  template <class At, class Row>\n  FLASHJIT_FN static auto value(const At&" + at +
         ", const Row&" + row + ") {\n    return " + value + ";\n  }\n};\n\n";
}

bool is_outer(const TableDimension& dim) {
  using enum TableDimension::Kind;
  return dim.kind == batch || dim.kind == heads_q || dim.kind == heads_kv;
}

std::string named_types(const AttentionSpec& spec) {
  std::string text;
  for (std::size_t i = 0; i < spec.tables.size(); ++i) {
    const DeclaredTable& table = spec.tables[i];
    const std::string plain = ", Dimension::plain";
    std::string kinds;
    for (const TableDimension& dim : table.shape)
      kinds += dim.kind == TableDimension::Kind::total_q   ? ", Dimension::total_q"
               : dim.kind == TableDimension::Kind::total_k ? ", Dimension::total_k"
               : is_outer(dim)                             ? ", Dimension::outer"
                                                           : plain;
    while (kinds.ends_with(plain)) kinds.resize(kinds.size() - plain.size());
    text += "using table_" + table.name + " = Table<" + std::to_string(i) + ", " + to_string(table.dtype) +
            kinds + ">;  // " + shape_text(table.shape, "") + "\n";
  }
  for (std::size_t i = 0; i < spec.scalars.size(); ++i)
    text += "using scalar_" + spec.scalars[i].name + " = Scalar<" + std::to_string(i) + ", " +
            to_string(spec.scalars[i].dtype) + ">;\n";
  return text.empty() ? text : text + "\n";
}

// Whether a formula of the masks passes the test.
template <class Test>
bool any_mask(const AttentionSpec& spec, const Test& test) {
  return std::any_of(spec.mask.begin(), spec.mask.end(), [&](const Mask& mask) {
    const auto* formula = std::get_if<FormulaMask>(&mask);
    return formula && test(parse_formula(formula->formula, FormulaUse::mask, spec));
  });
}

}  // namespace

}  // namespace flashjit::device_text

namespace flashjit {

bool reads_formula_params(const AttentionSpec& spec) {
  return spec.sink_logits || has_formulas(spec);
}

bool reads(const FormulaNode& formula, FormulaName name) {
  return device_text::any(formula, [&](const FormulaNode& node) {
    return node.kind == FormulaNode::Kind::name && node.name == name;
  });
}

std::string formula_functors(const AttentionSpec& spec) {
  std::string text = device_text::named_types(spec);
  int masks = 0, scores = 0;
  for (const Mask& mask : spec.mask)
    if (const auto* formula = std::get_if<FormulaMask>(&mask))
      text += device_text::functor_text("Mask" + std::to_string(++masks), formula->formula, FormulaUse::mask,
                                        spec);
  for (const std::string& score : spec.score)
    text += device_text::functor_text("Score" + std::to_string(++scores), score, FormulaUse::score, spec);
  return text;
}

bool masks_read_head(const AttentionSpec& spec) {
  return device_text::any_mask(spec,
                               [](const FormulaNode& formula) { return reads(formula, FormulaName::head); });
}

FormulaWork work_of_formulas(const AttentionSpec& spec) {
  using device_text::any, device_text::varies;
  const auto loads = [](const FormulaNode& formula) {
    return any(formula,
               [](const FormulaNode& node) { return node.kind == FormulaNode::Kind::table && varies(node); });
  };
  FormulaWork work{.loads = device_text::any_mask(spec, loads)};
  for (const std::string& text : spec.score) {
    const FormulaNode formula = parse_formula(text, FormulaUse::score, spec);
    work.loads = work.loads || loads(formula);
    work.functions = work.functions || any(formula, [](const FormulaNode& node) {
                       return node.kind == FormulaNode::Kind::operation &&
                              device_text::is_function(node.operation) && varies(node);
                     });
  }
  return work;
}

bool masks_have_diagonal(const AttentionSpec& spec) {
  return device_text::any_mask(spec, [](const FormulaNode& formula) {
    return device_text::any(formula, [](const FormulaNode& node) {
      const bool compares = node.kind == FormulaNode::Kind::operation &&
                            node.operation >= FormulaOperation::less &&
                            node.operation <= FormulaOperation::greater_equal;
      return compares && reads(node, FormulaName::key) &&
             (reads(node, FormulaName::position) || reads(node, FormulaName::row));
    });
  });
}

}  // namespace flashjit
