#include "formula_functors.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <vector>

#include "declarations.hpp"
#include "derivatives.hpp"

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
bool reads_row(const FormulaNode& node) {
  return reads(node, FormulaName::row) || reads(node, FormulaName::position);
}
// Or between rows.
bool varies_with_rows(const FormulaNode& node) {
  return varies(node) || reads_row(node);
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
  // A functor computes parts of its formula ahead: for each row those that no key changes, for each key those
  // that no row changes, or for each tile those that neither changes.
  enum class Ahead { row, key, tile };

  Writer(const AttentionSpec& spec, FormulaUse use, Ahead ahead = Ahead::row)
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
  std::string call(const std::string& function, const FormulaNode& node) {
    std::string text = function + "(";
    for (std::size_t i = 0; i < node.operands.size(); ++i)
      text += (i == 0 ? "" : ", ") + write(node.operands[i]).text;
    return text + ")";
  }

  bool changes(const FormulaNode& node) const {
    if (ahead_ == Ahead::key) return reads(node, FormulaName::score) || reads_row(node);
    return ahead_ == Ahead::row ? varies(node) : varies_with_rows(node);
  }

  // Whether a kernel may hold it as a value and distances from it.
  bool stands_for_many(const FormulaNode& node) const {
    return ahead_ == Ahead::key ? varies_with_rows(node) : varies(node);
  }

  // "row.a", if there is room and if this is not computed ahead itself.
  bool kept(const std::string& text, Text& place) {
    const auto found = std::find(values_.begin(), values_.end(), text);
    const std::size_t index = static_cast<std::size_t>(found - values_.begin());
    if (found == values_.end()) {
      if (values_.size() == most_values) return false;
      values_.push_back(text);
    }
    const char* const of = ahead_ == Ahead::row ? "row." : ahead_ == Ahead::key ? "of_key." : "tile.";
    place = {std::string(of) + static_cast<char>('a' + index), primary};
    return true;
  }

  Text write(const FormulaNode& node) {
    if (!in_ahead_ && !changes(node) && is_costly(node)) {
      in_ahead_ = true;
      const Text whole = write_bare(node);
      in_ahead_ = false;
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
    if (!is_score() || is_distance(node) || !stands_for_many(node))
      return "to_real(" + write(node).text + ")";
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
    } else if (!(ahead_ == Ahead::key ? changes(divisor) : varies(divisor)) && !in_ahead_) {
      in_ahead_ = true;
      const std::string text = "inverse(" + write_bare(divisor).text + ")";
      in_ahead_ = false;
      if (!kept(text, inverse)) inverse = {text, primary};
    } else {
      return {"quotient(" + write(dividend).text + ", " + write(divisor).text + ")", primary};
    }
    return {bracketed(write(dividend), 6) + " * " + inverse.text, 6};
  }

  const AttentionSpec& spec_;
  FormulaUse use_;
  Ahead ahead_;
  bool in_ahead_ = false;  // writing what is computed ahead
  std::vector<std::string> values_;
};

// The keys that a row sees, as text; empty: no limit of that side.
struct Limits {
  std::string begin, end;
};
std::string call(const char* function, const std::string& a, const std::string& b) {
  return a.empty() ? b : b.empty() ? a : std::string(function) + "(" + a + ", " + b + ")";
}

FormulaOperation mirrored(FormulaOperation comparison) {
  return comparison == less            ? greater
         : comparison == less_equal    ? greater_equal
         : comparison == greater       ? less
         : comparison == greater_equal ? less_equal
                                       : comparison;
}

// key <comparison> limit
std::optional<Limits> limits_of(FormulaOperation comparison, const std::string& limit) {
  const std::string after = "bounded_sum(" + limit + ", Integer(1))";
  if (comparison == less) return Limits{{}, limit};
  if (comparison == less_equal) return Limits{{}, after};
  if (comparison == greater) return Limits{after, {}};
  if (comparison == greater_equal) return Limits{limit, {}};
  if (comparison == equal) return Limits{limit, after};
  return {};
}

bool is_name(const FormulaNode& node, std::initializer_list<FormulaName> names) {
  return node.kind == Kind::name && std::find(names.begin(), names.end(), node.name) != names.end();
}

