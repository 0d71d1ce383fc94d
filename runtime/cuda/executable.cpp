// load_cuda: a cubin on a device, launched through the driver.
#include "runtime/executable.hpp"

#include <cstddef>
#include <string>
#include <vector>

#include "codegen/base/float_state.hpp"
#include "runtime/cuda/driver.hpp"

namespace flashjit {
namespace {

using cuda::check;
using cuda::driver;

// Bytes of static and dynamic shared memory that a block may use without opting in to more.
constexpr int default_shared_memory = 48 * 1024;

class CudaExecutable final : public Executable {
 public:
  CudaExecutable(int device_index, const std::string& code, const std::vector<Step>& steps)
      : Executable(steps), context_(device_index), device_(cuda_device(device_index)) {
    const cuda::ContextScope scope(context_);
    check_code(driver().LibraryLoadData(&library_, code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
               "the code");
    try {
      for (const Step& step : steps) functions_.push_back(load(step));
    } catch (...) {
      driver().LibraryUnload(library_);
      throw;
    }
  }

  // At process exit the driver or the context may be gone already, and the code with them.
  ~CudaExecutable() override {
    if (const cuda::DriverApi* const api = cuda::driver_of_this_process()) api->LibraryUnload(library_);
  }

  int parallelism() const override { return device_.multiprocessors; }
  const cuda::Context* context() const override { return &context_; }

  void run(const Launch& launch, Stream stream) const override {
    const DefaultFloatState state;
    const cuda::ContextScope scope(context_);
    for (std::size_t i = 0; i < launch.size(); ++i)
      if (launch[i].grid.x > 0) run(steps()[i], functions_[i], launch[i], stream);
  }

 private:
  void require_device() const override { driver(); }

  void run(const Step& loaded, cuda::CUfunction function, const StepLaunch& step, Stream stream) const {
    cuda::CUlaunchConfig config{};
    config.gridDimX = step.grid.x;
    config.gridDimY = step.grid.y;
    config.gridDimZ = step.grid.z;
    config.blockDimX = static_cast<unsigned>(loaded.threads);
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = static_cast<unsigned>(loaded.shared_memory);
    config.hStream = static_cast<cuda::CUstream>(stream);
    // Devices before sm_90 have no dependent launches: a step begins when the previous step has ended.
    cuda::CUlaunchAttribute dependent{};
    dependent.id = cuda::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    dependent.value.programmaticStreamSerializationAllowed = 1;
    config.attrs = &dependent;
    config.numAttrs = step.dependent && device_.major >= 9 ? 1 : 0;

    // The driver reads as many of these as the kernel has parameters.
    auto* const params = const_cast<std::byte*>(step.params.data());
    void* arguments[] = {params, params + step.second};
    const cuda::CUresult result = driver().LaunchKernelEx(&config, function, arguments, nullptr);
    if (result == cuda::CUDA_ERROR_INVALID_HANDLE) {
      throw Error(ErrorCode::invalid_argument,
                  "the stream does not belong to cuda:" + std::to_string(context_.index()) +
                      ", this kernel's device, or not to its primary context; "
                      "pass null or a stream that the runtime API made on that device");
    }
    check(result, loaded.function.c_str());
  }

  cuda::CUfunction load(const Step& step) const {
    cuda::CUkernel kernel = nullptr;
    check_code(driver().LibraryGetKernel(&kernel, library_, step.function.c_str()), step.function);
    if (step.shared_memory > default_shared_memory) {
      check(driver().KernelSetAttribute(cuda::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                        step.shared_memory, kernel, context_.device()),
            ("a block of " + std::to_string(step.shared_memory) + " bytes of shared memory").c_str());
    }
    // Loads the code onto the device now. Otherwise the first
    // launch would load it, which a stream capture does not allow.
    cuda::CUfunction function = nullptr;
    check_code(driver().KernelGetFunction(&function, kernel), step.function);
    if (driver().KernelGetParamInfo) check_params(step, kernel);
    return function;
  }

  // Drivers before CUDA 12.4 do not know the sizes of params, those before 13.2 not their number. No call may
  // fail if the kernel is right, since tools that watch a process would report it: without the number only
  // the params that launches make are asked for.
  void check_params(const Step& step, cuda::CUkernel kernel) const {
    std::size_t count = step.params.second_bytes ? 2 : 1;
    if (driver().KernelGetParamCount)
      check(driver().KernelGetParamCount(kernel, &count), "cuKernelGetParamCount");
    require_params(step, count > 0 ? bytes_of_param(kernel, 0) : 0,
                   count > 1 ? bytes_of_param(kernel, 1) : 0);
  }
  // 0 if the kernel has no such parameter.
  static std::size_t bytes_of_param(cuda::CUkernel kernel, std::size_t index) {
    std::size_t offset = 0, bytes = 0;
    return driver().KernelGetParamInfo(kernel, index, &offset, &bytes) == cuda::CUDA_SUCCESS ? bytes : 0;
  }

  // Any of the calls that load code may be the first to read it.
  void check_code(cuda::CUresult result, const std::string& what) const {
    if (cuda::blames_code(result)) {
      throw BadCode(ErrorCode::target_unavailable,
                    device_.name + " (compute capability " + std::to_string(device_.major) + "." +
                        std::to_string(device_.minor) + ", driver for CUDA " + cuda_driver_version() +
                        ") does not take this machine code: " + cuda::error_text(result) +
                        "; compile for its own target, with an NVRTC of the driver's CUDA version or older "
                        "(FLASHJIT_NVRTC)");
    }
    check(result, ("loading " + what).c_str());
  }

  cuda::Context context_;
  CudaDevice device_;
  cuda::CUlibrary library_ = nullptr;
  std::vector<cuda::CUfunction> functions_;
};

}  // namespace

std::unique_ptr<Executable> load_cuda(int device_index, const std::string& code,
                                      const std::vector<Step>& steps) {
  return std::make_unique<CudaExecutable>(device_index, code, steps);
}

}  // namespace flashjit
