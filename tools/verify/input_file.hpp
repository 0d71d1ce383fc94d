// Files that somebody names as input.
#pragma once

#include <fstream>
#include <string>

namespace flashjit::verify {

// The file, open for reading from its start. Throws invalid_argument, which ends with `what_works`, for what
// cannot be opened and for what is no regular file: a FIFO waits for its writer, a device need not end.
std::ifstream open_input(const std::string& path, const std::string& what_works);

}  // namespace flashjit::verify
