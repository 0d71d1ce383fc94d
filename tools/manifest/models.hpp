// Well-known models, by what attention kernels need to know of them.
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
  std::vector<Shape> shapes;  // typical ones
  std::string_view source;    // of the figures: repository on huggingface.co, file
};

std::span<const Model> models();

// bf16 and fp16, with fixed lengths and varlen, with and without log-sum-exp.
std::vector<AttentionSpec> specs_of(const Model& model);

}  // namespace flashjit
