#include "tools/verify/random_names.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>

#include "codegen/formulas/formula.hpp"
#include "codegen/spec/declarations.hpp"
#include "tools/verify/draw.hpp"

namespace flashjit::verify {
namespace {

using Kind = TableDimension::Kind;

class NamedMaker {
 public:
  NamedMaker(const Shape& shape, std::uint64_t seed) : shape_(shape), draw_(seed ^ 0x6e616d65) {}

  NamedTable table(const DeclaredTable& declared) {
    NamedTable table{declared.name, declared.dtype, {}, {}};
    std::int64_t count = 1;
    for (const TableDimension& dim : declared.shape) {
      table.shape.push_back(size_of_dimension(dim));
      count *= table.shape.back();
    }
    table.elements.resize(static_cast<std::size_t>(count) * size_of(table.dtype));
    if (count == 0) return table;
    if (type_of(table.dtype) == FormulaType::real) {
      fill_random(table.view(), draw_.bits(), {.outlier_every = 0, .long_row_every = 0});
      return table;
    }
    const std::int64_t last = table.shape.back();
    const Kind kind = declared.shape.back().kind;
    const bool along =
        kind == Kind::seqlen_q || kind == Kind::seqlen_k || kind == Kind::total_q || kind == Kind::total_k;
    int id = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      id = i % last == 0 ? draw_.between(-1, 2) : id + draw_.chance(0.125);
      store(table, i, along ? id : draw_.between(0, std::max(shape_.seqlen_k, 1)));
    }
    return table;
  }

  double scalar(const DeclaredScalar& declared) {
    if (declared.dtype == DType::fp32) return draw_.between(2, 120) / 4.0;
    return draw_.between(-3, shape_.seqlen_k + 3);
  }

 private:
  std::int64_t size_of_dimension(const TableDimension& dim) {
    if (dim.or_one && draw_.chance(0.5)) return 1;
    if (const auto size = size_in(shape_, dim)) return *size;
    const auto [size, added] = free_.try_emplace(dim.name, 0);
    if (added) size->second = draw_.between(1, 40);
    return size->second;
  }

  void store(NamedTable& table, std::int64_t at, std::int64_t value) {
    if (table.dtype == DType::int32) {
      const auto word = draw_.chance(0.005) ? draw_.word() : static_cast<std::int32_t>(value);
      std::memcpy(table.elements.data() + static_cast<std::size_t>(at) * sizeof word, &word, sizeof word);
      return;
    }
    const bool any = draw_.chance(0.25);
    table.elements[static_cast<std::size_t>(at)] =
        static_cast<std::byte>(any ? draw_.bits() : draw_.bits() % 2);
  }

  const Shape shape_;
  Draw draw_;
  std::map<std::string, std::int64_t> free_;
};

}  // namespace

Tensor NamedTable::view() const {
  return Tensor::contiguous(const_cast<std::byte*>(elements.data()), dtype, {}, shape);
}

std::vector<NamedArgument> NamedData::arguments() const {
  std::vector<NamedArgument> all;
  for (const NamedTable& table : tables) all.emplace_back(table.name, table.view());
  for (const NamedScalar& scalar : scalars) all.emplace_back(scalar.name, scalar.value);
  return all;
}

NamedData random_named_data(const AttentionSpec& spec, const Shape& shape, std::uint64_t seed) {
  NamedData data;
  NamedMaker make(shape, seed);
  for (const DeclaredTable& table : spec.tables) data.tables.push_back(make.table(table));
  for (const DeclaredScalar& scalar : spec.scalars)
    data.scalars.push_back({scalar.name, make.scalar(scalar)});
  return data;
}

}  // namespace flashjit::verify
