// The CUDA driver, opened at run time, initialised on first use and never closed;
// the devices that it sees; and the context of a device. The host may use the
// runtime or driver API beside us: every call leaves its current context unchanged.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "runtime/cuda/driver_api.hpp"

namespace flashjit {

struct CudaDevice {
  int index = 0;
  std::string name;          // "NVIDIA H200"
  int major = 0, minor = 0;  // compute capability
  std::size_t memory = 0;    // bytes
  int multiprocessors = 0;
  std::size_t l2_cache = 0;   // bytes
  int max_shared_memory = 0;  // bytes that a block may ask for
};

// All devices that CUDA_VISIBLE_DEVICES leaves visible. If there are none, `reason` says why and what helps.
std::vector<CudaDevice> cuda_devices(std::string* reason = nullptr);
// Throws target_unavailable if there is no driver or no such device.
CudaDevice cuda_device(int index);
// "13.0": the newest CUDA version that the driver supports. Throws target_unavailable.
std::string cuda_driver_version();

namespace cuda {

// Throws target_unavailable if there is no driver, no device, the driver is too old, or this process was
// forked after it was opened.
const DriverApi& driver();
// Null where driver() would throw or would open it: for what a forked child destroys of its parent's.
const DriverApi* driver_of_this_process() noexcept;

// "CUDA_ERROR_INVALID_VALUE (invalid argument)".
std::string error_text(CUresult result);
// Whether this result of loading code blames the code, and not the device or its memory.
bool blames_code(CUresult result);
// Throws device_failed: "<what>: <error_text>".
void check(CUresult result, const char* what);

// A retained primary context: the context that the runtime API uses, too.
class Context {
 public:
  explicit Context(int device_index);  // throws target_unavailable, device_failed
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  CUcontext handle() const { return handle_; }
  CUdevice device() const { return device_; }
  int index() const { return index_; }

 private:
  int index_;
  CUdevice device_ = 0;
  CUcontext handle_ = nullptr;
};

// Makes a context current on this thread for a scope. Costs only a query if it is current already.
class ContextScope {
 public:
  explicit ContextScope(const Context& context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  bool pushed_ = false;
};

}  // namespace cuda
}  // namespace flashjit
