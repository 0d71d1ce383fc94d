// The table of error codes, one row for each. Names, the command's exit codes and the reference follow from
// it.
#pragma once

#include <cstddef>
#include <iterator>

#include "codegen/base/error.hpp"

namespace flashjit {

struct ErrorInfo {
  ErrorCode code;
  const char* name;
  const char* meaning;
};

// In the order of the codes, which begin with 1.
inline constexpr ErrorInfo error_table[] = {
    {ErrorCode::invalid_spec, "invalid_spec",
     "malformed JSON, an unknown field, a contradictory or impossible combination"},
    {ErrorCode::unsupported, "unsupported", "a valid request that this version has no kernel for"},
    {ErrorCode::invalid_argument, "invalid_argument",
     "a tensor, length, pointer or option that does not fit the request"},
    {ErrorCode::target_unavailable, "target_unavailable", "this machine cannot run the target"},
    {ErrorCode::compiler_unavailable, "compiler_unavailable", "NVRTC or the LLVM plugin was not found"},
    {ErrorCode::compile_failed, "compile_failed", "the compiler refused the source; the detail is its log"},
    {ErrorCode::cache_failed, "cache_failed", "a cache folder is unusable or refused"},
    {ErrorCode::device_failed, "device_failed", "the CUDA driver or the operating system reported a failure"},
    {ErrorCode::internal, "internal", "a defect of flashjit itself"},
    {ErrorCode::not_prebuilt, "not_prebuilt",
     "an engine of policy require_prebuilt found the kernel in no cache folder"},
    {ErrorCode::cancelled, "cancelled", "a compilation was cancelled by its host"},
    {ErrorCode::limit_exceeded, "limit_exceeded", "a compilation went beyond a limit of its host's"},
};
static_assert(
    [] {
      for (std::size_t i = 0; i < std::size(error_table); ++i)
        if (static_cast<std::size_t>(error_table[i].code) != i + 1) return false;
      return true;
    }(),
    "the rows of error_table are in the order of the codes");

}  // namespace flashjit
