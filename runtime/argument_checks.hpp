// What every check of an argument needs: refusals that name it.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

#include "codegen/arguments.hpp"
#include "runtime/flashjit.hpp"
#include "templates/shared/tensor_view.h"

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

// Throws for the first argument that the spec needs and has not, or has no use for.
void check_presence(const AttentionSpec& spec, const AttentionArgs& args);

// What every tensor argument must satisfy before its shape is compared with others': is there, rank, dtype,
// device, sizes, memory that the device can reach.
const Tensor& require(const Argument& argument, const AttentionSpec& spec, const AttentionArgs& args,
                      Device device);
template <TensorMember member>
const Tensor& require(const AttentionSpec& spec, const AttentionArgs& args, Device device) {
  static constexpr const Argument& argument = argument_of(member);
  return require(argument, spec, args, device);
}

void require_shape(const char* name, const Tensor& t, int dim, std::int64_t expected, const char* what);

// Sizes that no kernel can be asked for: negative ones, no heads, query heads that are no multiple of others.
void check_shape(const AttentionSpec& spec, const Shape& shape);

// Row-major without gaps, aligned to its elements: tables of integers. One without elements may have any
// strides.
void require_table(const char* name, const Tensor& t);

// Strides of dimensions that are never stepped along are of no matter: 0 keeps them out of every check.
inline std::int64_t stride(const Tensor& t, int dim) {
  return t.shape[dim] > 1 ? t.strides[dim] : 0;
}

// The last dimension is contiguous, and addresses of rows are what the device can load from: GPU kernels move
// 16 bytes at a time.
void require_alignment(const char* name, const Tensor& t);

// The view of a tensor [batch, row, head, dim] or packed [row, head, dim].
device::TensorView view(const Tensor& t);

inline int size(const Tensor& t, int dim) {
  return static_cast<int>(t.shape[dim]);
}

// "[2, 128]"
std::string shape_text(const Tensor& t);

}  // namespace flashjit
