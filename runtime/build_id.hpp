// What identifies a shared library's build without opening it.
#pragma once

#include <string>

namespace flashjit {

// The build ID that the linker left in the ELF file, in hexadecimal; empty if there is no such file or it has
// none.
std::string build_id(const std::string& file);

}  // namespace flashjit
