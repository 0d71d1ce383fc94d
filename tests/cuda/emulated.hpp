// GPU kernels' own code on the host, thread by thread (emulator/emulator.hpp): the parts of Specs and Configs
// that tests put together, the grid, and the fixture. To be included after the kernels' headers.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "codegen/spec/spec.hpp"
#include "runtime/executable.hpp"
#include "shared/kv_element.h"
#include "tests/cuda/emulator/emulator.hpp"
#include "tests/support/sampled_test.hpp"
#include "tests/support/test_device.hpp"

namespace flashjit::testing_support {

using device::i64;

using Bf16 = device::bf16;
using Fp16 = device::fp16;

template <class Element>
constexpr DType dtype_of = std::is_same_v<Element, Bf16>               ? DType::bf16
                           : std::is_same_v<Element, Fp16>             ? DType::fp16
                           : std::is_same_v<Element, device::int8>     ? DType::int8
                           : std::is_same_v<Element, device::fp8_e4m3> ? DType::fp8_e4m3
                           : std::is_same_v<Element, device::fp8_e5m2> ? DType::fp8_e5m2
                           : device::is_ds_mla<Element>                ? DType::fp8_ds_mla
                                                                       : DType::fp32;
// Nothing for void.
template <class Element>
constexpr std::optional<DType> dtype_if_any =
    std::is_void_v<Element> ? std::nullopt : std::optional(dtype_of<Element>);

// Specs and Configs, like those that render() writes. Defaults: of the kernel's Spec.
template <class Defaults, class Element_, int head_dim_, int head_dim_v_>
struct HeadsOf : Defaults {
  using Element = Element_;
  static constexpr int head_dim = head_dim_, head_dim_v = head_dim_v_;
};
template <class Spec>
struct WithDropout : Spec {
  static constexpr bool dropout = true;
};
template <class Spec>
struct WithFloatOutput : Spec {
  using o_dtype = float;
};
template <class Spec>
struct Deterministic : Spec {
  static constexpr bool deterministic = true;
};
template <class Spec>
struct ValuesInKeys : Spec {
  static constexpr bool v_in_k = true;
};
template <int num_warps_>
struct WarpsOf {
  static constexpr int num_warps = num_warps_;
};
template <int block_m_, int block_n_, int num_stages_, int num_warps_>
struct TilesOf : WarpsOf<num_warps_> {
  static constexpr int block_m = block_m_, block_n = block_n_, num_stages = num_stages_;
};

inline constexpr int not_a_number = 0xff;  // the value of every byte

// Runs step() as every thread of the grid. `garbage`: what shared memory holds at first.
template <class Step>
void run_grid(const Grid& grid, int threads, int shared_bytes, const Step& step, int garbage = not_a_number) {
  gridDim = {grid.x, grid.y, grid.z};
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        emulator::Block::run(threads, shared_bytes, garbage, step);
      }
  blockIdx = {0, 0, 0};
}
template <class Step>
void run_grid(i64 blocks, int threads, int shared_bytes, const Step& step) {
  run_grid(Grid{static_cast<unsigned>(blocks)}, threads, shared_bytes, step);
}

// A workspace, which may hold anything.
class DirtyWorkspace {
 public:
  explicit DirtyWorkspace(std::size_t bytes) : bytes_(bytes), memory_(bytes / 4 + 65, 0x7fc12345) {}
  DirtyWorkspace(const DirtyWorkspace&) = delete;
  DirtyWorkspace& operator=(const DirtyWorkspace&) = delete;
  Tensor view() {
    const auto address = (reinterpret_cast<std::uintptr_t>(memory_.data()) + 255) / 256 * 256;
    return Tensor::contiguous(reinterpret_cast<void*>(address), DType::int8, {Device::Kind::cpu, 0},
                              {static_cast<std::int64_t>(bytes_)});
  }

 private:
  const std::size_t bytes_;
  std::vector<std::uint32_t> memory_;
};

// A host thread takes long for each GPU thread, so `expect` takes a sample of the cases.
class EmulatorTest : public SampledTest {
 protected:
  EmulatorTest() : SampledTest(4) {}

  // Only lends its memory.
  TestDevice host{{Device::Kind::cpu, 0}, "x86-64-v3"};
};

}  // namespace flashjit::testing_support
