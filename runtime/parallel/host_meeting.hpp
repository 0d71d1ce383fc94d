// A meeting of the ranks of one host, threads or processes, through shared memory.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "runtime/parallel/shared_memory.hpp"

namespace flashjit {

class HostMeeting {
 public:
  // Makes the memory for so many ranks, and returns its name. Throws device_failed.
  static std::string create(int size);
  // Throws device_failed if this process cannot open it.
  static void require(const std::string& name, int size);
  // All ranks open it; the last one to do so removes its name. Throws device_failed if one does not come.
  HostMeeting(const std::string& name, int rank, int size,
              std::chrono::milliseconds most = std::chrono::minutes(5));
  HostMeeting(const HostMeeting&) = delete;
  HostMeeting& operator=(const HostMeeting&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // The texts of all ranks, by rank. Throws device_failed if a rank has failed or its process has ended.
  std::vector<std::string> gather(const std::string& own);
  // Returns once `done` says so. Throws device_failed if a rank has failed or its process has ended.
  void wait_until(const std::function<bool()>& done);
  // Makes the others' waiting and later calls throw. The first failure is the one that is told.
  void fail(const std::string& why) noexcept;
  void require_alive() const;
  // Whether a rank has failed. Looks whether the processes of all ranks are there.
  bool has_failed() noexcept;

 private:
  struct Shared;
  void wait();
  void wait_for_all(std::chrono::milliseconds most);

  const int rank_, size_;
  const SharedMemory memory_;
  Shared* const shared_;
};

}  // namespace flashjit
