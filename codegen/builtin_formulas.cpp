#include "builtin_formulas.hpp"

#include "declarations.hpp"
#include "formula_words.hpp"
#include "mask_rules.hpp"
#include "suggest.hpp"

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

}  // namespace

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
