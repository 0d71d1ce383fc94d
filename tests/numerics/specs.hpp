// Short ways to make a spec.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "codegen/spec.hpp"

namespace flashjit::testing_support {

struct SpecOptions {
  int head_dim_v = 0;
  bool lse = true;
  bool varlen = false;
  bool dropout = false;
  std::optional<DType> o_dtype = {};
};

inline AttentionSpec forward_spec(DType dtype, int head_dim, std::vector<Mask> mask = {},
                                  SpecOptions options = {}) {
  AttentionSpec spec;
  spec.dtype = dtype;
  spec.head_dim = head_dim;
  spec.head_dim_v = options.head_dim_v;
  spec.mask = std::move(mask);
  spec.lse = options.lse;
  spec.varlen = options.varlen;
  spec.dropout = options.dropout;
  spec.o_dtype = options.o_dtype;
  return spec.validated();
}

}  // namespace flashjit::testing_support
