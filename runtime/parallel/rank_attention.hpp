// A rank's part of attention over several ranks, by one way of dividing it.
#pragma once

#include <memory>
#include <optional>

#include "runtime/parallel.hpp"
#include "runtime/parallel/transport.hpp"

namespace flashjit {

struct RankTask {
  Engine& engine;
  std::shared_ptr<Transport> transport;
  Shape whole;
  AttentionSpec spec, gradients;  // a forward and its backward, as the caller has them
  SequenceLayout layout;
  // The bytes that partial results and sums of rows may take, with what launches need, before heads are
  // computed some at a time. So long sequences take less memory, and others as few launches as they can.
  std::size_t most_bytes = std::size_t{2400} << 20;

  // Multiprocessors that launches leave to copies that run beside them.
  std::optional<int> multiprocessors_of_copies() const {
    constexpr int of_nccl = 4;
    if (transport->maps_memory() || engine.device().kind != Device::Kind::cuda) return std::nullopt;
    return of_nccl;
  }
  int own() const { return transport->rank(); }
  int size() const { return transport->size(); }
  // The rank that is `step` after this one, in a circle.
  int after(int step) const { return (own() + step) % size(); }
  std::int64_t batch() const { return whole.batch; }
  int own_rows() const { return whole.seqlen_q / size(); }
  int own_keys() const { return whole.seqlen_k / size(); }
};

class RankAttention {
 public:
  virtual ~RankAttention() = default;

  virtual std::size_t workspace_bytes(bool backward) const = 0;
  // Loads the kernels of a launch, and makes the memory that others write into. All ranks call it.
  virtual void prepare(bool backward) = 0;
  // These take checked arguments, after prepare().
  virtual ParallelAttention::Steps forward(const AttentionArgs& args, Stream stream) = 0;
  virtual ParallelAttention::Steps backward(const AttentionArgs& args, Stream stream) = 0;
  // Waits until this rank's copies are done.
  virtual void finish() = 0;
};

std::unique_ptr<RankAttention> attention_by_sequence(const RankTask& task);
std::unique_ptr<RankAttention> attention_by_heads(const RankTask& task);

}  // namespace flashjit
