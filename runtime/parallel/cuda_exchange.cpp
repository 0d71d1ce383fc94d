#include "runtime/parallel/cuda_exchange.hpp"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "runtime/cuda/memory.hpp"
#include "runtime/parallel/cuda_copy.hpp"
#include "runtime/parallel/tensor_parts.hpp"

namespace flashjit {
namespace {

using cuda::check;
using cuda::driver;

cuda::CUdeviceptr address_of(const void* pointer) {
  return reinterpret_cast<cuda::CUdeviceptr>(pointer);
}

}  // namespace

// Where a rank's memory is.
struct MemoryPlace {
  std::int64_t process, device, address;
  std::int64_t gpu;  // the same in all processes
  cuda::CUipcMemHandle handle;
};

// Another rank's memory in this process's addresses.
class PeerMemory {
 public:
  PeerMemory(const cuda::Context& context, const MemoryPlace& own, const MemoryPlace& peer, int rank)
      : context_(context) {
    const auto refuse = [&](const std::string& why) {
      throw Error(ErrorCode::unsupported, "rank " + std::to_string(rank) + " of the group " + why +
                                              "; GPUs of one host that reach each other's memory would work");
    };
    const cuda::ContextScope scope(context);
    if (own.process == peer.process) {
      address_ = static_cast<cuda::CUdeviceptr>(peer.address);
      if (own.device == peer.device) return;
      const cuda::Context of_peer(static_cast<int>(peer.device));
      const cuda::CUresult result = driver().CtxEnablePeerAccess(of_peer.handle(), 0);
      if (result != cuda::CUDA_SUCCESS && result != cuda::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
        refuse("has a GPU whose memory is out of reach: " + cuda::error_text(result));
      return;
    }
    const cuda::CUresult result =
        driver().IpcOpenMemHandle(&opened_, peer.handle, cuda::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    if (result != cuda::CUDA_SUCCESS) refuse("has memory out of reach: " + cuda::error_text(result));
    address_ = opened_;
  }
  PeerMemory(const PeerMemory&) = delete;
  ~PeerMemory() {
    // A destructor reports no failure, such as a context that is gone with its memory.
    const cuda::DriverApi* const api = cuda::driver_of_this_process();
    if (!opened_ || !api || api->CtxPushCurrent(context_.handle()) != cuda::CUDA_SUCCESS) return;
    api->IpcCloseMemHandle(opened_);
    cuda::CUcontext popped;
    api->CtxPopCurrent(&popped);
  }
  cuda::CUdeviceptr address() const { return address_; }

 private:
  const cuda::Context& context_;
  cuda::CUdeviceptr address_ = 0, opened_ = 0;
};

// The same GPU's, also in processes that see different GPUs.
std::int64_t number_of_gpu(int index) {
  cuda::CUdevice device = 0;
  check(driver().DeviceGet(&device, index), "cuDeviceGet");
  std::int64_t number = 0;
  for (const auto which : {cuda::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, cuda::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID,
                           cuda::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID}) {
    int value = 0;
    check(driver().DeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute");
    number = number << 16 | value;
  }
  return number;
}

// Device memory begins with the boxes: a word for each box of each rank, 1 where it is posted; and the flags.
class CudaExchange : public MappedExchange {
 public:
  CudaExchange(const cuda::Context& context, int rank, int size, std::size_t bytes)
      : context_(context),
        rank_(rank),
        size_(size),
        flags_at_(static_cast<std::size_t>(size * num_boxes) * sizeof(unsigned)),
        boxes_bytes_((flags_at_ + static_cast<std::size_t>(size * flags_for_each) * sizeof(unsigned) + 255) /
                     256 * 256),
        memory_(context, boxes_bytes_ + bytes),
        copies_(context),
        forked_(context),
        joined_(context) {
    memory_.fill(0, copies_.get());
    load_copies(context_, memory_.data(), copies_.get());
    copies_.synchronize();
  }
  ~CudaExchange() override {
    try {
      copies_.synchronize();
    } catch (const Error&) {
      // A destructor reports no failure, such as a context that is gone.
    }
  }

  MemoryPlace place() const {
    MemoryPlace place{getpid(),
                      context_.index(),
                      static_cast<std::int64_t>(address_of(memory_.data())),
                      number_of_gpu(context_.index()),
                      {}};
    const cuda::ContextScope scope(context_);
    check(driver().IpcGetMemHandle(&place.handle, address_of(memory_.data())), "cuIpcGetMemHandle");
    return place;
  }
  void open_peers(const std::vector<MemoryPlace>& places) {
    const MemoryPlace& own = places[static_cast<std::size_t>(rank_)];
    for (std::size_t i = 0; i < places.size(); ++i)
      for (std::size_t j = 0; j < i; ++j) shares_gpu_ = shares_gpu_ || places[i].gpu == places[j].gpu;
    for (int rank = 0; rank < size_; ++rank) {
      if (rank == rank_) {
        addresses_.push_back(address_of(memory_.data()));
        continue;
      }
      const PeerMemory& peer =
          peers_.emplace_back(context_, own, places[static_cast<std::size_t>(rank)], rank);
      addresses_.push_back(peer.address());
    }
  }

  // Ends what waits for others, once one of them has failed.
  void end_waits(Stream stream) const {
    const cuda::ContextScope scope(context_);
    for (std::size_t at = 0; at < boxes_bytes_; at += sizeof(unsigned))
      driver().StreamWriteValue32(static_cast<cuda::CUstream>(stream), address_of(memory_.data()) + at, 1,
                                  cuda::CU_STREAM_WRITE_VALUE_DEFAULT);
  }

  std::byte* memory() const override { return static_cast<std::byte*>(memory_.data()) + boxes_bytes_; }
  void write(std::byte* to, const void* from, std::size_t bytes) override {
    if (bytes == 0) return;
    const cuda::ContextScope scope(context_);
    check(driver().MemcpyAsync(address_of(to), address_of(from), bytes, copies()), "copy to the device");
    copies_.synchronize();
  }

  void begin(Stream stream) override {
    forked_.record(stream);
    forked_.hold(copies_.get());
  }
  void end(Stream stream) override {
    joined_.record(copies_.get());
    joined_.hold(stream);
  }
  void finish() override { copies_.synchronize(); }
  void wait(int rank, Box box, Stream stream) override { take(rank, box, stream); }
  // A copy within a GPU may be a kernel's, for which a waiting one leaves no multiprocessor.
  std::optional<Tensor> flags(int first, int count) const override {
    if (shares_gpu_ || first + count > size_ * flags_for_each) return std::nullopt;
    const Tensor all = Tensor::contiguous(static_cast<std::byte*>(memory_.data()) + flags_at_, DType::int32,
                                          {Device::Kind::cuda, context_.index()}, {first + count});
    return part_of(all, 0, first, count);
  }
  void lower(int first, int count, Stream stream) override {
    for (int flag = first; flag < first + count; ++flag)
      write_flag(address_of(memory_.data()), flag, 0, static_cast<cuda::CUstream>(stream));
  }

 protected:
  int own_rank() const override { return rank_; }
  void await(int rank, Box box) override { take(rank, box, copies_.get()); }
  void post(int rank, Box box) override { post(rank, box, copies_.get()); }
  void post(int rank, Box box, Stream stream) override {
    const cuda::ContextScope scope(context_);
    check(driver().StreamWriteValue32(static_cast<cuda::CUstream>(stream), box_of(rank, rank_, box), 1,
                                      cuda::CU_STREAM_WRITE_VALUE_DEFAULT),
          "cuStreamWriteValue32");
  }
  void raise(int rank, int flag) override {
    write_flag(addresses_[static_cast<std::size_t>(rank)], flag, 1, copies());
  }
  void put(int rank, const Tensor& to, const Tensor& from) override {
    const cuda::CUdeviceptr own = addresses_[static_cast<std::size_t>(rank_)],
                            other = addresses_[static_cast<std::size_t>(rank)];
    Tensor there = to;
    there.data = reinterpret_cast<void*>(address_of(to.data) - own + other);
    enqueue_copy(context_, there, from, copies_.get());
  }

 private:
  cuda::CUstream copies() const { return static_cast<cuda::CUstream>(copies_.get()); }
  // In the memory of `owner`.
  cuda::CUdeviceptr box_of(int owner, int poster, Box box) const {
    return addresses_[static_cast<std::size_t>(owner)] +
           static_cast<cuda::CUdeviceptr>(box * size_ + poster) * sizeof(unsigned);
  }
  void write_flag(cuda::CUdeviceptr memory, int flag, unsigned value, cuda::CUstream stream) const {
    const cuda::ContextScope scope(context_);
    check(driver().StreamWriteValue32(
              stream, memory + flags_at_ + static_cast<cuda::CUdeviceptr>(flag) * sizeof(unsigned), value,
              cuda::CU_STREAM_WRITE_VALUE_DEFAULT),
          "cuStreamWriteValue32");
  }
  void take(int rank, Box box, Stream stream) const {
    const cuda::ContextScope scope(context_);
    const auto on = static_cast<cuda::CUstream>(stream);
    const cuda::CUdeviceptr at = box_of(rank_, rank, box);
    check(driver().StreamWaitValue32(on, at, 1, cuda::CU_STREAM_WAIT_VALUE_GEQ), "cuStreamWaitValue32");
    check(driver().StreamWriteValue32(on, at, 0, cuda::CU_STREAM_WRITE_VALUE_DEFAULT),
          "cuStreamWriteValue32");
  }

  const cuda::Context& context_;
  const int rank_, size_;
  const std::size_t flags_at_, boxes_bytes_;
  bool shares_gpu_ = false;  // two ranks have one
  cuda::DeviceBuffer memory_;
  const cuda::OwnedStream copies_;
  cuda::Event forked_, joined_;
  std::deque<PeerMemory> peers_;
  std::vector<cuda::CUdeviceptr> addresses_;  // of every rank's memory
};

// A thread that looks whether all ranks are there, and ends what waits for those that are not.
class FailureWatch {
 public:
  FailureWatch(const std::function<bool()>& has_failed, const cuda::Context& context)
      : has_failed_(has_failed), stream_(context) {
    thread_ = std::thread([this] { run(); });
  }
  ~FailureWatch() {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void add(const std::shared_ptr<CudaExchange>& exchange) {
    const std::lock_guard lock(mutex_);
    exchanges_.push_back(exchange);
  }

 private:
  void run() {
    constexpr std::chrono::milliseconds pause(100);
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, pause, [&] { return stopped_; })) {
      if (!has_failed_()) continue;
      for (const std::weak_ptr<CudaExchange>& each : exchanges_)
        if (const auto exchange = each.lock()) exchange->end_waits(stream_.get());
    }
  }

  const std::function<bool()> has_failed_;
  const cuda::OwnedStream stream_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopped_ = false;
  std::vector<std::weak_ptr<CudaExchange>> exchanges_;
  std::thread thread_;
};

struct CudaExchanges::Impl {
  const cuda::Context context;
  const int rank, size;
  const Gather gather;
  FailureWatch watch;

  Impl(int device, int own, int all, Gather to_gather, const std::function<bool()>& has_failed)
      : context(device), rank(own), size(all), gather(std::move(to_gather)), watch(has_failed, context) {}
};

CudaExchanges::CudaExchanges(int device, int rank, int size, Gather gather,
                             const std::function<bool()>& has_failed)
    : impl_(std::make_unique<Impl>(device, rank, size, std::move(gather), has_failed)) {}
CudaExchanges::~CudaExchanges() = default;

std::shared_ptr<Exchange> CudaExchanges::open(std::size_t bytes) {
  auto made = std::make_shared<CudaExchange>(impl_->context, impl_->rank, impl_->size, bytes);
  // A rank that cannot reach another tells all, so that none waits for it.
  std::string refusal;
  const auto attempt = [&](const auto& part) {
    try {
      part();
    } catch (const Error& error) {
      refusal = error.message();
    }
    for (const std::string& text : impl_->gather(refusal))
      if (!text.empty()) throw Error(ErrorCode::unsupported, text);
  };
  MemoryPlace own{};
  attempt([&] { own = made->place(); });
  std::vector<MemoryPlace> places;
  for (const std::string& text : impl_->gather(std::string(reinterpret_cast<const char*>(&own), sizeof own)))
    std::memcpy(&places.emplace_back(), text.data(), sizeof own);
  attempt([&] { made->open_peers(places); });
  impl_->watch.add(made);
  return made;
}

}  // namespace flashjit
