// load_cuda and the driver functions below it, with a probe
// kernel on the first GPU. Skipped if there is no GPU.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "codegen/base/error.hpp"
#include "codegen/embedded_headers.hpp"
#include "runtime/compiler.hpp"
#include "runtime/cuda/cold_launches.hpp"
#include "runtime/cuda/driver.hpp"
#include "runtime/cuda/memory.hpp"
#include "runtime/executable.hpp"
#include "templates/shared/forward_params.h"

namespace flashjit::cuda {
namespace {

using testing::HasSubstr;

constexpr int shared_bytes = 64 * 1024;  // more than a block gets without opting in

template <class Body>
Error error_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(ErrorCode::internal, "");
}

// Computes o[block] = block + total_q through the last word of the dynamic shared memory.
std::string probe(const Target& target) {
  KernelSource source;
  source.target = target;
  for (const EmbeddedHeader& header : embedded_headers()) source.headers.push_back(header);
  source.text =
      "#include \"shared/forward_params.h\"\n"
      "extern \"C\" __global__ void probe(const __grid_constant__ flashjit::device::ForwardParams params) {\n"
      "  extern __shared__ int words[];\n"
      "  const int last = " +
      std::to_string(shared_bytes / 4 - 1) +
      ";\n"
      "  if (threadIdx.x == blockDim.x - 1) words[last] = blockIdx.x + params.total_q;\n"
      "  __syncthreads();\n"
      "  if (threadIdx.x == 0) static_cast<int*>(params.o.data)[blockIdx.x] = words[last];\n"
      "}\n";
  return nvrtc_compiler()->compile(source).code;
}

std::unique_ptr<Executable> load(const std::string& code) {
  return load_cuda(0, code, {{.function = "probe", .threads = 96, .shared_memory = shared_bytes}});
}

class CudaDeviceTest : public testing::Test {
 protected:
  static constexpr int blocks = 30;

  void SetUp() override {
    std::string reason;
    const std::vector<CudaDevice> devices = cuda_devices(&reason);
    if (devices.empty()) GTEST_SKIP() << reason;
    try {
      nvrtc_compiler();
    } catch (const Error& error) {
      GTEST_SKIP() << error.message();
    }
    target_ = Target::for_compute_capability(devices[0].major, devices[0].minor);
    context_ = std::make_unique<Context>(0);
  }

  static void launch(const Executable& kernel, const DeviceBuffer& out, int number, Stream stream) {
    device::ForwardParams p{};
    p.o.data = out.data();
    p.total_q = number;
    Launch launch;
    StepLaunch& step = launch.add_step();
    step.make_params<device::ForwardParams>(p);
    step.grid = {blocks};
    kernel.launch(launch, stream);
  }

  DeviceBuffer buffer(unsigned char byte = 0xff) const {
    DeviceBuffer out(*context_, blocks * sizeof(int));
    out.fill(byte);
    synchronize(*context_);
    return out;
  }

  void expect_result(const DeviceBuffer& out, int number) const {
    synchronize(*context_);
    std::vector<int> got(blocks);
    out.copy_to(got.data(), out.size());
    synchronize(*context_);
    for (int i = 0; i < blocks; ++i) ASSERT_EQ(got[i], number + i);
  }

