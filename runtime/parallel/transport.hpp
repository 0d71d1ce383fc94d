// How the ranks of a group reach each other's memory. What ranks compute knows nothing
// else of other ranks. Every rank calls the functions in an order that fits the others'.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/flashjit.hpp"

namespace flashjit {

// Ranks tell each other that what they sent is there, or sent back, and that its place is free again. A
// second place has boxes of its own, so that a call's copies need not wait for the call before.
enum Box { sent, returned, freed, sent_to_second, freed_second, num_boxes };

// A copy to the same place of another rank's memory as `to` has in this rank's. Strides may be any, but for
// those of the last dimension, which is contiguous.
struct RankCopy {
  Tensor to, from;
  int flag = -1;  // of the receiver, raised when this copy and those before it are done; -1: none
};

// In a step every rank sends to one rank and receives from one. In the same step `to` is told to receive what
// this rank sends it, by a list of the same places in the same order. A rank may be its own.
struct CopyStep {
  int to, from;
  Box box;  // copies begin when the place of Box::sent or Box::sent_to_second is free
  std::vector<RankCopy> sends{};
  std::vector<Tensor> receives{};  // places in this rank's memory
};

// Memory of each rank that others copy into. What one tells another goes through a box, a message that only
// says "now": each is posted once and waited for once by turns.
//
// On a GPU all of this is enqueued, and copies run beside the kernels of the caller's stream. On a CPU a call
// returns when it is done.
class Exchange {
 public:
  Exchange() = default;
  Exchange(const Exchange&) = delete;
  virtual ~Exchange() = default;

  // This rank's own, aligned to 256 bytes.
  virtual std::byte* memory() const = 0;
  // Copies from host memory to this rank's own, and waits until it is there.
  virtual void write(std::byte* to, const void* from, std::size_t bytes) = 0;

  // Copies from here on begin after the stream's work so far.
  virtual void begin(Stream stream) = 0;
  // All ranks make the same steps in the same order. Posts the box of each that is sent or received, unless
  // nothing is.
  virtual void pass(const CopyStep& step) = 0;
  // Copies within this rank's memory.
  virtual void copy(const Tensor& to, const Tensor& from) = 0;
  // The stream's work from here on begins after the rank's post.
  virtual void wait(int rank, Box box, Stream stream) = 0;
  // Tells a rank that a place is free when the copies so far are done, or the stream's work so far.
  virtual void release(int rank, Box box) = 0;
  virtual void release(int rank, Box box, Stream stream) = 0;
  // Copies from here on begin after the rank's post, too.
  virtual void hold(int rank, Box box) = 0;
  // Flags that a rank's kernels wait for while they run, 0 until they are raised: int32 [count], at most
  // flags_for_each times the ranks. None where a kernel must not wait, since copies may wait for it.
  static constexpr int flags_for_each = 4;
  virtual std::optional<Tensor> flags(int first, int count) const = 0;
  // Lowers these flags of this rank's after the stream's work so far.
  virtual void lower(int first, int count, Stream stream) = 0;
  // The stream's work from here on begins when the copies so far are done.
  virtual void end(Stream stream) = 0;
  // Waits until the copies so far are done.
  virtual void finish() = 0;
};

// Ranks that reach each other's memory: one copies into another's by itself.
class MappedExchange : public Exchange {
 public:
  void pass(const CopyStep& step) final;
  void copy(const Tensor& to, const Tensor& from) final { put(own_rank(), to, from); }
  void release(int rank, Box box) final { post(rank, box); }
  void release(int rank, Box box, Stream stream) final { post(rank, box, stream); }
  void hold(int rank, Box box) final { await(rank, box); }

 protected:
  virtual int own_rank() const = 0;
  // Copies from here on begin after the rank's post.
  virtual void await(int rank, Box box) = 0;
  virtual void put(int rank, const Tensor& to, const Tensor& from) = 0;
  // Tells a rank that the copies so far are done, or the stream's work so far.
  virtual void post(int rank, Box box) = 0;
  virtual void post(int rank, Box box, Stream stream) = 0;
  // Raises a rank's flag when the copies so far are done.
  virtual void raise(int rank, int flag) = 0;
};

class Transport {
 public:
  Transport() = default;
  Transport(const Transport&) = delete;
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Throws unsupported if the transport does not reach the engine's memory.
  virtual void require_device(Device device) const = 0;

  // The texts of all ranks, by rank.
  virtual std::vector<std::string> gather(const std::string& own) = 0;
  // Whether ranks reach each other's memory. Others send messages, for which a GPU's kernels have to leave
  // some multiprocessors.
  virtual bool maps_memory() const { return true; }
  // Why they do, or do not.
  virtual const std::string& reason() const;
  // In memory of the engine's device. Every rank calls it with the same numbers. A step sends at most
  // `bytes_of_step`, and receives as many.
  virtual std::shared_ptr<Exchange> exchange(Device device, std::size_t bytes, std::size_t bytes_of_step) = 0;
  // Throws device_failed once a rank has failed.
  virtual void require_alive() const = 0;
  // Makes the waiting and later calls of the other ranks throw device_failed.
  virtual void fail(const std::string& why) noexcept = 0;
};

// An exchange whose places are free.
std::shared_ptr<Exchange> open_exchange(Transport& transport, Device device, std::size_t bytes,
                                        std::size_t bytes_of_step);

// Makes a rank's object of some work. Throws on all ranks if one was given other work, or refuses its own.
void make_together(Transport& transport, const std::string& work, const std::function<void()>& make);
// Runs a rank's part, and tells the others if it fails.
void run_together(Transport& transport, const std::function<void()>& part);
// Waits until no rank writes into the memory of another. `finish`: this rank's copies.
void end_together(Transport& transport, const std::function<void()>& finish) noexcept;

}  // namespace flashjit
