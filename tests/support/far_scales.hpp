// Scales of values that differ by orders of magnitude, and keys whose weights make up for it.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <optional>
#include <vector>

#include "tests/support/workload.hpp"
#include "tools/verify/element.hpp"

namespace flashjit::testing_support {

// The value's scale times 2^exponent. Without a score the key keeps its own.
struct FarScale {
  int key, exponent;
  std::optional<double> log2_weight;  // the score, in units of ln 2. The other keys' are near 0.
};

// A decode's keys of that kind, of `keys`. Its mask is causal.
struct FarScales {
  const char* name;
  std::vector<FarScale> keys;
};
inline std::vector<FarScales> far_scales(int keys) {
  std::vector<FarScales> all = {
      {"a large value that weighs nothing", {{keys / 2, 20, -50.}}},
      {"a huge value that weighs nothing", {{keys / 3, 60, -90.}}},
      {"a large value that only the last row sees", {{keys - 1, 20, std::nullopt}}},
      {"a small value that outweighs the others", {{0, -20, 18.}}},
  };
  // References rise by more than weights can.
  all.push_back({"large values that weigh nothing at first", {}});
  for (int key = 0; key < keys / 2; ++key) all.back().keys.push_back({key, 80, -110.});
  return all;
}

// Sets them in a decode without pages, of any batch and heads, whose kv_scale is token_head.
inline void set_scales(Workload& workload, const std::vector<FarScale>& far) {
  const Tensor q = workload.q().on_host(), k = workload.k().on_host(),
               k_scale = workload.tensor(&AttentionArgs::k_scale).on_host(),
               v_scale = workload.tensor(&AttentionArgs::v_scale).on_host();
  const auto place = [](const Tensor& t, std::int64_t i, std::int64_t j, std::int64_t l) {
    return i * t.strides[0] + j * t.strides[1] + l * t.strides[2];
  };
  // The first element of each query is 1, and it is all that those keys look at.
  for (std::int64_t b = 0; b < q.shape[0]; ++b)
    for (std::int64_t row = 0; row < q.shape[1]; ++row)
      for (std::int64_t head = 0; head < q.shape[2]; ++head)
        verify::store_element(q.data, q.dtype, place(q, b, row, head), 1);
  const double unit = std::numbers::ln2 * std::sqrt(static_cast<double>(q.shape[3]));
  for (std::int64_t b = 0; b < k.shape[0]; ++b)
    for (const FarScale& of : far)
      for (std::int64_t head = 0; head < k.shape[2]; ++head) {
        float& scale = static_cast<float*>(v_scale.data)[place(v_scale, b, of.key, head)];
        scale = std::ldexp(scale, of.exponent);
        if (!of.log2_weight) continue;
        for (std::int64_t c = 0; c < k.shape[3]; ++c)
          verify::store_element(k.data, k.dtype, place(k, b, of.key, head) + c, c == 0 ? 1.0f : 0.0f);
        static_cast<float*>(k_scale.data)[place(k_scale, b, of.key, head)] =
            static_cast<float>(*of.log2_weight * unit);
      }
  for (const TensorMember member :
       {&AttentionArgs::q, &AttentionArgs::k, &AttentionArgs::k_scale, &AttentionArgs::v_scale})
    workload.tensor(member).upload();
}

}  // namespace flashjit::testing_support