// A comparison with the key, or with its distance from the row or its position, which cannot wrap.
std::optional<Limits> limits_of_comparison(const FormulaNode& node, Writer& writer) {
  const FormulaNode &left = node.operands[0], &right = node.operands[1];
  if (varies(right))
    return varies(left) ? std::nullopt
                        : limits_of_comparison({.kind = Kind::operation,
                                                .type = FormulaType::boolean,
                                                .operation = mirrored(node.operation),
                                                .operands = {right, left}},
                                               writer);
  if (is_name(left, {FormulaName::key})) return limits_of(node.operation, writer.value(right));
  if (left.kind != Kind::operation || left.operation != subtract) return {};
  const FormulaNode &from = left.operands[0], &subtracted = left.operands[1];
  const auto places = {FormulaName::row, FormulaName::position};
  if (is_name(from, places) && is_name(subtracted, {FormulaName::key}))
    return limits_of(mirrored(node.operation),
                     "bounded_difference(" + writer.value(from) + ", " + writer.value(right) + ")");
  if (is_name(from, {FormulaName::key}) && is_name(subtracted, places))
    return limits_of(node.operation,
                     "bounded_sum(" + writer.value(subtracted) + ", " + writer.value(right) + ")");
  return {};
}

// The interval of keys that each row keeps, if the mask's formula is one.
std::optional<Limits> limits_of(const FormulaNode& node, Writer& writer) {
  if (node.kind != Kind::operation || node.type != FormulaType::boolean || reads(node, FormulaName::head) ||
      reads(node, FormulaName::head_kv))
    return {};
  if (node.operation == both || node.operation == either) {
    const auto a = limits_of(node.operands[0], writer), b = limits_of(node.operands[1], writer);
    if (!a || !b) return {};
    if (node.operation == both)
      return Limits{call("maximum", a->begin, b->begin), call("minimum", a->end, b->end)};
    if (a->begin.empty() && b->begin.empty()) return Limits{{}, call("maximum", a->end, b->end)};
    if (a->end.empty() && b->end.empty()) return Limits{call("minimum", a->begin, b->begin), {}};
    return {};
  }
  const bool compares = node.operation >= less && node.operation <= equal;
  if (!compares || node.operands[0].type != FormulaType::integer) return {};
  return limits_of_comparison(node, writer);
}

std::string ahead_text(const char* name, const Writer& writer) {
  if (writer.ahead().empty()) return {};
  std::string values;
  for (const std::string& one : writer.ahead()) values += (values.empty() ? "" : ", ") + one;
  return std::string("  template <class At>\n  FLASHJIT_FN static auto ") + name +
         "(const At& at) {\n    return row_values(" + values + ");\n  }\n";
}

// A function of `at` and of the values computed ahead, which are a Row or a Tile; empty: none.
std::string function_text(const char* name, const std::string& ahead, const std::string& value) {
  const auto parameter = [&](const std::string& type, const std::string& of) {
    const bool used = value.find(of + ".") != std::string::npos ||
                      value.find(of + ",") != std::string::npos || value.find(of + ")") != std::string::npos;
    return "const " + type + "&" + (used ? " " + of : "");
  };
  const char* const of = ahead == "Row" ? "row" : ahead == "OfKey" ? "of_key" : "tile";
  return "  template <class At" + (ahead.empty() ? "" : ", class " + ahead) +
         ">\n  FLASHJIT_FN static auto " + name + "(" + parameter("At", "at") +
         (ahead.empty() ? "" : ", " + parameter(ahead, of)) + ") {\n    return " + value + ";\n  }\n";
}

std::string interval_text(const Limits& limits, const Writer& writer) {
  return ahead_text("of_tile", writer) +
         function_text("begin", "Tile", limits.begin.empty() ? "Integer(0)" : limits.begin) +
         function_text("end", "Tile", limits.end.empty() ? "at.seqlen_k" : limits.end);
}

// cap * tanh(score / cap), as users write softcaps. The same holds for the magnitude of the cap.
struct Cap {
  FormulaNode cap, before_cap;
  bool of_score;
};
std::optional<Cap> cap_of(const FormulaNode& node) {
  const auto is = [](const FormulaNode& of, FormulaOperation name) {
    return of.kind == Kind::operation && of.operation == name;
  };
  if (!is(node, multiply)) return {};
  const FormulaNode &cap = node.operands[0], &function = node.operands[1];
  if (!is(function, tanh) || !is(function.operands[0], divide)) return {};
  const FormulaNode& divisor = function.operands[0].operands[1];
  if (cap.kind != divisor.kind) return {};
  const bool of_score = is_name(function.operands[0].operands[0], {FormulaName::score});
  if (cap.kind == Kind::real && cap.real == divisor.real && cap.real > 0) return Cap{cap, function, of_score};
  if (cap.kind != Kind::scalar || cap.declared != divisor.declared) return {};
  Cap magnitudes = {
      {.kind = Kind::operation, .type = FormulaType::real, .operation = absolute, .operands = {cap}},
      function,
      of_score};
  magnitudes.before_cap.operands[0].operands[1] = magnitudes.cap;
  return magnitudes;
}

