// Ranks of an NCCL communicator.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <utility>

#include "cache/environment.hpp"
#include "runtime/cuda/memory.hpp"
#include "runtime/parallel.hpp"
#include "runtime/parallel/nccl.hpp"
#include "runtime/parallel/nccl_exchange.hpp"
#include "runtime/parallel/process_group.hpp"
#include "runtime/parallel/shared_memory.hpp"

namespace flashjit {
namespace {

// Processes of one boot of a host have the same.
std::string boot_of_host() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot;
}

// As many bytes of each rank, by rank.
std::string gather_bytes(const NcclCommunicator& comm, const std::string& own) {
  struct Room {
    const cuda::Context context;
    const cuda::OwnedStream stream{context};
    cuda::DeviceBuffer from, to;
    Room(int device, std::size_t bytes, std::size_t bytes_of_all)
        : context(device), from(context, bytes), to(context, bytes_of_all) {}
  };
  std::string all(own.size() * static_cast<std::size_t>(comm.size()), '\0');
  auto room = std::make_unique<Room>(comm.device(), own.size(), all.size());
  const cuda::OwnedStream& stream = room->stream;
  room->from.copy_from(own.data(), own.size(), stream.get());
  comm.all_gather(room->from.data(), room->to.data(), own.size(), stream.get());
  try {
    comm.wait_until([&] { return stream.is_done(); }, NcclCommunicator::patience);
  } catch (...) {
    keep_for_ever(std::move(room));
    throw;
  }
  room->to.copy_to(all.data(), all.size(), stream.get());
  stream.synchronize();
  return all;
}

// The texts of all ranks, by rank.
std::vector<std::string> gather_texts(const NcclCommunicator& comm, const std::string& own) {
  const auto ranks = static_cast<std::size_t>(comm.size());
  std::uint64_t length = own.size();
  const std::string bytes =
      gather_bytes(comm, std::string(reinterpret_cast<const char*>(&length), sizeof length));
  std::vector<std::uint64_t> lengths(ranks);
  std::memcpy(lengths.data(), bytes.data(), bytes.size());
  const std::uint64_t most = *std::max_element(lengths.begin(), lengths.end());
  std::vector<std::string> texts(ranks);
  if (most == 0) return texts;
  std::string padded = own;
  padded.resize(most);
  const std::string all = gather_bytes(comm, padded);
  for (std::size_t rank = 0; rank < ranks; ++rank) texts[rank] = all.substr(rank * most, lengths[rank]);
  return texts;
}

void require_gpu(const NcclCommunicator& comm, Device device) {
  if (device.kind != Device::Kind::cuda || device.index != comm.device())
    throw Error(ErrorCode::unsupported, "the communicator's GPU is cuda:" + std::to_string(comm.device()) +
                                            ", and the engine is of another device; an engine of that GPU "
                                            "would work");
}

// Ranks that reach each other's memory. NCCL only brings them together: then they meet on the host.
class MappedTransport : public ProcessTransport {
 public:
  MappedTransport(const NcclCommunicator& comm, const std::string& meeting)
      : ProcessTransport(meeting, comm.rank(), comm.size()), comm_(comm) {
    try {
      first_ = exchange({Device::Kind::cuda, comm.device()}, 0, 0);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::unsupported) fail(error.message());  // which all ranks are told anyway
      throw;
    }
  }
  void require_device(Device device) const override { require_gpu(comm_, device); }
  const std::string& reason() const override { return reason_; }

 private:
  const NcclCommunicator comm_;
  const std::string reason_ = "the ranks reach each other's memory";
  std::shared_ptr<Exchange> first_;  // which has shown that they do
};

// Ranks that do all by NCCL. A rank learns of another's failure from the communicator alone.
class MessageTransport : public Transport {
 public:
  MessageTransport(const NcclCommunicator& comm, std::string reason)
      : comm_(comm), reason_(std::move(reason)) {}

  int rank() const override { return comm_.rank(); }
  int size() const override { return comm_.size(); }
  void require_device(Device device) const override { require_gpu(comm_, device); }
  bool maps_memory() const override { return false; }
  const std::string& reason() const override { return reason_; }
  std::vector<std::string> gather(const std::string& own) override {
    require_alive();
    return gather_texts(comm_, own);
  }
  std::shared_ptr<Exchange> exchange(Device, std::size_t bytes, std::size_t bytes_of_step) override {
    return make_nccl_exchange(comm_, bytes, bytes_of_step);
  }
  void require_alive() const override {
    {
      const std::lock_guard lock(mutex_);
      if (failed_)
        throw Error(ErrorCode::device_failed,
                    failure_ + "; the group is of no use any more, and a new one would work");
    }
    comm_.require_alive();
  }
  void fail(const std::string& why) noexcept override {
    const std::lock_guard lock(mutex_);
    if (std::exchange(failed_, true)) return;
    try {
      failure_ = "rank " + std::to_string(rank()) + " of the group failed: " + why;
    } catch (...) {
      failure_.clear();
    }
  }

 private:
  const NcclCommunicator comm_;
  const std::string reason_;
  mutable std::mutex mutex_;
  bool failed_ = false;
  std::string failure_;
};

// "rank R" and its text, of the first rank that has one.
std::string first_of(const std::vector<std::string>& texts) {
  for (std::size_t rank = 0; rank < texts.size(); ++rank)
    if (!texts[rank].empty()) return "rank " + std::to_string(rank) + texts[rank];
  return {};
}

// Every rank comes to the same one.
std::shared_ptr<Transport> choose_transport(const NcclCommunicator& comm) {
  const auto messages = [&](const std::string& why) { return std::make_shared<MessageTransport>(comm, why); };
  const std::vector<std::string> hosts = gather_texts(comm, boot_of_host());
  for (std::size_t rank = 1; rank < hosts.size(); ++rank)
    if (hosts[rank] != hosts[0])
      return messages("rank " + std::to_string(rank) + " is on another host than rank 0");
  // Rank 0 makes the meeting, and tells the others its name.
  std::string name, refusal;
  if (environment_variable(Variable::map_peers) == "0") refusal = " has FLASHJIT_MAP_PEERS=0";
  const auto attempt = [&](const auto& part) {
    try {
      if (refusal.empty()) part();
    } catch (const Error& error) {
      refusal = ": " + error.message();
    }
  };
  if (comm.rank() == 0) attempt([&] { name = HostMeeting::create(comm.size()); });
  std::string of_all;
  try {
    of_all = gather_texts(comm, name)[0];
    attempt([&] {
      if (!of_all.empty()) HostMeeting::require(of_all, comm.size());
    });
    if (const std::string why = first_of(gather_texts(comm, refusal)); !why.empty()) {
      SharedMemory::remove_name(name);
      return messages(why);
    }
  } catch (...) {
    SharedMemory::remove_name(name);
    throw;
  }
  try {
    return std::make_shared<MappedTransport>(comm, of_all);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsupported) throw;
    return messages(error.message());
  }
}

}  // namespace

ParallelGroup ParallelGroup::of_nccl(void* comm) {
  return ParallelGroup(choose_transport(NcclCommunicator(comm)));
}

}  // namespace flashjit
