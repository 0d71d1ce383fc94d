// Helpers of the fuzz targets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "codegen/base/error.hpp"

// libFuzzer calls this with any bytes. There must be no crash,
// no hang, no sanitizer report and no failed FUZZ_CHECK.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

#define FUZZ_CHECK(condition)                                                      \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

namespace flashjit::fuzz {

inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

// Runs the body. An Error is the valid answer to bad input and
// must have a message; any other exception ends the program.
template <class Body>
bool accepted(Body body) {
  try {
    body();
    return true;
  } catch (const Error& error) {
    FUZZ_CHECK(!error.message().empty() && error.code() != ErrorCode::internal);
    return false;
  }
}

}  // namespace flashjit::fuzz
