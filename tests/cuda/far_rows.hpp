// Rows of an emulated backward that no gradient comes to, and formulas that are not finite everywhere.
#pragma once

#include <limits>
#include <numbers>

#include "tests/cuda/learned_specs.hpp"
#include "tests/support/workload.hpp"
#include "tools/verify/element.hpp"

namespace flashjit::testing_support {

// Makes do and dlse of every third row 0. No launch may look at these rows' lse, o and scores, so `lse_too`
// gives them an lse that is far or no number.
inline void stop_gradients(Workload& workload, bool lse_too) {
  const AttentionArgs& args = workload.host_args();
  const Tensor &d_o = *args.d_o, &lse = *args.lse, &dlse = *args.dlse;
  constexpr float values[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::lowest(),
                              std::numeric_limits<float>::infinity(), 1e6f};
  for (std::int64_t b = 0; b < d_o.shape[0]; ++b)
    for (std::int64_t row = 0; row < d_o.shape[1]; row += 3)
      for (std::int64_t head = 0; head < d_o.shape[2]; ++head) {
        const std::int64_t at = b * d_o.strides[0] + row * d_o.strides[1] + head * d_o.strides[2];
        for (std::int64_t c = 0; c < d_o.shape[3]; ++c)
          verify::store_element(d_o.data, d_o.dtype, at + c, row % 2 ? 0.0f : -0.0f);
        static_cast<float*>(dlse.data)[b * dlse.strides[0] + head * dlse.strides[1] + row] = 0;
        if (lse_too)
          static_cast<float*>(lse.data)[b * lse.strides[0] + head * lse.strides[1] + row] =
              values[row / 3 % 4];
      }
  for (const TensorMember member : {&AttentionArgs::d_o, &AttentionArgs::lse, &AttentionArgs::dlse})
    workload.tensor(member).upload();
}

// Makes lse that of twice as many keys, of which these have half of the weight: a merge's.
inline void double_keys(Workload& workload) {
  const Tensor lse = *workload.host_args().lse;
  for (std::int64_t b = 0; b < lse.shape[0]; ++b)
    for (std::int64_t head = 0; head < lse.shape[1]; ++head)
      for (std::int64_t row = 0; row < lse.shape[2]; ++row)
        static_cast<float*>(lse.data)[b * lse.strides[0] + head * lse.strides[1] + row] +=
            std::numbers::ln2_v<float>;
  workload.tensor(&AttentionArgs::lse).upload();
}

// A score that is infinite, with a derivative that is NaN, where the product of q and k is 0.
template <class Base>
struct WithInverse : Base {
  static constexpr bool learns = true;
  using table_bias = device::Table<0, device::fp32, device::Dimension::outer>;
  struct Score1 : device::Formula {
    static constexpr bool by_key = true, reads_head = true;
    template <class At>
    static auto of_key(const At& at) {
      return device::row_values(at.read(table_bias(), at.head));
    }
    template <class At, class OfKey>
    static auto value(const At& at, const OfKey& of_key) {
      return at.score + quotient(of_key.a, at.score);
    }
    template <class At, class OfKey>
    static auto derivative(const At& at, const OfKey& of_key) {
      return device::Real(1.0f) + -quotient(quotient(of_key.a, at.score), at.score);
    }
    static constexpr int reads = 1;
    template <class At, class OfKey, class Add>
    static void elements(const At& at, const OfKey&, const Add& add) {
      add(device::Read<0>(), table_bias(), quotient(device::Real(1.0f), at.score), at.head);
    }
  };
  using Score = device::FormulaScore<LearnedParams, Score1>;

  static AttentionSpec add_to(AttentionSpec spec) {
    spec.score = {"score + bias[head] / score"};
    spec.tables = {{"bias", DType::fp32, {{.kind = TableDimension::Kind::heads_q}}, true}};
    return spec.validated();
  }
};

}  // namespace flashjit::testing_support
