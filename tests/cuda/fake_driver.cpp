#include "tests/cuda/fake_driver.hpp"

#include <cstdint>
#include <string_view>

#include "runtime/cuda/driver_api.hpp"

namespace flashjit::testing_support {
namespace {

using namespace cuda;

// One of the first four arguments of any of the functions. All of them are integers or pointers, so they
// arrive in the same registers, integers of 32 bits in a half of one.
using Argument = std::uintptr_t;

CUresult answer(std::string_view symbol, Argument a, Argument b, Argument c, Argument d) {
  FakeDriver& driver = fake_driver();
  if (symbol == "cuDriverGetVersion") *reinterpret_cast<int*>(a) = 13020;
  if (symbol == "cuDeviceGetCount") *reinterpret_cast<int*>(a) = 1;
  if (symbol == "cuDeviceGetAttribute") switch (static_cast<CUdevice_attribute>(static_cast<int>(b))) {
      case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *reinterpret_cast<int*>(a) = 9;
        break;
      case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *reinterpret_cast<int*>(a) = 0;
        break;
      default:
        *reinterpret_cast<int*>(a) = 132;
    }
  if (symbol == "cuStreamQuery" && driver.not_ready) return CUDA_ERROR_NOT_READY;
  if (symbol == "cuMemAlloc_v2")
    *reinterpret_cast<std::uintptr_t*>(a) = 0x1000 * static_cast<unsigned>(++driver.allocated);
  if (symbol == "cuMemFree_v2") ++driver.freed;
  if (symbol == "cuStreamSynchronize") ++driver.waited;
  if (symbol == "cuGetErrorName" || symbol == "cuGetErrorString")
    *reinterpret_cast<const char**>(b) = "an error";
  if (symbol == "cuPointerGetAttributes")
    for (unsigned i = 0; i < static_cast<unsigned>(a); ++i) {
      const CUpointer_attribute which = reinterpret_cast<CUpointer_attribute*>(b)[i];
      if (which == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *reinterpret_cast<unsigned**>(c)[i] = CU_MEMORYTYPE_DEVICE;
      if (which == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *reinterpret_cast<int**>(c)[i] = 0;
    }
  if (symbol == "cuKernelGetParamCount") *reinterpret_cast<std::size_t*>(b) = driver.params.size();
  if (symbol == "cuKernelGetParamInfo") {
    if (b >= driver.params.size()) {
      ++driver.failed;
      return static_cast<CUresult>(1);  // CUDA_ERROR_INVALID_VALUE
    }
    *reinterpret_cast<std::size_t*>(d) = driver.params[b];
  }
  return CUDA_SUCCESS;
}

}  // namespace

FakeDriver& fake_driver() {
  static FakeDriver driver;
  return driver;
}

// Functions by the names of the driver's symbols. Callers know them by types of their own.
#define FAKE(name, symbol, ...)                                                                             \
  extern "C" [[gnu::visibility("default")]] __attribute__((no_sanitize("undefined"))) CUresult fake_##name( \
      Argument a, Argument b, Argument c, Argument d) asm(symbol);                                          \
  CUresult fake_##name(Argument a, Argument b, Argument c, Argument d) {                                    \
    return answer(symbol, a, b, c, d);                                                                      \
  }
FLASHJIT_CUDA_DRIVER_FUNCTIONS(FAKE)
#ifdef FLASHJIT_FAKE_DRIVER_COUNTS_PARAMS
FLASHJIT_CUDA_DRIVER_NEW_FUNCTIONS(FAKE)
#else
FAKE(KernelGetParamInfo, "cuKernelGetParamInfo")
#endif

}  // namespace flashjit::testing_support
