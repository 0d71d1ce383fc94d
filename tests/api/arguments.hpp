// Valid arguments of a forward, for tests that make one of them wrong.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "runtime/flashjit.h"
#include "runtime/flashjit.hpp"

namespace flashjit {

struct GoodArguments {
  static constexpr int batch = 2, seqlen_q = 5, seqlen_k = 7, heads_q = 4, heads_kv = 2, head_dim = 16,
                       head_dim_v = 24;

  explicit GoodArguments(bool varlen = false, bool lse = true) {
    const auto tensor = [&](int rows, int heads, int dim) {
      const std::int64_t total = std::int64_t{batch} * rows;
      return varlen ? make(DType::bf16, {total, heads, dim}) : make(DType::bf16, {batch, rows, heads, dim});
    };
    args.q = tensor(seqlen_q, heads_q, head_dim);
    args.k = tensor(seqlen_k, heads_kv, head_dim);
    args.v = tensor(seqlen_k, heads_kv, head_dim_v);
    args.o = tensor(seqlen_q, heads_q, head_dim_v);
    if (lse) {
      args.lse = varlen ? make(DType::fp32, {heads_q, batch * seqlen_q})
                        : make(DType::fp32, {batch, heads_q, seqlen_q});
    }
    if (varlen) {
      args.cu_seqlens_q = make(DType::int32, {batch + 1});
      args.cu_seqlens_k = make(DType::int32, {batch + 1});
      for (int b = 0; b <= batch; ++b) {
        starts(args.cu_seqlens_q)[b] = b * seqlen_q;
        starts(args.cu_seqlens_k)[b] = b * seqlen_k;
      }
    }
  }

  static std::int32_t* starts(const std::optional<Tensor>& t) { return static_cast<std::int32_t*>(t->data); }
  static constexpr Shape shape() { return {batch, seqlen_q, seqlen_k, heads_q, heads_kv}; }

  AttentionArgs args;

 private:
  Tensor make(DType dtype, std::initializer_list<std::int64_t> shape) {
    memory_.emplace_back(4096);  // 16 kB, more than any tensor here
    return Tensor::contiguous(memory_.back().data(), dtype, {}, shape);
  }
  std::vector<std::vector<std::int32_t>> memory_;
};

// The tensor as the C interface takes it.
inline flashjit_tensor c_tensor(const Tensor& t) {
  flashjit_tensor c{t.data,
                    static_cast<std::int32_t>(t.dtype),
                    static_cast<std::int32_t>(t.device.kind),
                    t.device.index,
                    t.rank,
                    {},
                    {}};
  std::copy(t.shape.begin(), t.shape.end(), c.shape);
  std::copy(t.strides.begin(), t.strides.end(), c.strides);
  return c;
}

}  // namespace flashjit
