// The part of the CUDA driver interface that we call, written from its documentation,
// so that building needs no CUDA toolkit. Names, values and layouts are the driver's
// ABI; tests/cuda/abi_test.cpp compares them with <cuda.h> if it is installed.
#pragma once

#include <cstddef>
#include <type_traits>

namespace flashjit::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUlibrary = struct CUlib_st*;
using CUkernel = struct CUkern_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUgraph = struct CUgraph_st*;
using CUgraphExec = struct CUgraphExec_st*;

enum : CUresult {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_STUB_LIBRARY = 34,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_IMAGE = 200,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
  CUDA_ERROR_INVALID_PTX = 218,
  CUDA_ERROR_JIT_COMPILER_NOT_FOUND = 221,
  CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222,
  CUDA_ERROR_JIT_COMPILATION_DISABLED = 223,
  CUDA_ERROR_INVALID_SOURCE = 300,
  CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND = 302,
  CUDA_ERROR_SHARED_OBJECT_INIT_FAILED = 303,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_NOT_FOUND = 500,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
};

enum CUdevice_attribute : int {
  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  CU_DEVICE_ATTRIBUTE_PCI_BUS_ID = 33,
  CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID = 34,
  CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38,
  CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID = 50,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
  CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
  CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES = 100,
};

enum CUfunction_attribute : int { CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8 };

enum CUpointer_attribute : int {
  CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
  CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3,
  CU_POINTER_ATTRIBUTE_IS_MANAGED = 8,
  CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
};

enum : unsigned { CU_MEMORYTYPE_HOST = 1, CU_MEMORYTYPE_DEVICE = 2, CU_MEMORYTYPE_UNIFIED = 4 };
enum : unsigned { CU_STREAM_NON_BLOCKING = 1, CU_EVENT_DEFAULT = 0, CU_EVENT_DISABLE_TIMING = 2 };
enum : unsigned {
  CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1,
  CU_STREAM_WAIT_VALUE_GEQ = 0,
  CU_STREAM_WRITE_VALUE_DEFAULT = 0,
};
enum CUstreamCaptureMode : int { CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1 };

enum CUtensorMapDataType : int {
  CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0,
  CU_TENSOR_MAP_DATA_TYPE_UINT32 = 2,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9,
};
enum CUtensorMapInterleave : int { CU_TENSOR_MAP_INTERLEAVE_NONE = 0 };
enum CUtensorMapSwizzle : int { CU_TENSOR_MAP_SWIZZLE_NONE = 0, CU_TENSOR_MAP_SWIZZLE_128B = 3 };
enum CUtensorMapL2promotion : int { CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3 };
enum CUtensorMapFloatOOBfill : int { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0 };

struct alignas(64) CUtensorMap {
  unsigned long long opaque[16];
};

