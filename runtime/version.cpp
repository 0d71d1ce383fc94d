#include "runtime/flashjit.hpp"

namespace flashjit {

const char* version() noexcept {
  return FLASHJIT_VERSION;
}

}  // namespace flashjit
