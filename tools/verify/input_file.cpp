#include "tools/verify/input_file.hpp"

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "codegen/base/error.hpp"

namespace flashjit::verify {

std::ifstream open_input(const std::string& path, const std::string& what_works) {
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorCode::invalid_argument, path + ": cannot be read: " + why + "; " + what_works);
  };
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) refuse(error.message());
  if (std::filesystem::is_directory(status)) refuse(std::strerror(EISDIR));
  if (!std::filesystem::is_regular_file(status))
    refuse("it is a FIFO, a device or a socket, not a regular file");
  std::ifstream file(path, std::ios::binary);
  if (!file) refuse(std::strerror(errno));
  return file;
}

}  // namespace flashjit::verify
