// Parses and types formulas: operator precedence as in C, one pass.
#include "codegen/formulas/formula.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <span>
#include <utility>

#include "codegen/base/suggest.hpp"
#include "codegen/formulas/formula_words.hpp"
#include "codegen/spec/declarations.hpp"

namespace flashjit {
namespace {

using Op = FormulaOperation;

struct Token {
  enum class Kind { end, number, name, symbol };
  Kind kind = Kind::end;
  std::string_view text = {};
  std::size_t at = 0;
};

[[noreturn]] void fail(std::size_t at, const std::string& message) {
  throw Error(ErrorCode::invalid_spec, "column " + std::to_string(at + 1) + ": " + message);
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}
bool is_of_name(char c) {
  return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

class Lexer {
 public:
  explicit Lexer(std::string_view text) : text_(text) {}

  Token next() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos)
      ++at_;
    if (at_ == text_.size()) return {Token::Kind::end, {}, at_};
    const char c = text_[at_];
    if (is_digit(c) || (c == '.' && is_digit(peek(1)))) return number();
    if (is_of_name(c)) {
      std::size_t size = 1;
      while (is_of_name(peek(size))) ++size;
      return take(Token::Kind::name, size);
    }
    for (const std::string_view symbol : {"&&", "||", "==", "!=", "<=", ">="})
      if (text_.substr(at_, 2) == symbol) return take(Token::Kind::symbol, 2);
    if (std::string_view("+-*/%<>!?:()[],").find(c) != std::string_view::npos)
      return take(Token::Kind::symbol, 1);
    if (c == '=') fail(at_, "= is no operator of formulas; == compares");
    if (c == '&' || c == '|')
      fail(at_, std::string(1, c) + " is no operator of formulas; " + c + c + " would work");
    if (c == '^') fail(at_, "^ is no operator of formulas; x * x, or exp(y * log(x)), would work");
    fail(at_, static_cast<unsigned char>(c) < 0x80 ? in_quotes({&c, 1}) + " is in no formula"
                                                   : "no formula has letters outside ASCII");
  }

 private:
  char peek(std::size_t ahead) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0'; }

  Token take(Token::Kind kind, std::size_t size) {
    const Token token{kind, text_.substr(at_, size), at_};
    at_ += size;
    return token;
  }

