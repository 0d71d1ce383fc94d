// Building blocks of argument checks. Every message names the argument.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

#include "codegen/arguments/table.hpp"
#include "runtime/flashjit.hpp"
#include "templates/shared/divisor.h"
#include "templates/shared/tensor_view.h"

namespace flashjit {

// Throws invalid_argument with the message made of the parts, texts and
// numbers. The text is made only here, so that valid arguments cost no text.
template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void refuse_argument(const Parts&... parts) {
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

// Throws for the first argument that the spec needs and lacks, or has no use for.
void check_presence(const AttentionSpec& spec, const AttentionArgs& args);

// Checks a tensor argument by itself, before its shape is compared with others:
// presence, rank, dtype, device, sizes, and that the device can reach its memory.
const Tensor& require(const Argument& argument, const AttentionSpec& spec, const AttentionArgs& args,
                      Device device);
template <TensorMember member>
const Tensor& require(const AttentionSpec& spec, const AttentionArgs& args, Device device) {
  static constexpr const Argument& argument = argument_of(member);
  return require(argument, spec, args, device);
}

// The same for a tensor of any name, without its rank and dtype.
void require_memory(const char* name, const Tensor& t, Device device);

void require_shape(const char* name, const Tensor& t, int dim, std::int64_t expected, const char* what);

// The last dimension of k is as long as the spec's key_elements(): why.
inline const char* rule_of_key_elements(const AttentionSpec& spec) {
  return spec.kv_dtype == DType::fp8_ds_mla ? "the bytes of a key of fp8_ds_mla" : "the spec's head_dim";
}

// Throws for sizes that no kernel can have: negative sizes, num_heads_q that is no multiple of num_heads_kv.
void check_shape(const AttentionSpec& spec, const Shape& shape);

// Requires a table of integers to be row-major without gaps and aligned to its elements.
void require_table(const char* name, const Tensor& t);

// The stride of a dimension; 0 if the dimension has at most one
// index, so that a stride that is never used passes every check.
inline std::int64_t stride(const Tensor& t, int dim) {
  return t.shape[dim] > 1 ? t.strides[dim] : 0;
}

// Checks of where elements lie. A tensor without elements passes all of them: nobody reads its pointer or its
// strides, and libraries give such tensors any.
bool has_elements(const Tensor& t);
// Requires an address that is a multiple of so many bytes, for the reason given ("", ", which ...").
void require_address(const char* name, const Tensor& t, std::size_t bytes, const char* why = "");
// Requires stride 1 along the last dimension, whose elements kernels read together.
void require_contiguous_rows(const char* name, const Tensor& t);
// Requires contiguous rows at addresses that the device can load from: GPU kernels load 16 bytes at a time.
void require_alignment(const char* name, const Tensor& t);

// Kernels' view of a tensor [batch, row, head, dim] or packed [row, head, dim].
device::TensorView view(const Tensor& t);

// How kernels divide by a size. Exact for numbers whose product with the size fits 64 bits.
inline device::Divisor divisor_of(std::int64_t size) {
  const auto unsigned_size = static_cast<device::u64>(size);
  return {unsigned_size, size > 1 ? ~device::u64{0} / unsigned_size + 1 : 0};
}

inline int size(const Tensor& t, int dim) {
  return static_cast<int>(t.shape[dim]);
}

// "[2, 128]"
std::string shape_text(const Tensor& t);

}  // namespace flashjit
