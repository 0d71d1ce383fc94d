// The forward of one of two ranks in one launch, of causal masks in layout zigzag: its kernel takes the
// rank's own keys and those of others where they arrive, and waits for the latter when it comes to them. So
// nothing is merged.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include "runtime/parallel/rank_attention.hpp"
#include "runtime/parallel/schedule.hpp"

namespace flashjit {

class GatheredForward {
 public:
  // Null where the group, the layout, the spec or the target's kernels are others.
  static std::unique_ptr<GatheredForward> make(const RankTask& task);

  // The launch's.
  std::size_t workspace_bytes() const;
  // Keys of others go to `all_k` and `all_v` in the exchange's memory, [batch, half of the whole, heads,
  // dim], its second place or its first.
  void forward(const AttentionArgs& args, const std::optional<Tensor>& workspace, Exchange& exchange,
               const Tensor& all_k, const Tensor& all_v, bool second, Stream stream) const;

 private:
  GatheredForward(const RankTask& task, AttentionSpec spec);
  const Kernel& kernel() const;
  int piece_keys() const;
  void send(const AttentionArgs& args, Exchange& exchange, const Tensor& all_k, const Tensor& all_v,
            bool second, Stream stream) const;

  const RankTask task_;
  const AttentionSpec spec_;  // with gathered keys
  const KeyChunks keys_;
  Shape shape_;  // by which all ranks choose the kernel
};

}  // namespace flashjit
