// Machine code of a CPU kernel, as Clang made it, in this process's memory. Takes no compiler and no linker:
// a host with prebuilt kernels needs neither.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace flashjit {

// One relocatable ELF object for x86-64 (System V ABI, AMD64 supplement), laid out and relocated. Code is
// mapped read and execute only, constants read only, data without execute; the destructor frees it all. It
// may call what object.cpp lists and nothing else of the process.
class LoadedObject {
 public:
  // Reads bytes that nobody vouches for. Throws device_failed with what is wrong: as BadCode if it is not
  // such an object, damaged, or has unknown functions, static initialisers, thread-local variables,
  // relocations beyond those of position independent code; else no memory, or none that may be executable.
  explicit LoadedObject(std::string_view object);
  LoadedObject(const LoadedObject&) = delete;
  LoadedObject& operator=(const LoadedObject&) = delete;
  ~LoadedObject();

  // The address of that global function. Throws BadCode (device_failed) if there is none.
  void* function(std::string_view name) const;

 private:
  std::byte* memory_ = nullptr;
  std::size_t size_ = 0;
  std::map<std::string, void*, std::less<>> functions_;
};

}  // namespace flashjit
