// load_cuda: a cubin on a device, launched through the driver.
#include "runtime/executable.hpp"

#include <string>

#include "runtime/cuda/driver.hpp"
#include "runtime/cuda/tensor_maps.hpp"
#include "runtime/cuda/tile_plan.hpp"

namespace flashjit {
namespace {

using cuda::check;
using cuda::driver;

// Static and dynamic bytes that a block may use without asking for more.
constexpr int default_shared_memory = 48 * 1024;

class CudaExecutable final : public Executable {
 public:
  CudaExecutable(int device_index, const KernelInfo& info, const std::string& code, const Step& step)
      : context_(device_index),
        multiprocessors_(cuda_device(device_index).multiprocessors),
        spec_(info.spec),
        config_(info.config),
        target_(info.target),
        step_(step) {
    const cuda::ContextScope scope(context_);
    check_code(driver().LibraryLoadData(&library_, code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0));
    try {
      load();
    } catch (...) {
      driver().LibraryUnload(library_);
      throw;
    }
  }

  // At process exit the driver or the context may be gone already, and the code with it.
  ~CudaExecutable() override { driver().LibraryUnload(library_); }

  void encode(const device::ForwardParams& params, Launch& launch) const override {
    launch.params = params;
    launch.grid = cuda::plan_tiles(spec_, target_, config_, multiprocessors_, launch.params);
    if (!target_.arch_specific) return;
    const cuda::ContextScope scope(context_);
    cuda::encode_tensor_maps(spec_, config_, launch.params, launch.maps);
  }

  using Executable::launch;
  void launch(const Launch& launch, Stream stream) const override {
    cuda::CUlaunchConfig config{};
    config.gridDimX = launch.grid.x;
    config.gridDimY = launch.grid.y;
    config.gridDimZ = 1;
    config.blockDimX = static_cast<unsigned>(step_.threads);
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = static_cast<unsigned>(step_.shared_memory);
    config.hStream = static_cast<cuda::CUstream>(stream);

    void* arguments[] = {const_cast<device::ForwardParams*>(&launch.params),
                         const_cast<device::ForwardMaps*>(&launch.maps)};
    const cuda::ContextScope scope(context_);
    const cuda::CUresult result = driver().LaunchKernelEx(&config, function_, arguments, nullptr);
    if (result == cuda::CUDA_ERROR_INVALID_HANDLE) {
      throw Error(ErrorCode::invalid_argument, "stream: not of cuda:" + std::to_string(context_.index()) +
                                                   ", this kernel's device, or not of its primary context; "
                                                   "pass a stream made there by the runtime API, or null");
    }
    check(result, step_.entry.c_str());
  }

 private:
  void load() {
    cuda::CUkernel kernel = nullptr;
    check_code(driver().LibraryGetKernel(&kernel, library_, step_.entry.c_str()));
    if (step_.shared_memory > default_shared_memory) {
      check(driver().KernelSetAttribute(cuda::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                        step_.shared_memory, kernel, context_.device()),
            ("a block of " + std::to_string(step_.shared_memory) + " bytes of shared memory").c_str());
    }
    // Puts the code on the device now: lazily, the first launch would load it, which a capture does not
    // allow.
    check_code(driver().KernelGetFunction(&function_, kernel));
  }

  // Any of the calls that load code may be the one that reads it.
  void check_code(cuda::CUresult result) const {
    if (cuda::blames_code(result)) {
      const CudaDevice device = cuda_device(context_.index());
      throw BadCode(ErrorCode::target_unavailable,
                    device.name + " (compute capability " + std::to_string(device.major) + "." +
                        std::to_string(device.minor) + ", driver for CUDA " + cuda_driver_version() +
                        ") does not take this machine code: " + cuda::error_text(result) +
                        "; compile for its own target, with an NVRTC of the driver's CUDA version or older "
                        "(FLASHJIT_NVRTC)");
    }
    check(result, ("loading " + step_.entry).c_str());
  }

  cuda::Context context_;
  int multiprocessors_;
  AttentionSpec spec_;
  KernelConfig config_;
  Target target_;
  Step step_;
  cuda::CUlibrary library_ = nullptr;
  cuda::CUfunction function_ = nullptr;
};

}  // namespace

std::unique_ptr<Executable> load_cuda(int device_index, const KernelInfo& info, const std::string& code,
                                      const std::vector<Step>& steps) {
  if (steps.size() != 1) {
    throw Error(ErrorCode::internal,
                "load_cuda: " + std::to_string(steps.size()) + " steps, one is expected");
  }
  return std::make_unique<CudaExecutable>(device_index, info, code, steps.front());
}

}  // namespace flashjit
