#include "tools/verify/formula.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <variant>

#include "codegen/declarations.hpp"
#include "tools/verify/element.hpp"

namespace flashjit::verify {
namespace {

using Op = FormulaOperation;

constexpr double infinity = std::numeric_limits<double>::infinity();

// `sure`: a kernel has the same value.
struct Integer {
  std::int32_t value = 0;
  bool sure = true;
};
struct Truth {
  bool value = false;
  bool sure = true;
};
// A real of a score, and a bound on a kernel's error.
struct Bounded {
  double value = 0, error = 0;
};

// --- integers wrap; division by 0 gives 0

std::int32_t wrapped(std::int64_t value) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(static_cast<std::uint64_t>(value)));
}
Integer binary(Op op, Integer a, Integer b) {
  const std::int64_t x = a.value, y = b.value;
  std::int64_t result = 0;
  switch (op) {
    case Op::add:
      result = x + y;
      break;
    case Op::subtract:
      result = x - y;
      break;
    case Op::multiply:
      result = x * y;
      break;
    case Op::divide:
      result = y == 0 ? 0 : x / y;
      break;
    case Op::remainder:
      result = y == 0 ? 0 : x % y;
      break;
    case Op::minimum:
      result = std::min(x, y);
      break;
    default:
      result = std::max(x, y);
  }
  return {wrapped(result), a.sure && b.sure};
}
Integer negative(Integer a) {
  return {wrapped(-std::int64_t{a.value}), a.sure};
}
Integer absolute(Integer a) {
  return a.value < 0 ? negative(a) : a;
}

std::int32_t saturated_floor(double value) {
  using Limits = std::numeric_limits<std::int32_t>;
  if (std::isnan(value)) return 0;
  return static_cast<std::int32_t>(std::clamp<double>(std::floor(value), Limits::min(), Limits::max()));
}

// --- reals of masks: float32, each operation rounded by itself

float binary(Op op, float a, float b) {
  switch (op) {
    case Op::add:
      return a + b;
    case Op::subtract:
      return a - b;
    case Op::multiply:
      return a * b;
    case Op::divide:
      return a / b;
    case Op::minimum:
      return std::fmin(a, b);
    default:
      return std::fmax(a, b);
  }
}
float negative(float a) {
  return -a;
}
float absolute(float a) {
  return std::fabs(a);
}
float function(Op op, float a, const FunctionErrors&) {
  switch (op) {
    case Op::exp:
      return std::exp(a);
    case Op::log:
      return std::log(a);
    case Op::tanh:
      return std::tanh(a);
    default:
      return std::sqrt(a);
  }
}
Integer floor_of(float a) {
  return {saturated_floor(a)};
}
bool holds(Op op, auto a, auto b) {
  switch (op) {
    case Op::less:
      return a < b;
    case Op::less_equal:
      return a <= b;
    case Op::greater:
      return a > b;
    case Op::greater_equal:
      return a >= b;
    case Op::equal:
      return a == b;
    default:
      return a != b;
  }
}
Truth compare(Op op, float a, float b) {
  return {holds(op, a, b)};
}
Truth compare(Op op, Integer a, Integer b) {
  return {holds(op, a.value, b.value), a.sure && b.sure};
}
void convert(Integer from, float& to) {
  to = static_cast<float>(from.value);
}
void make(double value, float& to) {
  to = static_cast<float>(value);
}
float either(float, float b) {  // conditions of masks are sure
  return b;
}
Integer either(Integer a, Integer b) {
  return {b.value, b.sure && a.sure && a.value == b.value};
}
Truth either(Truth a, Truth b) {
  return {b.value, b.sure && a.sure && a.value == b.value};
}

// --- reals of scores

