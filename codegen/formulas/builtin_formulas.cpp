#include "codegen/formulas/builtin_formulas.hpp"

#include "codegen/base/shape.hpp"
#include "codegen/base/suggest.hpp"
#include "codegen/formulas/formula_words.hpp"
#include "codegen/spec/builtin_names.hpp"
#include "codegen/spec/declarations.hpp"
#include "codegen/spec/mask_rules.hpp"

namespace flashjit {
namespace {

// The spec's declaration of the table, or the usual one, which is then added to the spec.
const DeclaredTable& declared(AttentionSpec& spec, const std::string& name, DType dtype,
                              std::initializer_list<const char*> shape) {
  if (const int found = find_declared(spec.tables, name); found >= 0)
    return spec.tables[static_cast<std::size_t>(found)];
  DeclaredTable table{name, dtype};
  for (const char* dim : shape) table.shape.push_back(dimension_of(dim));
  return spec.tables.emplace_back(std::move(table));
}

// "bias[batch, head, row, key]" for a table whose dimensions are sizes of a launch.
std::string element_of(const DeclaredTable& table) {
  std::string text;
  for (const TableDimension& dim : table.shape) {
    if (dim.kind == TableDimension::Kind::number || dim.kind == TableDimension::Kind::free)
      invalid("tables." + table.name + ".shape has " + to_string(dim) +
              ", which no size of a launch indexes; a formula instead of the name would work");
    text += (text.empty() ? "" : ", ") + std::string(usual_index(dim));
  }
  return table.name + "[" + text + "]";
}

std::string written_out(AttentionSpec& spec, std::string_view name) {
  if (name == "softcap") {
    // Gemma 2 (2024): scores stay within (-softcap, softcap).
    if (find_declared(spec.scalars, name) < 0) spec.scalars.push_back({"softcap", DType::fp32});
    return "softcap * tanh(score / softcap)";
  }
  if (name == "alibi") {
    // Press et al., "Train Short, Test Long" (2022), and its symmetric form where keys come after a row.
    return "score - " + element_of(declared(spec, "alibi_slopes", DType::fp32, {"heads_q"})) +
           " * abs(position - key)";
  }
  if (name == "bias")
    return "score + " + element_of(declared(spec, "bias", spec.dtype,
                                            {"batch or 1", "heads_q or 1", "seqlen_q or 1", "seqlen_k"}));
  // T5 (2020): a prefix that all rows see, causal beyond.
  return "key < " + element_of(declared(spec, "prefix", DType::int32, {"batch"})) + " || key <= position";
}

void write_out(AttentionSpec& spec, std::string& text, std::span<const std::string_view> names,
               const std::string& place) {
  if (!is_identifier(text)) return;
  for (const std::string_view name : names)
    if (text == name) {
      text = written_out(spec, name);
      return;
    }
  if (!find_variable(text) && text != "inf" && find_declared(spec.scalars, text) < 0 &&
      find_declared(spec.tables, text) < 0)
    invalid(place + " " + in_quotes(text) + " is neither a formula nor one of " + listed(names) +
            did_you_mean(text, names));
}

// One dimension of a neighbourhood, for the places `row` and `key` along it.
std::string near_along(const std::string& row, const std::string& key, int size, int window, int dilation) {
  const auto text = [](int value) { return std::to_string(value); };
  const std::string d = text(dilation);
  // Places among those a multiple of the dilation away, and how many these are.
  const std::string of_row = dilation == 1 ? row : row + " / " + d,
                    of_key = dilation == 1 ? key : key + " / " + d;
  const std::string last = dilation == 1 ? text(size - window)
                                         : "(" + text(size + dilation - 1) + " - " + row + " % " + d +
                                               ") / " + d + " - " + text(window);
  const std::string first = "max(0, min(" + of_row + " - " + text(window / 2) + ", " + last + "))";
  return (dilation == 1 ? "" : key + " % " + d + " == " + row + " % " + d + " && ") + of_key +
         " >= " + first + " && " + of_key + " < " + first + " + " + text(window);
}

}  // namespace

FormulaMask FormulaMask::neighbourhood(const std::vector<int>& shape, const std::vector<int>& window,
                                       const std::vector<int>& dilation) {
  const std::string what = "a neighbourhood's ";
  if (shape.empty() || shape.size() > 3)
    invalid(what + "shape has " + std::to_string(shape.size()) + " dimensions; 1 to 3 would work");
  if (window.size() != shape.size() || (!dilation.empty() && dilation.size() != shape.size()))
    invalid(what + "window and dilation must have as many numbers as its shape, " +
            std::to_string(shape.size()));
  std::string formula;
  std::int64_t inside = 1;  // places of the dimensions after this one
  for (std::size_t i = shape.size(); i-- > 0;) {
    const int size = shape[i], step = dilation.empty() ? 1 : dilation[i];
    if (size < 1 || inside * size > longest_sequence)
      invalid(what + "shape has " + std::to_string(size) + " places in dimension " + std::to_string(i) +
              "; 1 to " + std::to_string(longest_sequence) + ", over all dimensions, would work");
    if (step < 1 || window[i] < 1 || std::int64_t{window[i]} * step > size)
      invalid(what + "window of " + std::to_string(window[i]) + " places, " + std::to_string(step) +
              " apart, does not fit the " + std::to_string(size) + " of dimension " + std::to_string(i));
    const auto along = [&](std::string place) {
      if (inside > 1) place += " / " + std::to_string(inside);
      return i > 0 ? place + " % " + std::to_string(size) : place;
    };
    if (window[i] < size) {
      const std::string near = near_along(along("position"), along("key"), size, window[i], step);
      formula = near + (formula.empty() ? "" : " && " + formula);
    }
    inside *= size;
  }
  return {.formula = formula.empty() ? "0 == 0" : formula, .places = inside};
}

void write_out_names(AttentionSpec& spec) {
  const auto place = [](const char* field, std::size_t i) {
    return std::string(field) + "[" + std::to_string(i) + "]";
  };
  for (std::size_t i = 0; i < spec.mask.size(); ++i)
    if (auto* const formula = std::get_if<FormulaMask>(&spec.mask[i]))
      write_out(spec, formula->formula, builtin_masks, place("mask", i));
  for (std::size_t i = 0; i < spec.score.size(); ++i)
    write_out(spec, spec.score[i], builtin_scores, place("score", i));
}

}  // namespace flashjit
