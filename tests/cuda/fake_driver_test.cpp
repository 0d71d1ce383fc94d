// What flashjit asks of the CUDA driver, and what a launch on a GPU is checked for, with a driver that has
// none (fake_driver.hpp).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "codegen/arguments/table.hpp"
#include "codegen/base/error.hpp"
#include "codegen/families/kernel_family.hpp"
#include "codegen/families/search_space.hpp"
#include "codegen/render.hpp"
#include "runtime/cuda/driver.hpp"
#include "runtime/executable.hpp"
#include "runtime/operation.hpp"
#include "tests/cuda/fake_driver.hpp"
#include "tests/support/feature_space.hpp"
#include "tests/support/feature_workload.hpp"
#include "tests/support/sample_seed.hpp"
#include "tools/verify/random_tensor.hpp"

namespace flashjit::testing_support {
namespace {

using testing::HasSubstr;

template <class Body>
std::string message_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.message();
  }
  return "nothing was thrown";
}

// A kernel whose machine code has params of `has` bytes and whose launches make params of `made`.
std::unique_ptr<Executable> load(const std::vector<std::size_t>& has,
                                 std::pair<std::size_t, std::size_t> made) {
  static const int own = 0;
  fake_driver() = {.params = has};
  return load_cuda(0, "code",
                   {{.function = "some_kernel",
                     .params = {.own = &own, .bytes = made.first, .second_bytes = made.second}}});
}

TEST(FakeDriver, NoCallFailsForARightKernel) {
  load({640}, {640, 0});
  EXPECT_EQ(fake_driver().failed, 0);
  load({640, 384}, {640, 384});
  EXPECT_EQ(fake_driver().failed, 0);
}

TEST(FakeDriver, ParamsOfOtherSizesAreRefused) {
  using Bytes = std::vector<std::size_t>;
  std::vector<Bytes> of_two = {{}, {640}, {648, 384}, {640, 392}, {384, 640}}, of_one = {{}, {632}};
#ifdef FLASHJIT_FAKE_DRIVER_COUNTS_PARAMS
  of_one.push_back({640, 384});
#endif
  for (const Bytes& has : of_two)
    EXPECT_THAT(message_of([&] { load(has, {640, 384}); }), HasSubstr("some_kernel"));
  for (const Bytes& has : of_one)
    EXPECT_THAT(message_of([&] { load(has, {640, 0}); }), HasSubstr("some_kernel"));
}

// Launches without steps, with the kernel's steps, and with more.
TEST(FakeDriver, AForkedChildIsRefusedWhateverItLaunches) {
  const auto kernel = load({640}, {640, 0});
  const pid_t child = fork();
  if (child == 0) {
    bool refused = true;
    Launch launch;
    for (int steps = 0; steps <= 2; ++steps, launch.add_step())
      refused &= message_of([&] { kernel->launch(launch, nullptr); }).find("forked") != std::string::npos;
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

#ifdef FLASHJIT_FAKE_DRIVER_COUNTS_PARAMS
// The tensors that a case has for a GPU, in host memory, at the strides and addresses that kernels take.
void expect_planned(const FeatureCase& of, const Target& target) {
  TestDevice lender({Device::Kind::cpu, 0}, target.str());
  Workload workload(lender, workload_of(of));
  const AttentionSpec& spec = workload.given().spec;
  const Shape shape = workload.given().shape();
  const Device device{Device::Kind::cuda, 0};
  AttentionArgs args = workload.args();
  for (const Argument& argument : arguments)
    if (argument.tensor() && args.*argument.tensor()) (args.*argument.tensor())->device = device;
  std::vector<NamedArgument> named(args.named.begin(), args.named.end());
  for (NamedArgument& one : named)
    if (Tensor* const table = std::get_if<Tensor>(&one.value)) table->device = device;
  args.named = named;
  const cuda::Context context(0);
  const KernelConfig config = heuristic_config(spec, target, shape);
  const KernelSource source = render(spec, target, config);
  const PlannedKernel kernel{spec, target, config, device, 132, &context, source.steps};
  const std::size_t bytes = runtime_of(spec.op).workspace_bytes(kernel, shape);
  constexpr std::align_val_t aligned{256};
  const auto release = [](void* memory) { operator delete(memory, aligned); };
  const std::unique_ptr<void, decltype(release)> workspace(operator new(bytes + 1, aligned));
  args.workspace = bytes_at(workspace.get(), bytes);
  args.workspace->device = device;
  Launch launch;
  EXPECT_EQ(message_of([&] { runtime_of(spec.op).plan(kernel, args, launch); }), "nothing was thrown")
      << workload.given().str();
}

// Whatever a row of a covering array has a Workload make for a GPU, a GPU's launch takes.
TEST(FakeDriver, LaunchesOfRandomRowsAreTaken) {
  std::uint64_t draws = 0;
  for (const char* const name : {"sm_80", "sm_90a"}) {
    const Target target = Target::parse(name);
    for (const Operation op : operations_on(target)) {
      if (op == Operation::append_kv || op == Operation::merge) continue;  // no Workload makes them
      const FeatureSpace space(op, target);
      for (int taken = 0; taken < 12;) {
        Row row;
        for (const int size : space.sizes())
          row.push_back(
              static_cast<int>(verify::random_bits(sample_seed(), draws++) % static_cast<unsigned>(size)));
        FeatureCase c;
        try {
          c = space.at(row);
        } catch (const Error&) {
          continue;
        }
        if (!why_unsupported(c.spec, target).empty()) continue;
        c.seed = draws;
        expect_planned(c, target);
        ++taken;
      }
    }
  }
}
#endif

}  // namespace
}  // namespace flashjit::testing_support
