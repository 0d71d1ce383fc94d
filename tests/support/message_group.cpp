#include "tests/support/message_group.hpp"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "runtime/parallel/message_exchange.hpp"
#include "runtime/parallel/tensor_parts.hpp"

namespace flashjit::testing_support {
namespace {

// The messages of all ranks that nobody has received yet.
class Mail {
 public:
  // A receiver copies from the sender's memory, so a sender waits for it.
  void send(int from, int to, const Message& message) {
    const std::lock_guard lock(mutex_);
    sent_[{from, to}].push_back(message);
    changed_.notify_all();
  }
  void receive(int from, int to, const Message& message, const Transport& alive) {
    std::unique_lock lock(mutex_);
    std::deque<Message>& queue = sent_[{from, to}];
    wait(lock, alive, [&] { return !queue.empty(); });
    if (queue.front().bytes != message.bytes)
      throw Error(ErrorCode::internal, "rank " + std::to_string(from) + " sends " +
                                           std::to_string(queue.front().bytes) + " bytes, rank " +
                                           std::to_string(to) + " expects " + std::to_string(message.bytes));
    std::memcpy(message.data, queue.front().data, message.bytes);
    queue.pop_front();
    changed_.notify_all();
  }
  void wait_for_receiver(int from, int to, const Transport& alive) {
    std::unique_lock lock(mutex_);
    const std::deque<Message>& queue = sent_[{from, to}];
    wait(lock, alive, [&] { return queue.empty(); });
  }

 private:
  template <class Done>
  void wait(std::unique_lock<std::mutex>& lock, const Transport& alive, const Done& done) {
    while (!changed_.wait_for(lock, std::chrono::milliseconds(20), done)) alive.require_alive();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<int, int>, std::deque<Message>> sent_;
};

class ThreadMessages : public MessageExchange {
 public:
  ThreadMessages(const Transport& transport, std::shared_ptr<Mail> mail, std::size_t bytes,
                 std::size_t bytes_of_step)
      : MessageExchange(transport.rank(), {}, bytes_of_step),
        transport_(transport),
        mail_(std::move(mail)),
        memory_(bytes + alignment, std::byte{0xff}),
        packed_(packed_bytes_ + alignment, std::byte{0xff}) {}

  std::byte* memory() const override { return aligned(memory_); }
  void write(std::byte* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void begin(Stream) override {}
  void copy(const Tensor& to, const Tensor& from) override { copy_elements(to, from); }
  void wait(int, Box, Stream) override {}
  using MessageExchange::release;
  void release(int, Box, Stream) override {}
  void end(Stream) override {}
  void finish() override {}

 private:
  static constexpr std::size_t alignment = 256;
  static std::byte* aligned(const std::vector<std::byte>& memory) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    return reinterpret_cast<std::byte*>((address + alignment - 1) / alignment * alignment);
  }
  std::byte* packed() const override { return aligned(packed_); }
  void exchange(int to, const std::vector<Message>& sends, int from,
                const std::vector<Message>& receives) override {
    for (const Message& message : sends) mail_->send(rank_, to, message);
    for (const Message& message : receives) mail_->receive(from, rank_, message, transport_);
    mail_->wait_for_receiver(rank_, to, transport_);
  }
  void arrives(int) override {}

  const Transport& transport_;
  const std::shared_ptr<Mail> mail_;
  std::vector<std::byte> memory_, packed_;
};

class ThreadTransport : public Transport {
 public:
  ThreadTransport(std::shared_ptr<Transport> threads, std::shared_ptr<Mail> mail)
      : threads_(std::move(threads)), mail_(std::move(mail)) {}

  int rank() const override { return threads_->rank(); }
  int size() const override { return threads_->size(); }
  void require_device(Device) const override {}
  bool maps_memory() const override { return false; }
  std::vector<std::string> gather(const std::string& own) override { return threads_->gather(own); }
  std::shared_ptr<Exchange> exchange(Device, std::size_t bytes, std::size_t bytes_of_step) override {
    return std::make_shared<ThreadMessages>(*threads_, mail_, bytes, bytes_of_step);
  }
  void require_alive() const override { threads_->require_alive(); }
  void fail(const std::string& why) noexcept override { threads_->fail(why); }

 private:
  const std::shared_ptr<Transport> threads_;
  const std::shared_ptr<Mail> mail_;
};

}  // namespace

std::vector<ParallelGroup> message_group(int size) {
  const auto mail = std::make_shared<Mail>();
  std::vector<ParallelGroup> ranks;
  for (const ParallelGroup& rank : ParallelGroup::of_threads(size))
    ranks.push_back(ParallelGroup(std::make_shared<ThreadTransport>(rank.transport(), mail)));
  return ranks;
}

}  // namespace flashjit::testing_support