// With a rounding of so much of the result. Infinity and NaN, of operands with finite errors, have none.
Bounded rounded(double value, double error, double relative, double absolute = 0x1p-126) {
  constexpr double largest = std::numeric_limits<float>::max();
  if (!std::isfinite(value)) return {value, 0};
  if (value == 0 && error == 0) return {value, 0};
  error += relative * (std::abs(value) + error) + absolute;
  return {value, std::abs(value) + error < largest ? error : infinity};
}
double gap(const Bounded& a) {  // an error counts only where the value is finite
  return std::isfinite(a.value) ? a.error : a.error > 0 ? infinity : 0;
}
Bounded binary(Op op, const Bounded& a, const Bounded& b) {
  const double x = a.value, y = b.value, ex = gap(a), ey = gap(b);
  if (ex == infinity || ey == infinity) return {x + y, infinity};
  constexpr double unit = 0x1p-23;
  switch (op) {
    case Op::add:
      return rounded(x + y, ex + ey, unit);
    case Op::subtract:
      return rounded(x - y, ex + ey, unit);
    case Op::multiply:
      // Infinity times a number that may be 0, or of either sign.
      if ((std::isinf(x) && ey > 0 && std::abs(y) <= ey) || (std::isinf(y) && ex > 0 && std::abs(x) <= ex))
        return {x * y, infinity};
      return rounded(x * y, std::abs(x) * ey + std::abs(y) * ex + ex * ey, unit);
    case Op::divide: {
      if (ex == 0 && ey == 0) return rounded(x / y, 0, 0x1p-21);
      const double nearest = std::abs(y) - ey;  // of the divisor to 0
      if (!(nearest > 0)) return {x / y, infinity};
      return rounded(x / y, (ex + std::abs(x / y) * ey) / nearest, 0x1p-21);
    }
    default: {
      const bool least = op == Op::minimum;
      if (std::isnan(x) || std::isnan(y)) return std::isnan(x) ? b : a;
      return {least ? std::min(x, y) : std::max(x, y), std::max(ex, ey)};
    }
  }
}
Bounded negative(const Bounded& a) {
  return {-a.value, a.error};
}
Bounded absolute(const Bounded& a) {
  return {std::abs(a.value), a.error};
}
Bounded function(Op op, const Bounded& a, const FunctionErrors& errors) {
  const double x = a.value, e = gap(a);
  if (e == infinity && op != Op::tanh) return {x, infinity};
  switch (op) {
    case Op::exp: {
      const double y = std::exp(x);
      return rounded(y, y * std::expm1(e),
                     errors.exp_relative + (std::isinf(x) ? 0 : errors.exp_operand * std::abs(x)));
    }
    case Op::log:
      if (e > 0 && !(x > e)) return {std::log(x), infinity};
      return rounded(std::log(x), e > 0 ? std::log(x / (x - e)) : 0, errors.log_relative,
                     errors.log_absolute + 0x1p-126);
    case Op::tanh: {
      if (std::isnan(x)) return {x, e};
      // Steepest where it is nearest to 0.
      const double nearest = std::max(std::abs(x) - e, 0.0),
                   slope = 1 - std::tanh(nearest) * std::tanh(nearest);
      return rounded(std::tanh(x), std::isinf(x) ? e : std::min(e * slope, 2.0), errors.tanh_relative,
                     errors.tanh_absolute + 0x1p-126);
    }
    default:
      if (e > 0 && !(x > e)) return {std::sqrt(x), infinity};
      return rounded(std::sqrt(x), e > 0 ? std::sqrt(x) - std::sqrt(x - e) : 0, errors.sqrt_relative);
  }
}
Integer floor_of(const Bounded& a) {
  const std::int32_t value = saturated_floor(a.value);
  const bool sure = a.error == 0 || (saturated_floor(a.value - a.error) == value &&
                                     saturated_floor(a.value + a.error) == value);
  return {value, sure};
}
Truth compare(Op op, const Bounded& a, const Bounded& b) {
  const double error = gap(a) + gap(b);
  return {holds(op, a.value, b.value), error == 0 || std::abs(a.value - b.value) > error};
}
void convert(Integer from, Bounded& to) {
  const double size = std::abs(static_cast<double>(from.value));
  to = {static_cast<double>(from.value), !from.sure ? infinity : size > 0x1p24 ? size * 0x1p-24 : 0};
}
void make(double value, Bounded& to) {
  to = {value, 0};
}
Bounded either(const Bounded& a, const Bounded& b) {
  const double error = std::abs(a.value - b.value) + std::max(gap(a), gap(b));
  return {b.value, a.value == b.value ? std::max(gap(a), gap(b)) : std::isnan(error) ? infinity : error};
}

