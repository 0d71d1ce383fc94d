// Ranks that are processes of one host. CPUs write into memory that the processes share, GPUs into each
// other's.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/parallel/cuda_exchange.hpp"
#include "runtime/parallel/host_meeting.hpp"
#include "runtime/parallel/transport.hpp"

namespace flashjit {

class ProcessTransport : public Transport {
 public:
  // All ranks open a name of HostMeeting::create().
  ProcessTransport(const std::string& name, int rank, int size);

  int rank() const override { return meeting_->rank(); }
  int size() const override { return meeting_->size(); }
  void require_device(Device) const override {}
  void require_alive() const override;
  std::vector<std::string> gather(const std::string& own) override { return meeting_->gather(own); }
  std::shared_ptr<Exchange> exchange(Device device, std::size_t bytes, std::size_t bytes_of_step) override;
  void fail(const std::string& why) noexcept override;

 private:
  const std::shared_ptr<HostMeeting> meeting_;
  std::map<int, std::unique_ptr<CudaExchanges>> exchanges_;  // by GPU
};

}  // namespace flashjit
