// Short ways to make a spec.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "codegen/spec/spec.hpp"

namespace flashjit::testing_support {

struct SpecOptions {
  int head_dim_v = 0;
  bool lse = true;
  bool varlen = false;
  bool dropout = false;
  std::optional<DType> o_dtype = {};
  bool paged = false;
  bool v_in_k = false;
  bool batch_invariant = false;
  std::optional<DType> kv_dtype = {};
  std::optional<KvScale> kv_scale = {};
};

inline AttentionSpec attention_spec(Operation op, DType dtype, int head_dim, std::vector<Mask> mask,
                                    const SpecOptions& options) {
  AttentionSpec spec;
  spec.op = op;
  spec.dtype = dtype;
  spec.head_dim = head_dim;
  spec.head_dim_v = options.head_dim_v;
  spec.mask = std::move(mask);
  spec.lse = options.lse;
  spec.varlen = options.varlen;
  spec.paged = options.paged;
  spec.v_in_k = options.v_in_k;
  spec.batch_invariant = options.batch_invariant;
  spec.dropout = options.dropout;
  spec.o_dtype = options.o_dtype;
  spec.kv_dtype = options.kv_dtype;
  spec.kv_scale = options.kv_scale;
  return spec.validated();
}
inline AttentionSpec forward_spec(DType dtype, int head_dim, std::vector<Mask> mask = {},
                                  const SpecOptions& options = {}) {
  return attention_spec(Operation::forward, dtype, head_dim, std::move(mask), options);
}
inline AttentionSpec decode_spec(DType dtype, int head_dim, std::vector<Mask> mask = {},
                                 const SpecOptions& options = {}) {
  return attention_spec(Operation::decode, dtype, head_dim, std::move(mask), options);
}

}  // namespace flashjit::testing_support
