// Owned file descriptors and the few operations on them that cache/ needs.
#pragma once

#include <sys/resource.h>
#include <unistd.h>
#include <cerrno>
#include <cstddef>
#include <string>
#include <system_error>
#include <utility>

namespace flashjit {

class File {
 public:
  File() = default;
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(File&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }

  explicit operator bool() const { return descriptor_ >= 0; }
  int get() const { return descriptor_; }

 private:
  int descriptor_ = -1;
};

// "No space left on device", ...
inline std::string error_text(int error) {
  return std::generic_category().message(error);
}

// Returns true if all `size` bytes were read; false with errno
// 0 at the end of the file, with another errno otherwise.
inline bool read_fully(int descriptor, char* to, std::size_t size) {
  while (size > 0) {
    const ssize_t count = ::read(descriptor, to, size);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      if (count == 0) errno = 0;
      return false;
    }
    to += count;
    size -= static_cast<std::size_t>(count);
  }
  return true;
}

// Writes to an empty file. Returns false with errno if not everything could be written.
inline bool write_fully(int descriptor, const char* from, std::size_t size) {
  // Writing beyond this limit would raise SIGXFSZ, which ends the host process.
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && size > limit.rlim_cur) {
    errno = EFBIG;
    return false;
  }
  while (size > 0) {
    const ssize_t count = ::write(descriptor, from, size);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      if (count == 0) errno = EIO;
      return false;
    }
    from += count;
    size -= static_cast<std::size_t>(count);
  }
  return true;
}

}  // namespace flashjit
