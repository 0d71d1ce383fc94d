#include "tools/verify/formula.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <variant>

#include "codegen/spec/declarations.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/formula_values.hpp"

namespace flashjit::verify {
namespace {

using namespace formula_values;

// The values of a node for each key; one value if they are all the same.
template <class Real>
using Column = std::variant<std::vector<Truth>, std::vector<Integer>, std::vector<Real>>;

struct Place {
  const Sequence& sequence;
  int head, head_kv, row, first_key;
  std::size_t keys;
};

template <class Real>
class Evaluation {
 public:
  Evaluation(const AttentionSpec& spec, const std::vector<Tensor>& tables, const std::vector<double>& scalars,
             const Place& place, const std::vector<Real>* scores = nullptr,
             const FormulaNode* variable = nullptr)
      : spec_(spec),
        tables_(tables),
        scalars_(scalars),
        place_(place),
        scores_(scores),
        variable_(variable),
        errors_(spec.precise ? precise_functions : fast_functions) {}

  Column<Real> operator()(const FormulaNode& node) const {
    switch (node.kind) {
      case FormulaNode::Kind::integer:
        return std::vector<Integer>{{node.integer}};
      case FormulaNode::Kind::real:
        return one(node.real);
      case FormulaNode::Kind::name:
        return named(node.name);
      case FormulaNode::Kind::scalar: {
        const double value = scalars_[static_cast<std::size_t>(node.declared)];
        if (node.type == FormulaType::integer)
          return std::vector<Integer>{{static_cast<std::int32_t>(value)}};
        return one(value);
      }
      case FormulaNode::Kind::table:
        return element(node);
      case FormulaNode::Kind::operation:
        break;
    }
    return operation(node);
  }

  // The row-major places of the elements that a read of a table finds: one, or one for each key.
  std::vector<std::int64_t> places(const FormulaNode& node) const {
    const auto declared = static_cast<std::size_t>(node.declared);
    const Tensor& table = tables_[declared];
    std::vector<std::vector<Integer>> indices;
    std::size_t count = 1;
    for (const FormulaNode& operand : node.operands) {
      indices.push_back(std::get<std::vector<Integer>>((*this)(operand)));
      if (indices.back().size() != 1) count = indices.back().size();
    }
    std::vector<std::int64_t> places(count);
    for (std::size_t i = 0; i < count; ++i)
      for (std::size_t dim = 0; dim < indices.size() && places[i] >= 0; ++dim) {
        const Integer& index = indices[dim][indices[dim].size() == 1 ? 0 : i];
        const std::int64_t size = table.shape[dim];
        places[i] = !index.sure
                        ? -1
                        : places[i] * size + clamped(spec_.tables[declared].shape[dim], size, index.value);
      }
    return places;
  }

 private:
  static std::vector<Real> one(double value) {
    std::vector<Real> reals(1);
    make(value, reals.front());
    return reals;
  }

  Column<Real> named(FormulaName name) const {
    const Sequence& s = place_.sequence;
    const auto integer = [](int value) { return std::vector<Integer>{{value}}; };
    switch (name) {
      case FormulaName::score:
        return *scores_;
      case FormulaName::row:
        return integer(place_.row + s.row_offset);
      case FormulaName::position:
        return integer(position_of(s, place_.row + s.row_offset));
      case FormulaName::head:
        return integer(place_.head);
      case FormulaName::head_kv:
        return integer(place_.head_kv);
      case FormulaName::batch:
        return integer(s.batch);
      case FormulaName::seqlen_q:
        return integer(s.seqlen_q);
      case FormulaName::seqlen_k:
        return integer(s.seqlen_k);
      case FormulaName::key:
        break;
    }
    std::vector<Integer> keys(place_.keys);
    for (std::size_t i = 0; i < keys.size(); ++i)
      keys[i].value = s.key_offset + place_.first_key + static_cast<int>(i);
    return keys;
  }

