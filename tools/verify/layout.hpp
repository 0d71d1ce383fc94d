// The layout of a launch's tensors, for the oracles.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

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
        q(need(args.q, "q", rank())),
        k(need(args.k, "k", rank())),
        v(need(args.v, "v", rank())) {
    head_dim = static_cast<int>(q.shape[rank() - 1]);
    head_dim_v = static_cast<int>(v.shape[rank() - 1]);
    heads_q = static_cast<int>(q.shape[rank() - 2]);
    heads_kv = static_cast<int>(k.shape[rank() - 2]);
    if (heads_kv > 0 && heads_q % heads_kv != 0) refuse("num_heads_q is not a multiple of num_heads_kv");
    if (packed_) {
      need(args.cu_seqlens_q, "cu_seqlens_q", 1);
      need(args.cu_seqlens_k, "cu_seqlens_k", 1);
    }
    sequences = sequences_of(spec, args);
  }

  int rank() const { return packed_ ? 3 : 4; }
  int head_kv(int head_q) const { return head_q / (heads_q / heads_kv); }
  // Element index of [row, head, 0] of q, k, v or o; In packed tensors `row` counts from the tensor's start.
  std::int64_t index(const Tensor& t, int batch, std::int64_t row, int head) const {
    if (packed_) return row * t.strides[0] + head * t.strides[1];
    return batch * t.strides[0] + row * t.strides[1] + head * t.strides[2];
  }
  std::int64_t lse_index(const Tensor& t, int batch, std::int64_t row, int head) const {
    if (packed_) return head * t.strides[0] + row * t.strides[1];
    return batch * t.strides[0] + head * t.strides[1] + row * t.strides[2];
  }

 private:
  bool packed_;

 public:
  Tensor q, k, v;
  int head_dim, head_dim_v, heads_q, heads_kv;
  std::vector<Sequence> sequences;
};

}  // namespace flashjit::verify
