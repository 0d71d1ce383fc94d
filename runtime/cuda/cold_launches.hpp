// Times launches on a GPU whose caches hold nothing of their tensors, and a plain read to compare them with.
// Compiled by NVRTC at run time. For the tuner and the command.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "codegen/families/kernel_source.hpp"
#include "runtime/cuda/memory.hpp"
#include "runtime/executable.hpp"

namespace flashjit::cuda {

// The kernel of PlainRead.
KernelSource plain_read_source(const Target& target);

// Reads memory as fast as a plain kernel can, and adds up its words.
class PlainRead {
 public:
  // Throws compiler_unavailable without NVRTC.
  explicit PlainRead(const Context& context);
  // `data` is aligned to 16 bytes; the last bytes % 16 are not read.
  void launch(const void* data, std::size_t bytes, Stream stream) const;
  // The sum of the last launch's 32-bit words, modulo 2^32. Waits for the device.
  std::uint32_t sum() const;

 private:
  const Context& context_;
  unsigned blocks_;
  std::unique_ptr<Executable> kernel_;
  DeviceBuffer sums_;  // one of each block
};

class ColdLaunches {
 public:
  // Before each launch 256 MB are cleared or read. Reading leaves nothing to write back. Cleared lines stay
  // dirty in L2, and their write-back slows down the next kernel: wrong beside kernels that memory bounds.
  enum class Before { clear, read };

  // Both objects must outlive this one. With Before::clear `read` may be null.
  ColdLaunches(const Context& context, const PlainRead* read, Before before);

  // The milliseconds of each of `count` launches, each between two events. All of them are queued at once, so
  // that the GPU never waits for the host.
  std::vector<double> operator()(const std::function<void(Stream)>& launch, int count);
  // The milliseconds of a launch and the reading or clearing before it, the mean of the last call's.
  double ms_with_preparation() const { return ms_with_preparation_; }
  const OwnedStream& stream() const { return stream_; }

 private:
  const Context& context_;
  const PlainRead* const read_;
  const Before before_;
  double ms_with_preparation_ = 0;
  OwnedStream stream_;
  DeviceBuffer other_;
  std::deque<Event> events_;  // two for each launch; a deque, because its elements do not move
};

}  // namespace flashjit::cuda
