#include <algorithm>
#include <bit>
#include <string>

#include "runtime/argument_checks.hpp"
#include "runtime/arguments.hpp"
#include "runtime/cpu/decode_partition.hpp"
#include "runtime/cpu/parts.hpp"
#include "runtime/operations/operations.hpp"
#include "templates/shared/decode_layout.h"

namespace flashjit {
namespace {

constexpr int most_rows = 64;  // of a sequence

struct Decode {
  struct Checked {
    device::DecodeParams params{};
    Shape shape{};
    bool empty = false;
  };

  static Checked check(const AttentionSpec& spec, Device device, const AttentionArgs& args) {
    Checked checked;
    device::DecodeParams& p = checked.params;
    const CheckedAttention attention = check_attention(spec, device, args, most_rows, p);
    if (args.max_seqlen_q && *args.max_seqlen_q > most_rows)
      refuse_argument("max_seqlen_q is ", *args.max_seqlen_q, too_many_rows);
    if (!spec.varlen && p.seqlen_q > most_rows) refuse_argument("q has ", p.seqlen_q, " rows", too_many_rows);
    p.scale_log2 = attention.scale_log2;
    p.q = attention.q;
    p.k = attention.k;
    p.v = attention.v;
    p.o = attention.o;
    p.lse = attention.lse;
    p.pages = attention.pages.table;
    check_data(spec, device, p, p.pages);
    checked.shape = attention.shape;
    checked.empty = attention.empty;
    return checked;
  }

  static std::size_t workspace_bytes(const PlannedKernel&, const Shape&) { return 0; }

  // No GPU has the operation yet: its kernels are refused before they are planned.
  static void plan_cuda(const PlannedKernel& kernel, const device::DecodeParams&, void*, Launch&) {
    throw Error(ErrorCode::unsupported, "op decode is not supported on " + kernel.target.str());
  }

  static void plan_cpu(const PlannedKernel& kernel, const device::DecodeParams& params, void*,
                       Launch& launch) {
    const int group = params.num_heads_q / params.num_heads_kv;
    if (device::round_up(group, device::decode_rows_at_once) > kernel.config.block_m)
      refuse_argument("q has ", group, " heads for each of k's, more than the ", kernel.config.block_m,
                      " of the kernel's block_m: get a kernel for a shape with these heads");
    const DecodePartition cut = decode_partition(params, kernel.spec, kernel.config, kernel.parallelism);
    StepLaunch& step = launch.add_step();
    auto& p = step.make_params<device::CpuDecodeParams>(params);
    p.parts = cut.parts;
    p.heads_at_once = cut.heads_at_once;
    p.positions_at_once = cut.positions_at_once;
    Items& items = step.items;
    items.count = cut.tiles * cut.parts;
    items.pieces = std::min(cut.pieces, items.count);
    if (cut.parts == 1) return;
    // A power of two: lengths decide how many parts there are, and threads' memory seldom grows.
    items.lent_bytes = std::bit_ceil(partials_bytes(static_cast<std::size_t>(cut.tiles),
                                                    static_cast<std::size_t>(cut.parts), cut.part_bytes));
    items.lend = [](StepLaunch& lent, void* memory) {
      auto& to = lent.params_as<device::CpuDecodeParams>();
      lend_partials(lent.items, memory, to.parts, to.arrived, to.partials);
    };
  }

 private:
  static constexpr char too_many_rows[] =
      ": decode takes 1 to 64 query rows of a sequence; op forward takes more";
};

}  // namespace

const OperationRuntime decode_runtime = operation_runtime<Decode>;

}  // namespace flashjit
