// What every check of an argument needs: refusals that name it.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

#include "runtime/flashjit.hpp"

namespace flashjit {

// Throws invalid_argument. The message is the parts, texts and numbers, one after another: it is made here
// and nowhere before, so that arguments that are right cost no text.
template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void refuse(const Parts&... parts) {
  std::string message;
  const auto add = [&](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(part)>>) {
      char digits[32];
      message.append(digits, std::to_chars(digits, digits + sizeof digits, part).ptr);
    } else {
      message += part;
    }
  };
  (add(parts), ...);
  throw Error(ErrorCode::invalid_argument, message);
}

// What every tensor argument must satisfy before its shape is compared with others': is there, rank, dtype,
// device, sizes, memory that the device can reach. `layout` names its dimensions.
const Tensor& require(const char* name, const std::optional<Tensor>& given, DType dtype, int rank,
                      const char* layout, Device device);

void require_shape(const char* name, const Tensor& t, int dim, std::int64_t expected, const char* what);

// Row-major without gaps, aligned to its elements: tables of integers.
void require_table(const char* name, const Tensor& t);

inline int size(const Tensor& t, int dim) {
  return static_cast<int>(t.shape[dim]);
}

// "[2, 128]"
std::string shape_text(const Tensor& t);

}  // namespace flashjit
