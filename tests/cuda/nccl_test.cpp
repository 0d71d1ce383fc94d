// The meeting of ranks over an NCCL communicator, with a driver that has no GPU (fake_driver.hpp) and an NCCL
// whose gather never ends by itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "codegen/base/error.hpp"
#include "runtime/parallel.hpp"
#include "runtime/parallel/nccl.hpp"
#include "tests/cuda/fake_driver.hpp"

namespace flashjit::testing_support {
namespace {

using testing::HasSubstr;

constexpr int success = 0, remote_error = 6, in_progress = 7;

struct FakeNccl {
  int state = success;      // of the communicator
  int in_progress_for = 0;  // questions for its state, which it is in progress before
  int of_gather = success;  // what the gather returns
  int questions = 0;
  int of_send = success, of_group = success;
  int groups = 0;  // that are open
  std::string messages;
};
FakeNccl fake_nccl;

}  // namespace

#define FAKE_NCCL extern "C" [[gnu::visibility("default")]]
FAKE_NCCL const char* ncclGetErrorString(int) {
  return "remote process exited";
}
FAKE_NCCL int ncclCommCount(void*, int* count) {
  *count = 2;
  return success;
}
FAKE_NCCL int ncclCommUserRank(void*, int* rank) {
  *rank = 0;
  return success;
}
FAKE_NCCL int ncclCommCuDevice(void*, int* device) {
  *device = 0;
  return success;
}
FAKE_NCCL int ncclCommGetAsyncError(void*, int* state) {
  *state = ++fake_nccl.questions <= fake_nccl.in_progress_for ? in_progress : fake_nccl.state;
  return success;
}
FAKE_NCCL int ncclGroupStart() {
  ++fake_nccl.groups;
  return success;
}
FAKE_NCCL int ncclGroupEnd() {
  --fake_nccl.groups;
  return fake_nccl.of_group;
}
FAKE_NCCL int ncclSend(const void*, std::size_t bytes, int, int to, void*, void*) {
  fake_nccl.messages += " > " + std::to_string(to) + ": " + std::to_string(bytes);
  return fake_nccl.of_send;
}
FAKE_NCCL int ncclRecv(void*, std::size_t bytes, int, int from, void*, void*) {
  fake_nccl.messages += " < " + std::to_string(from) + ": " + std::to_string(bytes);
  return success;
}
FAKE_NCCL int ncclAllGather(const void*, void*, std::size_t, int, void*, void*) {
  return fake_nccl.of_gather;
}

namespace {

class Nccl : public testing::Test {
 protected:
  Nccl() {
    fake_nccl = {};
    fake_driver() = {};
  }
  // The text of what waiting throws.
  std::string message(bool done, std::chrono::milliseconds most) const {
    try {
      NcclCommunicator(&fake_nccl).wait_until([&] { return done; }, most);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::device_failed);
      return error.message();
    }
    return {};
  }
};

TEST_F(Nccl, WaitsNoLongerThanTold) {
  EXPECT_EQ(message(true, std::chrono::minutes(1)), "");
  EXPECT_THAT(message(false, std::chrono::milliseconds(5)), HasSubstr("within 5 ms"));
}

TEST_F(Nccl, TellsWhatTheCommunicatorTells) {
  fake_nccl.state = remote_error;
  EXPECT_THAT(message(false, std::chrono::minutes(1)), HasSubstr("remote process exited"));
}

TEST_F(Nccl, IsNotDoneBeforeTheGatherIsEnqueued) {
  fake_nccl.in_progress_for = 3;
  EXPECT_EQ(message(true, std::chrono::minutes(1)), "");
  EXPECT_EQ(fake_nccl.questions, 4);
}

TEST_F(Nccl, SendsAndReceivesInTheOrderOfTheLists) {
  const NcclCommunicator comm(&fake_nccl);
  std::byte memory[8];
  const std::vector<Message> sends = {{memory, 3}, {memory, 5}}, receives = {{memory, 7}};
  comm.send_and_receive(1, sends, 2, receives, nullptr);
  EXPECT_EQ(fake_nccl.messages, " > 1: 3 > 1: 5 < 2: 7");
  // A communicator that does not block has enqueued them once it is no longer in progress.
  fake_nccl.of_group = fake_nccl.of_send = in_progress;
  fake_nccl.in_progress_for = 3;
  comm.send_and_receive(1, sends, 2, receives, nullptr);
  EXPECT_EQ(fake_nccl.questions, 4);
  fake_nccl.of_send = remote_error;
  fake_nccl.of_group = success;
  EXPECT_THROW(comm.send_and_receive(1, sends, 2, receives, nullptr), Error);
  EXPECT_EQ(fake_nccl.groups, 0) << "a group that failed is still open";
}

// Freeing the gather's memory would wait for the gather.
TEST_F(Nccl, LeavesAFailedGatherItsMemory) {
  fake_driver().not_ready = true;
  fake_nccl.of_gather = in_progress;
  fake_nccl.in_progress_for = 3;
  fake_nccl.state = remote_error;
  try {
    ParallelGroup::of_nccl(&fake_nccl);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::device_failed);
    EXPECT_THAT(error.message(), HasSubstr("remote process exited"));
  }
  EXPECT_EQ(fake_driver().allocated, 2);
  EXPECT_EQ(fake_driver().freed, 0);
  EXPECT_EQ(fake_driver().waited, 0);
}

}  // namespace
}  // namespace flashjit::testing_support
