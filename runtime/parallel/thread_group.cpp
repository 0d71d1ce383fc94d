// Ranks that are threads of one process: they read each other's tensors where they lie.
#include <condition_variable>
#include <mutex>
#include <utility>

#include "runtime/arguments/checks.hpp"
#include "runtime/parallel.hpp"
#include "runtime/parallel/transport.hpp"

namespace flashjit {
namespace {

// What the ranks share. A meeting ends when all have come.
struct Meetings {
  explicit Meetings(int ranks) : size(ranks), texts(ranks), tensors(ranks) {}

  const std::size_t size;
  std::mutex mutex;
  std::condition_variable changed;
  std::size_t waiting = 0, count = 0;
  std::string failure;  // empty: none
  std::vector<std::string> texts;
  std::vector<std::vector<Tensor>> tensors;

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

class ThreadTransport : public Transport {
 public:
  ThreadTransport(std::shared_ptr<Meetings> meetings, int rank)
      : meetings_(std::move(meetings)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(meetings_->size); }
  void require_device(Device device) const override {
    if (device.kind != Device::Kind::cpu)
      throw Error(ErrorCode::unsupported,
                  "a group of threads was given the engine of a GPU; engines with device cpu would work");
  }

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
  void publish(std::span<const Tensor> own, Stream) override {
    meetings_->tensors[place()].assign(own.begin(), own.end());
    meetings_->wait();
  }
  Tensor fetch(int rank, std::size_t place, Stream) override {
    return meetings_->tensors[static_cast<std::size_t>(rank)][place];
  }
  void meet(Stream) override { meetings_->wait(); }
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

  const std::shared_ptr<Meetings> meetings_;
  const int rank_;
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

}  // namespace flashjit
