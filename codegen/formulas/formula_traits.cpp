#include "codegen/formulas/formula_traits.hpp"

#include <iterator>

#include "codegen/formulas/derivatives.hpp"
#include "codegen/formulas/formula_patterns.hpp"
#include "codegen/spec/declarations.hpp"

namespace flashjit {

namespace {

bool is_function(FormulaOperation operation) {
  using enum FormulaOperation;
  constexpr FormulaOperation functions[] = {exp, log, tanh, sqrt, divide, remainder};
  return std::find(std::begin(functions), std::end(functions), operation) != std::end(functions);
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

bool varies(const FormulaNode& formula) {
  return reads(formula, FormulaName::key) || reads(formula, FormulaName::score);
}
bool reads_row(const FormulaNode& formula) {
  return reads(formula, FormulaName::row) || reads(formula, FormulaName::position);
}
bool varies_with_rows(const FormulaNode& formula) {
  return varies(formula) || reads_row(formula);
}

bool is_costly(const FormulaNode& formula) {
  return any(formula, [](const FormulaNode& node) {
    return node.kind == FormulaNode::Kind::table ||
           (node.kind == FormulaNode::Kind::operation && is_function(node.operation));
  });
}

bool reads_formula_params(const AttentionSpec& spec) {
  return spec.sink_logits || has_formulas(spec);
}

bool reads(const FormulaNode& formula, FormulaName name) {
  return any(formula, [&](const FormulaNode& node) {
    return node.kind == FormulaNode::Kind::name && node.name == name;
  });
}

bool formulas_read(const AttentionSpec& spec, FormulaName name) {
  return any_mask(spec, [&](const FormulaNode& formula) { return reads(formula, name); }) ||
         std::any_of(spec.score.begin(), spec.score.end(), [&](const std::string& score) {
           return reads(parse_formula(score, FormulaUse::score, spec), name);
         });
}

bool has_gradients(const AttentionSpec& spec) {
  return info_of(spec.op).writes_gradients && (spec.sink_logits || has_table_gradients(spec));
}

bool is_interval(const FormulaMask& mask, const AttentionSpec& spec) {
  FormulaWriter writer(spec, FormulaUse::mask, FormulaWriter::Ahead::tile);
  return limits_of(parse_formula(mask.formula, FormulaUse::mask, spec), writer).has_value();
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
  return any_mask(spec, [](const FormulaNode& formula) { return reads(formula, FormulaName::head); });
}

bool masks_differ_by_head(const AttentionSpec& spec) {
  return any_mask(spec, [](const FormulaNode& formula) {
    return reads(formula, FormulaName::head) || reads(formula, FormulaName::head_kv);
  });
}

bool masks_read_tables(const AttentionSpec& spec) {
  return any_mask(spec, [](const FormulaNode& formula) {
    return any(formula, [](const FormulaNode& node) { return node.kind == FormulaNode::Kind::table; });
  });
}

FormulaWork work_of_formulas(const AttentionSpec& spec) {
  const auto loads = [](const FormulaNode& formula) {
    return any(formula,
               [](const FormulaNode& node) { return node.kind == FormulaNode::Kind::table && varies(node); });
  };
  FormulaWork work{.loads = any_mask(spec, loads)};
  for (const std::string& text : spec.score) {
    const FormulaNode formula = parse_formula(text, FormulaUse::score, spec);
    work.loads = work.loads || loads(formula);
    work.functions =
        work.functions || any(formula, [](const FormulaNode& node) {
          return node.kind == FormulaNode::Kind::operation && is_function(node.operation) && varies(node);
        });
  }
  return work;
}

bool masks_have_diagonal(const AttentionSpec& spec) {
  return any_mask(spec, [](const FormulaNode& formula) {
    return any(formula, [](const FormulaNode& node) {
      const bool compares = node.kind == FormulaNode::Kind::operation &&
                            node.operation >= FormulaOperation::less &&
                            node.operation <= FormulaOperation::greater_equal;
      return compares && reads(node, FormulaName::key) &&
             (reads(node, FormulaName::position) || reads(node, FormulaName::row));
    });
  });
}

}  // namespace flashjit
