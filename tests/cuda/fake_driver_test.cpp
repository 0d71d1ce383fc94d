// The calls that flashjit makes of the CUDA driver, and the checks of a launch on a GPU, with a driver that
// has none (fake_driver.hpp).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "cache/kernel_entry.hpp"
#include "cache/kernel_key.hpp"
#include "codegen/arguments/table.hpp"
#include "codegen/base/error.hpp"
#include "codegen/families/kernel_family.hpp"
#include "codegen/families/search_space.hpp"
#include "codegen/render.hpp"
#include "runtime/cuda/driver.hpp"
#include "runtime/executable.hpp"
#include "runtime/flashjit.hpp"
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

// A folder with the kernel of a lesser target serves a GPU of 9.0, whose own target is sm_90a.
TEST(FakeDriver, AKernelOfALesserTargetIsTakenWhereNoneElseIs) {
  std::string folder = ::testing::TempDir() + "flashjit-lesser-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const AttentionSpec spec = AttentionSpec{.head_dim = 64}.validated();
  const Shape shape{.batch = 1, .seqlen_q = 100, .seqlen_k = 100, .num_heads_q = 2, .num_heads_kv = 2};
  // Machine code that the driver takes, whatever it is.
  const auto publish = [&](const char* name) {
    const Target target = Target::parse(name);
    const KernelSource source = render(spec, target, heuristic_config(spec, target, bucket(shape)));
    const CacheKey key = entry_key(request_key(spec, source), "", "a compiler");
    CompiledKernel compiled;
    compiled.code = "code";
    compiled.compiler = "a compiler";
    ASSERT_TRUE(DiskCache(folder).publish(pack_kernel(key, compiled, source)));
    fake_driver() = {.params = {source.steps.front().params.bytes}};
  };
  std::vector<KernelEvent> events;
  const auto get = [&](const std::string& target) {
    events.clear();
    Engine engine({.device = "cuda:0",
                   .target = target,
                   .cache_dir = "",
                   .cache_path = folder,
                   .policy = Policy::require_prebuilt,
                   .on_kernel = [&](const KernelEvent& event) { events.push_back(event); }});
    EXPECT_EQ(engine.target().str(), target.empty() ? "sm_90a" : target);
    return engine.get(spec, shape).info();
  };
  EXPECT_THAT(message_of([&] { get(""); }), HasSubstr("no cache folder has the kernel"));
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events.front().kind, KernelEvent::Kind::failed);
  publish("sm_80");  // of another major version
  EXPECT_THAT(message_of([&] { get(""); }), HasSubstr("for sm_90a"));
  publish("sm_90");
  const KernelInfo info = get("");
  EXPECT_EQ(info.target.str(), "sm_90");
  EXPECT_EQ(info.origin, Origin::disk);
  EXPECT_THAT(info.cache_note, HasSubstr("the kernel is for sm_90, since no folder has it for sm_90a"));
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events.front().kind, KernelEvent::Kind::loaded);
  EXPECT_EQ(events.front().target.str(), "sm_90");
  EXPECT_THAT(events.front().reason, HasSubstr("the kernel is for sm_90"));
  // The target that is named, by the option or the environment, is the first choice.
  EXPECT_EQ(get("sm_90").cache_note, "");
  setenv("FLASHJIT_TARGET", "x86-64-v3,sm_90", 1);
  EXPECT_EQ(Engine({.device = "cuda:0", .cache_dir = "", .cache_path = ""}).target().str(), "sm_90");
  EXPECT_EQ(Engine({.device = "cpu", .cache_dir = "", .cache_path = ""}).target().str(), "x86-64-v3");
  setenv("FLASHJIT_TARGET", "sm_9", 1);
  EXPECT_THAT(message_of([] { Engine({.device = "cpu", .cache_dir = "", .cache_path = ""}); }),
              HasSubstr("FLASHJIT_TARGET: target \"sm_9\" is not one of"));
  setenv("FLASHJIT_TARGET", "sm_100", 1);
  EXPECT_THAT(message_of([] { Engine({.device = "cuda:0", .cache_dir = "", .cache_path = ""}); }),
              HasSubstr("FLASHJIT_TARGET: target sm_100 does not run on cuda:0"));
  unsetenv("FLASHJIT_TARGET");
  std::filesystem::remove_all(folder);
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
      if (op == Operation::append_kv || op == Operation::copy_kv || op == Operation::merge)
        continue;  // no Workload makes them
      const FeatureSpace space(op, target);
      for (int taken = test_all() ? 0 : 8; taken < 12;) {
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