  // f of the operands' values, key by key.
  template <class Result>
  static Column<Real> each(const auto& f, const auto&... operands) {
    const bool empty = (operands.empty() || ...);
    std::vector<Result> results(empty ? 0 : std::max({operands.size()...}));
    for (std::size_t i = 0; i < results.size(); ++i)
      results[i] = f(operands[operands.size() == 1 ? 0 : i]...);
    return results;
  }
  Column<Real> operation(const FormulaNode& node) const {
    const Op op = node.operation;
    const Column<Real> a = (*this)(node.operands[0]);
    const auto truths = [](const Column<Real>& column) -> const std::vector<Truth>& {
      return std::get<std::vector<Truth>>(column);
    };
    switch (op) {
      case Op::invert:
        return each<Truth>([](Truth x) { return Truth{!x.value, x.sure}; }, truths(a));
      case Op::to_real:
        return each<Real>(
            [](Integer x) {
              Real real;
              convert(x, real);
              return real;
            },
            std::get<std::vector<Integer>>(a));
      case Op::floor:
        return each<Integer>([](const Real& x) { return floor_of(x); }, std::get<std::vector<Real>>(a));
      case Op::exp:
      case Op::log:
      case Op::tanh:
      case Op::sqrt:
        return each<Real>([&](const Real& x) { return function(op, x, errors_); },
                          std::get<std::vector<Real>>(a));
      case Op::negate:
      case Op::absolute:
        if (const auto* integers = std::get_if<std::vector<Integer>>(&a))
          return each<Integer>([&](Integer x) { return op == Op::negate ? negative(x) : absolute(x); },
                               *integers);
        return each<Real>([&](const Real& x) { return op == Op::negate ? negative(x) : absolute(x); },
                          std::get<std::vector<Real>>(a));
      default:
        break;
    }
    const Column<Real> b = (*this)(node.operands[1]);
    switch (op) {
      case Op::both:
      case Op::either:
        return each<Truth>(
            [&](Truth x, Truth y) {
              const bool decides = op == Op::either;  // this value of either operand
              const bool value = decides ? x.value || y.value : x.value && y.value;
              const bool decided = (x.sure && x.value == decides) || (y.sure && y.value == decides);
              return Truth{value, decided || (x.sure && y.sure)};
            },
            truths(a), truths(b));
      case Op::select: {
        const Column<Real> c = (*this)(node.operands[2]);
        return std::visit(
            [&]<class T>(const std::vector<T>& yes) -> Column<Real> {
              return each<T>(
                  [](Truth condition, const T& x, const T& y) {
                    if (condition.sure) return condition.value ? x : y;
                    return condition.value ? either(y, x) : either(x, y);
                  },
                  truths(a), yes, std::get<std::vector<T>>(c));
            },
            b);
      }
      case Op::less:
      case Op::less_equal:
      case Op::greater:
      case Op::greater_equal:
      case Op::equal:
      case Op::not_equal:
        if (const auto* integers = std::get_if<std::vector<Integer>>(&a))
          return each<Truth>([&](Integer x, Integer y) { return compare(op, x, y); }, *integers,
                             std::get<std::vector<Integer>>(b));
        return each<Truth>([&](const Real& x, const Real& y) { return compare(op, x, y); },
                           std::get<std::vector<Real>>(a), std::get<std::vector<Real>>(b));
      default:
        if (const auto* integers = std::get_if<std::vector<Integer>>(&a))
          return each<Integer>([&](Integer x, Integer y) { return binary(op, x, y); }, *integers,
                               std::get<std::vector<Integer>>(b));
        return each<Real>([&](const Real& x, const Real& y) { return binary(op, x, y); },
                          std::get<std::vector<Real>>(a), std::get<std::vector<Real>>(b));
    }
  }

  // The index of an element within a dimension: clamped, and within the entry's own rows or keys of a total.
  std::int64_t clamped(const TableDimension& dim, std::int64_t size, std::int64_t index) const {
    const Sequence& s = place_.sequence;
    const auto within = [&](std::int64_t begin, int length) {
      index = begin + std::max<std::int64_t>(std::min<std::int64_t>(index, length - 1), 0);
    };
    if (dim.kind == TableDimension::Kind::total_q) within(s.q_begin, s.seqlen_q);
    if (dim.kind == TableDimension::Kind::total_k) within(s.k_begin, s.seqlen_k);
    return std::max<std::int64_t>(std::min(index, size - 1), 0);
  }

