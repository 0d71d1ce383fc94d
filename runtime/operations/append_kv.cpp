#include "runtime/arguments/append_rows.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "runtime/arguments/attention.hpp"
#include "runtime/arguments/checks.hpp"
#include "runtime/arguments/masks.hpp"
#include "runtime/operations/operations.hpp"

namespace flashjit {
namespace {

struct Append {
  struct Checked {
    CheckedAppend params{};
    Shape shape{};
    bool empty = false;
  };

  static Checked check(const AttentionSpec& spec, Device device, const AttentionArgs& args) {
    check_presence(spec, args);
    Checked checked;
    CheckedAppend& p = checked.params;
    check_new_rows(spec, device, args, p);
    check_places(spec, device, args, p);
    check_conversions(spec, device, args, p);

    const Tensor &k_new = *args.k_new, &k = *args.k;
    checked.shape = {.batch = p.batch,
                     .seqlen_q = size(k_new, k_new.rank - 3),
                     .seqlen_k = size(k, 1),
                     .num_heads_q = static_cast<int>(std::max(p.rotary.heads_q, p.heads_kv)),
                     .num_heads_kv = static_cast<int>(p.heads_kv),
                     .page_size = spec.paged ? size(k, 1) : 0};
    checked.empty = p.tokens == 0 || (p.heads_kv == 0 && p.rotary.heads_q == 0);
    return checked;
  }

  static std::size_t workspace_bytes(const PlannedKernel&, const Shape&) { return 0; }

  static void plan_cuda(const PlannedKernel& kernel, const CheckedAppend& params, void*, Launch& launch) {
    plan_cuda_append(kernel, kernel.config.num_warps, params, launch);
  }
  static void plan_cpu(const PlannedKernel& kernel, const CheckedAppend& params, void*, Launch& launch) {
    plan_cpu_append(kernel, params, launch);
  }

 private:
  static void check_places(const AttentionSpec& spec, Device device, const AttentionArgs& args,
                           CheckedAppend& p) {
    const Tensor &k_new = *args.k_new, &k = *args.k;
    if (args.slots.has_value() == args.append_positions.has_value())
      refuse_argument(args.slots
                          ? "slots and append_positions were given: both say where rows go, leave one out"
                          : "slots is missing: it says where each token's rows go; append_positions may "
                            "say it instead");
    p.batch = spec.varlen ? 1 : size(k_new, 0);
    if (args.slots) {
      const Tensor& slots = require<&AttentionArgs::slots>(spec, args, device);
      require_of_tokens("slots", slots, k_new);
      p.slots = static_cast<const device::i64*>(slots.data);
      for (const auto& [name, given] :
           {std::pair{"page_table", &args.page_table}, {"cu_seqlens_q", &args.cu_seqlens_q}})
        if (*given)
          refuse_argument(name, " was given, but slots says where each token's rows go: leave one out");
      return;
    }
    const Tensor& positions = require<&AttentionArgs::append_positions>(spec, args, device);
    if (spec.varlen) {
      const Tensor& starts = require<&AttentionArgs::cu_seqlens_q>(spec, args, device);
      if (starts.shape[0] < 1)
        refuse_argument("cu_seqlens_q is empty: it holds batch + 1 running totals, the first of them 0");
      require_table("cu_seqlens_q", starts);
      p.cu_seqlens = static_cast<const int*>(starts.data);
      p.batch = size(starts, 0) - 1;
      if (device.kind == Device::Kind::cpu)
        check_running_totals("cu_seqlens_q", p.cu_seqlens, p.batch, p.tokens);
      else if (checks_device_data())
        check_running_totals_on(device, "cu_seqlens_q", p.cu_seqlens, p.batch, p.tokens);
    }
    require_shape("append_positions", positions, 0, p.batch,
                  spec.varlen ? "the batch of cu_seqlens_q" : "k_new's batch");
    require_table("append_positions", positions);
    p.append_positions = static_cast<const int*>(positions.data);
    p.entry_rows = k.shape[1];
    if (!spec.paged) {
      require_shape("k", k, 0, p.batch, spec.varlen ? "the batch of cu_seqlens_q" : "k_new's batch");
      return;
    }
    check_append_pages(spec, device, args, p);
  }
};

}  // namespace

const OperationRuntime append_kv_runtime = operation_runtime<Append>;

}  // namespace flashjit
