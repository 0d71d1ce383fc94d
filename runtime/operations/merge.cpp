#include <algorithm>
#include <string>

#include "runtime/arguments/checks.hpp"
#include "runtime/arguments/overlap.hpp"
#include "runtime/operations/operations.hpp"
#include "runtime/step_params.hpp"
#include "templates/shared/merge_params.h"

namespace flashjit {
namespace {

// The first part of a tensor of parts.
Tensor first_part(const Tensor& parts) {
  Tensor part = parts;
  part.rank = parts.rank - 1;
  for (int i = 0; i < part.rank; ++i) {
    part.shape[i] = parts.shape[i + 1];
    part.strides[i] = parts.strides[i + 1];
  }
  return part;
}

// Kernels' view of [batch, heads, seqlen] or packed [heads, total].
device::TensorView view_of_lse(const Tensor& t) {
  return {t.data, t.rank == 3 ? stride(t, 0) : 0, stride(t, t.rank - 1), stride(t, t.rank - 2)};
}

struct Merge {
  struct Checked {
    device::MergeParams params{};
    Shape shape{};
    bool empty = false;
  };

  static Checked check(const AttentionSpec& spec, Device device, const AttentionArgs& args) {
    check_presence(spec, args);
    const Tensor& parts_o = require<&AttentionArgs::parts_o>(spec, args, device);
    const Tensor& o = require<&AttentionArgs::o>(spec, args, device);
    const Tensor part_o = first_part(parts_o);
    const int rows = o.rank - 3, heads = o.rank - 2, dim = o.rank - 1;
    require_shape("o", o, dim, spec.head_dim_v, "the spec's head_dim_v");
    for (int i = 0; i < o.rank; ++i) require_shape("parts_o", parts_o, i + 1, o.shape[i], "as o");
    const auto require_rows_of_o = [&](const char* name, const Tensor& t, int first) {
      if (o.rank == 4) require_shape(name, t, first, o.shape[0], "o's batch");
      require_shape(name, t, first + rows, o.shape[heads], "o's heads");
      require_shape(name, t, first + rows + 1, o.shape[rows], "o's rows");
      require_address(name, t, sizeof(float));
    };
    if (o.shape[rows] > longest_sequence)
      refuse_argument("o has shape ", shape_text(o), ": a sequence has at most ", longest_sequence, " rows");
    require_alignment("parts_o", parts_o);
    require_alignment("o", o);
    require_distinct_rows("o", o);

    Checked checked;
    device::MergeParams& p = checked.params;
    p.parts_o = view(part_o);
    p.o = view(o);
    p.parts_o_stride = stride(parts_o, 0);
    p.parts = size(parts_o, 0);
    p.batch = o.rank == 4 ? static_cast<device::u32>(o.shape[0]) : 1;
    p.heads = static_cast<device::u32>(o.shape[heads]);
    p.seqlen = size(o, rows);
    if (!spec.sum) {
      const Tensor& parts_lse = require<&AttentionArgs::parts_lse>(spec, args, device);
      require_shape("parts_lse", parts_lse, 0, parts_o.shape[0], "the parts of parts_o");
      require_rows_of_o("parts_lse", parts_lse, 1);
      p.parts_lse = view_of_lse(first_part(parts_lse));
      p.parts_lse_stride = stride(parts_lse, 0);
    }
    if (spec.lse) {
      const Tensor& lse = require<&AttentionArgs::lse>(spec, args, device);
      require_rows_of_o("lse", lse, 0);
      require_distinct_rows("lse", lse);
      p.lse = view_of_lse(lse);
    }
    checked.shape = {.batch = static_cast<int>(p.batch),
                     .seqlen_q = p.seqlen,
                     .seqlen_k = 0,
                     .num_heads_q = static_cast<int>(p.heads),
                     .num_heads_kv = static_cast<int>(p.heads)};
    checked.empty = p.batch == 0 || p.heads == 0 || p.seqlen == 0;
    return checked;
  }

  static std::size_t workspace_bytes(const PlannedKernel&, const Shape&) { return 0; }

  static void plan_cuda(const PlannedKernel& kernel, const device::MergeParams& params, void*,
                        Launch& launch) {
    constexpr unsigned most_blocks = 65535;  // limit of a grid's second and third dimensions
    const int columns = 16 / static_cast<int>(size_of(kernel.spec.parts_dtype.value_or(DType::fp32)));
    const auto rows =
        static_cast<device::u32>(kernel.config.num_warps * 32 / (kernel.spec.head_dim_v / columns));
    StepLaunch& step = add_step(kernel, launch, "flashjit_merge");
    auto& p = make_params<device::CudaMergeParams>(step, params);
    p.block_heads = std::min(p.heads, rows);
    p.block_positions = rows / p.block_heads;
    p.heads_inverse = (65536 + p.block_heads - 1) / p.block_heads;
    const auto ceil_div = [](device::u32 a, device::u32 b) { return a / b + (a % b != 0); };
    step.grid = {ceil_div(static_cast<device::u32>(p.seqlen), p.block_positions),
                 std::min(ceil_div(p.heads, p.block_heads), most_blocks), std::min(p.batch, most_blocks)};
  }

  static void plan_cpu(const PlannedKernel& kernel, const device::MergeParams& params, void*,
                       Launch& launch) {
    constexpr std::int64_t worthwhile = 1 << 17;  // elements that take some 10 us
    StepLaunch& step = add_step(kernel, launch, "flashjit_merge");
    make_params<device::MergeParams>(step, params);
    const std::int64_t positions = std::int64_t{params.batch} * params.seqlen;
    const std::int64_t elements = std::int64_t{params.heads} * kernel.spec.head_dim_v * (params.parts + 1);
    // The fewest positions of a piece.
    const std::int64_t least = std::max<std::int64_t>(1, worthwhile / elements);
    step.items.count = positions;
    step.items.pieces = std::clamp<std::int64_t>(positions / least, 1, 4 * std::int64_t{kernel.parallelism});
  }
};

}  // namespace

const OperationRuntime merge_runtime = operation_runtime<Merge>;

void merge(Engine& engine, const AttentionArgs& args, Stream stream) {
  if (!args.o)
    refuse_argument("o is missing: merging writes it, ", argument_of(&AttentionArgs::o).layout.text.text);
  const Tensor& o = *args.o;
  if (o.rank != 3 && o.rank != 4)
    refuse_argument("o has rank ", o.rank,
                    ", it must be [batch, seqlen, heads, head_dim] or packed [total, heads, head_dim]");
  AttentionSpec spec;
  spec.op = Operation::merge;
  spec.dtype = o.dtype;
  spec.varlen = o.rank == 3;
  spec.lse = args.lse.has_value();
  if (args.parts_o && args.parts_o->dtype != DType::fp32) spec.parts_dtype = args.parts_o->dtype;
  for (int i = 0; i < o.rank; ++i)
    if (o.shape[i] < 0 || o.shape[i] > longest_sequence)
      refuse_argument("o has shape ", shape_text(o), ": every size must be between 0 and ", longest_sequence);
  spec.head_dim = spec.head_dim_v = size(o, o.rank - 1);
  const int rows = o.rank - 3, heads = std::max(size(o, o.rank - 2), 1);
  engine
      .get(spec, {.batch = spec.varlen ? 1 : size(o, 0),
                  .seqlen_q = size(o, rows),
                  .seqlen_k = 0,
                  .num_heads_q = heads,
                  .num_heads_kv = heads})
      .launch(args, stream);
}

}  // namespace flashjit
