// Ranks that are GPUs of one host. NCCL only brings them together: then they meet on the host.
#include <cstring>
#include <fstream>

#include "runtime/arguments/checks.hpp"
#include "runtime/cuda/memory.hpp"
#include "runtime/parallel.hpp"
#include "runtime/parallel/cuda_exchange.hpp"
#include "runtime/parallel/host_meeting.hpp"
#include "runtime/parallel/nccl.hpp"
#include "runtime/parallel/transport.hpp"

namespace flashjit {
namespace {

// A rank tells this of itself to the others, by NCCL.
struct Hello {
  char host[64];  // the same for processes of one boot of a host
  char meeting[64];
};
std::string boot_of_host() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot;
}

class NcclTransport : public Transport {
 public:
  explicit NcclTransport(void* comm)
      : comm_(comm),
        meeting_(name_of_meeting(), comm_.rank(), comm_.size()),
        exchanges_(
            comm_.device(), comm_.rank(), comm_.size(),
            [this](const std::string& own) { return meeting_.gather(own); },
            [this] { return meeting_.has_failed(); }) {}

  int rank() const override { return comm_.rank(); }
  int size() const override { return comm_.size(); }
  void require_device(Device device) const override {
    if (device.kind != Device::Kind::cuda || device.index != comm_.device())
      throw Error(ErrorCode::unsupported,
                  "the communicator's GPU is cuda:" + std::to_string(comm_.device()) +
                      ", and the engine is of another device; an engine of that GPU would work");
  }
  void require_alive() const override { meeting_.require_alive(); }

  std::vector<std::string> gather(const std::string& own) override { return meeting_.gather(own); }
  std::shared_ptr<Exchange> exchange(Device, std::size_t bytes, int boxes) override {
    return exchanges_.open(bytes, boxes);
  }
  void fail(const std::string& why) noexcept override {
    try {
      meeting_.fail("rank " + std::to_string(rank()) + " of the group failed: " + why);
    } catch (...) {
      meeting_.fail("a rank failed");
    }
  }

 private:
  // Rank 0 makes it, and tells the others.
  std::string name_of_meeting() {
    Hello own{};
    const std::string host = boot_of_host(), name = rank() == 0 ? HostMeeting::create(size()) : std::string();
    std::strncpy(own.host, host.c_str(), sizeof own.host - 1);
    std::strncpy(own.meeting, name.c_str(), sizeof own.meeting - 1);
    const auto count = static_cast<std::size_t>(size());
    std::vector<Hello> all(count);
    {
      const cuda::Context context(comm_.device());
      const cuda::OwnedStream stream(context);
      cuda::DeviceBuffer from(context, sizeof own), to(context, sizeof own * count);
      from.copy_from(&own, sizeof own, stream.get());
      comm_.all_gather(from.data(), to.data(), sizeof own, stream.get());
      to.copy_to(all.data(), sizeof own * count, stream.get());
      stream.synchronize();
    }
    for (std::size_t rank = 0; rank < count; ++rank)
      if (std::strcmp(all[rank].host, all[0].host) != 0)
        throw Error(ErrorCode::unsupported, "rank " + std::to_string(rank) +
                                                " of the group is on another host than rank 0; GPUs of one "
                                                "host that reach each other's memory would work");
    return all[0].meeting;
  }

  const NcclCommunicator comm_;
  HostMeeting meeting_;
  CudaExchanges exchanges_;
};

}  // namespace

ParallelGroup ParallelGroup::of_nccl(void* comm) {
  return ParallelGroup(std::make_shared<NcclTransport>(comm));
}

}  // namespace flashjit
