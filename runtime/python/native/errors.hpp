// Failures as Python exceptions.
#pragma once

#include "python.hpp"
#include "runtime/flashjit.h"

namespace flashjit::python {

// Takes the exception classes of flashjit._errors. Returns -1 with an exception if they are not there.
int load_errors();

// Each sets an exception and returns null.
std::nullptr_t raise(flashjit_status status, const std::string& message, const std::string& detail = "");
// The library's last failure on this thread. An exception that is pending already, such as KeyboardInterrupt
// by the signal that cancelled a compilation, stays.
std::nullptr_t raise_last(flashjit_status status);
inline std::nullptr_t refuse(const std::string& message) {
  return raise(FLASHJIT_INVALID_ARGUMENT, message);
}
// Replaces the pending exception by InvalidArgumentError with its text after `prefix`.
std::nullptr_t refuse_with_cause(const std::string& prefix);

}  // namespace flashjit::python
