// Ranks that are GPUs of one host. NCCL only brings them together: then they meet on the host.
#include <atomic>
#include <cstring>
#include <fstream>
#include <memory>

#include "runtime/cuda/memory.hpp"
#include "runtime/parallel.hpp"
#include "runtime/parallel/nccl.hpp"
#include "runtime/parallel/process_group.hpp"
#include "runtime/parallel/shared_memory.hpp"

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

// What all ranks tell, by rank.
std::vector<Hello> gather(const NcclCommunicator& comm, const Hello& own) {
  struct Room {
    const cuda::Context context;
    const cuda::OwnedStream stream{context};
    cuda::DeviceBuffer from, to;
    Room* before = nullptr;
    Room(int device, std::size_t bytes, std::size_t bytes_of_all)
        : context(device), from(context, bytes), to(context, bytes_of_all) {}
  };
  std::vector<Hello> all(static_cast<std::size_t>(comm.size()));
  const std::size_t bytes_of_all = sizeof own * all.size();
  auto room = std::make_unique<Room>(comm.device(), sizeof own, bytes_of_all);
  const cuda::OwnedStream& stream = room->stream;
  room->from.copy_from(&own, sizeof own, stream.get());
  comm.all_gather(room->from.data(), room->to.data(), sizeof own, stream.get());
  try {
    comm.wait_until([&] { return stream.is_done(); }, std::chrono::minutes(5));
  } catch (...) {
    // NCCL may still write there, and to free memory would be to wait for it. So it stays, in a list.
    static std::atomic<Room*> kept = nullptr;
    room->before = kept.exchange(room.get());
    (void)room.release();
    throw;
  }
  room->to.copy_to(all.data(), bytes_of_all, stream.get());
  stream.synchronize();
  return all;
}

// Rank 0 makes the meeting, and tells the others its name.
std::string name_of_meeting(const NcclCommunicator& comm) {
  Hello own{};
  const std::string host = boot_of_host(),
                    name = comm.rank() == 0 ? HostMeeting::create(comm.size()) : std::string();
  std::strncpy(own.host, host.c_str(), sizeof own.host - 1);
  std::strncpy(own.meeting, name.c_str(), sizeof own.meeting - 1);
  std::vector<Hello> all;
  try {
    all = gather(comm, own);
  } catch (...) {
    if (comm.rank() == 0) SharedMemory::remove_name(name);
    throw;
  }
  for (std::size_t rank = 0; rank < all.size(); ++rank)
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
