// Fuzzes objects of CPU kernels: each is loaded or refused. No function is called.
#include "runtime/cpu/object.hpp"

#include "tests/fuzz/fuzz.hpp"

using namespace flashjit;

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::accepted([&] { LoadedObject(fuzz::text_of(data, size)).function("kernel"); });
  return 0;
}
