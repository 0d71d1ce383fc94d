// Device memory, streams, events and graphs for the command, the tuner and the tests; kernels own none.
// Each object borrows the Context that it was made with. Copies and fills are in stream order, and
// asynchronous to the host only if the driver can make them so: synchronize() before reading host memory.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>

#include "runtime/cuda/driver.hpp"
#include "runtime/flashjit.hpp"

namespace flashjit::cuda {

// Throws invalid_argument unless kernels on the device can read and write at `pointer`. They
// can if it is memory of that device, managed memory, mapped pinned memory, or any host
// memory if the device uses the host's page tables. `argument` is the name in the message.
void check_device_pointer(const void* pointer, int device_index, const char* argument);

// Bytes of free device memory.
std::size_t free_memory(const Context& context);
// Waits for all work in the context.
void synchronize(const Context& context);

// Copies `bytes` of device memory to host memory and waits until they are there.
void copy_to_host(const Context& context, void* host, const void* device, std::size_t bytes);

class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  // Throws device_failed with the requested and the free bytes. For zero bytes data() is null.
  DeviceBuffer(const Context& context, std::size_t bytes);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept { swap(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    swap(other);
    return *this;
  }

  void* data() const { return reinterpret_cast<void*>(pointer_); }
  std::size_t size() const { return size_; }

  void copy_from(const void* host, std::size_t bytes, Stream stream = nullptr);
  void copy_to(void* host, std::size_t bytes, Stream stream = nullptr) const;
  // Copies the first `bytes` bytes to those that follow them.
  void copy_within(std::size_t bytes, Stream stream);
  void fill(unsigned char byte, Stream stream = nullptr);

 private:
  void swap(DeviceBuffer& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(pointer_, other.pointer_);
    std::swap(size_, other.size_);
  }
  const Context* context_ = nullptr;
  CUdeviceptr pointer_ = 0;
  std::size_t size_ = 0;
};

// A stream that does not wait for the legacy default stream.
class OwnedStream {
 public:
  // Blocks of an urgent stream's kernels get multiprocessors before those of others.
  explicit OwnedStream(const Context& context, bool urgent = false);
  ~OwnedStream();
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;

  Stream get() const { return handle_; }
  void synchronize() const;
  // Whether its work so far is done.
  bool is_done() const;

 private:
  const Context& context_;
  CUstream handle_ = nullptr;
};

class Event {
 public:
  explicit Event(const Context& context);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(Stream stream = nullptr);
  // The stream's work from here on begins after what was recorded.
  void hold(Stream stream) const;
  void synchronize() const;
  // Milliseconds between two recorded events, waiting for both.
  friend float elapsed_ms(const Event& start, const Event& stop);

 private:
  const Context& context_;
  CUevent handle_ = nullptr;
};

// The work that `body` enqueues on a stream of the graph's own, to be launched many times.
class Graph {
 public:
  Graph(const Context& context, const std::function<void(Stream)>& body);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch(Stream stream = nullptr) const;

 private:
  const Context& context_;
  CUgraphExec handle_ = nullptr;
};

}  // namespace flashjit::cuda
