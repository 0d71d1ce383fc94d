// A merge in guarded memory: partial results of any sizes, among them empty ones whose o is poison, and the
// check against the float64 oracle.
#pragma once

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/support/guarded_tensor.hpp"
#include "tests/support/test_device.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/report.hpp"

namespace flashjit::testing_support {

struct MergeCase {
  int parts = 2, batch = 1, seqlen = 7, heads = 3, head_dim = 64;
  DType dtype = DType::bf16, parts_dtype = DType::fp32;
  bool lse = true, packed = false;
  bool sum = false;
  int gap = 0;               // elements between rows, a multiple of 8
  double empty_share = 0.2;  // share of a row's parts that are empty
  double lse_level = 0, lse_spread = 3;
  bool parts_inside = false;  // the parts lie inside a batch entry in memory
  unsigned seed = 1;

  std::string str() const {
    return std::to_string(parts) + " parts " + to_string(parts_dtype) + " -> " + to_string(dtype) +
           " batch " + std::to_string(batch) + " seqlen " + std::to_string(seqlen) + " heads " +
           std::to_string(heads) + " head_dim " + std::to_string(head_dim) + (packed ? " packed" : "") +
           (lse ? "" : " without lse") + (sum ? " sum" : "") + " gap " + std::to_string(gap) + " level " +
           std::to_string(lse_level) + " spread " + std::to_string(lse_spread) +
           (parts_inside ? " parts inside" : "") + " seed " + std::to_string(seed);
  }
  Shape shape() const {
    return {.batch = packed ? 1 : batch,
            .seqlen_q = seqlen,
            .seqlen_k = 0,
            .num_heads_q = heads,
            .num_heads_kv = heads};
  }
  AttentionSpec spec() const {
    AttentionSpec spec;
    spec.op = Operation::merge;
    spec.dtype = dtype;
    spec.head_dim = head_dim;
    spec.parts_dtype = parts_dtype;
    spec.lse = lse && !sum;
    spec.sum = sum;
    spec.varlen = packed;
    return spec.validated();
  }
};

// A row-major shape with `gap` elements after each row of the last dimension.
inline TensorShape with_gaps(const std::vector<std::int64_t>& sizes, int gap) {
  TensorShape shape{.rank = static_cast<int>(sizes.size())};
  std::int64_t stride = 1;
  for (int i = shape.rank - 1; i >= 0; --i) {
    shape.shape[i] = sizes[i];
    shape.strides[i] = stride;
    stride *= sizes[i] + (i == shape.rank - 1 ? gap : 0);
  }
  return shape;
}

class MergeProblem {
  using Fence = GuardedTensor::Fence;

 public:
  MergeProblem(TestDevice& device, const MergeCase& given)
      : case_(given),
        parts_o_(device, given.parts_dtype, shape(true, true), Poison::nan, Fence::after),
        parts_lse_(device, DType::fp32, shape(true, false), Poison::nan, Fence::after),
        o_(device, given.dtype, shape(false, true), Poison::nan, Fence::after),
        lse_(device, DType::fp32, shape(false, false), Poison::nan, Fence::before) {
    fill();
    args_ = {.o = o_.on_device(), .parts_o = parts_o_.on_device()};
    if (!given.sum) args_.parts_lse = parts_lse_.on_device();
    if (given.lse && !given.sum) args_.lse = lse_.on_device();
  }

  const AttentionArgs& args() const { return args_; }
  AttentionArgs host_args() const {
    AttentionArgs args = args_;
    args.o = o_.on_host();
    args.parts_o = parts_o_.on_host();
    if (args.parts_lse) args.parts_lse = parts_lse_.on_host();
    if (args.lse) args.lse = lse_.on_host();
    return args;
  }

  testing::AssertionResult check() {
    o_.download();
    lse_.download();
    for (const auto& [tensor, name, written] : {std::tuple{&parts_o_, "parts_o", false},
                                                {&parts_lse_, "parts_lse", false},
                                                {&o_, "o", true},
                                                {&lse_, "lse", case_.lse && !case_.sum}}) {
      if (auto untouched = tensor->was_not_touched(name, written); !untouched)
        return untouched << case_.str();
    }
    const verify::Report report = verify::verify_outputs(case_.spec(), host_args());
    return (report.ok() ? testing::AssertionSuccess() : testing::AssertionFailure()) << case_.str() << "\n"
                                                                                     << report.str();
  }
  std::vector<std::byte> outputs() {
    o_.download();
    return o_.elements();
  }

 private:
  TensorShape shape(bool of_parts, bool of_o) const {
    std::vector<std::int64_t> sizes;
    if (of_parts) sizes.push_back(case_.parts);
    if (!case_.packed) sizes.push_back(case_.batch);
    if (of_o)
      sizes.insert(sizes.end(), {case_.seqlen, case_.heads, case_.head_dim});
    else
      sizes.insert(sizes.end(), {case_.heads, case_.seqlen});
    const bool swap = of_parts && case_.parts_inside;
    if (swap) std::swap(sizes[0], sizes[1]);
    TensorShape shape = with_gaps(sizes, of_o ? case_.gap : 0);
    if (swap) std::swap(shape.shape[0], shape.shape[1]), std::swap(shape.strides[0], shape.strides[1]);
    return shape;
  }

  void fill() {
    std::mt19937 random(case_.seed);
    std::normal_distribution<float> normal;
    std::bernoulli_distribution is_empty(case_.empty_share);
    const Tensor o = parts_o_.on_host(), lse = parts_lse_.on_host();
    const std::int64_t batch = case_.packed ? 1 : case_.batch;
    const int first = case_.packed ? 0 : 1;  // 1 if there is a batch dimension after that of parts
    for (std::int64_t part = 0; part < case_.parts; ++part)
      for (std::int64_t b = 0; b < batch; ++b)
        for (std::int64_t row = 0; row < case_.seqlen; ++row)
          for (std::int64_t head = 0; head < case_.heads; ++head) {
            const auto at = [&](const Tensor& t, std::int64_t i, std::int64_t j) {
              return part * t.strides[0] + (first ? b * t.strides[1] : 0) + i * t.strides[1 + first] +
                     j * t.strides[2 + first];
            };
            // All parts of the first row are empty.
            const bool empty = !case_.sum && (row == 0 || is_empty(random));
            const float level =
                static_cast<float>(case_.lse_level) + static_cast<float>(case_.lse_spread) * normal(random);
            static_cast<float*>(lse.data)[at(lse, head, row)] =
                empty ? -std::numeric_limits<float>::infinity() : level;
            for (int c = 0; c < case_.head_dim; ++c)
              verify::store_element(o.data, o.dtype, at(o, row, head) + c,
                                    empty ? std::numeric_limits<float>::quiet_NaN() : normal(random));
          }
    parts_o_.upload();
    parts_lse_.upload();
    o_.upload();
    lse_.upload();
  }

  const MergeCase case_;
  GuardedTensor parts_o_, parts_lse_, o_, lse_;
  AttentionArgs args_;
};

}  // namespace flashjit::testing_support