  Column<Real> element(const FormulaNode& node) const {
    const auto declared = static_cast<std::size_t>(node.declared);
    const Tensor& table = tables_[declared];
    std::vector<std::vector<Integer>> indices;
    std::size_t count = 1;
    for (const FormulaNode& operand : node.operands) {
      indices.push_back(std::get<std::vector<Integer>>((*this)(operand)));
      if (indices.back().size() != 1) count = indices.back().size();
    }
    bool empty = false;
    for (int dim = 0; dim < table.rank; ++dim) empty |= table.shape[dim] == 0;
    const auto at = [&](std::size_t i, bool& sure) {
      std::int64_t element = 0;
      for (std::size_t dim = 0; dim < indices.size(); ++dim) {
        const Integer& index = indices[dim][indices[dim].size() == 1 ? 0 : i];
        sure = sure && index.sure;
        element +=
            clamped(spec_.tables[declared].shape[dim], table.shape[dim], index.value) * table.strides[dim];
      }
      return element;
    };
    if (node.type == FormulaType::integer) {
      std::vector<Integer> values(count);
      for (std::size_t i = 0; i < count; ++i) {
        const std::int64_t element = at(i, values[i].sure);
        if (!empty) values[i].value = integer_at(table, element);
      }
      return values;
    }
    std::vector<Real> values(count);
    for (std::size_t i = 0; i < count; ++i) {
      bool sure = true;
      const std::int64_t element = at(i, sure);
      make(empty ? 0 : load_element(table.data, table.dtype, element), values[i]);
      if constexpr (std::is_same_v<Real, Bounded>)
        if (!sure) values[i].error = infinity;
      if constexpr (std::is_same_v<Real, Dual>) {
        if (!sure) values[i].value.error = infinity;
        if (&node == variable_) values[i].slope = {1, 0};
      }
    }
    return values;
  }

  static std::int32_t integer_at(const Tensor& table, std::int64_t element) {
    switch (table.dtype) {
      case DType::int8:
        return static_cast<const std::int8_t*>(table.data)[element];
      case DType::uint8:
        return static_cast<const std::uint8_t*>(table.data)[element];
      default:
        return static_cast<const std::int32_t*>(table.data)[element];
    }
  }

