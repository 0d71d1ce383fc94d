// Ranks that are threads of one process, with engines of CPUs or each of a GPU: they write into each other's
// memory.
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "runtime/arguments/checks.hpp"
#include "runtime/parallel.hpp"
#include "runtime/parallel/cuda_exchange.hpp"
#include "runtime/parallel/host_exchange.hpp"
#include "runtime/parallel/transport.hpp"

namespace flashjit {
namespace {

// The boxes of all ranks.
struct Boxes {
  explicit Boxes(std::size_t ranks) : size(ranks), posted(ranks * ranks * num_boxes) {}
  std::size_t place(int from, int to, Box box) const {
    return (static_cast<std::size_t>(box) * size + static_cast<std::size_t>(from)) * size +
           static_cast<std::size_t>(to);
  }
  const std::size_t size;
  std::vector<char> posted;
};

// The ranks share these. A meeting ends when all have come.
struct Meetings {
  explicit Meetings(int ranks) : size(static_cast<std::size_t>(ranks)), texts(size), memories(size) {}

  const std::size_t size;
  std::mutex mutex;
  std::condition_variable changed;
  std::size_t waiting = 0, count = 0;
  std::string failure;  // empty: none
  std::vector<std::string> texts;
  std::vector<std::byte*> memories;  // of the exchange that is being made
  std::shared_ptr<Boxes> boxes;

  void wait() {
    std::unique_lock lock(mutex);
    require_alive();
    if (++waiting == size) {
      waiting = 0;
      ++count;
      changed.notify_all();
      return;
    }
    const std::size_t mine = count;
    changed.wait(lock, [&] { return count != mine || !failure.empty(); });
    if (count == mine) require_alive();
  }
  void require_alive() const {
    if (!failure.empty())
      throw Error(ErrorCode::device_failed,
                  failure + "; the group is of no use any more, and a new one would work");
  }
};

class ThreadExchange : public HostExchange {
 public:
  ThreadExchange(std::shared_ptr<Meetings> meetings, std::shared_ptr<Boxes> boxes, int rank,
                 std::unique_ptr<std::byte[]> memory, std::vector<std::byte*> memories)
      : HostExchange(rank),
        meetings_(std::move(meetings)),
        boxes_(std::move(boxes)),
        allocated_(std::move(memory)),
        memories_(std::move(memories)) {}

  using HostExchange::post;
  void post(int rank, Box box) override {
    {
      const std::lock_guard lock(meetings_->mutex);
      boxes_->posted[boxes_->place(rank_, rank, box)] = 1;
    }
    meetings_->changed.notify_all();
  }
  void await(int rank, Box box) override {
    std::unique_lock lock(meetings_->mutex);
    char& posted = boxes_->posted[boxes_->place(rank, rank_, box)];
    meetings_->changed.wait(lock, [&] { return posted || !meetings_->failure.empty(); });
    meetings_->require_alive();
    posted = 0;
  }

 private:
  std::byte* memory_of(int rank) const override { return memories_[static_cast<std::size_t>(rank)]; }

  const std::shared_ptr<Meetings> meetings_;
  const std::shared_ptr<Boxes> boxes_;
  const std::unique_ptr<std::byte[]> allocated_;
  const std::vector<std::byte*> memories_;
};

class ThreadTransport : public Transport {
 public:
  ThreadTransport(std::shared_ptr<Meetings> meetings, int rank)
      : meetings_(std::move(meetings)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(meetings_->size); }
  void require_device(Device) const override {}

  std::vector<std::string> gather(const std::string& own) override {
    {
      const std::lock_guard lock(meetings_->mutex);
      meetings_->texts[place()] = own;
    }
    meetings_->wait();
    const std::vector<std::string> all = meetings_->texts;
    meetings_->wait();  // nobody changes them before all have read them
    return all;
  }
  std::shared_ptr<Exchange> exchange(Device device, std::size_t bytes, std::size_t) override {
    if (device.kind == Device::Kind::cuda) return on_gpu(device.index, bytes);
    constexpr std::size_t alignment = 256;
    std::unique_ptr<std::byte[]> memory(new std::byte[bytes + alignment]);
    const auto address =
        (reinterpret_cast<std::uintptr_t>(memory.get()) + alignment - 1) / alignment * alignment;
    {
      const std::lock_guard lock(meetings_->mutex);
      meetings_->memories[place()] = reinterpret_cast<std::byte*>(address);
      if (rank_ == 0) meetings_->boxes = std::make_shared<Boxes>(meetings_->size);
    }
    meetings_->wait();
    auto made = std::make_shared<ThreadExchange>(meetings_, meetings_->boxes, rank_, std::move(memory),
                                                 meetings_->memories);
    meetings_->wait();
    return made;
  }
  void require_alive() const override {
    const std::lock_guard lock(meetings_->mutex);
    meetings_->require_alive();
  }
  void fail(const std::string& why) noexcept override {
    const std::lock_guard lock(meetings_->mutex);
    if (!meetings_->failure.empty()) return;
    try {
      meetings_->failure = "rank " + std::to_string(rank_) + " of the group failed: " + why;
    } catch (...) {
      meetings_->failure = "a rank failed";
    }
    meetings_->changed.notify_all();
  }

 private:
  std::size_t place() const { return static_cast<std::size_t>(rank_); }
  std::shared_ptr<Exchange> on_gpu(int device, std::size_t bytes) {
    std::unique_ptr<CudaExchanges>& exchanges = exchanges_[device];
    if (!exchanges)
      exchanges = std::make_unique<CudaExchanges>(
          device, rank_, size(), [this](const std::string& own) { return gather(own); },
          [meetings = meetings_] {
            const std::lock_guard lock(meetings->mutex);
            return !meetings->failure.empty();
          });
    return exchanges->open(bytes);
  }

  const std::shared_ptr<Meetings> meetings_;
  const int rank_;
  std::map<int, std::unique_ptr<CudaExchanges>> exchanges_;  // by GPU
};

}  // namespace

std::vector<ParallelGroup> ParallelGroup::of_threads(int size) {
  constexpr int most = 1024;
  if (size < 1 || size > most)
    refuse_argument("a group of ", size, " threads was asked for; 1 to ", most, " would work");
  const auto meetings = std::make_shared<Meetings>(size);
  std::vector<ParallelGroup> ranks;
  for (int rank = 0; rank < size; ++rank)
    ranks.push_back(ParallelGroup(std::make_shared<ThreadTransport>(meetings, rank)));
  return ranks;
}

int ParallelGroup::rank() const noexcept {
  return transport_->rank();
}
int ParallelGroup::size() const noexcept {
  return transport_->size();
}
bool ParallelGroup::maps_memory() const noexcept {
  return transport_->maps_memory();
}
const std::string& ParallelGroup::transport_reason() const noexcept {
  return transport_->reason();
}
void ParallelGroup::fail(const std::string& why) const noexcept {
  transport_->fail(why);
}
void ParallelGroup::require_alive() const {
  transport_->require_alive();
}

}  // namespace flashjit
