// NumPy's .npy files, versions 1 to 3 of its format ("NPY format", numpy.lib.format): little-endian, C order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/flashjit.hpp"

namespace flashjit::verify {

struct NpyArray {
  std::string descr;  // "<f4", "<f2", "<u2", "<i8", "<i4", "|i1", "|u1"
  std::vector<std::int64_t> shape;
  std::vector<std::byte> data;
};

// Throws invalid_argument, with the file's name, unless the file is a whole .npy file of one of these types.
NpyArray read_npy(const std::string& path);

// The elements as `dtype`, row-major, rounded to nearest even. NumPy has no bf16 and no 8-bit floats: give
// "<f4", which is rounded, or their bits as "<u2" and "|u1". Integers take their own type only. Throws
// invalid_argument for other combinations.
std::vector<std::byte> elements_as(const NpyArray& array, DType dtype);

// Writes any tensor of host memory in C order; bf16 and 8-bit floats as "<f4", which holds them exactly.
void write_npy(const std::string& path, const Tensor& tensor);

}  // namespace flashjit::verify
