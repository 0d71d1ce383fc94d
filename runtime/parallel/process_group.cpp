#include "runtime/parallel/process_group.hpp"

#include <atomic>
#include <cstdint>
#include <optional>
#include <utility>

#include "runtime/parallel.hpp"
#include "runtime/parallel/host_exchange.hpp"

namespace flashjit {
namespace {

// Memory of each rank in host memory that all processes have. It begins with the boxes: a word for each box
// of each rank, 1 where it is posted.
class ProcessExchange : public HostExchange {
 public:
  ProcessExchange(std::shared_ptr<HostMeeting> meeting, std::size_t bytes)
      : HostExchange(meeting->rank()),
        meeting_(std::move(meeting)),
        boxes_bytes_((static_cast<std::size_t>(meeting_->size() * num_boxes) * sizeof(Word) + 255) / 256 *
                     256) {
    const std::size_t all = boxes_bytes_ + bytes;
    std::optional<SharedMemory> own;
    std::string refusal;
    try {
      own.emplace(SharedMemory::create(all));
    } catch (const Error& error) {
      refusal = error.message();
    }
    const std::vector<std::string> names = meeting_->gather(own ? own->name() : std::string()),
                                   refusals = meeting_->gather(refusal);
    try {
      for (const std::string& text : refusals)
        if (!text.empty()) throw Error(ErrorCode::device_failed, text);
      for (int rank = 0; rank < meeting_->size(); ++rank) {
        if (rank == rank_)
          memories_.push_back(std::move(*own));
        else
          memories_.push_back(SharedMemory::open(names[static_cast<std::size_t>(rank)], all));
      }
      meeting_->gather({});
    } catch (...) {
      remove_own(names);
      throw;
    }
    remove_own(names);
  }

  using HostExchange::post;
  void post(int rank, Box box) override { box_of(rank, rank_, box) = 1; }
  void await(int rank, Box box) override {
    Word& own = box_of(rank_, rank, box);
    meeting_->wait_until([&] { return own != 0; });
    own = 0;
  }

 private:
  using Word = std::atomic<std::uint32_t>;

  void remove_own(const std::vector<std::string>& names) const {
    SharedMemory::remove_name(names[static_cast<std::size_t>(rank_)]);
  }
  std::byte* memory_of(int rank) const override {
    return memories_[static_cast<std::size_t>(rank)].data() + boxes_bytes_;
  }
  // In the memory of `owner`.
  Word& box_of(int owner, int poster, Box box) const {
    return reinterpret_cast<Word*>(
        memories_[static_cast<std::size_t>(owner)].data())[box * meeting_->size() + poster];
  }

  const std::shared_ptr<HostMeeting> meeting_;
  const std::size_t boxes_bytes_;
  std::vector<SharedMemory> memories_;  // by rank
};

}  // namespace

ProcessTransport::ProcessTransport(const std::string& name, int rank, int size)
    : meeting_(std::make_shared<HostMeeting>(name, rank, size)) {}

void ProcessTransport::require_alive() const {
  if (exchanges_.empty()) meeting_->has_failed();  // a GPU's exchanges look by themselves
  meeting_->require_alive();
}

std::shared_ptr<Exchange> ProcessTransport::exchange(Device device, std::size_t bytes, std::size_t) {
  if (device.kind != Device::Kind::cuda) return std::make_shared<ProcessExchange>(meeting_, bytes);
  std::unique_ptr<CudaExchanges>& of_gpu = exchanges_[device.index];
  if (!of_gpu)
    of_gpu = std::make_unique<CudaExchanges>(
        device.index, rank(), size(), [this](const std::string& own) { return gather(own); },
        [meeting = meeting_] { return meeting->has_failed(); });
  return of_gpu->open(bytes);
}

void ProcessTransport::fail(const std::string& why) noexcept {
  try {
    meeting_->fail("rank " + std::to_string(rank()) + " of the group failed: " + why);
  } catch (...) {
    meeting_->fail("a rank failed");
  }
}

std::string ParallelGroup::name_of_processes(int size) {
  return HostMeeting::create(size);
}
ParallelGroup ParallelGroup::of_processes(const std::string& name, int rank, int size) {
  return ParallelGroup(std::make_shared<ProcessTransport>(name, rank, size));
}

}  // namespace flashjit
