#include "runtime/parallel/shared_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "codegen/base/error.hpp"

namespace flashjit {
namespace {

[[noreturn]] void failed(const std::string& name, const std::string& why) {
  throw Error(ErrorCode::device_failed,
              "shared memory " + name + ": " + why + "; ranks of a host need memory under /dev/shm");
}

}  // namespace

SharedMemory SharedMemory::create(std::size_t bytes) {
  std::uint64_t number = 0;
  if (getrandom(&number, sizeof number, 0) != sizeof number) failed("", std::strerror(errno));
  const std::string name = "/flashjit-" + std::to_string(number);
  const int file = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
  if (file < 0) failed(name, std::strerror(errno));
  // Without room of its own the memory would end the process that writes it.
  if (const int error = posix_fallocate(file, 0, static_cast<off_t>(bytes)); error != 0) {
    close(file);
    remove_name(name);
    failed(name, std::to_string(bytes) + " bytes: " + std::strerror(error));
  }
  try {
    return SharedMemory(name, file, bytes);
  } catch (...) {
    remove_name(name);
    throw;
  }
}

SharedMemory SharedMemory::open(const std::string& name, std::size_t bytes) {
  const int file = shm_open(name.c_str(), O_RDWR, 0);
  if (file < 0) failed(name, std::strerror(errno));
  return SharedMemory(name, file, bytes);
}

SharedMemory::SharedMemory(std::string name, int file, std::size_t bytes)
    : name_(std::move(name)), data_(nullptr), bytes_(bytes) {
  struct stat facts{};
  if (fstat(file, &facts) != 0 || facts.st_size != static_cast<off_t>(bytes)) {
    close(file);
    failed(name_, "it has " + std::to_string(facts.st_size) + " bytes, not " + std::to_string(bytes) +
                      ", so it belongs to a group of another size");
  }
  data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  const int error = errno;
  close(file);
  if (data_ == MAP_FAILED) failed(name_, std::strerror(error));
}
SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : name_(std::move(other.name_)), data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
SharedMemory::~SharedMemory() {
  if (data_) munmap(data_, bytes_);
}

void SharedMemory::remove_name(const std::string& name) noexcept {
  shm_unlink(name.c_str());
}

}  // namespace flashjit
