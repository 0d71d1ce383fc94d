// A libcuda.so.1 for tests without a GPU. It has one device, of compute capability 9.0. All memory counts as
// that device's. Calls succeed and do nothing, but for questions about params that the kernels do not have.
#pragma once

#include <cstddef>
#include <vector>

namespace flashjit::testing_support {

struct FakeDriver {
  std::vector<std::size_t> params;  // bytes of each parameter of every kernel
  int failed = 0;                   // calls
  bool not_ready = false;           // streams have work that does not end
  int allocated = 0, freed = 0;     // pieces of memory
  int waited = 0;                   // calls that wait for a stream
};

[[gnu::visibility("default")]] FakeDriver& fake_driver();

}  // namespace flashjit::testing_support
