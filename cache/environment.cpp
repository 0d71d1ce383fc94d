#include "cache/environment.hpp"

#include <cstdlib>

namespace flashjit {

std::string environment_variable(Variable variable) {
  const char* const value = ::secure_getenv(environment_table[static_cast<std::size_t>(variable)].name);
  return value ? value : "";
}

}  // namespace flashjit
