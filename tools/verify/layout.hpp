// The layout of a launch's tensors, for the oracles.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "codegen/arguments/table.hpp"
#include "runtime/flashjit.hpp"
#include "tools/verify/mask.hpp"

namespace flashjit::verify {

[[noreturn]] inline void refuse(const std::string& what) {
  throw Error(ErrorCode::invalid_argument, "oracle: " + what);
}

inline const Tensor& need(const std::optional<Tensor>& tensor, const char* name, int rank) {
  if (!tensor) refuse(std::string(name) + " is missing");
  if (tensor->rank != rank) {
    refuse(std::string(name) + " has rank " + std::to_string(tensor->rank) + ", expected " +
           std::to_string(rank));
  }
  return *tensor;
}

// The problem's sizes, and the element index of a (sequence, row, head).
class Layout {
 public:
  Layout(const AttentionSpec& spec, const AttentionArgs& args)
      : packed_(spec.varlen),
        keys_(key_layout(spec)),
        q(need(args.q, "q", rank())),
        k(need(args.k, "k", key_rank())),
        v(spec.v_in_k ? k : need(args.v, "v", key_rank())) {
    head_dim = static_cast<int>(q.shape[rank() - 1]);
    head_dim_v = spec.v_in_k ? spec.head_dim_v : static_cast<int>(v.shape[key_rank() - 1]);
    heads_q = static_cast<int>(q.shape[rank() - 2]);
    heads_kv = static_cast<int>(k.shape[key_rank() - 2]);
    if (heads_kv > 0 && heads_q % heads_kv != 0) refuse("num_heads_q is not a multiple of num_heads_kv");
    if (packed_) need(args.cu_seqlens_q, "cu_seqlens_q", 1);
    if (keys_ == KeyLayout::packed) need(args.cu_seqlens_k, "cu_seqlens_k", 1);
    if (keys_ == KeyLayout::paged) pages_ = need(args.page_table, "page_table", 2);
    sequences = sequences_of(spec, args);
  }

  int rank() const { return packed_ ? 3 : 4; }
  int key_rank() const { return keys_ == KeyLayout::packed ? 3 : 4; }
  int head_kv(int head_q) const { return head_q / (heads_q / heads_kv); }
  // Element index of [row, head, 0] of q or o. In packed tensors `row` counts from the tensor's start.
  std::int64_t index(const Tensor& t, int batch, std::int64_t row, int head) const {
    if (packed_) return row * t.strides[0] + head * t.strides[1];
    return batch * t.strides[0] + row * t.strides[1] + head * t.strides[2];
  }
  // Element index of a key of k or v, for a query head. The page of a key that the sequence has is looked up.
  std::int64_t key_index(const Tensor& t, const Sequence& s, std::int64_t key, int head_q) const {
    const int head = head_kv(head_q);
    switch (keys_) {
      case KeyLayout::packed:
        return (s.k_begin + key) * t.strides[0] + head * t.strides[1];
      case KeyLayout::batched:
        return s.batch * t.strides[0] + key * t.strides[1] + head * t.strides[2];
      case KeyLayout::paged:
        break;
    }
    const std::int64_t page_size = t.shape[1];
    const std::int64_t entry = s.batch * pages_.strides[0] + key / page_size * pages_.strides[1];
    const std::int32_t page = static_cast<const std::int32_t*>(pages_.data)[entry];
    if (page < 0 || page >= t.shape[0]) refuse("page " + std::to_string(page) + " does not exist");
    return page * t.strides[0] + key % page_size * t.strides[1] + head * t.strides[2];
  }
  std::int64_t lse_index(const Tensor& t, int batch, std::int64_t row, int head) const {
    if (packed_) return head * t.strides[0] + row * t.strides[1];
    return batch * t.strides[0] + head * t.strides[1] + row * t.strides[2];
  }

 private:
  bool packed_;
  KeyLayout keys_;
  Tensor pages_;

 public:
  Tensor q, k, v;
  int head_dim, head_dim_v, heads_q, heads_kv;
  std::vector<Sequence> sequences;
};

}  // namespace flashjit::verify
