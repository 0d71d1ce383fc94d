// A meeting of the ranks of one host, threads or processes, through shared memory.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace flashjit {

class HostMeeting {
 public:
  // Makes the memory for so many ranks, and returns its name. Throws device_failed.
  static std::string create(int size);
  // All ranks open it; the last one to do so removes its name.
  HostMeeting(const std::string& name, int rank, int size);
  ~HostMeeting();
  HostMeeting(const HostMeeting&) = delete;
  HostMeeting& operator=(const HostMeeting&) = delete;

  // The texts of all ranks, by rank. Throws device_failed if a rank has failed or its process has ended.
  std::vector<std::string> gather(const std::string& own);
  // Makes the others' waiting and later calls throw. The first failure is the one that is told.
  void fail(const std::string& why) noexcept;
  void require_alive() const;
  // Whether a rank has failed. Looks whether the processes of all ranks are there.
  bool has_failed() noexcept;

 private:
  struct Shared;
  void wait();

  const int rank_, size_;
  const std::size_t bytes_;
  Shared* shared_ = nullptr;
};

}  // namespace flashjit
