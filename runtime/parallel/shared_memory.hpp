// Memory that processes of one host share.
#pragma once

#include <cstddef>
#include <string>

namespace flashjit {

class SharedMemory {
 public:
  // Memory of zeros, by a name of its own. Throws device_failed, as open() does.
  static SharedMemory create(std::size_t bytes);
  static SharedMemory open(const std::string& name, std::size_t bytes);
  SharedMemory(SharedMemory&& other) noexcept;
  ~SharedMemory();

  const std::string& name() const { return name_; }
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  // Nobody opens it any more. Those that have opened it keep it.
  static void remove_name(const std::string& name) noexcept;

 private:
  SharedMemory(std::string name, int file, std::size_t bytes);

  std::string name_;
  void* data_;
  std::size_t bytes_;
};

}  // namespace flashjit
