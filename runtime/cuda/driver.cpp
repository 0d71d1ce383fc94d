#include "runtime/cuda/driver.hpp"

#include <dlfcn.h>

#include "cache/fork.hpp"
#include "codegen/base/error.hpp"
#include "runtime/library_file.hpp"

namespace flashjit {
namespace cuda {
namespace {

constexpr char library_name[] = "libcuda.so.1";
constexpr int oldest_driver = 12000;  // cuLibrary*: CUDA 12.0

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

[[noreturn]] void unavailable(const std::string& wrong, const std::string& helps) {
  throw Error(ErrorCode::target_unavailable, "CUDA: " + wrong + "; " + helps);
}

DriverApi load() {
  std::string why;
  void* const library = open_library(library_name, &why);
  if (!library) {
    unavailable("no NVIDIA driver, " + why,
                "install the NVIDIA driver or use device cpu "
                "(a container must be started with the NVIDIA runtime: docker --gpus all)");
  }
  DriverApi api;
  std::string missing;
  const auto find = [&](auto& function, const char* symbol) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
    return function != nullptr;
  };
#define FLASHJIT_FIND(name, symbol, ...) \
  if (!find(api.name, symbol) && missing.empty()) missing = symbol;
  FLASHJIT_CUDA_DRIVER_FUNCTIONS(FLASHJIT_FIND)
#undef FLASHJIT_FIND
#define FLASHJIT_FIND(name, symbol, ...) find(api.name, symbol);
  FLASHJIT_CUDA_DRIVER_NEW_FUNCTIONS(FLASHJIT_FIND)
#undef FLASHJIT_FIND

  int version = 0;
  if (api.DriverGetVersion) api.DriverGetVersion(&version);
  if (!missing.empty() || version < oldest_driver) {
    unavailable(
        "the driver is for CUDA " + version_text(version) + (missing.empty() ? "" : " and lacks " + missing),
        "flashjit needs a driver for CUDA " + version_text(oldest_driver) + " or newer (525.60 and up)");
  }
  const CUresult result = api.Init(0);
  if (result == CUDA_ERROR_STUB_LIBRARY) {
    unavailable("the libcuda.so.1 found is the toolkit's stub, not a driver",
                "take the toolkit's stubs folder out of LD_LIBRARY_PATH");
  }
  if (result == CUDA_ERROR_NO_DEVICE) {
    unavailable("the driver sees no device", "check nvidia-smi and CUDA_VISIBLE_DEVICES, or use device cpu");
  }
  if (result != CUDA_SUCCESS) {
    const char* name = "error";
    const char* text = "";
    api.GetErrorName(result, &name);
    api.GetErrorString(result, &text);
    unavailable(std::string("the driver did not start: ") + name + " (" + text + ")", "check nvidia-smi");
  }
  return api;
}

int attribute(CUdevice device, CUdevice_attribute which) {
  int value = 0;
  check(driver().DeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

CudaDevice describe(int index) {
  CUdevice device = 0;
  check(driver().DeviceGet(&device, index), "cuDeviceGet");
  CudaDevice d;
  d.index = index;
  char name[256] = {};
  check(driver().DeviceGetName(name, sizeof name - 1, device), "cuDeviceGetName");
  d.name = name;
  check(driver().DeviceTotalMem(&d.memory, device), "cuDeviceTotalMem");
  d.major = attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  d.minor = attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  d.multiprocessors = attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  d.l2_cache = static_cast<std::size_t>(attribute(device, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE));
  d.max_shared_memory = attribute(device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  return d;
}

int device_count() {
  int count = 0;
  check(driver().DeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

void require_device(int index) {
  const int count = device_count();
  if (index < 0 || index >= count) {
    unavailable("no device " + std::to_string(index) + ", this process sees " + std::to_string(count),
                "use cuda:0" + (count > 1 ? " to cuda:" + std::to_string(count - 1) : "") +
                    ", or check CUDA_VISIBLE_DEVICES");
  }
}

}  // namespace

namespace {

struct OpenedDriver {
  DriverApi api = load();
  std::uint32_t of = forks();
};
constinit std::atomic<const OpenedDriver*> opened = nullptr;

}  // namespace

const DriverApi& driver() {
  const OpenedDriver& found = opened_once(opened, [] { return OpenedDriver(); });
  if (found.of == forks()) return found.api;
  throw Error(ErrorCode::target_unavailable,
              "CUDA does not work in a process that was forked after its parent had used it: "
              "make the engine in the child first, or start the child by exec (multiprocessing: spawn)");
}

const DriverApi* driver_of_this_process() noexcept {
  const OpenedDriver* const found = opened.load(std::memory_order_acquire);
  return found && found->of == forks() ? &found->api : nullptr;
}

std::string error_text(CUresult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  driver().GetErrorName(result, &name);
  driver().GetErrorString(result, &text);
  if (!name) return "CUDA error " + std::to_string(result);
  return std::string(name) + (text ? " (" + std::string(text) + ")" : "");
}

bool blames_code(CUresult result) {
  switch (result) {
    case CUDA_ERROR_INVALID_IMAGE:
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    // The driver takes anything that is no cubin for PTX; we pass cubins only.
    case CUDA_ERROR_INVALID_PTX:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
    case CUDA_ERROR_JIT_COMPILER_NOT_FOUND:
    case CUDA_ERROR_JIT_COMPILATION_DISABLED:
    case CUDA_ERROR_INVALID_SOURCE:
    case CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND:
    case CUDA_ERROR_SHARED_OBJECT_INIT_FAILED:
    case CUDA_ERROR_NOT_FOUND:  // the code has no such function
      return true;
    default:
      return false;
  }
}

void check(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) {
    throw Error(ErrorCode::device_failed, std::string(what) + ": " + error_text(result));
  }
}

Context::Context(int device_index) : index_(device_index) {
  require_device(device_index);
  check(driver().DeviceGet(&device_, device_index), "cuDeviceGet");
  check(driver().DevicePrimaryCtxRetain(&handle_, device_), "cuDevicePrimaryCtxRetain");
}

// At process exit the driver may be gone already. It then
// returns an error, and there is nothing left to release.
Context::~Context() {
  if (const DriverApi* const api = driver_of_this_process()) api->DevicePrimaryCtxRelease(device_);
}

ContextScope::ContextScope(const Context& context) {
  CUcontext current = nullptr;
  check(driver().CtxGetCurrent(&current), "cuCtxGetCurrent");
  if (current == context.handle()) return;
  check(driver().CtxPushCurrent(context.handle()), "cuCtxPushCurrent");
  pushed_ = true;
}

ContextScope::~ContextScope() {
  CUcontext popped;
  const DriverApi* const api = driver_of_this_process();
  if (pushed_ && api) api->CtxPopCurrent(&popped);
}

}  // namespace cuda

std::vector<CudaDevice> cuda_devices(std::string* reason) {
  std::vector<CudaDevice> devices;
  try {
    const int count = cuda::device_count();
    for (int i = 0; i < count; ++i) devices.push_back(cuda::describe(i));
  } catch (const Error& error) {
    devices.clear();
    if (reason) *reason = error.message();
  }
  return devices;
}

CudaDevice cuda_device(int index) {
  cuda::require_device(index);
  return cuda::describe(index);
}

std::string cuda_driver_version() {
  int version = 0;
  cuda::check(cuda::driver().DriverGetVersion(&version), "cuDriverGetVersion");
  return cuda::version_text(version);
}

}  // namespace flashjit