// score + tilt * distance, with a tilt that no key changes, and the distance of the key from the row or its
// position, or the magnitude of that distance.
struct Tilt {
  FormulaNode tilt, from;
  bool negative, magnitude;
};
std::optional<Tilt> tilt_of(const FormulaNode& node) {
  const auto is = [](const FormulaNode& of, FormulaOperation name) {
    return of.kind == Kind::operation && of.operation == name;
  };
  if (!is(node, add) && !is(node, subtract)) return {};
  const bool score_first = is_name(node.operands[0], {FormulaName::score});
  const FormulaNode &score = node.operands[score_first ? 0 : 1],
                    &product = node.operands[score_first ? 1 : 0];
  if (!is_name(score, {FormulaName::score}) || (is(node, subtract) && !score_first) || !is(product, multiply))
    return {};
  const bool tilt_first = !varies(product.operands[0]);
  const FormulaNode &tilt = product.operands[tilt_first ? 0 : 1],
                    &distance = product.operands[tilt_first ? 1 : 0];
  if (varies(tilt)) return {};
  // abs and the conversion to a real may come in either order.
  const FormulaNode* difference = &distance;
  bool magnitude = false;
  while (is(*difference, to_real) || is(*difference, absolute)) {
    magnitude |= is(*difference, absolute);
    difference = &difference->operands[0];
  }
  if (!is(*difference, subtract)) return {};
  const FormulaNode &left = difference->operands[0], &right = difference->operands[1];
  const auto places = {FormulaName::row, FormulaName::position};
  if (is_name(left, {FormulaName::key}) && is_name(right, places))
    return Tilt{tilt, right, is(node, subtract), magnitude};
  if (is_name(left, places) && is_name(right, {FormulaName::key}))
    return Tilt{tilt, left, is(node, subtract) == magnitude, magnitude};
  return {};
}

// A score's derivatives: by the score and by elements of tables. `reads`: how many elements the functors
// before have.
std::string derivatives_text(const FormulaNode& formula, const std::optional<Cap>& cap, Writer& writer,
                             const std::string& ahead, const AttentionSpec& spec, int& reads) {
  std::string text;
  if (cap && cap->of_score) {
    const std::string t = "before_cap(at, " + std::string(ahead == "Row" ? "row" : "of_key") + ")";
    text += function_text("derivative", ahead, "fma(-" + t + ", " + t + ", Real(1.0f))");
  } else if (const FormulaNode derivative = derivative_by_score(formula); is_constant(derivative, 1)) {
    text += "  static constexpr bool shifts = true;\n";
  } else {
    text += function_text("derivative", ahead, writer.value(derivative));
  }
  const std::vector<ElementDerivative> elements = derivatives_by_elements(formula, spec);
  if (elements.empty()) return text;
  std::string calls;
  for (const ElementDerivative& element : elements) {
    calls += (calls.empty() ? "" : "\n    ") + std::string("add(Read<") + std::to_string(reads++) +
             ">(), table_" + spec.tables[static_cast<std::size_t>(element.read.declared)].name + "(), " +
             writer.value(element.derivative);
    for (const FormulaNode& index : element.read.operands) calls += ", " + writer.value(index);
    calls += ");";
  }
  const bool keyed = ahead == "OfKey";
  const bool used = calls.find(keyed ? "of_key." : "row.") != std::string::npos ||
                    calls.find(keyed ? "of_key)" : ", row)") != std::string::npos;
  return text + "  static constexpr int reads = " + std::to_string(elements.size()) +
         ";\n  template <class At, class " + ahead +
         ", class Add>\n  FLASHJIT_FN static void elements(const At& at, const " + ahead + "&" +
         (!used   ? ""
          : keyed ? " of_key"
                  : " row") +
         ", const Add& add) {\n    " + calls + "\n  }\n";
}

