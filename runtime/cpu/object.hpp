// A CPU kernel's machine code, as Clang made it, loaded into this process. Needs
// neither compiler nor linker, so a host with prebuilt kernels needs neither.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace flashjit {

// One relocatable ELF object for x86-64 (System V ABI, AMD64 supplement), laid out and
// relocated. Code is mapped read and execute only, constants read only, data without execute;
// the destructor frees everything. The object may call only the functions that object.cpp lists.
class LoadedObject {
 public:
  // Loads untrusted bytes. Throws device_failed with the reason. The error is BadCode if
  // the bytes are damaged, are no such object, refer to unknown functions, or have static
  // initialisers, thread-local variables or relocations that position-independent code has
  // not. Any other error means that there is no memory, or that the host lets this process
  // execute neither memory that it wrote (mprotect) nor a file in memory (memfd_create, mmap).
  explicit LoadedObject(std::string_view object);
  LoadedObject(const LoadedObject&) = delete;
  LoadedObject& operator=(const LoadedObject&) = delete;
  ~LoadedObject();

  // The address of the global function. Throws BadCode (device_failed) if there is none.
  void* function(std::string_view name) const;
  // The same; null if there is none.
  void* find(std::string_view name) const;

 private:
  std::byte* memory_ = nullptr;
  std::size_t size_ = 0;
  std::map<std::string, void*, std::less<>> functions_;
};

}  // namespace flashjit
