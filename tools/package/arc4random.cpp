// glibc has arc4random from 2.36 on. LLVM and the C++ runtime take seeds and names of temporary files from
// it. A build for older systems (FLASHJIT_PORTABLE) links this one.
#include <sys/random.h>

#include <cstdint>

extern "C" __attribute__((visibility("hidden"))) std::uint32_t arc4random() noexcept {
  std::uint32_t number = 0;
  while (::getrandom(&number, sizeof number, 0) != sizeof number) {
  }
  return number;
}
