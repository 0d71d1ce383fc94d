// What every check of an argument needs: refusals that name it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "runtime/flashjit.hpp"

namespace flashjit {

[[noreturn]] void refuse(const std::string& message);

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
