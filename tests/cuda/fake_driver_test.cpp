// What flashjit asks of the CUDA driver, with a driver that has no GPU (fake_driver.hpp).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "codegen/base/error.hpp"
#include "runtime/executable.hpp"
#include "tests/cuda/fake_driver.hpp"

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

}  // namespace
}  // namespace flashjit::testing_support
