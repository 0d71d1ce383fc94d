// Compares our declarations of the CUDA driver with the toolkit's own <cuda.h> and stub library.
#include <cuda.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <type_traits>

#include "runtime/cuda/driver_api.hpp"

namespace flashjit::cuda {
namespace {

// ---- constants ----

#define SAME_VALUE(name) static_assert(static_cast<int>(cuda::name) == static_cast<int>(::name))
SAME_VALUE(CUDA_SUCCESS);
SAME_VALUE(CUDA_ERROR_OUT_OF_MEMORY);
SAME_VALUE(CUDA_ERROR_STUB_LIBRARY);
SAME_VALUE(CUDA_ERROR_NO_DEVICE);
SAME_VALUE(CUDA_ERROR_INVALID_IMAGE);
SAME_VALUE(CUDA_ERROR_INVALID_CONTEXT);
SAME_VALUE(CUDA_ERROR_NO_BINARY_FOR_GPU);
SAME_VALUE(CUDA_ERROR_INVALID_PTX);
SAME_VALUE(CUDA_ERROR_JIT_COMPILER_NOT_FOUND);
SAME_VALUE(CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
SAME_VALUE(CUDA_ERROR_JIT_COMPILATION_DISABLED);
SAME_VALUE(CUDA_ERROR_INVALID_SOURCE);
SAME_VALUE(CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND);
SAME_VALUE(CUDA_ERROR_SHARED_OBJECT_INIT_FAILED);
SAME_VALUE(CUDA_ERROR_INVALID_HANDLE);
SAME_VALUE(CUDA_ERROR_NOT_FOUND);
SAME_VALUE(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME_VALUE(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
SAME_VALUE(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME_VALUE(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME_VALUE(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
SAME_VALUE(CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES);
SAME_VALUE(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME_VALUE(CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
SAME_VALUE(CU_POINTER_ATTRIBUTE_DEVICE_POINTER);
SAME_VALUE(CU_POINTER_ATTRIBUTE_IS_MANAGED);
SAME_VALUE(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
SAME_VALUE(CU_MEMORYTYPE_HOST);
SAME_VALUE(CU_MEMORYTYPE_DEVICE);
SAME_VALUE(CU_MEMORYTYPE_UNIFIED);
SAME_VALUE(CU_STREAM_NON_BLOCKING);
SAME_VALUE(CU_EVENT_DISABLE_TIMING);
SAME_VALUE(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
SAME_VALUE(CU_STREAM_WAIT_VALUE_GEQ);
SAME_VALUE(CU_STREAM_WRITE_VALUE_DEFAULT);
SAME_VALUE(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
SAME_VALUE(CUDA_ERROR_NOT_READY);
SAME_VALUE(CU_EVENT_DEFAULT);
SAME_VALUE(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);

SAME_VALUE(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);

SAME_VALUE(CU_TENSOR_MAP_DATA_TYPE_FLOAT16);
SAME_VALUE(CU_TENSOR_MAP_DATA_TYPE_UINT32);
SAME_VALUE(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
SAME_VALUE(CU_TENSOR_MAP_INTERLEAVE_NONE);
SAME_VALUE(CU_TENSOR_MAP_SWIZZLE_128B);
SAME_VALUE(CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
SAME_VALUE(CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);

// ---- layouts ----

static_assert(sizeof(cuda::CUtensorMap) == sizeof(::CUtensorMap));
static_assert(alignof(cuda::CUtensorMap) <= alignof(::CUtensorMap));

static_assert(sizeof(cuda::CUipcMemHandle) == sizeof(::CUipcMemHandle));
#define SAME_MEMBER_OF_COPY(name)                                                        \
  static_assert(offsetof(cuda::CUDA_MEMCPY2D, name) == offsetof(::CUDA_MEMCPY2D, name)); \
  static_assert(sizeof(cuda::CUDA_MEMCPY2D::name) == sizeof(::CUDA_MEMCPY2D::name))
SAME_MEMBER_OF_COPY(srcY);
SAME_MEMBER_OF_COPY(srcMemoryType);
SAME_MEMBER_OF_COPY(srcHost);
SAME_MEMBER_OF_COPY(srcDevice);
SAME_MEMBER_OF_COPY(srcPitch);
SAME_MEMBER_OF_COPY(dstMemoryType);
SAME_MEMBER_OF_COPY(dstDevice);
SAME_MEMBER_OF_COPY(dstPitch);
SAME_MEMBER_OF_COPY(WidthInBytes);
SAME_MEMBER_OF_COPY(Height);
static_assert(sizeof(cuda::CUDA_MEMCPY2D) == sizeof(::CUDA_MEMCPY2D));

#define SAME_MEMBER(name)                                                                  \
  static_assert(offsetof(cuda::CUlaunchConfig, name) == offsetof(::CUlaunchConfig, name)); \
  static_assert(sizeof(cuda::CUlaunchConfig::name) == sizeof(::CUlaunchConfig::name))
SAME_MEMBER(gridDimX);
SAME_MEMBER(gridDimY);
SAME_MEMBER(gridDimZ);
SAME_MEMBER(blockDimX);
SAME_MEMBER(blockDimY);
SAME_MEMBER(blockDimZ);
SAME_MEMBER(sharedMemBytes);
SAME_MEMBER(hStream);
SAME_MEMBER(attrs);
SAME_MEMBER(numAttrs);
static_assert(sizeof(cuda::CUlaunchConfig) == sizeof(::CUlaunchConfig));
static_assert(sizeof(cuda::CUlaunchAttribute) == sizeof(::CUlaunchAttribute));
static_assert(alignof(cuda::CUlaunchAttribute) == alignof(::CUlaunchAttribute));
static_assert(offsetof(cuda::CUlaunchAttribute, value) == offsetof(::CUlaunchAttribute, value));

// ---- functions: the number and sizes of their parameters ----

// Compares what the calling convention distinguishes: among
// these functions, only integers from pointers, by size.
template <class Ours, class Theirs>
struct SameCall : std::false_type {};
template <class R1, class... P1, class R2, class... P2>
struct SameCall<R1 (*)(P1...), R2 (*)(P2...)> {
  static constexpr bool check() {
    if constexpr (sizeof...(P1) != sizeof...(P2) || sizeof(R1) != sizeof(R2)) {
      return false;
    } else {
      return ((sizeof(P1) == sizeof(P2) && std::is_pointer_v<P1> == std::is_pointer_v<P2>) && ...);
    }
  }
  static constexpr bool value = check();
};
// <cuda.h> maps cuName to the versioned symbol before the name is joined with ::.
#define SAME_CALL(name, symbol, ...) \
  static_assert(SameCall<decltype(DriverApi::name), decltype(&::cu##name)>::value, symbol);
FLASHJIT_CUDA_DRIVER_FUNCTIONS(SAME_CALL)

TEST(CudaAbi, EverySymbolIsExported) {
  void* stub = dlopen(FLASHJIT_CUDA_STUB, RTLD_LAZY | RTLD_LOCAL);
  if (!stub) GTEST_SKIP() << dlerror();
#define IS_EXPORTED(name, symbol, ...) EXPECT_NE(dlsym(stub, symbol), nullptr) << symbol;
  FLASHJIT_CUDA_DRIVER_FUNCTIONS(IS_EXPORTED)
}

}  // namespace
}  // namespace flashjit::cuda
