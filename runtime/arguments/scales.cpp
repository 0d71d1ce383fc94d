#include "runtime/arguments/scales.hpp"

#include <cmath>
#include <cstdint>

#include "runtime/arguments/checks.hpp"

namespace flashjit {
namespace {

template <TensorMember scale_member>
device::KvScales check(const AttentionSpec& spec, Device device, const AttentionArgs& args,
                       const Tensor& keys) {
  constexpr const char* name = argument_of(scale_member).name;
  const Tensor& t = require<scale_member>(spec, args, device);
  const KvScale shared = spec.kv_scale.value_or(KvScale::tensor);
  if (shared == KvScale::tensor) require_shape(name, t, 0, 1, "one scale for all");
  if (shared == KvScale::head) require_shape(name, t, 0, keys.shape[2], "k's heads");
  if (shared == KvScale::token_head) {
    require_shape(name, t, 0, keys.shape[0], spec.paged ? "k's pages" : "k's batch");
    require_shape(name, t, 1, keys.shape[1], spec.paged ? "k's page size" : "k's rows");
    require_shape(name, t, 2, keys.shape[2], "k's heads");
  }
  require_address(name, t, sizeof(float));
  const auto* const data = static_cast<const float*>(t.data);
  if (shared == KvScale::token_head) return {data, stride(t, 0), stride(t, 1), stride(t, 2)};
  const std::int64_t head_stride = shared == KvScale::head ? stride(t, 0) : 0;
  if (device.kind == Device::Kind::cpu)
    for (std::int64_t head = 0; head < t.shape[0]; ++head)
      if (!std::isfinite(data[head * head_stride]))
        refuse_argument(name, "[", head, "] is ", data[head * head_stride], ": a scale must be finite");
  return {data, 0, 0, head_stride};
}

}  // namespace

std::optional<CheckedKvScales> check_kv_scales(const AttentionSpec& spec, Device device,
                                               const AttentionArgs& args) {
  if (!spec.has_kv_scales()) return {};
  const device::KvScales k = check<&AttentionArgs::k_scale>(spec, device, args, *args.k);
  return CheckedKvScales{k, spec.v_in_k ? k : check<&AttentionArgs::v_scale>(spec, device, args, *args.k)};
}

}  // namespace flashjit
