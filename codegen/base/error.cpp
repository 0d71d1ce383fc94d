#include "codegen/base/error.hpp"

namespace flashjit {

const char* to_string(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::invalid_spec:
      return "invalid_spec";
    case ErrorCode::unsupported:
      return "unsupported";
    case ErrorCode::invalid_argument:
      return "invalid_argument";
    case ErrorCode::target_unavailable:
      return "target_unavailable";
    case ErrorCode::compiler_unavailable:
      return "compiler_unavailable";
    case ErrorCode::compile_failed:
      return "compile_failed";
    case ErrorCode::cache_failed:
      return "cache_failed";
    case ErrorCode::device_failed:
      return "device_failed";
    case ErrorCode::internal:
      return "internal";
    case ErrorCode::not_prebuilt:
      return "not_prebuilt";
    case ErrorCode::cancelled:
      return "cancelled";
    case ErrorCode::limit_exceeded:
      return "limit_exceeded";
  }
  return "unknown";
}

}  // namespace flashjit
