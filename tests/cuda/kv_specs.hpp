// 8-bit keys and values for emulated kernels, as codegen renders their Spec.
#pragma once

#include <optional>
#include <type_traits>

#include "codegen/spec/spec.hpp"
#include "shared/kv_scale_params.h"

namespace flashjit::testing_support {

template <class Spec, class KvElement, device::KvScale scale>
struct WithKv : Spec {
  using kv_dtype = KvElement;
  static constexpr device::KvScale kv_scale = scale;
};

// `spec` with the fields that Spec has. fp8_ds_mla is of decodes alone, which the forward's kernel computes.
template <class Spec>
AttentionSpec with_kv(AttentionSpec spec) {
  using KvElement = typename Spec::kv_dtype;
  if constexpr (!std::is_void_v<KvElement>) {
    spec.kv_dtype = device::is_ds_mla<KvElement>                  ? DType::fp8_ds_mla
                    : std::is_same_v<KvElement, device::int8>     ? DType::int8
                    : std::is_same_v<KvElement, device::fp8_e4m3> ? DType::fp8_e4m3
                                                                  : DType::fp8_e5m2;
    if (Spec::kv_scale != device::KvScale::tensor) spec.kv_scale = static_cast<KvScale>(Spec::kv_scale);
    if (device::is_ds_mla<KvElement>) spec.op = Operation::decode;
  }
  return spec.validated();
}

}  // namespace flashjit::testing_support
