// How the ranks of a group reach each other's tensors. A schedule (attention.cpp) knows nothing else of other
// ranks. Every rank calls the functions in the same order.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "runtime/flashjit.hpp"

namespace flashjit {

class Transport {
 public:
  Transport() = default;
  Transport(const Transport&) = delete;
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Throws unsupported if the transport does not reach the engine's memory.
  virtual void require_device(Device device) const = 0;

  // What every rank says, by rank.
  virtual std::vector<std::string> gather(const std::string& own) = 0;
  // Shows tensors to the other ranks. What was written to them before on the stream is seen.
  virtual void publish(std::span<const Tensor> own, Stream stream) = 0;
  // A tensor that a rank has published last, by its place: in this rank's memory, or where it can read it.
  virtual Tensor fetch(int rank, std::size_t place, Stream stream) = 0;
  // Every rank's work so far is done before any rank's later work begins.
  virtual void meet(Stream stream) = 0;
  // Makes the waiting and later calls of the other ranks throw device_failed.
  virtual void fail(const std::string& why) noexcept = 0;
};

}  // namespace flashjit