  Token number() {
    std::size_t size = 0;
    const auto digits = [&] {
      while (is_digit(peek(size))) ++size;
    };
    digits();
    if (peek(size) == '.') {
      ++size;
      digits();
    }
    if (peek(size) == 'e' || peek(size) == 'E') {
      const std::size_t sign = peek(size + 1) == '+' || peek(size + 1) == '-';
      if (is_digit(peek(size + 1 + sign))) {
        size += 1 + sign;
        digits();
      }
    }
    std::size_t word = size;
    while (is_of_name(peek(word)) || peek(word) == '.') ++word;
    if (word != size)
      fail(at_, in_quotes(text_.substr(at_, word)) + " is no number; 30, 0.5 and 1e-3 are examples");
    return take(Token::Kind::number, size);
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

// A formula, where it begins and how many levels it has.
struct Part {
  FormulaNode node;
  std::size_t at = 0;
  int height = 1;
};

const char* name_of(FormulaType type) {
  switch (type) {
    case FormulaType::boolean:
      return "a condition";
    case FormulaType::integer:
      return "an integer";
    case FormulaType::real:
      return "a real";
  }
  return "unknown";
}

Part converted(Part part, FormulaType type) {
  if (part.node.type == type) return part;
  FormulaNode& node = part.node;
  if (node.kind == FormulaNode::Kind::integer) {
    node = {.kind = FormulaNode::Kind::real, .type = type, .real = static_cast<float>(node.integer)};
    return part;
  }
  FormulaNode outer{.kind = FormulaNode::Kind::operation, .type = type, .operation = Op::to_real};
  outer.operands.push_back(std::move(node));
  part.node = std::move(outer);
  return part;
}

class Parser {
 public:
  Parser(std::string_view text, FormulaUse use, const AttentionSpec& declared)
      : lexer_(text), use_(use), declared_(declared) {
    advance();
  }

  FormulaNode formula() {
    if (token_.kind == Token::Kind::end) fail(0, "the formula is empty");
    Part part = conditional();
    if (is(")") || is("]") || is(":") || is(","))
      fail(token_.at, std::string(token_.text) + " has no beginning before it");
    if (token_.kind != Token::Kind::end)
      fail(token_.at, "an operator is missing before " + in_quotes(token_.text));
    const bool boolean = part.node.type == FormulaType::boolean;
    if (use_ == FormulaUse::mask && !boolean)
      fail(0, std::string("the formula of a mask must be a condition, this one is ") +
                  name_of(part.node.type) + "; a comparison, such as key <= position, would work");
    if (use_ == FormulaUse::score && boolean)
      fail(0,
           "the formula of a score must be a number, this one is a condition; condition ? score : -inf "
           "would work");
    if (use_ == FormulaUse::score) part = converted(std::move(part), FormulaType::real);
    return std::move(part.node);
  }

 private:
  // Counts one more level of the text while it lives.
  class Level {
   public:
    Level(int& levels, int most, std::size_t at) : levels_(levels) {
      if (levels == most) fail(at, too_deep());
      ++levels;
    }
    ~Level() { --levels_; }
    Level(const Level&) = delete;

   private:
    int& levels_;
  };
  static std::string too_deep() {
    return "the formula nests deeper than " + std::to_string(most_levels) +
           " levels; brackets that halve a long chain, as in (a + b) + (c + d), would work";
  }

  bool is(std::string_view symbol) const {
    return token_.kind == Token::Kind::symbol && token_.text == symbol;
  }
  void advance() { token_ = lexer_.next(); }
  void close(std::string_view symbol, const Token& open) {
    if (!is(symbol))
      fail(token_.at, std::string(symbol) + " is missing: the " + std::string(open.text) + " of column " +
                          std::to_string(open.at + 1) + " is open");
    advance();
  }

  static Part operation(Op op, FormulaType type, std::vector<Part> operands, std::size_t at) {
    Part part{{.kind = FormulaNode::Kind::operation, .type = type, .operation = op}, at};
    for (Part& operand : operands) {
      part.height = std::max(part.height, operand.height + 1);
      part.node.operands.push_back(std::move(operand.node));
    }
    if (part.height > most_levels) fail(at, too_deep());
    return part;
  }

  static void require_condition(const Part& part, const std::string& what) {
    if (part.node.type != FormulaType::boolean)
      fail(part.at, what + " must be a condition, this is " + name_of(part.node.type) +
                        "; a comparison, such as x != 0, would work");
  }
  static void require_number(const Part& part, const std::string& what) {
    if (part.node.type == FormulaType::boolean)
      fail(part.at, what + " must be a number, this is a condition; condition ? 1 : 0 would work");
  }
  static void require_integer(const Part& part, const std::string& what) {
    require_number(part, what);
    if (part.node.type == FormulaType::real)
      fail(part.at, what + " must be an integer, this is a real; floor(x) would work");
  }

  // The type that both numbers convert to.
  static FormulaType common(const Part& a, const Part& b) {
    const bool real = a.node.type == FormulaType::real || b.node.type == FormulaType::real;
    return real ? FormulaType::real : FormulaType::integer;
  }

  Part conditional() {
    const Level level(levels_, most_recursion, token_.at);
    Part condition = binary(0);
    if (!is("?")) return condition;
    require_condition(condition, "the operand before ?");
    const Token question = token_;
    advance();
    Part yes = conditional();
    if (!is(":"))
      fail(token_.at, ": is missing: the ? of column " + std::to_string(question.at + 1) + " is open");
    advance();
    Part no = conditional();
    FormulaType type = FormulaType::boolean;
    const bool conditions = yes.node.type == type, other = no.node.type == type;
    if (conditions != other)
      fail(question.at, std::string("the values of ?: are ") + name_of(yes.node.type) + " and " +
                            name_of(no.node.type) + "; two numbers or two conditions would work");
    if (!conditions) {
      type = common(yes, no);
      yes = converted(std::move(yes), type);
      no = converted(std::move(no), type);
    }
    const std::size_t at = condition.at;
    return joined(Op::select, type, at, std::move(condition), std::move(yes), std::move(no));
  }

  template <class... Parts>
  static Part joined(Op op, FormulaType type, std::size_t at, Parts... parts) {
    std::vector<Part> operands;
    operands.reserve(sizeof...(parts));
    (operands.push_back(std::move(parts)), ...);
    return operation(op, type, std::move(operands), at);
  }

  // Operators of this precedence and higher ones.
  Part binary(int precedence) {
    if (precedence == unary_precedence) return unary();
    Part left = binary(precedence + 1);
    while (const BinaryOperator* found = binary_operator(precedence)) {
      const std::size_t at = token_.at;
      advance();
      Part right = binary(precedence + 1);
      left = combined(*found, at, std::move(left), std::move(right));
    }
    return left;
  }
  const BinaryOperator* binary_operator(int precedence) const {
    if (token_.kind != Token::Kind::symbol) return nullptr;
    for (const BinaryOperator& op : binary_operators)
      if (op.symbol == token_.text && op.precedence == precedence) return &op;
    return nullptr;
  }

  static Part combined(const BinaryOperator& op, std::size_t at, Part left, Part right) {
    const std::string symbol(op.symbol);
    const std::size_t begin = left.at;
    const auto made = [&](FormulaType type) {
      Part part = joined(op.operation, type, at, std::move(left), std::move(right));
      part.at = begin;
      return part;
    };
    if (op.operation == Op::both || op.operation == Op::either) {
      require_condition(left, "the left operand of " + symbol);
      require_condition(right, "the right operand of " + symbol);
      return made(FormulaType::boolean);
    }
    const bool conditions = left.node.type == FormulaType::boolean && right.node.type == FormulaType::boolean;
    if (conditions && (op.operation == Op::equal || op.operation == Op::not_equal))
      fail(at,
           symbol + (op.operation == Op::equal ? " of conditions is no operation; a ? b : !b would work"
                                               : " of conditions is no operation; a ? !b : b would work"));
    if (op.compares() && is_comparison(left.node))
      fail(at, "a comparison of a comparison; a " + symbol + " b && b " + symbol + " c would work");
    require_number(left, "the left operand of " + symbol);
    require_number(right, "the right operand of " + symbol);
    if (op.operation == Op::remainder) {
      require_integer(left, "the left operand of %");
      require_integer(right, "the right operand of %");
    }
    const FormulaType type = common(left, right);
    left = converted(std::move(left), type);
    right = converted(std::move(right), type);
    return made(op.compares() ? FormulaType::boolean : type);
  }
  static bool is_comparison(const FormulaNode& node) {
    return node.kind == FormulaNode::Kind::operation && node.operation >= Op::less &&
           node.operation <= Op::not_equal;
  }

  Part unary() {
    const Level level(levels_, most_recursion, token_.at);
    const std::size_t at = token_.at;
    if (is("-")) {
      advance();
      Part part = unary();
      require_number(part, "the operand of -");
      const FormulaType type = part.node.type;
      return joined(Op::negate, type, at, std::move(part));
    }
    if (is("!")) {
      advance();
      Part part = unary();
      require_condition(part, "the operand of !");
      return joined(Op::invert, FormulaType::boolean, at, std::move(part));
    }
    return primary();
  }

  Part primary() {
    const Token token = token_;
    if (token.kind == Token::Kind::number) {
      advance();
      return number(token);
    }
    if (token.kind == Token::Kind::name) {
      advance();
      return named(token);
    }
    if (!is("("))
      fail(token.at,
           (token.kind == Token::Kind::end ? "the formula ends" : in_quotes(token.text) + " stands") +
               " where a number, a name or a bracket is expected");
    const Level level(brackets_, most_levels, token.at);
    advance();
    Part part = conditional();
    close(")", token);
    part.at = token.at;
    return part;
  }

  static Part number(const Token& token) {
    const std::string text(token.text);
    const char* const end = text.data() + text.size();
    if (text.find_first_of(".eE") == std::string::npos) {
      if (text.size() > 1 && text[0] == '0')
        fail(token.at, text + " would be octal in C; no leading 0 would work");
      std::int32_t value = 0;
      if (std::from_chars(text.data(), end, value).ec != std::errc())
        fail(token.at, in_quotes(text) + " is beyond int32, at most 2147483647; a real, " +
                           in_quotes(text + ".0") + ", would work");
      return {{.kind = FormulaNode::Kind::integer, .type = FormulaType::integer, .integer = value}, token.at};
    }
    float value = 0;
    const bool fits = std::from_chars(text.data(), end, value).ec == std::errc();
    // A denormal number would be 0 on some targets.
    const bool tiny = value != 0 && std::fabs(value) < std::numeric_limits<float>::min();
    if (!fits || tiny)
      fail(token.at, in_quotes(text) + " is beyond float32, from 1.2e-38 to 3.4e38; 0.0 or inf would work");
    return {{.kind = FormulaNode::Kind::real, .type = FormulaType::real, .real = value}, token.at};
  }

  Part named(const Token& token) {
    const std::string name(token.text);
    if (const Function* function = find_function(token.text)) return call(token, *function);
    Part part{{.kind = FormulaNode::Kind::real, .type = FormulaType::real}, token.at};
    const auto table = find_declared(declared_.tables, token.text);
    if (table >= 0) return indexed(token, table);
    if (token.text == "inf") {
      part.node.real = std::numeric_limits<double>::infinity();
    } else if (const Variable* variable = find_variable(token.text)) {
      part.node = {.kind = FormulaNode::Kind::name, .type = variable->type, .name = variable->name};
      if (variable->name == FormulaName::score && use_ == FormulaUse::mask)
        fail(token.at,
             "a mask does not know the score: masks come after it; row, key and position would work");
    } else if (const int scalar = find_declared(declared_.scalars, token.text); scalar >= 0) {
      part.node = {.kind = FormulaNode::Kind::scalar,
                   .type = type_of(declared_.scalars[static_cast<std::size_t>(scalar)].dtype),
                   .declared = scalar};
    } else {
      unknown(token);
    }
    if (is("(")) fail(token.at, name + " is no function; the functions are " + listed(function_names));
    if (is("["))
      fail(token.at, name + " is no table" + (declared_.tables.empty() ? "; \"tables\" declares them" : ""));
    return part;
  }

  [[noreturn]] void unknown(const Token& token) const {
    std::vector<std::string_view> known(function_names.begin(), function_names.end());
    known.emplace_back("inf");
    for (const Variable& variable : variables)
      if (variable.name != FormulaName::score || use_ == FormulaUse::score) known.push_back(variable.text);
    for (const DeclaredTable& table : declared_.tables) known.push_back(table.name);
    for (const DeclaredScalar& scalar : declared_.scalars) known.push_back(scalar.name);
    const std::string hint = did_you_mean(token.text, known);
    fail(token.at, "unknown name " + in_quotes(token.text) +
                       (hint.empty() ? "; \"tables\" and \"scalars\" declare names" : hint));
  }

  // The operands of a bracket that `open` begins.
  std::vector<Part> operands(std::string_view closing) {
    const Token open = token_;
    const Level level(brackets_, most_levels, open.at);
    advance();
    std::vector<Part> parts;
    if (!is(closing)) parts.push_back(conditional());
    while (is(",")) {
      advance();
      parts.push_back(conditional());
    }
    close(closing, open);
    return parts;
  }

  Part call(const Token& token, const Function& function) {
    const std::string name(token.text);
    if (!is("("))
      fail(token.at,
           name + " is a function; " + name + (function.arity == 1 ? "(x)" : "(x, y)") + " would work");
    std::vector<Part> parts = operands(")");
    if (parts.size() != static_cast<std::size_t>(function.arity))
      fail(token.at, name + " takes " + std::to_string(function.arity) +
                         (function.arity == 1 ? " operand" : " operands") + ", here it has " +
                         std::to_string(parts.size()));
    for (const Part& part : parts) require_number(part, "an operand of " + name);
    // floor() of an integer is the integer itself.
    if (function.operation == Op::floor && parts.front().node.type == FormulaType::integer)
      return std::move(parts.front());
    FormulaType type = parts.size() == 2 ? common(parts[0], parts[1]) : parts[0].node.type;
    if (function.takes_reals) type = FormulaType::real;
    for (Part& part : parts) part = converted(std::move(part), type);
    if (function.operation == Op::floor) type = FormulaType::integer;
    return operation(function.operation, type, std::move(parts), token.at);
  }

  Part indexed(const Token& token, int declared) {
    const DeclaredTable& table = declared_.tables[static_cast<std::size_t>(declared)];
    const std::size_t dims = table.shape.size(), shared = leading_dimensions(table);
    const auto wrong = [&](const std::string& what) {
      std::string full, rest;
      for (std::size_t i = 0; i < dims; ++i) {
        const std::string index = usual_index(table.shape[i]);
        full += (i ? ", " : "") + index;
        if (i >= shared) rest += (rest.empty() ? "" : ", ") + index;
      }
      fail(token.at, table.name + what + table.name + "[" + full + "]" +
                         (rest.empty() || rest == full ? "" : " or " + table.name + "[" + rest + "]") +
                         " would work");
    };
    if (!is("[")) wrong(" is a table " + shape_text(table.shape, "") + "; ");
    std::vector<Part> parts = operands("]");
    if (parts.size() != dims && (parts.empty() || parts.size() != dims - shared))
      wrong(" has shape " + shape_text(table.shape, "") + ", here it has " + std::to_string(parts.size()) +
            (parts.size() == 1 ? " index; " : " indices; "));
    for (const Part& part : parts) require_integer(part, "an index of " + table.name);
    Part whole{{.kind = FormulaNode::Kind::table, .type = type_of(table.dtype), .declared = declared},
               token.at};
    for (std::size_t i = 0; i < dims - parts.size(); ++i)
      whole.node.operands.push_back({.kind = FormulaNode::Kind::name,
                                     .type = FormulaType::integer,
                                     .name = find_variable(usual_index(table.shape[i]))->name});
    for (Part& part : parts) {
      whole.height = std::max(whole.height, part.height + 1);
      whole.node.operands.push_back(std::move(part.node));
    }
    if (whole.height > most_levels) fail(token.at, too_deep());
    return whole;
  }

  // Redundant brackets do not count as levels of a formula, but need stack.
  static constexpr int most_recursion = 4 * most_levels;

  Lexer lexer_;
  Token token_;
  FormulaUse use_;
  const AttentionSpec& declared_;
  int levels_ = 0, brackets_ = 0;
};

}  // namespace

FormulaNode parse_formula(std::string_view text, FormulaUse use, const AttentionSpec& declarations) {
  if (text.size() > most_characters)
    fail(most_characters, "the formula has " + std::to_string(text.size()) + " characters, at most " +
                              std::to_string(most_characters) + " would work");
  return Parser(text, use, declarations).formula();
}

}  // namespace flashjit