  const AttentionSpec& spec_;
  const std::vector<Tensor>& tables_;
  const std::vector<double>& scalars_;
  const Place& place_;
  const std::vector<Real>* scores_;
  const FormulaNode* variable_;  // the read of a table whose element derivatives are by
  const FunctionErrors& errors_;
};

[[noreturn]] void missing(const std::string& name) {
  throw Error(ErrorCode::invalid_argument, "oracle: " + name + " is missing");
}

template <class Value>
const Value& value_of(const AttentionArgs& args, const std::string& name) {
  for (const NamedArgument& argument : args.named)
    if (argument.name == name)
      if (const auto* value = std::get_if<Value>(&argument.value)) return *value;
  missing(name);
}

}  // namespace

Formulas::Formulas(const AttentionSpec& spec, const AttentionArgs& args) : spec_(spec), args_(args) {
  for (const Mask& mask : spec.mask)
    if (const auto* formula = std::get_if<FormulaMask>(&mask))
      masks_.push_back(parse_formula(formula->formula, FormulaUse::mask, spec));
  for (const std::string& formula : spec.score)
    scores_.push_back(parse_formula(formula, FormulaUse::score, spec));
  for (const DeclaredTable& table : spec.tables) {
    const Tensor& t = tables_.emplace_back(value_of<Tensor>(args, table.name));
    if (t.rank != static_cast<int>(table.shape.size()) || t.dtype != table.dtype)
      throw Error(ErrorCode::invalid_argument,
                  "oracle: table " + table.name + " is of another rank or dtype");
  }
  for (const DeclaredScalar& scalar : spec.scalars) {
    const double value = value_of<double>(args, scalar.name);
    scalars_.push_back(scalar.dtype == DType::fp32 ? static_cast<double>(static_cast<float>(value)) : value);
  }
}

namespace {

bool reads_head(const FormulaNode& node) {
  if (node.kind == FormulaNode::Kind::name)
    return node.name == FormulaName::head || node.name == FormulaName::head_kv;
  return std::any_of(node.operands.begin(), node.operands.end(), reads_head);
}

int head_kv_of(const AttentionArgs& args, int head) {
  const auto heads = [](const std::optional<Tensor>& t, const char* name) {
    if (!t) missing(name);
    return static_cast<int>(t->shape[t->rank - 2]);
  };
  return head / (heads(args.q, "q") / heads(args.k, "k"));
}

}  // namespace

bool Formulas::masks_differ_by_head() const {
  return std::any_of(masks_.begin(), masks_.end(), reads_head);
}

void Formulas::mask(const Sequence& sequence, int head, int row, int first_key, std::span<char> seen) const {
  const Place place{sequence, head, head_kv_of(args_, head), row, first_key, seen.size()};
  const Evaluation<float> evaluate(spec_, tables_, scalars_, place);
  for (const FormulaNode& formula : masks_) {
    const auto truths = std::get<std::vector<Truth>>(evaluate(formula));
    for (std::size_t i = 0; i < seen.size(); ++i)
      if (!truths[truths.size() == 1 ? 0 : i].value) seen[i] = 0;
  }
}

namespace {

// One value for each key.
template <class Real>
std::vector<Real> spread(Column<Real> column, std::size_t keys) {
  auto values = std::move(std::get<std::vector<Real>>(column));
  if (values.size() == 1) values.resize(keys, Real(values.front()));
  return values;
}

void find_reads(const FormulaNode& node, const AttentionSpec& spec, std::vector<const FormulaNode*>& reads) {
  if (node.kind == FormulaNode::Kind::table && spec.tables[static_cast<std::size_t>(node.declared)].grad)
    reads.push_back(&node);
  for (const FormulaNode& operand : node.operands) find_reads(operand, spec, reads);
}

// A kernel's derivative.
double kernel_error(const Bounded& derivative) {
  return is_zero(derivative) ? 0 : 2 * derivative.error + 0x1p-20 * std::abs(derivative.value);
}

}  // namespace

void Formulas::score(const Sequence& sequence, int head, int row, int first_key, std::span<double> scores,
                     std::span<double> errors) const {
  const Place place{sequence, head, head_kv_of(args_, head), row, first_key, scores.size()};
  std::vector<Bounded> values(scores.size());
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = {scores[i], errors[i]};
  for (const FormulaNode& formula : scores_)
    values = spread(Evaluation<Bounded>(spec_, tables_, scalars_, place, &values)(formula), values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    scores[i] = values[i].value;
    errors[i] = values[i].error;
  }
}

Formulas::Derivatives Formulas::derivatives(const Sequence& sequence, int head, int row, int first_key,
                                            std::span<const double> raw_scores,
                                            std::span<const double> raw_errors) const {
  const std::size_t keys = raw_scores.size();
  const Place place{sequence, head, head_kv_of(args_, head), row, first_key, keys};
  // The scores before each formula, and each formula's derivative by them.
  std::vector<std::vector<Dual>> before(1, std::vector<Dual>(keys));
  for (std::size_t i = 0; i < keys; ++i) before[0][i] = {{raw_scores[i], raw_errors[i]}, {1, 0}};
  std::vector<std::vector<Bounded>> slopes;
  for (const FormulaNode& formula : scores_) {
    std::vector<Dual> after =
        spread(Evaluation<Dual>(spec_, tables_, scalars_, place, &before.back())(formula), keys);
    std::vector<Bounded>& slope = slopes.emplace_back(keys);
    for (std::size_t i = 0; i < keys; ++i) {
      slope[i] = after[i].slope;
      after[i].slope = {1, 0};
    }
    before.push_back(std::move(after));
  }
  Derivatives all;
  std::vector<Bounded> later(keys, Bounded{1, 0});  // the final score by that after a formula
  for (std::size_t at = scores_.size(); at-- > 0;) {
    std::vector<Dual> fixed = before[at];
    for (Dual& score : fixed) score.slope = {};
    std::vector<const FormulaNode*> reads;
    find_reads(scores_[at], spec_, reads);
    for (const FormulaNode* read : reads) {
      const Evaluation<Dual> evaluate(spec_, tables_, scalars_, place, &fixed, read);
      const std::vector<Dual> values = spread(evaluate(scores_[at]), keys);
      ByElement& element = all.by_elements.emplace_back();
      element.table = static_cast<std::size_t>(read->declared);
      element.places = evaluate.places(*read);
      element.places.resize(keys, std::int64_t{element.places.front()});
      for (std::size_t i = 0; i < keys; ++i) {
        const Bounded derivative = times(later[i], values[i].slope);
        element.values.push_back(derivative.value);
        element.errors.push_back(kernel_error(derivative));
      }
    }
    for (std::size_t i = 0; i < keys; ++i) {
      const Bounded& slope = slopes[at][i];
      later[i] = slope.value == 1 && slope.error == 0 ? later[i] : times(later[i], slope);
    }
  }
  for (const Bounded& derivative : later) {
    all.by_score.push_back(derivative.value);
    all.errors.push_back(derivative.value == 1 && derivative.error == 0 ? 0 : kernel_error(derivative));
  }
  return all;
}

}  // namespace flashjit::verify
