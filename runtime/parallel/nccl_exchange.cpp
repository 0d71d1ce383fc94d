#include "runtime/parallel/nccl_exchange.hpp"

#include <deque>
#include <utility>
#include <vector>

#include "runtime/cuda/memory.hpp"
#include "runtime/parallel/cuda_copy.hpp"
#include "runtime/parallel/message_exchange.hpp"

namespace flashjit {
namespace {

class NcclExchange : public MessageExchange {
 public:
  NcclExchange(const NcclCommunicator& comm, std::size_t bytes, std::size_t bytes_of_step)
      : MessageExchange(comm.rank(), {Device::Kind::cuda, comm.device()}, bytes_of_step),
        comm_(comm),
        room_(std::make_unique<Room>(comm, bytes, packed_bytes_)) {
    try {
      load_copies(room_->context, room_->packed.data(), stream());
      connect();
      finish();
    } catch (...) {
      leave();
      throw;
    }
  }
  ~NcclExchange() override {
    try {
      if (room_->copies.is_done()) return;
    } catch (const Error&) {
      // A destructor reports no failure, such as a context that is gone.
    }
    leave();
  }

  std::byte* memory() const override { return static_cast<std::byte*>(room_->memory.data()); }
  void write(std::byte* to, const void* from, std::size_t bytes) override {
    if (bytes == 0) return;
    const cuda::ContextScope scope(room_->context);
    cuda::check(cuda::driver().MemcpyAsync(reinterpret_cast<cuda::CUdeviceptr>(to),
                                           reinterpret_cast<cuda::CUdeviceptr>(from), bytes,
                                           static_cast<cuda::CUstream>(stream())),
                "copy to the device");
    room_->copies.synchronize();
  }
  void begin(Stream of_caller) override {
    room_->forked.record(of_caller);
    room_->forked.hold(stream());
  }
  void copy(const Tensor& to, const Tensor& from) override {
    enqueue_copy(room_->context, to, from, stream());
  }
  void wait(int rank, Box, Stream of_caller) override { arrival(rank).hold(of_caller); }
  using MessageExchange::release;
  // Copies from here on write over places that the stream's work so far reads.
  void release(int, Box, Stream of_caller) override { begin(of_caller); }
  void end(Stream of_caller) override {
    room_->joined.record(stream());
    room_->joined.hold(of_caller);
  }
  void finish() override {
    comm_.wait_until([&] { return room_->copies.is_done(); }, NcclCommunicator::patience);
  }

 private:
  static constexpr std::size_t greeting_bytes = 256;

  struct Room {
    const cuda::Context context;
    cuda::DeviceBuffer memory, packed;
    const cuda::OwnedStream copies;  // its blocks come before those of kernels that were there first
    cuda::Event forked, joined;
    std::deque<cuda::Event> arrivals;  // by rank
    Room(const NcclCommunicator& comm, std::size_t bytes, std::size_t packed_bytes)
        : context(comm.device()),
          memory(context, bytes),
          packed(context, packed_bytes + 2 * greeting_bytes),
          copies(context, true),
          forked(context),
          joined(context) {
      for (int rank = 0; rank < comm.size(); ++rank) arrivals.emplace_back(context);
    }
  };

  Stream stream() const { return room_->copies.get(); }
  cuda::Event& arrival(int rank) const { return room_->arrivals[static_cast<std::size_t>(rank)]; }
  std::byte* packed() const override { return static_cast<std::byte*>(room_->packed.data()); }
  void exchange(int to, const std::vector<Message>& sends, int from,
                const std::vector<Message>& receives) override {
    comm_.send_and_receive(to, sends, from, receives, stream());
  }
  void arrives(int rank) override { arrival(rank).record(stream()); }

  // NCCL connects ranks when they first send something.
  void connect() {
    std::byte* const greeting = packed() + packed_bytes_;
    for (int step = 1; step < comm_.size(); ++step)
      exchange((rank_ + step) % comm_.size(), {{greeting, 1}}, (rank_ + comm_.size() - step) % comm_.size(),
               {{greeting + greeting_bytes, 1}});
  }
  void leave() noexcept {
    try {
      keep_for_ever(std::move(room_));
    } catch (...) {
      (void)room_.release();
    }
  }

  const NcclCommunicator& comm_;
  std::unique_ptr<Room> room_;
};

}  // namespace

std::shared_ptr<Exchange> make_nccl_exchange(const NcclCommunicator& comm, std::size_t bytes,
                                             std::size_t bytes_of_step) {
  return std::make_shared<NcclExchange>(comm, bytes, bytes_of_step);
}

}  // namespace flashjit
