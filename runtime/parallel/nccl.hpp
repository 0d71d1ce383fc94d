// NCCL, opened at run time: what the group of a communicator needs to begin with.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "runtime/flashjit.hpp"

namespace flashjit {

// A caller's ncclComm_t.
class NcclCommunicator {
 public:
  // Throws target_unavailable if NCCL cannot be found, device_failed with its text.
  explicit NcclCommunicator(void* comm);

  int rank() const { return rank_; }
  int size() const { return size_; }
  int device() const { return device_; }  // of this rank, as CUDA counts them

  // Gathers equally many bytes of device memory from every rank, by rank. Enqueued on the stream.
  void all_gather(const void* from, void* to, std::size_t bytes, Stream stream) const;
  // Returns once `done` says that what was enqueued is done. Throws device_failed if the communicator has
  // failed, or a rank has not come within that time. What was enqueued may then run on until the
  // communicator's owner aborts it.
  void wait_until(const std::function<bool()>& done, std::chrono::milliseconds most) const;

 private:
  void check(int result, const char* what) const;

  void* const comm_;
  int rank_ = 0, size_ = 0, device_ = 0;
};

}  // namespace flashjit