// --- reals of scores with a derivative

struct Dual {
  Bounded value, slope;
};
bool is_zero(const Bounded& a) {
  return a.value == 0 && a.error == 0;
}
// A slope of 0 stays 0, whatever it is multiplied by: the operand does not change.
Bounded times(const Bounded& a, const Bounded& slope) {
  return is_zero(slope) ? slope : binary(Op::multiply, a, slope);
}
Bounded plus(const Bounded& a, const Bounded& b) {
  return is_zero(a) ? b : is_zero(b) ? a : binary(Op::add, a, b);
}
Bounded over(const Bounded& slope, const Bounded& a) {
  return is_zero(slope) ? slope : binary(Op::divide, slope, a);
}
Dual binary(Op op, const Dual& a, const Dual& b) {
  const Bounded value = binary(op, a.value, b.value);
  switch (op) {
    case Op::add:
      return {value, plus(a.slope, b.slope)};
    case Op::subtract:
      return {value, plus(a.slope, negative(b.slope))};
    case Op::multiply:
      return {value, plus(times(b.value, a.slope), times(a.value, b.slope))};
    case Op::divide:
      return {value, over(plus(a.slope, negative(times(value, b.slope))), b.value)};
    default: {
      const Truth less =
          op == Op::minimum ? compare(Op::less, b.value, a.value) : compare(Op::less, a.value, b.value);
      const bool second = std::isnan(a.value.value) || less.value;
      const Bounded &chosen = second ? b.slope : a.slope, &other = second ? a.slope : b.slope;
      return {value, less.sure || std::isnan(a.value.value) ? chosen : either(other, chosen)};
    }
  }
}
Dual negative(const Dual& a) {
  return {negative(a.value), negative(a.slope)};
}
Dual absolute(const Dual& a) {
  const Bounded zero{}, slope = a.value.value < 0 ? negative(a.slope) : a.value.value > 0 ? a.slope : zero;
  const bool sure = compare(Op::less, a.value, zero).sure;
  return {absolute(a.value), sure ? slope : either(negative(slope), either(zero, slope))};
}
Dual function(Op op, const Dual& a, const FunctionErrors& errors) {
  const Bounded value = function(op, a.value, errors), one{1, 0}, half{0.5, 0};
  switch (op) {
    case Op::exp:
      return {value, times(value, a.slope)};
    case Op::log:
      return {value, over(a.slope, a.value)};
    case Op::tanh:
      return {value, times(binary(Op::subtract, one, binary(Op::multiply, value, value)), a.slope)};
    default:
      if (is_zero(value) || std::isnan(value.value)) return {value, {}};
      return {value, over(times(half, a.slope), value)};
  }
}
Integer floor_of(const Dual& a) {
  return floor_of(a.value);
}
Truth compare(Op op, const Dual& a, const Dual& b) {
  return compare(op, a.value, b.value);
}
void convert(Integer from, Dual& to) {
  to = {};
  convert(from, to.value);
}
void make(double value, Dual& to) {
  to = {{value, 0}, {}};
}
Dual either(const Dual& a, const Dual& b) {
  return {either(a.value, b.value), either(a.slope, b.slope)};
}

// --- trees, for all keys of a row at once

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
        return integer(place_.row);
      case FormulaName::position:
        return integer(place_.row + s.seqlen_k - s.seqlen_q);
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
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i].value = place_.first_key + static_cast<int>(i);
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
