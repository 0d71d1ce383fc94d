// A table from (spec, shape bucket) to the kernel, read
// without locks: the path of a get() that was asked before.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "cache/fork.hpp"
#include "codegen/base/shape.hpp"
#include "codegen/spec/spec.hpp"

namespace flashjit {

class Kernel;

// A hash table with open addressing and a power of two of slots. Nodes are never
// removed or moved. A full slot array is replaced by one of twice the size and kept
// until the end, since readers may still use it; all arrays together are small.
class KernelTable {
 public:
  KernelTable() { grow(); }

  // The kernel; null if there is none.
  const Kernel* find(const AttentionSpec& spec, const Shape& bucket) const noexcept {
    const std::size_t h = hash(spec, bucket);
    const Slots& slots = *current_.load(std::memory_order_acquire);
    for (std::size_t i = h;; ++i) {
      const Node* node = slots.at(i).load(std::memory_order_acquire);
      if (!node) return nullptr;
      if (node->hash == h && node->bucket == bucket && node->spec == spec) return node->kernel;
    }
  }

  // Inserts a kernel. The first kernel inserted for a (spec, bucket) stays.
  void insert(const AttentionSpec& spec, const Shape& bucket, const Kernel* kernel) {
    const std::lock_guard lock(process_mutex());
    if (find(spec, bucket)) return;
    if (2 * (nodes_.size() + 1) > tables_.back()->size()) grow();
    nodes_.push_back(std::make_unique<Node>(Node{hash(spec, bucket), spec, bucket, kernel}));
    place(*tables_.back(), nodes_.back().get());
  }

 private:
  struct Node {
    std::size_t hash;
    AttentionSpec spec;
    Shape bucket;
    const Kernel* kernel;
  };
  class Slots {
   public:
    explicit Slots(std::size_t n) : slots_(n) {}
    std::size_t size() const { return slots_.size(); }
    const std::atomic<const Node*>& at(std::size_t i) const { return slots_[i & (slots_.size() - 1)]; }
    std::atomic<const Node*>& at(std::size_t i) { return slots_[i & (slots_.size() - 1)]; }

   private:
    std::vector<std::atomic<const Node*>> slots_;
  };

  static std::size_t hash(const AttentionSpec& spec, const Shape& b) noexcept {
    std::size_t h = spec.hash();
    for (const int n : {b.batch, b.seqlen_q, b.seqlen_k, b.num_heads_q, b.num_heads_kv})
      h = (h ^ static_cast<std::size_t>(n)) * 0x9e3779b97f4a7c15u;
    return h ^ (h >> 32);
  }
  static void place(Slots& slots, const Node* node) {
    std::size_t i = node->hash;
    while (slots.at(i).load(std::memory_order_relaxed)) ++i;
    slots.at(i).store(node, std::memory_order_release);
  }
  void grow() {
    tables_.push_back(std::make_unique<Slots>(tables_.empty() ? 64 : 2 * tables_.back()->size()));
    for (const auto& node : nodes_) place(*tables_.back(), node.get());
    current_.store(tables_.back().get(), std::memory_order_release);
  }

  std::vector<std::unique_ptr<Slots>> tables_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::atomic<const Slots*> current_{nullptr};
};

}  // namespace flashjit
