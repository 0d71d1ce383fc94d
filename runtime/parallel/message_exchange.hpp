// An exchange of ranks that do not reach each other's memory. A copy to another rank is a message of
// contiguous bytes. Its sender packs a tensor of other strides first, its receiver unpacks one afterwards.
#pragma once

#include <cstddef>
#include <vector>

#include "runtime/parallel/transport.hpp"

namespace flashjit {

// Contiguous bytes. A rank receives what another sends in the order in which it sends it.
struct Message {
  std::byte* data;
  std::size_t bytes;
};

class MessageExchange : public Exchange {
 public:
  void pass(const CopyStep& step) final;
  // This rank's copies write over places in the order of its own work.
  void release(int, Box) final {}
  void hold(int, Box) final {}
  std::optional<Tensor> flags(int, int) const final { return std::nullopt; }
  void lower(int, int, Stream) final {}

 protected:
  MessageExchange(int rank, Device device, std::size_t bytes_of_step)
      : rank_(rank), device_(device), packed_bytes_(2 * bytes_of_step) {}

  // Sends some to a rank, and receives some from a rank, at the same time.
  virtual void exchange(int to, const std::vector<Message>& sends, int from,
                        const std::vector<Message>& receives) = 0;
  // Once the copies so far are done, this step's of a rank are there.
  virtual void arrives(int rank) = 0;
  // So many bytes for packed tensors.
  virtual std::byte* packed() const = 0;

  const int rank_;
  const Device device_;
  const std::size_t packed_bytes_;
};

}  // namespace flashjit
