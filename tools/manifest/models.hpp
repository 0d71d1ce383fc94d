// Well-known models: the sizes that attention kernels need.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "codegen/shape.hpp"
#include "codegen/spec.hpp"

namespace flashjit {

struct Model {
  std::string_view name;
  int head_dim, head_dim_v;
  bool causal;
  std::vector<Shape> shapes;  // typical shapes
  std::string_view source;    // where the figures come from: repository on huggingface.co, file
};

std::span<const Model> models();

// The model's specs of op forward or backward: bf16 and fp16, with fixed lengths and varlen; a forward with
// and without log-sum-exp.
std::vector<AttentionSpec> specs_of(const Model& model, Operation op);

}  // namespace flashjit
