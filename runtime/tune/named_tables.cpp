#include "runtime/tune/named_tables.hpp"

#include <algorithm>
#include <cstring>
#include <random>

#include "codegen/formulas/formula.hpp"
#include "runtime/arguments/checks.hpp"

namespace flashjit {
namespace {

using Kind = TableDimension::Kind;

std::vector<std::int64_t> sizes_of(const DeclaredTable& table, const Shape& shape) {
  constexpr std::int64_t many = 1 << 27, most = 1 << 30;
  std::vector<std::int64_t> sizes;
  for (const bool shared : {false, true}) {
    sizes.clear();
    for (const TableDimension& dim : table.shape) {
      const bool along = dim.kind == Kind::seqlen_q || dim.kind == Kind::seqlen_k;
      sizes.push_back(dim.or_one && (shared || !along) ? 1 : size_in(shape, dim).value_or(128));
    }
    const auto count = product_of(sizes);
    if (count && *count <= (shared ? most : many)) return sizes;
  }
  refuse_argument("table ", table.name, " would have more than ", most,
                  " elements; a smaller shape, or a table of your own, would work");
}

// The bits of n / 64 for n = -128 ... 127, which every dtype of reals holds.
void store_real(DType dtype, int n, char* to) {
  const float value = static_cast<float>(n) / 64;
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (dtype == DType::fp32) {
    std::memcpy(to, &bits, sizeof bits);
    return;
  }
  // bf16 is the upper half; fp16 has the exponent with bias 15 instead of 127.
  const std::uint32_t fp16 = n == 0 ? 0 : (bits >> 16 & 0x8000) | ((bits >> 13 & 0x3ffff) - (112 << 10));
  const auto half = static_cast<std::uint16_t>(dtype == DType::bf16 ? bits >> 16 : fp16);
  std::memcpy(to, &half, sizeof half);
}

}  // namespace

std::vector<TypicalTable> typical_named_tables(const AttentionSpec& spec, const Shape& shape) {
  std::vector<TypicalTable> tables;
  std::minstd_rand random(5);
  for (const DeclaredTable& declared : spec.tables) {
    TypicalTable& table = tables.emplace_back(&declared, sizes_of(declared, shape));
    const std::int64_t count = product_of(table.shape).value_or(0), last = table.shape.back();
    const Kind kind = declared.shape.back().kind;
    const bool along =
        kind == Kind::seqlen_q || kind == Kind::seqlen_k || kind == Kind::total_q || kind == Kind::total_k;
    const std::size_t width = size_of(declared.dtype);
    table.elements.resize(static_cast<std::size_t>(count) * width);
    for (std::int64_t i = 0; i < count; ++i) {
      char* const to = table.elements.data() + static_cast<std::size_t>(i) * width;
      if (type_of(declared.dtype) == FormulaType::real) {
        store_real(declared.dtype, static_cast<int>(random() >> 8 & 255) - 128, to);
      } else if (width == 1) {
        *to = static_cast<char>(random() >> 8 & 1);
      } else {
        const auto keys = static_cast<std::uint32_t>(std::max(shape.seqlen_k, 1));
        const auto value = static_cast<std::int32_t>(along ? 4 * (i % last) / last : random() % keys);
        std::memcpy(to, &value, sizeof value);
      }
    }
  }
  return tables;
}

double typical_scalar(const DeclaredScalar& scalar, const Shape& shape) {
  return scalar.dtype == DType::fp32 ? 20 : std::max(1, shape.seqlen_k / 4);
}

}  // namespace flashjit
