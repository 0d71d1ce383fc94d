// NCCL, opened at run time.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/flashjit.hpp"
#include "runtime/parallel/message_exchange.hpp"

namespace flashjit {

// Keeps what NCCL may still write to once a communicator has failed: to free it would be to wait for NCCL.
template <class T>
void keep_for_ever(std::unique_ptr<T> room) {
  struct Kept {
    std::unique_ptr<T> room;
    Kept* before;
  };
  static std::atomic<Kept*> last = nullptr;
  auto* const kept = new Kept{std::move(room), nullptr};
  kept->before = last.exchange(kept);
}

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
  // Sends some of device memory to a rank, and receives some from a rank, at the same time. Enqueued on the
  // stream.
  void send_and_receive(int to, const std::vector<Message>& sends, int from,
                        const std::vector<Message>& receives, Stream stream) const;
  // Throws device_failed if the communicator has failed.
  void require_alive() const;
  // Returns once `done` says that what was enqueued is done. Throws device_failed if the communicator has
  // failed, or a rank has not come within that time. What was enqueued may then run on until the
  // communicator's owner aborts it.
  void wait_until(const std::function<bool()>& done, std::chrono::milliseconds most) const;
  // As long as a rank waits for others to come.
  static constexpr std::chrono::minutes patience{5};

 private:
  // Whether calls so far are enqueued, which those of communicators that do not block may not be yet.
  bool is_ready() const;
  void check(int result, const char* what) const;

  void* const comm_;
  int rank_ = 0, size_ = 0, device_ = 0;
};

}  // namespace flashjit
