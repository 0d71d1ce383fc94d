#include "spec.hpp"

#include <algorithm>
#include <bit>
#include <string_view>
#include <type_traits>
#include <utility>

#include "declarations.hpp"
#include "families/kernel_family.hpp"
#include "float_state.hpp"
#include "formula_traits.hpp"
#include "mask_rules.hpp"
#include "spec_fields.hpp"

namespace flashjit {
namespace {

constexpr Range usual_head_dims = {.first = head_dims.first, .last = 256, .step = head_dims.step};

// Multi-head latent attention in the form of one shared head: K of 576 elements, V their first 512
// (DeepSeek-V2, 2024).
void check_mla(const AttentionSpec& spec) {
  constexpr int latent = 512, key = 576;
  if (spec.head_dim != key || (spec.head_dim_v != latent && spec.head_dim_v != key)) return;
  throw Error(
      ErrorCode::unsupported,
      "head_dim 576 is that of MLA, whose V is a part of K: MLA is not supported by this version; heads of "
      "its up-projected K and V would work: head_dim 192, head_dim_v 128");
}

void check_dtype_of(const char* field, const std::optional<DType>& value, DType dtype) {
  if (!value || *value == dtype || *value == DType::fp32) return;
  invalid(std::string(field) + " " + to_string(*value) + " is neither fp32 nor the dtype, " +
          to_string(dtype) + "; leaving it out would work");
}

void check_kv_dtype(const AttentionSpec& spec) {
  if (!spec.kv_dtype) {
    if (spec.kv_scale)
      throw Error(ErrorCode::unsupported,
                  std::string("kv_scale ") + to_string(*spec.kv_scale) +
                      " has no meaning without kv_dtype; a kv_dtype, or leaving kv_scale out, would work");
    return;
  }
  const std::string asked = std::string("kv_dtype ") + to_string(*spec.kv_dtype);
  if (size_of(*spec.kv_dtype) != 1)
    invalid(asked +
            " is not one of int8, fp8_e4m3, fp8_e5m2; leaving it out, which means the dtype, would work");
  if (spec.dtype == DType::fp32)
    throw Error(ErrorCode::unsupported, asked + " is not supported with dtype fp32; bf16 or fp16 would work");
  if (info_of(spec.op).caches == When::by_field && !spec.paged)
    throw Error(ErrorCode::unsupported, asked + " is not supported by a " + to_string(spec.op) +
                                            " without pages; \"paged\": true or op decode would work");
  if (spec.dropout)
    throw Error(
        ErrorCode::unsupported,
        asked + " is not supported with dropout, which is for training; leaving either out would work");
}

void check_rotary(const AttentionSpec& spec) {
  if (!spec.rotary) return;
  if (spec.rotary->dim) check_value("rotary.dim", spec.rotary->dim, Range{2, spec.head_dim, 2});
  check_dtype_of("rotary.tables", spec.rotary->tables, spec.dtype);
  if (info_of(spec.op).appends == When::by_field && !spec.append)
    throw Error(ErrorCode::unsupported, std::string("rotary is not supported by a ") + to_string(spec.op) +
                                            " that appends nothing; \"append\": true or op append_kv would "
                                            "work");
}

void check_block_lists(const AttentionSpec& spec) {
  if (!info_of(spec.op).makes_lists) return;
  const auto* blocks = find_mask<BlockSparseMask>(spec.mask);
  if (!blocks || !blocks->of_masks)
    throw Error(
        ErrorCode::unsupported,
        std::string("a spec without a block_sparse mask with of_masks is not supported by op ") +
            to_string(spec.op) +
            ", which "
            R"(makes the lists of one; mask [{"kind": "block_sparse", "of_masks": true}, "causal"] would work)");
  if (!blocks->per_head && masks_differ_by_head(spec))
    invalid(
        "a formula of the mask reads head or head_kv, and block_sparse with \"per_head\": false has one list "
        "for "
        "all heads; \"per_head\": true would work");
}

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

AttentionSpec AttentionSpec::validated() const {
  const DefaultFloatState state;
  if (static_cast<std::size_t>(op) >= num_operations)
    invalid("op " + std::to_string(static_cast<int>(op)) + " is no enumerator of Operation; " +
            to_string(Operation::forward) + " would work");
  AttentionSpec spec = *this;
  write_out_formulas(spec);
  spec = without_defaults(std::move(spec));
  if (spec.head_dim_v == 0) spec.head_dim_v = spec.head_dim;

  if (spec.dtype != DType::bf16 && spec.dtype != DType::fp16 && spec.dtype != DType::fp32)
    invalid(std::string("dtype ") + to_string(spec.dtype) +
            " is none that queries and outputs have; bf16, fp16 or fp32 would work");
  check_mla(spec);
  check_value("head_dim", spec.head_dim, usual_head_dims);
  check_value("head_dim_v", spec.head_dim_v, usual_head_dims);
  check_rotary(spec);
  check_fields(spec);
  check_dtype_of("o_dtype", spec.o_dtype, spec.dtype);
  check_dtype_of("parts_dtype", spec.parts_dtype, spec.dtype);
  check_dtype_of("grad_dtype", spec.grad_dtype, spec.dtype);
  check_kv_dtype(spec);
  check_masks(spec.mask);
  check_block_lists(spec);
  check_supported(spec);
  return spec;
}

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
      return 1;
  }
  return 0;
}

}  // namespace flashjit
