// The device of a numerics test: a CPU target that this machine can run, or a GPU and a target for it.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "runtime/cuda/driver.hpp"
#include "runtime/flashjit.hpp"
#include "tests/support/sample_seed.hpp"

namespace flashjit::testing_support {

class TestDevice {
 public:
  TestDevice(Device device, std::string target, bool only_prebuilds = false);

  // This process's engine, made on first use. Its cache is
  // FLASHJIT_CACHE_DIR, else a folder that is removed at the process's end.
  Engine& engine();
  // Another engine on the same device.
  std::unique_ptr<Engine> make_engine(EngineOptions options = {}) const;

  const Device& device() const { return device_; }
  const std::string& target() const { return target_; }
  bool is_cuda() const { return device_.kind == Device::Kind::cuda; }
  // FLASHJIT_TEST_PREBUILD=sm_90a,...: there are no devices but these targets, and a Workload compiles its
  // kernel into cache_folder() and launches nothing. tools/gpu-check packs the kernels.
  bool only_prebuilds() const { return only_prebuilds_; }
  std::string name() const;  // "cpu_x86_64_v3", "cuda0_sm_90a"
  std::vector<DType> dtypes() const;
  const cuda::Context& context();  // cuda only
  void synchronize();              // no-op on a CPU

 private:
  Device device_;
  std::string target_;
  bool only_prebuilds_;
  std::unique_ptr<cuda::Context> context_;  // before the engine, so destroyed after it
  std::unique_ptr<Engine> engine_;
};

// Every CPU target of this machine and every GPU with its
// targets. A single null stands for the GPUs if there are none.
const std::vector<std::shared_ptr<TestDevice>>& test_devices();
// The cache folder that TestDevice::engine() uses.
const std::string& cache_folder();
std::string describe(const std::shared_ptr<TestDevice>& device);
inline void PrintTo(const std::shared_ptr<TestDevice>& device, std::ostream* out) {
  *out << describe(device);
}

// Whether FLASHJIT_TEST_QUICK=1, which tools/test --quick sets: less of some tables.
bool test_quick();

// A suite whose cases run once on every device.
class OnEveryDevice : public testing::TestWithParam<std::shared_ptr<TestDevice>> {
 protected:
  // Skips the test if the device is null, or if another one runs it alone.
  void SetUp() override;
  // The CPU target that runs the test, drawn by its name and sample_seed(); null if each device does: GPUs,
  // random specs (but with FLASHJIT_TEST_QUICK=1), and all tests with FLASHJIT_TEST_ALL=1.
  const TestDevice* sole_target();
  TestDevice& on() { return *GetParam(); }
  // Whether this device takes the next case of a long table, a kernel of `spec`: every `one_in`th. CPU
  // targets that share a test take them in turns. GPUs take every case, and so do all devices with
  // FLASHJIT_TEST_ALL=1.
  bool takes_next(const AttentionSpec& spec, std::uint64_t one_in = 6);
  // The dtypes for tables that every device takes. Those whose kernels are the same as another device's are
  // left out (AMX multiplies only bf16), unless FLASHJIT_TEST_ALL=1 or this device runs the test alone.
  std::vector<DType> own_dtypes();

 private:
  std::uint64_t place_ = 0;
};

#define FLASHJIT_ON_EVERY_DEVICE(Suite)                                           \
  INSTANTIATE_TEST_SUITE_P(                                                       \
      All, Suite, testing::ValuesIn(::flashjit::testing_support::test_devices()), \
      [](const auto& device) { return ::flashjit::testing_support::describe(device.param); })

}  // namespace flashjit::testing_support
