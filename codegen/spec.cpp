#include "spec.hpp"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "mask_rules.hpp"

namespace flashjit {
namespace {

constexpr int smallest_head_dim = 8, largest_head_dim = 256, head_dim_step = 8;

[[noreturn]] void unsupported(const std::string& message) {
  throw Error(ErrorCode::unsupported, message);
}

// Throws unless value is one of first, first + step, ..., last.
void check_steps(const std::string& field, int value, int first, int last, int step) {
  if (value >= first && value <= last && (value - first) % step == 0) return;
  std::string rule =
      step == 1 ? "is not between " : "is not a multiple of " + std::to_string(step) + " between ";
  rule += std::to_string(first) + " and " + std::to_string(last) + "; ";
  const int below = first + (std::clamp(value, first, last) - first) / step * step;
  rule += std::to_string(below);
  if (value > first && value < last) rule += " or " + std::to_string(below + step);
  invalid(field + " " + std::to_string(value) + " " + rule + " would work");
}

void check_pin(const char* field, const std::optional<int>& value, int first, int last, int step) {
  if (value) check_steps(std::string("config.") + field, *value, first, last, step);
}

void refuse(const char* field, bool asked) {
  if (asked) unsupported(std::string(field) + " true is not supported by this version; false would work");
}

class Hasher {
 public:
  // Multiplies by 2^64 / golden ratio and folds, so that every bit of the value reaches the low bits.
  void add(std::uint64_t value) noexcept {
    state_ = (state_ ^ value) * 0x9e3779b97f4a7c15u;
    state_ ^= state_ >> 32;
  }
  template <class T>
  void add(const std::optional<T>& value) noexcept {
    add(value ? std::uint64_t{1} << 32 | static_cast<unsigned>(*value) : 0);
  }
  std::size_t result() const noexcept { return state_; }

 private:
  std::uint64_t state_ = 0x243f6a8885a308d3u;
};

}  // namespace

AttentionSpec AttentionSpec::validated() const {
  AttentionSpec spec = *this;
  if (spec.head_dim_v == 0) spec.head_dim_v = spec.head_dim;
  spec.mask = canonical(std::move(spec.mask));

  if (spec.dtype == DType::int32 || spec.dtype == DType::int64)
    invalid(std::string("dtype ") + to_string(spec.dtype) +
            " is for lengths, offsets and seeds; bf16, fp16 or fp32 would work");
  check_steps("head_dim", spec.head_dim, smallest_head_dim, largest_head_dim, head_dim_step);
  check_steps("head_dim_v", spec.head_dim_v, smallest_head_dim, largest_head_dim, head_dim_step);
  check_pin("block_m", spec.config.block_m, 16, 1024, 16);
  check_pin("block_n", spec.config.block_n, 16, 1024, 16);
  check_pin("num_stages", spec.config.num_stages, 1, 8, 1);
  check_pin("num_warps", spec.config.num_warps, 1, 32, 1);

  if (spec.op != Operation::forward) {
    unsupported(std::string("op ") + to_string(spec.op) +
                " is not supported by this version; forward would work");
  }
  check_masks(spec.mask, spec.varlen);
  refuse("paged", spec.paged);
  return spec;
}

std::string AttentionSpec::to_json() const {
  const auto flag = [](const char* field, bool value) {
    return std::string(", \"") + field + "\": " + (value ? "true" : "false");
  };
  std::string masks;
  for (const Mask& m : canonical(mask)) masks += (masks.empty() ? "" : ", ") + flashjit::to_json(m);
  return std::string(R"({"op": ")") + to_string(op) + R"(", "dtype": ")" + to_string(dtype) +
         R"(", "head_dim": )" + std::to_string(head_dim) + R"(, "head_dim_v": )" +
         std::to_string(head_dim_v == 0 ? head_dim : head_dim_v) + R"(, "mask": [)" + masks + "]" +
         flag("dropout", dropout) + flag("lse", lse) + flag("varlen", varlen) + flag("paged", paged) +
         flag("deterministic", deterministic) + R"(, "config": )" + flashjit::to_json(config) + "}";
}

std::size_t AttentionSpec::hash() const noexcept {
  Hasher hasher;
  hasher.add(std::uint64_t(op) | std::uint64_t(dtype) << 8 | std::uint64_t(dropout) << 16 |
             std::uint64_t(lse) << 17 | std::uint64_t(varlen) << 18 | std::uint64_t(paged) << 19 |
             std::uint64_t(deterministic) << 20);
  hasher.add(std::uint64_t(unsigned(head_dim)) << 32 | unsigned(head_dim_v));
  for (const Mask& m : mask) {
    hasher.add(m.index());
    std::visit(
        [&](const auto& fields) {
          fields.for_each_field(fields, [&](const char*, auto value) { hasher.add(std::uint64_t(value)); });
        },
        m);
  }
  for_each_choice([&](const char*, auto, auto pin) { hasher.add(config.*pin); });
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
  switch (op) {
    case Operation::forward:
      return "forward";
    case Operation::backward:
      return "backward";
    case Operation::decode:
      return "decode";
  }
  return "unknown";
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
  }
  return 0;
}

}  // namespace flashjit
