#include "codegen/spec/spec.hpp"

#include <algorithm>
#include <bit>
#include <string_view>
#include <type_traits>
#include <utility>

#include "codegen/base/suggest.hpp"
#include "codegen/spec/spec_fields.hpp"

namespace flashjit {
namespace {

class Hasher {
 public:
  void add(std::size_t value) noexcept {
    // Multiplies by 2^64 / golden ratio and folds, so that every bit of the value reaches the low bits.
    state_ = (state_ ^ value) * 0x9e3779b97f4a7c15u;
    state_ ^= state_ >> 32;
  }
  // Small values share a word: most fields are small, and every get() computes the hash.
  void add_small(unsigned value) noexcept { small_ = std::rotl(small_, 4) ^ value; }

  void add_field(bool value) noexcept { add_small(value); }
  void add_field(int value) noexcept { add(unsigned(value)); }
  void add_field(RotaryStyle value) noexcept { add_small(unsigned(value)); }
  void add_field(const std::optional<DType>& value) noexcept { add_small(value ? 1 + unsigned(*value) : 0); }
  void add_field(const std::optional<KvScale>& value) noexcept {
    add_small(value ? 1 + unsigned(*value) : 0);
  }
  void add_field(const std::optional<Rotary>& rotary) noexcept {
    if (!rotary) return;
    add_small(1);
    rotary->for_each_field(*rotary,
                           [&](const char*, const auto& value, const auto&...) { add_field(value); });
  }
  void add_field(const std::vector<Mask>& masks) noexcept {
    for (const Mask& mask : masks) {
      add(mask.index());
      std::visit(
          [&](const auto& m) {
            m.for_each_field(m, [&](const char*, const auto& value, const auto&...) { add_value(value); });
          },
          mask);
    }
  }
  void add_field(const std::vector<std::string>& formulas) noexcept {
    for (const std::string& formula : formulas) add_value(formula);
  }
  void add_field(const std::vector<DeclaredTable>& tables) noexcept {
    for (const DeclaredTable& table : tables) {
      add_value(table.name);
      add(unsigned(table.grad) << 16 | unsigned(table.dtype) << 8 | unsigned(table.shape.size()));
      for (const TableDimension& dim : table.shape) {
        add(std::size_t(dim.size) << 8 | unsigned(dim.kind) << 1 | dim.or_one);
        add_value(dim.name);
      }
    }
  }
  void add_field(const std::vector<DeclaredScalar>& scalars) noexcept {
    for (const DeclaredScalar& scalar : scalars) {
      add_value(scalar.name);
      add(unsigned(scalar.dtype));
    }
  }
  void add_field(const PinnedConfig& config) noexcept {
    std::size_t place = 0;
    for_each_choice([&](const char*, auto, auto pin) {
      ++place;
      if (config.*pin) add(place << 32 | unsigned(*(config.*pin)));
    });
  }

  std::size_t result() noexcept {
    add(small_);
    return state_;
  }

 private:
  void add_value(const std::string& text) noexcept {
    // An empty one is nothing: most of these fields are absent.
    if (!text.empty()) add(std::hash<std::string_view>()(text));
  }
  template <class Small>
  void add_value(Small value) noexcept {
    add(std::size_t(value));
  }

  std::size_t state_ = 0x243f6a8885a308d3u, small_ = 0;
};

}  // namespace

std::string AttentionSpec::to_json() const {
  return canonical_text(*this);
}

std::size_t AttentionSpec::hash() const noexcept {
  Hasher hasher;
  hasher.add_small(unsigned(op));
  hasher.add_small(unsigned(dtype));
  hasher.add_field(head_dim);
  [&]<std::size_t... i>(std::index_sequence<i...>) {
    (hasher.add_field(this->*std::get<spec_fields[i].member.index()>(spec_fields[i].member)), ...);
  }(std::make_index_sequence<std::size(spec_fields)>());
  return hasher.result();
}

std::string to_json(const PinnedConfig& config) {
  std::string text;
  for_each_choice([&](const char* name, auto choice, auto pin) {
    if (!(config.*pin)) return;
    constexpr bool is_word = std::is_same_v<decltype(choice), TileOrder KernelConfig::*>;
    const char* quote = is_word ? "\"" : "";
    text += (text.empty() ? "\"" : ", \"") + std::string(name) + "\": " + quote +
            choice_text(*(config.*pin)) + quote;
  });
  return "{" + text + "}";
}

Operation operation_named(std::string_view name) {
  std::vector<std::string_view> names;
  for (const OperationInfo& row : operation_table) {
    if (name == row.name) return row.op;
    names.emplace_back(row.name);
  }
  throw Error(ErrorCode::invalid_spec,
              "op " + in_quotes(name) + " is not one of " + listed(names) + did_you_mean(name, names));
}

const char* to_string(Operation op) noexcept {
  const auto row = static_cast<std::size_t>(op);
  return row < num_operations ? operation_table[row].name : "unknown";
}

const char* to_string(DType dtype) noexcept {
  switch (dtype) {
    case DType::fp32:
      return "fp32";
    case DType::fp16:
      return "fp16";
    case DType::bf16:
      return "bf16";
    case DType::int32:
      return "int32";
    case DType::int64:
      return "int64";
    case DType::int8:
      return "int8";
    case DType::uint8:
      return "uint8";
    case DType::fp8_e4m3:
      return "fp8_e4m3";
    case DType::fp8_e5m2:
      return "fp8_e5m2";
    case DType::fp8_ds_mla:
      return "fp8_ds_mla";
  }
  return "unknown";
}

const char* to_string(KvScale scale) noexcept {
  switch (scale) {
    case KvScale::tensor:
      return "tensor";
    case KvScale::head:
      return "head";
    case KvScale::token_head:
      return "token_head";
  }
  return "unknown";
}

const char* to_string(RotaryStyle style) noexcept {
  switch (style) {
    case RotaryStyle::half:
      return "half";
    case RotaryStyle::interleaved:
      return "interleaved";
  }
  return "unknown";
}

const char* to_string(TileOrder order) noexcept {
  switch (order) {
    case TileOrder::heads:
      return "heads";
    case TileOrder::sections:
      return "sections";
    case TileOrder::waves:
      return "waves";
  }
  return "unknown";
}

std::size_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::fp32:
    case DType::int32:
      return 4;
    case DType::fp16:
    case DType::bf16:
      return 2;
    case DType::int64:
      return 8;
    case DType::int8:
    case DType::uint8:
    case DType::fp8_e4m3:
    case DType::fp8_e5m2:
    case DType::fp8_ds_mla:
      return 1;
  }
  return 0;
}

}  // namespace flashjit
