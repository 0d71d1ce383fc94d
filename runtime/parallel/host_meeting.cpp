#include "runtime/parallel/host_meeting.hpp"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <thread>

#include "codegen/base/digest.hpp"
#include "runtime/arguments/checks.hpp"

namespace flashjit {
namespace {

// A process that has ended counts as gone before its parent has asked for its end. One of another
// namespace, whose number says nothing here, counts as there.
bool is_gone(std::int64_t process) {
  if (kill(static_cast<pid_t>(process), 0) != 0) return errno == ESRCH;
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string text;
  std::getline(file, text);
  const std::size_t end = text.rfind(')');
  return end != std::string::npos && text.compare(end, 3, ") Z") == 0;
}

}  // namespace

struct HostMeeting::Shared {
  static constexpr std::size_t most_text = 1 << 16;
  struct Rank {
    std::atomic<std::int64_t> process, namespace_of;
    std::uint64_t length;
    char text[most_text];
  };
  std::atomic<std::uint32_t> arrived, turn;
  std::atomic<std::uint32_t> failure;  // 0: none; 1: being written; 2: in `why`
  char why[1024];
  Rank ranks[];

  static std::size_t bytes(int size) {
    return sizeof(Shared) + static_cast<std::size_t>(size) * sizeof(Rank);
  }
};

namespace {

// The namespace of process numbers that this process is in.
std::int64_t own_namespace() {
  char text[64] = {};
  const ssize_t length = readlink("/proc/self/ns/pid", text, sizeof text - 1);
  std::int64_t number = 0;
  for (ssize_t i = 0; i < length; ++i)
    if (text[i] >= '0' && text[i] <= '9') number = number * 10 + (text[i] - '0');
  return number;
}

}  // namespace

std::string HostMeeting::create(int size) {
  constexpr int most = 1024;
  if (size < 1 || size > most)
    refuse_argument("a group of ", size, " processes was asked for; 1 to ", most, " would work");
  return SharedMemory::create(Shared::bytes(size)).name();
}

void HostMeeting::require(const std::string& name, int size) {
  SharedMemory::open(name, Shared::bytes(size));
}

HostMeeting::HostMeeting(const std::string& name, int rank, int size, std::chrono::milliseconds most)
    : rank_(rank),
      size_(size),
      memory_(SharedMemory::open(name, Shared::bytes(size))),
      shared_(reinterpret_cast<Shared*>(memory_.data())) {  // zeros, which are the atomics' initial values
  if (rank < 0 || rank >= size)
    refuse_argument("rank ", rank, " of ", size, ": ranks count from 0 to the size of the group");
  Shared::Rank& own = shared_->ranks[rank_];
  own.namespace_of = own_namespace();
  std::int64_t none = 0;
  if (!own.process.compare_exchange_strong(none, getpid()))
    refuse_argument("rank ", rank, " of the group is process ", none,
                    " already; a rank of its own would work");
  try {
    wait_for_all(most);
    gather({});
  } catch (...) {
    SharedMemory::remove_name(name);
    throw;
  }
  if (rank_ == 0) SharedMemory::remove_name(name);
}

void HostMeeting::wait_for_all(std::chrono::milliseconds most) {
  const auto last = std::chrono::steady_clock::now() + most;
  for (int rank = 0; rank < size_; ++rank)
    wait_until([&] {
      if (shared_->ranks[rank].process != 0) return true;
      if (std::chrono::steady_clock::now() > last)
        fail("rank " + std::to_string(rank) + " of the group has not come within " +
             std::to_string(most.count()) + " ms");
      return false;
    });
}

std::vector<std::string> HostMeeting::gather(const std::string& own) {
  // No usual work has a longer text. The digest stands for the end of one.
  std::string told = own;
  if (told.size() > Shared::most_text) {
    const std::string rest = digest(own);
    told.resize(Shared::most_text - rest.size());
    told += rest;
  }
  Shared::Rank& mine = shared_->ranks[rank_];
  mine.length = told.size();
  std::memcpy(mine.text, told.data(), told.size());
  wait();
  std::vector<std::string> texts;
  for (int rank = 0; rank < size_; ++rank)
    texts.emplace_back(shared_->ranks[rank].text,
                       std::min<std::size_t>(shared_->ranks[rank].length, Shared::most_text));
  wait();  // nobody changes them before all have read them
  return texts;
}

void HostMeeting::wait() {
  require_alive();
  const std::uint32_t mine = shared_->turn;
  if (++shared_->arrived == static_cast<std::uint32_t>(size_)) {
    shared_->arrived = 0;
    ++shared_->turn;
    return;
  }
  wait_until([&] { return shared_->turn != mine; });
}

void HostMeeting::wait_until(const std::function<bool()>& done) {
  constexpr int turns_of_a_look = 1000;
  for (int i = 0; !done(); ++i) {
    if (i % turns_of_a_look == turns_of_a_look - 1) has_failed();
    require_alive();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void HostMeeting::fail(const std::string& why) noexcept {
  std::uint32_t none = 0;
  if (!shared_->failure.compare_exchange_strong(none, 1)) return;
  std::strncpy(shared_->why, why.c_str(), sizeof shared_->why - 1);
  shared_->failure = 2;
}

void HostMeeting::require_alive() const {
  if (shared_->failure == 0) return;
  while (shared_->failure == 1) std::this_thread::yield();
  throw Error(ErrorCode::device_failed,
              std::string(shared_->why) + "; the group is of no use any more, and a new one would work");
}

bool HostMeeting::has_failed() noexcept {
  if (shared_->failure) return true;
  for (int rank = 0; rank < size_; ++rank) {
    const Shared::Rank& one = shared_->ranks[rank];
    const std::int64_t process = one.process;
    if (process == 0 || one.namespace_of != shared_->ranks[rank_].namespace_of || !is_gone(process)) continue;
    try {
      fail("the process of rank " + std::to_string(rank) + " of the group has ended");
    } catch (...) {
      fail("");
    }
    return true;
  }
  return false;
}

}  // namespace flashjit
