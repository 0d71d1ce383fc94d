// Ranks of one host that are processes of their own.
#include "runtime/parallel/host_meeting.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/unit/expect_error.h"

namespace flashjit {
namespace {

// Runs each rank in a child, which tells how it went by its exit code.
std::vector<int> in_processes(int size, const std::function<int(int rank, const std::string& name)>& work) {
  const std::string name = HostMeeting::create(size);
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t child = fork();
    if (child == 0) _exit(work(rank, name));
    children.push_back(child);
  }
  std::vector<int> codes;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  }
  return codes;
}

TEST(HostMeeting, RanksHearEachOtherAgainAndAgain) {
  constexpr int size = 4;
  const std::vector<int> codes = in_processes(size, [](int rank, const std::string& name) {
    HostMeeting meeting(name, rank, size);
    for (int turn = 0; turn < 200; ++turn) {
      const std::string own(static_cast<std::size_t>(rank * 1000 + turn), static_cast<char>('a' + rank));
      const std::vector<std::string> all = meeting.gather(own);
      for (int other = 0; other < size; ++other)
        if (all[static_cast<std::size_t>(other)] !=
            std::string(static_cast<std::size_t>(other * 1000 + turn), static_cast<char>('a' + other)))
          return 1;
    }
    return 0;
  });
  EXPECT_EQ(codes, (std::vector<int>{0, 0, 0, 0}));
}

// A text beyond what the memory holds still differs from another of the same beginning.
TEST(HostMeeting, LongTextsThatDifferAreTold) {
  const std::vector<int> codes = in_processes(2, [](int rank, const std::string& name) {
    HostMeeting meeting(name, rank, 2);
    const std::string text(1 << 20, 'x');
    const std::vector<std::string> same = meeting.gather(text);
    const std::vector<std::string> other = meeting.gather(text + (rank == 0 ? "0" : "1"));
    return same[0] == same[1] && other[0] != other[1] ? 0 : 1;
  });
  EXPECT_EQ(codes, (std::vector<int>{0, 0}));
}

TEST(HostMeeting, AFailureAndAnEndedProcessEndTheWaitOfOthers) {
  for (const bool killed : {false, true}) {
    const std::vector<int> codes = in_processes(3, [&](int rank, const std::string& name) {
      HostMeeting meeting(name, rank, 3);
      if (rank == 1 && killed) kill(getpid(), SIGKILL);
      if (rank == 1) {
        meeting.fail("no such tensor");
        return 0;
      }
      try {
        meeting.gather("waits");
      } catch (const Error& error) {
        const std::string text = error.message();
        return error.code() == ErrorCode::device_failed && meeting.has_failed() &&
                       text.find(killed ? "rank 1 of the group has ended" : "no such tensor") !=
                           std::string::npos
                   ? 0
                   : 2;
      }
      return 3;
    });
    EXPECT_EQ(codes, (std::vector<int>{0, killed ? 128 + SIGKILL : 0, 0})) << killed;
  }
}

TEST(HostMeeting, RanksThatDoNotComeOrComeTwiceAreTold) {
  const std::string name = HostMeeting::create(2);
  expect_error(ErrorCode::device_failed, {"has", "bytes", "another size"}, [&] { HostMeeting(name, 0, 3); });
  expect_error(ErrorCode::invalid_argument, {"rank 2 of 2"}, [&] { HostMeeting(name, 2, 2); });
  expect_error(ErrorCode::device_failed, {"rank 1 of the group has not come within 200 ms"},
               [&] { HostMeeting(name, 0, 2, std::chrono::milliseconds(200)); });
  expect_error(ErrorCode::device_failed, {"/dev/shm"}, [&] { HostMeeting(name, 1, 2); });  // the name is gone
  const std::string again = HostMeeting::create(2);
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    EXPECT_NO_THROW(HostMeeting(again, 1, 2));
  });
  std::thread twice([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    expect_error(ErrorCode::invalid_argument, {"rank 0 of the group is process", "already"},
                 [&] { HostMeeting(again, 0, 2); });
  });
  EXPECT_NO_THROW(HostMeeting(again, 0, 2));
  late.join();
  twice.join();
}

}  // namespace
}  // namespace flashjit
