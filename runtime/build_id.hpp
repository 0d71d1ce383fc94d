// The identity of a shared library's build, without opening the library.
#pragma once

#include <string>

namespace flashjit {

// The build ID that the linker wrote into the ELF file, in
// hexadecimal; empty if there is no such file or no build ID.
std::string build_id(const std::string& file);

}  // namespace flashjit
