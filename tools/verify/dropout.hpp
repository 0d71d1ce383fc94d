// The dropout of a launch, for the oracles.
#pragma once

#include <cstdint>
#include <cstring>

#include "runtime/dropout.hpp"
#include "tools/verify/layout.hpp"

namespace flashjit::verify {

// Which elements the launch drops. The tensors are in host memory.
inline Dropout dropout_of(const AttentionSpec& spec, const AttentionArgs& args) {
  if (!spec.dropout) return {};
  if (!args.dropout_p) refuse("dropout_p is missing");
  Dropout dropout{
      .p = *args.dropout_p, .seed = args.dropout_seed.value_or(0), .offset = args.dropout_offset.value_or(0)};
  const auto read = [](const Tensor& tensor, std::uint64_t& number) {
    std::memcpy(&number, tensor.data, sizeof number);
  };
  if (args.dropout_seed_tensor) read(*args.dropout_seed_tensor, dropout.seed);
  if (args.dropout_offset_tensor) read(*args.dropout_offset_tensor, dropout.offset);
  return dropout;
}

}  // namespace flashjit::verify
