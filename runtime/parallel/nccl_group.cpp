// Ranks that are GPUs of one host. NCCL only brings them together: then they meet on the host.
#include <cstring>
#include <fstream>

#include "runtime/cuda/memory.hpp"
#include "runtime/parallel.hpp"
#include "runtime/parallel/nccl.hpp"
#include "runtime/parallel/process_group.hpp"

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

// Rank 0 makes the meeting, and tells the others its name.
std::string name_of_meeting(const NcclCommunicator& comm) {
  Hello own{};
  const std::string host = boot_of_host(),
                    name = comm.rank() == 0 ? HostMeeting::create(comm.size()) : std::string();
  std::strncpy(own.host, host.c_str(), sizeof own.host - 1);
  std::strncpy(own.meeting, name.c_str(), sizeof own.meeting - 1);
  const auto count = static_cast<std::size_t>(comm.size());
  std::vector<Hello> all(count);
  {
    const cuda::Context context(comm.device());
    const cuda::OwnedStream stream(context);
    cuda::DeviceBuffer from(context, sizeof own), to(context, sizeof own * count);
    from.copy_from(&own, sizeof own, stream.get());
    comm.all_gather(from.data(), to.data(), sizeof own, stream.get());
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

class NcclTransport : public ProcessTransport {
 public:
  explicit NcclTransport(const NcclCommunicator& comm)
      : ProcessTransport(name_of_meeting(comm), comm.rank(), comm.size()), device_(comm.device()) {}

  void require_device(Device device) const override {
    if (device.kind != Device::Kind::cuda || device.index != device_)
      throw Error(ErrorCode::unsupported, "the communicator's GPU is cuda:" + std::to_string(device_) +
                                              ", and the engine is of another device; an engine of that GPU "
                                              "would work");
  }

 private:
  const int device_;
};

}  // namespace

ParallelGroup ParallelGroup::of_nccl(void* comm) {
  return ParallelGroup(std::make_shared<NcclTransport>(NcclCommunicator(comm)));
}

}  // namespace flashjit
