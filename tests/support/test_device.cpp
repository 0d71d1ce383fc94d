#include "tests/support/test_device.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "runtime/cpu/amx.hpp"
#include "runtime/cuda/memory.hpp"
#include "tools/verify/random_tensor.hpp"

namespace flashjit::testing_support {
namespace {

std::string why_no_cuda;

class TemporaryFolder {
 public:
  TemporaryFolder()
      : path((std::filesystem::temp_directory_path() / ("flashjit_test_" + std::to_string(getpid())))
                 .string()) {
    std::filesystem::create_directories(path);
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  const std::string path;
};

std::vector<std::shared_ptr<TestDevice>> find_devices() {
  std::vector<std::shared_ptr<TestDevice>> devices;
  if (const char* targets = std::getenv("FLASHJIT_TEST_PREBUILD"); targets && *targets) {
    std::istringstream list(targets);
    for (std::string target; std::getline(list, target, ',');)
      devices.push_back(std::make_shared<TestDevice>(Device{Device::Kind::cuda, 0}, target, true));
    return devices;
  }
  const Target best = cpu_target().target;
  for (const Target& target : Target::all()) {
    if (!best.runs(target)) continue;
    devices.push_back(std::make_shared<TestDevice>(Device{Device::Kind::cpu, 0}, target.str()));
  }
  const std::vector<CudaDevice> gpus = cuda_devices(&why_no_cuda);
  for (const CudaDevice& gpu : gpus) {
    // A GPU may have two targets, such as sm_90 and sm_90a; both are tested.
    const int level = Target::for_compute_capability(gpu.major, gpu.minor).level;
    for (const Target& target : Target::all()) {
      if (target.is_cuda() && target.level == level)
        devices.push_back(std::make_shared<TestDevice>(Device{Device::Kind::cuda, gpu.index}, target.str()));
    }
  }
  if (gpus.empty()) devices.push_back(nullptr);
  return devices;
}

std::vector<const TestDevice*> cpu_devices() {
  std::vector<const TestDevice*> cpus;
  for (const auto& device : test_devices())
    if (device && !device->is_cuda()) cpus.push_back(device.get());
  return cpus;
}

// The name of the test that runs, without its device.
std::string name_of_test() {
  const std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
  return name.substr(0, name.find('/'));
}

// Whether the device's kernels of that dtype are those of x86-64-v4: AmxKernel.OfOtherDtypesIsThatForAvx512.
bool repeats_avx512(const TestDevice& device, DType dtype) {
  const Target target = Target::parse(device.target());
  return (target.amx || target.avx512_bf16) && dtype != DType::bf16;
}

}  // namespace

const std::string& cache_folder() {
  static const TemporaryFolder temporary;
  static const std::string folder = [] {
    const char* given = std::getenv("FLASHJIT_CACHE_DIR");
    return given && *given ? std::string(given) : temporary.path;
  }();
  return folder;
}

TestDevice::TestDevice(Device device, std::string target, bool only_prebuilds)
    : device_(device), target_(std::move(target)), only_prebuilds_(only_prebuilds) {}

Engine& TestDevice::engine() {
  if (!engine_) engine_ = make_engine();
  return *engine_;
}

std::unique_ptr<Engine> TestDevice::make_engine(EngineOptions options) const {
  options.device = device_.str();
  options.target = target_;
  if (!options.cache_dir) options.cache_dir = cache_folder();
  return std::make_unique<Engine>(std::move(options));
}

std::string TestDevice::name() const {
  std::string name = (is_cuda() ? "cuda" + std::to_string(device_.index) : "cpu") + "_" + target_;
  std::replace_if(name.begin(), name.end(), [](unsigned char c) { return !std::isalnum(c); }, '_');
  return name;
}

std::vector<DType> TestDevice::dtypes() const {
  if (is_cuda()) return {DType::bf16, DType::fp16};
  return {DType::bf16, DType::fp16, DType::fp32};
}

const cuda::Context& TestDevice::context() {
  if (!context_) context_ = std::make_unique<cuda::Context>(device_.index);
  return *context_;
}

void TestDevice::synchronize() {
  if (is_cuda()) cuda::synchronize(context());
}

const std::vector<std::shared_ptr<TestDevice>>& test_devices() {
  cache_folder();  // constructed first, so that the folder outlives the engines
  static const std::vector<std::shared_ptr<TestDevice>> devices = find_devices();
  return devices;
}

std::string describe(const std::shared_ptr<TestDevice>& device) {
  return device ? device->name() : "cuda";
}

bool test_quick() {
  const char* value = std::getenv("FLASHJIT_TEST_QUICK");
  return value && std::string(value) == "1";
}

const TestDevice* OnEveryDevice::sole_target() {
  const std::string suite = testing::UnitTest::GetInstance()->current_test_info()->test_suite_name();
  const bool random = suite.ends_with("/Random");
  if (test_all() || on().is_cuda() || (random && !test_quick())) return nullptr;
  const std::vector<const TestDevice*> cpus = cpu_devices();
  return cpus[verify::random_bits(sample_seed(name_of_test()), 0) % cpus.size()];
}

bool OnEveryDevice::takes_next(const AttentionSpec& spec, std::uint64_t one_in) {
  const std::vector<const TestDevice*> cpus = cpu_devices();
  const std::uint64_t place = place_++;
  if (test_all() || on().is_cuda()) return true;
  // Draws at random instead of in turns: the table may have a period of its own. Each test draws differently.
  const std::uint64_t seed = sample_seed(name_of_test());
  const bool drawn_ones = verify::random_bits(seed + 1, place) % one_in == 0;
  if (sole_target())
    return drawn_ones && (!test_quick() || verify::random_bits(seed, place) % cpus.size() == 0);
  const std::uint64_t size = cpus.size();
  const std::uint64_t drawn = verify::random_bits(seed, place / size), step = place % size;
  const TestDevice* taker = cpus[(drawn + (drawn / size % 2 ? step : size - step)) % size];
  if (repeats_avx512(*taker, spec.dtype))
    taker = *std::find_if(cpus.begin(), cpus.end(),
                          [](const TestDevice* cpu) { return cpu->target() == "x86-64-v4"; });
  return taker == &on() && drawn_ones;
}

std::vector<DType> OnEveryDevice::own_dtypes() {
  std::vector<DType> dtypes = on().dtypes();
  if (!test_all() && !sole_target())
    std::erase_if(dtypes, [&](DType dtype) { return repeats_avx512(on(), dtype); });
  return dtypes;
}

void OnEveryDevice::SetUp() {
  if (!GetParam()) GTEST_SKIP() << "no GPU: " << why_no_cuda;
  const TestDevice* const taker = sole_target();
  if (taker && taker != &on())
    GTEST_SKIP() << "runs on " << taker->target() << ", and with FLASHJIT_TEST_ALL=1 here";
}

}  // namespace flashjit::testing_support
