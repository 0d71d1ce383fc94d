#include "codegen/base/error_table.hpp"

namespace flashjit {

const char* to_string(ErrorCode code) noexcept {
  for (const ErrorInfo& row : error_table)
    if (row.code == code) return row.name;
  return "unknown";
}

}  // namespace flashjit