std::string functor_text(const std::string& name, const std::string& words, FormulaUse use,
                         const AttentionSpec& spec, ComputedAhead computed_ahead, int& reads_before) {
  const FormulaNode formula = parse_formula(words, use, spec);
  std::string text = "// " + words + "\nstruct " + name + " : Formula {\n";
  if (use == FormulaUse::mask) {
    Writer writer(spec, use, Writer::Ahead::tile);
    if (const auto limits = limits_of(formula, writer))
      return text + "  static constexpr bool interval = true;\n" + interval_text(*limits, writer) + "};\n\n";
  }
  const bool by_key = computed_ahead == ComputedAhead::key;
  const std::string ahead = by_key ? "OfKey" : "Row";
  const char* const of_ahead = by_key ? "of_key" : "of_row";
  if (by_key) text += "  static constexpr bool by_key = true;\n";
  if (reads(formula, FormulaName::head)) text += "  static constexpr bool reads_head = true;\n";
  if (any(formula, [](const FormulaNode& node) { return node.kind == Kind::table && varies(node); }))
    text += "  static constexpr bool loads = true;\n";
  Writer writer(spec, use, by_key ? Writer::Ahead::key : Writer::Ahead::row);
  const bool differentiated = use == FormulaUse::score && spec.op == Operation::backward;
  const auto derivatives = [&](const std::optional<Cap>& cap) {
    return differentiated ? derivatives_text(formula, cap, writer, ahead, spec, reads_before) : std::string();
  };
  if (const auto cap = use == FormulaUse::score ? cap_of(formula) : std::nullopt) {
    const std::string before_cap = writer.value(cap->before_cap);
    text += "  static constexpr bool caps = true;\n";
    if (cap->of_score)
      text += std::string("  static constexpr bool caps_score = true") +
              (spec.precise ? ", precise = true" : "") + ";\n";
    const std::string value =
        function_text("cap", {}, writer.value(cap->cap)) + function_text("before_cap", ahead, before_cap) +
        function_text("value", ahead,
                      std::string("cap(at) * before_cap(at, ") + (by_key ? "of_key)" : "row)"));
    const std::string derived = derivatives(cap);
    return text + ahead_text(of_ahead, writer) + value + derived + "};\n\n";
  }
  const std::string value = writer.value(formula);
  std::string of_tilt;
  if (const auto tilt = use == FormulaUse::score && !by_key ? tilt_of(formula) : std::nullopt) {
    of_tilt = std::string("  static constexpr bool tilts = true, tilts_by_magnitude = ") +
              (tilt->magnitude ? "true" : "false") + ";\n" +
              function_text("from", {}, writer.value(tilt->from)) +
              function_text("tilt", "Row", (tilt->negative ? "-(" : "(") + writer.value(tilt->tilt) + ")");
  }
  const std::string derived = derivatives({});
  return text + ahead_text(of_ahead, writer) + function_text("value", ahead, value) + of_tilt + derived +
         "};\n\n";
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

std::string formula_functors(const AttentionSpec& spec, ComputedAhead ahead) {
  std::string text = device_text::named_types(spec);
  int masks = 0, scores = 0, reads = 0;
  for (const Mask& mask : spec.mask)
    if (const auto* formula = std::get_if<FormulaMask>(&mask))
      text += device_text::functor_text("Mask" + std::to_string(++masks), formula->formula, FormulaUse::mask,
                                        spec, ahead, reads);
  for (const std::string& score : spec.score)
    text += device_text::functor_text("Score" + std::to_string(++scores), score, FormulaUse::score, spec,
                                      ahead, reads);
  return text;
}

bool has_gradients(const AttentionSpec& spec) {
  return spec.op == Operation::backward && (spec.sink_logits || has_table_gradients(spec));
}

bool is_interval(const FormulaMask& mask, const AttentionSpec& spec) {
  using device_text::Writer;
  Writer writer(spec, FormulaUse::mask, Writer::Ahead::tile);
  return device_text::limits_of(parse_formula(mask.formula, FormulaUse::mask, spec), writer).has_value();
}

bool masks_are_tested(const AttentionSpec& spec) {
  return std::any_of(spec.mask.begin(), spec.mask.end(), [&](const Mask& mask) {
    const auto* formula = std::get_if<FormulaMask>(&mask);
    return formula && !is_interval(*formula, spec);
  });
}

bool has_derivatives(const AttentionSpec& spec) {
  return has_table_gradients(spec) ||
         std::any_of(spec.score.begin(), spec.score.end(), [&](const std::string& score) {
           return !is_constant(derivative_by_score(parse_formula(score, FormulaUse::score, spec)), 1);
         });
}

bool masks_read_head(const AttentionSpec& spec) {
  return device_text::any_mask(spec,
                               [](const FormulaNode& formula) { return reads(formula, FormulaName::head); });
}

bool masks_differ_by_head(const AttentionSpec& spec) {
  return device_text::any_mask(spec, [](const FormulaNode& formula) {
    return reads(formula, FormulaName::head) || reads(formula, FormulaName::head_kv);
  });
}

bool masks_read_tables(const AttentionSpec& spec) {
  return device_text::any_mask(spec, [](const FormulaNode& formula) {
    return device_text::any(formula,
                            [](const FormulaNode& node) { return node.kind == FormulaNode::Kind::table; });
  });
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
