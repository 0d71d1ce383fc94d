#include "tools/verify/random_names.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>

#include "codegen/declarations.hpp"
#include "tools/verify/draw.hpp"

namespace flashjit::verify {
namespace {

using Kind = TableDimension::Kind;

class NamedMaker {
 public:
  NamedMaker(const Shape& shape, std::uint64_t seed, bool hard)
      : shape_(shape), hard_(hard), draw_(seed ^ 0x6e616d65) {}

  NamedTable table(const DeclaredTable& declared) {
    NamedTable table{declared.name, declared.dtype, {}, {}};
    std::int64_t count = 1;
    for (bool shared = false;; shared = true) {
      table.shape.clear();
      for (const TableDimension& dim : declared.shape) table.shape.push_back(size_of_dimension(dim, shared));
      const auto product = product_of(table.shape);
      constexpr std::int64_t most = 1 << 30, many = 1 << 27;
      if (product && (*product <= many || (shared && *product <= most))) {
        count = *product;
        break;
      }
      if (shared)
        throw Error(ErrorCode::invalid_argument, "table " + declared.name + " would have more than " +
                                                     std::to_string(most) +
                                                     " elements; a smaller shape would work");
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
    std::int64_t id = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t place = i % last;
      // Four documents, or any.
      id = !hard_ ? 4 * place / last : place == 0 ? draw_.between(-1, 2) : id + draw_.chance(0.125);
      store(table, i, along ? id : draw_.between(0, std::max(shape_.seqlen_k, 1)));
    }
    return table;
  }

  double scalar(const DeclaredScalar& declared) {
    if (declared.dtype == DType::fp32) return hard_ ? static_cast<double>(draw_.between(2, 120)) / 4 : 20;
    return static_cast<double>(hard_ ? draw_.between(-3, shape_.seqlen_k + 3)
                                     : std::max(1, shape_.seqlen_k / 4));
  }

 private:
  std::int64_t size_of_dimension(const TableDimension& dim, bool shared) {
    const std::int64_t size = whole_size(dim);
    const bool one = shared
                         ? dim.kind == Kind::batch || dim.kind == Kind::heads_q || dim.kind == Kind::heads_kv
                         : hard_ && draw_.chance(0.5);
    return dim.or_one && one ? 1 : size;
  }
  std::int64_t whole_size(const TableDimension& dim) {
    switch (dim.kind) {
      case Kind::number:
        return dim.size;
      case Kind::batch:
        return shape_.batch;
      case Kind::heads_q:
        return shape_.num_heads_q;
      case Kind::heads_kv:
        return shape_.num_heads_kv;
      case Kind::seqlen_q:
        return shape_.seqlen_q;
      case Kind::seqlen_k:
        return shape_.seqlen_k;
      case Kind::total_q:
        return shape_.total_q;
      case Kind::total_k:
        return shape_.total_k;
      case Kind::free:
        break;
    }
    const auto [size, added] = free_.try_emplace(dim.name, 128);
    if (added && hard_) size->second = draw_.between(1, 40);
    return size->second;
  }

  void store(NamedTable& table, std::int64_t at, std::int64_t value) {
    if (table.dtype == DType::int32) {
      const auto word = hard_ && draw_.chance(0.005) ? draw_.word() : static_cast<std::int32_t>(value);
      std::memcpy(table.elements.data() + static_cast<std::size_t>(at) * sizeof word, &word, sizeof word);
      return;
    }
    const bool any = hard_ && draw_.chance(0.25);
    table.elements[static_cast<std::size_t>(at)] =
        static_cast<std::byte>(any ? draw_.bits() : draw_.bits() % 2);
  }

  const Shape shape_;
  const bool hard_;
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

NamedData random_named_data(const AttentionSpec& spec, const Shape& shape, std::uint64_t seed, bool hard) {
  NamedData data;
  NamedMaker make(shape, seed, hard);
  for (const DeclaredTable& table : spec.tables) data.tables.push_back(make.table(table));
  for (const DeclaredScalar& scalar : spec.scalars)
    data.scalars.push_back({scalar.name, make.scalar(scalar)});
  return data;
}

}  // namespace flashjit::verify