  Target target_;
  std::unique_ptr<Context> context_;
};

CUcontext current_context() {
  CUcontext current = nullptr;
  check(driver().CtxGetCurrent(&current), "cuCtxGetCurrent");
  return current;
}

TEST_F(CudaDeviceTest, DescribesTheDevice) {
  const CudaDevice device = cuda_device(0);
  EXPECT_FALSE(device.name.empty());
  EXPECT_GE(device.major, 8);
  EXPECT_GT(device.multiprocessors, 0);
  EXPECT_GT(device.l2_cache, 0u);
  EXPECT_GE(device.max_shared_memory, target_.max_shared_memory());
  EXPECT_GT(device.memory, free_memory(*context_));
  EXPECT_EQ(error_of([] { cuda_device(1000); }).code(), ErrorCode::target_unavailable);
}

// Drivers before CUDA 12.4 do not know what a kernel takes.
TEST_F(CudaDeviceTest, RefusesParamsOfAnotherSize) {
  if (!driver().KernelGetParamInfo) GTEST_SKIP() << "the driver has no cuKernelGetParamInfo";
  const std::string code = probe(target_);
  const auto load_as = [&](std::size_t bytes, std::size_t second_bytes) {
    load_cuda(0, code,
              {{.function = "probe",
                .threads = 96,
                .shared_memory = shared_bytes,
                .params = {.own = &code, .bytes = bytes, .second_bytes = second_bytes}}});
  };
  constexpr std::size_t right = sizeof(device::ForwardParams);
  EXPECT_NO_THROW(load_as(right, 0));
  for (const auto& [bytes, second_bytes] :
       {std::pair{right + 8, std::size_t{0}}, {right - 8, 0}, {right, 64}}) {
    const Error error = error_of([&] { load_as(bytes, second_bytes); });
    EXPECT_EQ(error.code(), ErrorCode::internal);
    EXPECT_THAT(error.message(), testing::HasSubstr("probe"));
  }
}

TEST_F(CudaDeviceTest, LaunchesEveryTileOnce) {
  const auto kernel = load(probe(target_));
  const DeviceBuffer out = buffer();
  launch(*kernel, out, 1000, nullptr);
  expect_result(out, 1000);
}

TEST_F(CudaDeviceTest, LeavesTheCurrentContextAlone) {
  const auto kernel = load(probe(target_));
  const DeviceBuffer out = buffer();
  const OwnedStream stream(*context_);
  // On a new thread no context is current.
  std::thread([&] {
    ASSERT_EQ(current_context(), nullptr);
    launch(*kernel, out, 1, nullptr);
    EXPECT_EQ(current_context(), nullptr);
    launch(*kernel, out, 2, stream.get());
    EXPECT_EQ(current_context(), nullptr);
    stream.synchronize();
    EXPECT_EQ(current_context(), nullptr);
  }).join();
  expect_result(out, 2);
  {
    const ContextScope scope(*context_);
    launch(*kernel, out, 3, nullptr);
    EXPECT_EQ(current_context(), context_->handle());
  }
  expect_result(out, 3);
}

TEST_F(CudaDeviceTest, FirstLaunchMayBeCaptured) {
  const auto kernel = load(probe(target_));
  DeviceBuffer out = buffer();
  const Graph graph(*context_, [&](Stream stream) { launch(*kernel, out, 7, stream); });
  for (int replay = 0; replay < 3; ++replay) {
    out.fill(0xff);
    graph.launch();
    expect_result(out, 7);
  }
}

TEST_F(CudaDeviceTest, ManyThreadsAndStreams) {
  const auto kernel = load(probe(target_));
  constexpr int threads = 8, launches = 200;
  std::vector<DeviceBuffer> outs;
  for (int i = 0; i < threads; ++i) outs.push_back(buffer());
  std::vector<std::thread> pool;
  for (int i = 0; i < threads; ++i) {
    pool.emplace_back([&, i] {
      const OwnedStream stream(*context_);
      for (int n = 0; n <= launches; ++n) launch(*kernel, outs[i], i * 1000 + n, stream.get());
      stream.synchronize();
    });
  }
  for (std::thread& thread : pool) thread.join();
  for (int i = 0; i < threads; ++i) expect_result(outs[i], i * 1000 + launches);
}

// The second step reverses the output of the first. In a dependent launch it waits for that output itself.
TEST_F(CudaDeviceTest, StepsRunOneAfterTheOther) {
  KernelSource source;
  source.target = target_;
  for (const EmbeddedHeader& header : embedded_headers()) source.headers.push_back(header);
  source.text =
      "#include \"shared/forward_params.h\"\n"
      "using Params = flashjit::device::ForwardParams;\n"
      "extern \"C\" __global__ void first(const __grid_constant__ Params p) {\n"
      "  __nanosleep(100000);\n"
      "  static_cast<int*>(p.q.data)[blockIdx.x] = p.total_q + gridDim.x - 1 - blockIdx.x;\n"
      "}\n"
      "extern \"C\" __global__ void second(const __grid_constant__ Params p) {\n"
      "#if __CUDA_ARCH__ >= 900\n"
      "  asm volatile(\"griddepcontrol.wait;\" ::: \"memory\");\n"
      "#endif\n"
      "  const int from = gridDim.x - 1 - blockIdx.x;\n"
      "  static_cast<int*>(p.o.data)[blockIdx.x] = static_cast<volatile int*>(p.q.data)[from];\n"
      "}\n";
  const auto kernel = load_cuda(0, nvrtc_compiler()->compile(source).code,
                                {{.function = "first", .threads = 1}, {.function = "second", .threads = 1}});
  for (const bool dependent : {false, true}) {
    const DeviceBuffer out = buffer(), between = buffer();
    device::ForwardParams p{};
    p.q.data = between.data();
    p.o.data = out.data();
    p.total_q = 500;
    Launch launch;
    for (int i = 0; i < 2; ++i) {
      StepLaunch& step = launch.add_step();
      step.make_params<device::ForwardParams>(p);
      step.grid = {blocks};
      step.dependent = i == 1 && dependent;
    }
    kernel->launch(launch, nullptr);
    expect_result(out, 500);
  }
}

TEST_F(CudaDeviceTest, PlainReadReadsEveryWord) {
  const PlainRead read(*context_);
  for (const std::size_t words : {std::size_t{4}, std::size_t{1'000'004}, std::size_t{40'000'000}}) {
    std::vector<std::uint32_t> numbers(words);
    std::uint32_t sum = 0, state = 1;
    for (std::uint32_t& number : numbers) {
      number = state = state * 1664525u + 1013904223u;
      sum += number;
    }
    DeviceBuffer memory(*context_, 4 * words);
    memory.copy_from(numbers.data(), 4 * words);
    read.launch(memory.data(), 4 * words, nullptr);
    EXPECT_EQ(read.sum(), sum) << words;
  }
}

TEST_F(CudaDeviceTest, ColdLaunchesAreMeasuredOneByOne) {
  const PlainRead read(*context_);
  const auto kernel = load(probe(target_));
  const DeviceBuffer out = buffer();
  for (const auto before : {ColdLaunches::Before::read, ColdLaunches::Before::clear}) {
    ColdLaunches cold(*context_, &read, before);
    int launches = 0;
    const std::vector<double> ms = cold([&](Stream stream) { launch(*kernel, out, ++launches, stream); }, 3);
    EXPECT_EQ(launches, 3);
    EXPECT_THAT(ms, testing::SizeIs(3));
    EXPECT_THAT(ms, testing::Each(testing::Gt(0.0)));
    EXPECT_GT(cold.ms_with_preparation(), 0);
    expect_result(out, 3);
  }
}

TEST_F(CudaDeviceTest, LaunchesAllocateNothing) {
  const auto kernel = load(probe(target_));
  const DeviceBuffer out = buffer();
  const OwnedStream stream(*context_);
  synchronize(*context_);
  const std::size_t before = free_memory(*context_);
  for (int n = 0; n < 100; ++n) launch(*kernel, out, n, stream.get());
  stream.synchronize();
  EXPECT_EQ(free_memory(*context_), before);
}

// A driver function that flashjit itself does not use.
template <class Function>
Function* driver_function(const char* symbol) {
  return reinterpret_cast<Function*>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), symbol));
}

