// Opens input files that the user names.
#pragma once

#include <fstream>
#include <string>

namespace flashjit::verify {

// Opens the file for reading. Throws invalid_argument if the file cannot be opened or is no regular file: a
// FIFO waits for its writer, and a device need not end. The message ends with `what_works`.
std::ifstream open_input(const std::string& path, const std::string& what_works);

}  // namespace flashjit::verify
