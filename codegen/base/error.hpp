// The one exception type of flashjit.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#if defined(__GNUC__)
#define FLASHJIT_API __attribute__((visibility("default")))
#else
#define FLASHJIT_API
#endif

namespace flashjit {

// The numbers are part of the C interface (flashjit.h) and the command's exit codes: append only.
enum class ErrorCode : int {
  invalid_spec = 1,          // malformed JSON, unknown field, contradictory or impossible combination
  unsupported = 2,           // a valid request that this version has no kernel for
  invalid_argument = 3,      // a tensor, length, pointer or option that does not fit the request
  target_unavailable = 4,    // this machine cannot run the target
  compiler_unavailable = 5,  // NVRTC or the LLVM plugin was not found
  compile_failed = 6,        // the compiler rejected the source; detail() is its log
  cache_failed = 7,          // a cache folder is unusable or refused
  device_failed = 8,         // the CUDA driver or the operating system reported a failure
  internal = 9,              // a defect of flashjit itself
  not_prebuilt = 10,         // a require_prebuilt engine found the kernel in no cache folder
  cancelled = 11,            // a compilation was cancelled by its host
  limit_exceeded = 12,       // a compilation went beyond a limit of its host's
};

// "invalid_spec", "unsupported", ...
FLASHJIT_API const char* to_string(ErrorCode code) noexcept;

// what() and message() say what was asked, what is wrong and
// what would work. detail() holds logs and may be empty.
class FLASHJIT_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message, std::string detail = {})
      : std::runtime_error(message), code_(code), detail_(std::move(detail)) {}

  ErrorCode code() const noexcept { return code_; }
  std::string message() const { return what(); }
  const std::string& detail() const noexcept { return detail_; }

 private:
  ErrorCode code_;
  std::string detail_;
};

}  // namespace flashjit