enum CUlaunchAttributeID : int { CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
union CUlaunchAttributeValue {
  char pad[64];
  int programmaticStreamSerializationAllowed;
};
struct alignas(8) CUlaunchAttribute {
  CUlaunchAttributeID id;
  alignas(8) CUlaunchAttributeValue value;
};

struct CUlaunchConfig {
  unsigned gridDimX, gridDimY, gridDimZ;
  unsigned blockDimX, blockDimY, blockDimZ;
  unsigned sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute* attrs;
  unsigned numAttrs;
};

struct CUipcMemHandle {
  char reserved[64];
};

// Rows of bytes; with unified memory the device pointers may point anywhere.
struct CUDA_MEMCPY2D {
  std::size_t srcXInBytes, srcY;
  unsigned srcMemoryType;
  const void* srcHost;
  CUdeviceptr srcDevice;
  void* srcArray;
  std::size_t srcPitch;
  std::size_t dstXInBytes, dstY;
  unsigned dstMemoryType;
  void* dstHost;
  CUdeviceptr dstDevice;
  void* dstArray;
  std::size_t dstPitch;
  std::size_t WidthInBytes, Height;
};

// X(name without its prefix, exported symbol, type). The
// version suffixes are those that <cuda.h> of CUDA 12 chooses.
#define FLASHJIT_CUDA_DRIVER_FUNCTIONS(X)                                                                 \
  X(GetErrorName, "cuGetErrorName", CUresult(CUresult, const char**))                                     \
  X(GetErrorString, "cuGetErrorString", CUresult(CUresult, const char**))                                 \
  X(Init, "cuInit", CUresult(unsigned))                                                                   \
  X(DriverGetVersion, "cuDriverGetVersion", CUresult(int*))                                               \
  X(DeviceGetCount, "cuDeviceGetCount", CUresult(int*))                                                   \
  X(DeviceGet, "cuDeviceGet", CUresult(CUdevice*, int))                                                   \
  X(DeviceGetName, "cuDeviceGetName", CUresult(char*, int, CUdevice))                                     \
  X(DeviceTotalMem, "cuDeviceTotalMem_v2", CUresult(std::size_t*, CUdevice))                              \
  X(DeviceGetAttribute, "cuDeviceGetAttribute", CUresult(int*, CUdevice_attribute, CUdevice))             \
  X(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", CUresult(CUcontext*, CUdevice))                   \
  X(DevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", CUresult(CUdevice))                          \
  X(CtxGetCurrent, "cuCtxGetCurrent", CUresult(CUcontext*))                                               \
  X(CtxPushCurrent, "cuCtxPushCurrent_v2", CUresult(CUcontext))                                           \
  X(CtxPopCurrent, "cuCtxPopCurrent_v2", CUresult(CUcontext*))                                            \
  X(CtxSynchronize, "cuCtxSynchronize", CUresult())                                                       \
  X(LibraryLoadData, "cuLibraryLoadData",                                                                 \
    CUresult(CUlibrary*, const void*, void*, void**, unsigned, void*, void**, unsigned))                  \
  X(LibraryUnload, "cuLibraryUnload", CUresult(CUlibrary))                                                \
  X(LibraryGetKernel, "cuLibraryGetKernel", CUresult(CUkernel*, CUlibrary, const char*))                  \
  X(KernelGetFunction, "cuKernelGetFunction", CUresult(CUfunction*, CUkernel))                            \
  X(KernelSetAttribute, "cuKernelSetAttribute", CUresult(CUfunction_attribute, int, CUkernel, CUdevice))  \
  X(LaunchKernelEx, "cuLaunchKernelEx", CUresult(const CUlaunchConfig*, CUfunction, void**, void**))      \
  X(TensorMapEncodeTiled, "cuTensorMapEncodeTiled",                                                       \
    CUresult(CUtensorMap*, CUtensorMapDataType, unsigned, void*, const unsigned long long*,               \
             const unsigned long long*, const unsigned*, const unsigned*, CUtensorMapInterleave,          \
             CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill))                        \
  X(PointerGetAttributes, "cuPointerGetAttributes",                                                       \
    CUresult(unsigned, CUpointer_attribute*, void**, CUdeviceptr))                                        \
  X(MemGetInfo, "cuMemGetInfo_v2", CUresult(std::size_t*, std::size_t*))                                  \
  X(MemAlloc, "cuMemAlloc_v2", CUresult(CUdeviceptr*, std::size_t))                                       \
  X(MemFree, "cuMemFree_v2", CUresult(CUdeviceptr))                                                       \
  X(MemcpyAsync, "cuMemcpyAsync", CUresult(CUdeviceptr, CUdeviceptr, std::size_t, CUstream))              \
  X(MemsetD8Async, "cuMemsetD8Async", CUresult(CUdeviceptr, unsigned char, std::size_t, CUstream))        \
  X(StreamCreateWithPriority, "cuStreamCreateWithPriority", CUresult(CUstream*, unsigned, int))           \
  X(StreamDestroy, "cuStreamDestroy_v2", CUresult(CUstream))                                              \
  X(StreamSynchronize, "cuStreamSynchronize", CUresult(CUstream))                                         \
  X(StreamQuery, "cuStreamQuery", CUresult(CUstream))                                                     \
  X(StreamBeginCapture, "cuStreamBeginCapture_v2", CUresult(CUstream, CUstreamCaptureMode))               \
  X(StreamEndCapture, "cuStreamEndCapture", CUresult(CUstream, CUgraph*))                                 \
  X(GraphInstantiate, "cuGraphInstantiateWithFlags", CUresult(CUgraphExec*, CUgraph, unsigned long long)) \
  X(GraphLaunch, "cuGraphLaunch", CUresult(CUgraphExec, CUstream))                                        \
  X(GraphDestroy, "cuGraphDestroy", CUresult(CUgraph))                                                    \
  X(GraphExecDestroy, "cuGraphExecDestroy", CUresult(CUgraphExec))                                        \
  X(EventCreate, "cuEventCreate", CUresult(CUevent*, unsigned))                                           \
  X(EventDestroy, "cuEventDestroy_v2", CUresult(CUevent))                                                 \
  X(EventRecord, "cuEventRecord", CUresult(CUevent, CUstream))                                            \
  X(StreamWaitEvent, "cuStreamWaitEvent", CUresult(CUstream, CUevent, unsigned))                          \
  X(StreamWaitValue32, "cuStreamWaitValue32_v2", CUresult(CUstream, CUdeviceptr, unsigned, unsigned))     \
  X(StreamWriteValue32, "cuStreamWriteValue32_v2", CUresult(CUstream, CUdeviceptr, unsigned, unsigned))   \
  X(Memcpy2DAsync, "cuMemcpy2DAsync_v2", CUresult(const CUDA_MEMCPY2D*, CUstream))                        \
  X(CtxEnablePeerAccess, "cuCtxEnablePeerAccess", CUresult(CUcontext, unsigned))                          \
  X(IpcGetMemHandle, "cuIpcGetMemHandle", CUresult(CUipcMemHandle*, CUdeviceptr))                         \
  X(IpcOpenMemHandle, "cuIpcOpenMemHandle_v2", CUresult(CUdeviceptr*, CUipcMemHandle, unsigned))          \
  X(IpcCloseMemHandle, "cuIpcCloseMemHandle", CUresult(CUdeviceptr))                                      \
  X(EventSynchronize, "cuEventSynchronize", CUresult(CUevent))                                            \
  X(EventElapsedTime, "cuEventElapsedTime", CUresult(float*, CUevent, CUevent))

// Functions that older drivers lack. Null there.
#define FLASHJIT_CUDA_DRIVER_NEW_FUNCTIONS(X)                                                                \
  X(KernelGetParamInfo, "cuKernelGetParamInfo", CUresult(CUkernel, std::size_t, std::size_t*, std::size_t*)) \
  X(KernelGetParamCount, "cuKernelGetParamCount", CUresult(CUkernel, std::size_t*))                          \
  X(ProfilerStart, "cuProfilerStart", CUresult())                                                            \
  X(ProfilerStop, "cuProfilerStop", CUresult())

// api.LaunchKernelEx(...) is cuLaunchKernelEx(...).
struct DriverApi {
#define FLASHJIT_MEMBER(name, symbol, ...) std::add_pointer_t<__VA_ARGS__> name = nullptr;
  FLASHJIT_CUDA_DRIVER_FUNCTIONS(FLASHJIT_MEMBER)
  FLASHJIT_CUDA_DRIVER_NEW_FUNCTIONS(FLASHJIT_MEMBER)
#undef FLASHJIT_MEMBER
};

}  // namespace flashjit::cuda
