// Where a numerics test runs: a CPU target that this machine can run, or a GPU and a target for it.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "runtime/cuda/driver.hpp"
#include "runtime/flashjit.hpp"

namespace flashjit::testing_support {

class TestDevice {
 public:
  TestDevice(Device device, std::string target);

  // Of this process, made on first use. Its cache is FLASHJIT_CACHE_DIR, else a folder that dies with the
  // process.
  Engine& engine();
  // One more engine on the same device.
  std::unique_ptr<Engine> make_engine(EngineOptions options = {}) const;

  const Device& device() const { return device_; }
  const std::string& target() const { return target_; }
  bool is_cuda() const { return device_.kind == Device::Kind::cuda; }
  std::string name() const;  // "cpu_x86_64_v3", "cuda0_sm_90a"
  std::vector<DType> dtypes() const;
  const cuda::Context& context();  // cuda only
  void synchronize();              // no-op on a CPU

 private:
  Device device_;
  std::string target_;
  std::unique_ptr<cuda::Context> context_;  // before the engine: dies after it
  std::unique_ptr<Engine> engine_;
};

// Every CPU target of this machine and every GPU with its targets; a single null in place of the GPUs where
// there are none.
const std::vector<std::shared_ptr<TestDevice>>& test_devices();
// The folder of disk caches described above.
const std::string& cache_folder();
std::string describe(const std::shared_ptr<TestDevice>& device);
inline void PrintTo(const std::shared_ptr<TestDevice>& device, std::ostream* out) {
  *out << describe(device);
}

// FLASHJIT_TEST_ALL=1: what other runs take a sample of is run whole.
bool test_all();

// A suite whose cases run once a device.
class OnEveryDevice : public testing::TestWithParam<std::shared_ptr<TestDevice>> {
 protected:
  void SetUp() override;  // skips where the device is the null one
  TestDevice& on() { return *GetParam(); }
  // Whether the next case of a long table, a kernel of `spec`, is one for this device. CPU targets are of one
  // text and share the table out, or one in so many of its cases: of as many cases in a row as there are
  // targets each gets one. GPUs take all of it, and so does everybody with FLASHJIT_TEST_ALL=1.
  bool takes_next(const AttentionSpec& spec, std::uint64_t one_in = 1);
  // For tables that every device takes: without dtypes whose kernels are another device's (AMX multiplies
  // bf16 only), but for FLASHJIT_TEST_ALL=1.
  std::vector<DType> own_dtypes();

 private:
  std::uint64_t place_ = 0;
};

#define FLASHJIT_ON_EVERY_DEVICE(Suite)                                           \
  INSTANTIATE_TEST_SUITE_P(                                                       \
      All, Suite, testing::ValuesIn(::flashjit::testing_support::test_devices()), \
      [](const auto& device) { return ::flashjit::testing_support::describe(device.param); })

}  // namespace flashjit::testing_support