TEST_F(CudaDeviceTest, StreamOfAnotherContextIsRefused) {
  const auto kernel = load(probe(target_));
  const DeviceBuffer out = buffer();
  CUcontext other = nullptr;
  ASSERT_EQ(driver_function<CUresult(CUcontext*, unsigned, CUdevice)>("cuCtxCreate_v2")(&other, 0, 0),
            CUDA_SUCCESS);
  CUstream stream = nullptr;
  check(driver().StreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreateWithPriority");
  const Error error = error_of([&] { launch(*kernel, out, 1, stream); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_THAT(error.message(), HasSubstr("stream"));
  EXPECT_EQ(current_context(), other);
  launch(*kernel, out, 2, nullptr);  // the primary context's default stream, whichever context is current
  expect_result(out, 2);
  driver_function<CUresult(CUcontext)>("cuCtxDestroy_v2")(other);
}

TEST_F(CudaDeviceTest, CodeForAnotherTargetIsRefused) {
  const std::string code = probe(Target::parse(target_.level == 120 ? "sm_80" : "sm_120"));
  const Error error = error_of([&] { load(code); });
  EXPECT_EQ(error.code(), ErrorCode::target_unavailable);
  EXPECT_THAT(error.message(), HasSubstr("compute capability"));
  EXPECT_THROW(load(code), BadCode);
}

TEST_F(CudaDeviceTest, DamagedCodeIsRefused) {
  std::string code = probe(target_);
  code.replace(0, 4, "oops");
  EXPECT_EQ(error_of([&] { load(code); }).code(), ErrorCode::target_unavailable);
  EXPECT_THROW(load(code), BadCode);
  EXPECT_THROW(load("no machine code at all"), BadCode);
}

TEST_F(CudaDeviceTest, CodeWithoutTheEntryIsRefused) {
  const std::string code = probe(target_);
  EXPECT_THROW(load_cuda(0, code, {{.function = "another", .threads = 96}}), BadCode);
}

TEST_F(CudaDeviceTest, TooMuchSharedMemoryIsRefused) {
  const std::string code = probe(target_);
  const Error error = error_of(
      [&] { load_cuda(0, code, {{.function = "probe", .threads = 96, .shared_memory = 10'000'000}}); });
  EXPECT_EQ(error.code(), ErrorCode::device_failed);
  EXPECT_THAT(error.message(), HasSubstr("10000000"));
}

TEST_F(CudaDeviceTest, PointersAreChecked) {
  const DeviceBuffer out = buffer();
  EXPECT_NO_THROW(check_device_pointer(out.data(), 0, "q"));
  EXPECT_NO_THROW(check_device_pointer(static_cast<char*>(out.data()) + 8, 0, "q"));

  const auto host_alloc = driver_function<CUresult(void**, std::size_t, unsigned)>("cuMemHostAlloc");
  const auto host_free = driver_function<CUresult(void*)>("cuMemFreeHost");
  const auto managed_alloc =
      driver_function<CUresult(CUdeviceptr*, std::size_t, unsigned)>("cuMemAllocManaged");
  const ContextScope scope(*context_);
  void* pinned = nullptr;
  constexpr unsigned portable_and_mapped = 3, attach_global = 1;
  ASSERT_EQ(host_alloc(&pinned, 4096, portable_and_mapped), CUDA_SUCCESS);
  EXPECT_NO_THROW(check_device_pointer(pinned, 0, "q"));
  host_free(pinned);
  CUdeviceptr managed = 0;
  ASSERT_EQ(managed_alloc(&managed, 4096, attach_global), CUDA_SUCCESS);
  EXPECT_NO_THROW(check_device_pointer(reinterpret_cast<void*>(managed), 0, "q"));
  driver().MemFree(managed);

  std::vector<float> host(1000);
  const Error error = error_of([&] { check_device_pointer(host.data(), 0, "cu_seqlens_q"); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_THAT(error.message(), HasSubstr("cu_seqlens_q"));
  EXPECT_THAT(error.message(), HasSubstr("host memory"));
  EXPECT_THAT(error.message(), HasSubstr("cuda:0"));
}

TEST_F(CudaDeviceTest, TooLargeABufferSaysHowMuchIsFree) {
  const Error error = error_of([&] { DeviceBuffer(*context_, std::size_t{1} << 50); });
  EXPECT_EQ(error.code(), ErrorCode::device_failed);
  EXPECT_THAT(error.message(), HasSubstr("1125899906842624"));
}

// ---- process exits, each in a process of its own ----

// CUDA does not survive fork(): what the child asks for is refused, and what it destroys is left alone.
TEST_F(CudaDeviceTest, AForkedChildIsRefused) {
  auto kernel = load(probe(target_));
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    bool refused = false;
    try {
      kernel->launch({}, nullptr);
    } catch (const Error& error) {
      refused = error.message().find("forked") != std::string::npos;
    }
    refused = refused && error_of([] { cuda_device(0); }).message().find("forked") != std::string::npos;
    kernel.reset();
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

class CudaExitTest : public CudaDeviceTest {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    CudaDeviceTest::SetUp();
  }
};

// Constructed before the driver is opened, so destroyed after the driver's own state.
std::unique_ptr<Executable> kept;

TEST_F(CudaExitTest, KernelsMayOutliveMain) {
  const auto body = [&] {
    kept = load(probe(target_));
    const DeviceBuffer out = buffer();
    launch(*kept, out, 1, nullptr);
    expect_result(out, 1);
    std::exit(0);
  };
  EXPECT_EXIT(body(), testing::ExitedWithCode(0), "");
}

TEST_F(CudaExitTest, KernelsMayOutliveTheirContext) {
  const auto body = [&] {
    auto kernel = load(probe(target_));
    const DeviceBuffer out = buffer();
    driver_function<CUresult(CUdevice)>("cuDevicePrimaryCtxReset_v2")(context_->device());
    kernel.reset();
    std::_Exit(0);
  };
  EXPECT_EXIT(body(), testing::ExitedWithCode(0), "");
}

// ---- without a GPU ----

TEST(CudaDriver, KnowsWhatBlamesTheCode) {
  for (const CUresult result :
       {CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_NO_BINARY_FOR_GPU, CUDA_ERROR_INVALID_PTX,
        CUDA_ERROR_UNSUPPORTED_PTX_VERSION, CUDA_ERROR_JIT_COMPILER_NOT_FOUND, CUDA_ERROR_NOT_FOUND})
    EXPECT_TRUE(blames_code(result)) << result;
  for (const CUresult result : {CUDA_SUCCESS, CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_NO_DEVICE,
                                CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE})
    EXPECT_FALSE(blames_code(result)) << result;
}

TEST(CudaDriver, AbsenceIsExplained) {
  std::string reason;
  if (!cuda_devices(&reason).empty()) GTEST_SKIP() << "there is a GPU";
  EXPECT_THAT(reason, HasSubstr("CUDA"));
  EXPECT_THAT(reason, testing::AnyOf(HasSubstr("device cpu"), HasSubstr("nvidia-smi")));
  EXPECT_EQ(error_of([] { cuda_device(0); }).code(), ErrorCode::target_unavailable);
  EXPECT_EQ(error_of([] { load("code"); }).code(), ErrorCode::target_unavailable);
}

}  // namespace
}  // namespace flashjit::cuda
