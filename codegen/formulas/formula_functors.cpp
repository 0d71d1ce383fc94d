#include "codegen/formulas/formula_functors.hpp"

#include <cstddef>
#include <optional>
#include <vector>

#include "codegen/formulas/derivatives.hpp"
#include "codegen/formulas/formula_patterns.hpp"
#include "codegen/formulas/formula_traits.hpp"
#include "codegen/formulas/formula_writer.hpp"
#include "codegen/spec/declarations.hpp"

namespace flashjit {

namespace {

std::string ahead_text(const char* name, const FormulaWriter& writer) {
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

std::string interval_text(const Limits& limits, const FormulaWriter& writer) {
  return ahead_text("of_tile", writer) +
         function_text("begin", "Tile", limits.begin.empty() ? "Integer(0)" : limits.begin) +
         function_text("end", "Tile", limits.end.empty() ? "at.seqlen_k" : limits.end);
}

// A score's derivatives: by the score and by elements of tables. `reads`: how many elements the functors
// before have.
std::string derivatives_text(const FormulaNode& formula, const std::optional<Cap>& cap, FormulaWriter& writer,
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
    FormulaWriter writer(spec, use, FormulaWriter::Ahead::tile);
    if (const auto limits = limits_of(formula, writer))
      return text + "  static constexpr bool interval = true;\n" + interval_text(*limits, writer) + "};\n\n";
  }
  const bool by_key = computed_ahead == ComputedAhead::key;
  const std::string ahead = by_key ? "OfKey" : "Row";
  const char* const of_ahead = by_key ? "of_key" : "of_row";
  if (by_key) text += "  static constexpr bool by_key = true;\n";
  if (reads(formula, FormulaName::head)) text += "  static constexpr bool reads_head = true;\n";
  if (any(formula,
          [](const FormulaNode& node) { return node.kind == FormulaNode::Kind::table && varies(node); }))
    text += "  static constexpr bool loads = true;\n";
  FormulaWriter writer(spec, use, by_key ? FormulaWriter::Ahead::key : FormulaWriter::Ahead::row);
  const bool differentiated = use == FormulaUse::score && info_of(spec.op).writes_gradients;
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

}  // namespace

std::string formula_functors(const AttentionSpec& spec, ComputedAhead ahead) {
  std::string text = named_types(spec);
  int masks = 0, scores = 0, reads = 0;
  for (const Mask& mask : spec.mask)
    if (const auto* formula = std::get_if<FormulaMask>(&mask))
      text += functor_text("Mask" + std::to_string(++masks), formula->formula, FormulaUse::mask, spec, ahead,
                           reads);
  for (const std::string& score : spec.score)
    text += functor_text("Score" + std::to_string(++scores), score, FormulaUse::score, spec, ahead, reads);
  return text;
}

}  // namespace flashjit
