#include <algorithm>
#include <cstdint>
#include <limits>

#include "runtime/arguments/checks.hpp"
#include "runtime/arguments/overlap.hpp"
#include "runtime/operations/operations.hpp"
#include "runtime/step_params.hpp"
#include "templates/shared/copy_params.h"

namespace flashjit {
namespace {

bool moves_scales(const AttentionSpec& spec) {
  return spec.kv_scale == KvScale::token_head;
}

// The parts of a workspace follow one another, each from a multiple of 256 bytes on.
struct WorkspaceLayout {
  std::size_t v, k_scale, v_scale, bytes;

  WorkspaceLayout(const AttentionSpec& spec, std::size_t rows, std::size_t heads) {
    constexpr std::size_t unit = 256;
    const std::size_t element = size_of(spec.kv_dtype.value_or(spec.dtype));
    std::size_t at = 0;
    const auto add = [&](std::size_t of_head) {
      std::size_t size = 0;
      if (__builtin_mul_overflow(rows, heads * of_head, &size) || size >> 56 != 0)
        refuse_argument(rows, " rows of ", heads, " heads are more than a workspace can hold");
      at += (size + unit - 1) / unit * unit;
      return at;
    };
    v = add(static_cast<std::size_t>(spec.head_dim) * element);
    k_scale = add(spec.v_in_k ? 0 : static_cast<std::size_t>(spec.head_dim_v) * element);
    v_scale = add(moves_scales(spec) ? sizeof(float) : 0);
    bytes = add(moves_scales(spec) && !spec.v_in_k ? sizeof(float) : 0);
  }
};

struct CopyKv {
  struct Params {
    device::CopyParams copy{};
    bool within = false;  // sources may share memory with what is written
  };
  struct Checked {
    Params params{};
    Shape shape{};
    bool empty = false;
  };

  static Checked check(const AttentionSpec& spec, Device device, const AttentionArgs& args) {
    check_presence(spec, args);
    Checked checked;
    device::CopyParams& p = checked.params.copy;
    p.from = check_caches<&AttentionArgs::k_from, &AttentionArgs::v_from, &AttentionArgs::k_scale_from,
                          &AttentionArgs::v_scale_from>(spec, device, args);
    p.to =
        check_caches<&AttentionArgs::k, &AttentionArgs::v, &AttentionArgs::k_scale, &AttentionArgs::v_scale>(
            spec, device, args);
    require_shape("k", *args.k, 2, args.k_from->shape[2], "k_from's heads");
    require_distinct_rows("k", *args.k);
    if (args.v) require_distinct_rows("v", *args.v);
    if (args.k_scale) require_distinct_rows("k_scale", *args.k_scale);
    if (args.v_scale) require_distinct_rows("v_scale", *args.v_scale);
    p.heads = static_cast<device::u32>(args.k->shape[2]);

    const Tensor& from = require<&AttentionArgs::from_slots>(spec, args, device);
    const Tensor& to = require<&AttentionArgs::to_slots>(spec, args, device);
    require_shape("to_slots", to, 0, from.shape[0], "as from_slots");
    require_table("from_slots", from);
    require_table("to_slots", to);
    if (from.shape[0] > std::numeric_limits<int>::max())
      refuse_argument("from_slots has ", from.shape[0], " elements: a launch copies at most ",
                      std::numeric_limits<int>::max(), " rows; several launches would work");
    p.rows = size(from, 0);
    p.from.slots = static_cast<const device::i64*>(from.data);
    p.to.slots = static_cast<const device::i64*>(to.data);

    checked.params.within = is_within(args);
    checked.shape = {.batch = 1,
                     .seqlen_q = p.rows,
                     .seqlen_k = static_cast<int>(std::min<std::int64_t>(args.k->shape[1], longest_sequence)),
                     .num_heads_q = static_cast<int>(p.heads),
                     .num_heads_kv = static_cast<int>(p.heads)};
    checked.empty = p.rows == 0 || p.heads == 0;
    return checked;
  }

  static std::size_t workspace_bytes(const PlannedKernel& kernel, const Shape& shape) {
    return WorkspaceLayout(kernel.spec,
                           static_cast<std::size_t>(shape.batch) * static_cast<std::size_t>(shape.seqlen_q),
                           static_cast<std::size_t>(shape.num_heads_kv))
        .bytes;
  }
  static std::size_t workspace_of(const PlannedKernel& kernel, const Checked& checked) {
    return checked.params.within ? workspace_bytes(kernel, checked.shape) : 0;
  }

  static void plan_cuda(const PlannedKernel& kernel, const Params& params, void* workspace, Launch& launch) {
    const AttentionSpec& spec = kernel.spec;
    const auto pieces = [element = static_cast<int>(size_of(spec.kv_dtype.value_or(spec.dtype)))](int dim) {
      const int bytes = dim * element;
      return bytes / (bytes % 16 == 0 ? 16 : 8);
    };
    const std::int64_t items = std::int64_t{params.copy.heads} *
                               std::max(pieces(spec.head_dim), spec.v_in_k ? 0 : pieces(spec.head_dim_v));
    const std::int64_t threads = kernel.config.num_warps * 32, most_blocks = std::numeric_limits<int>::max();
    const auto all = product_of({params.copy.rows, items});
    if (!all || *all > most_blocks * threads || !product_of({*all, items}))
      refuse_argument("from_slots has ", params.copy.rows, " rows of ", params.copy.heads,
                      " heads: more than a launch takes; several launches would work");
    for_each_step(params, kernel.spec, workspace,
                  [&](const char* function, const device::CopyParams& of_step) {
                    StepLaunch& step = add_step(kernel, launch, function);
                    make_params<device::CudaCopyParams>(step, of_step).items = divisor_of(items);
                    step.grid = {.x = static_cast<unsigned>((*all - 1) / threads + 1)};
                    step.dependent = of_step.from.in_workspace;
                  });
  }

  static void plan_cpu(const PlannedKernel& kernel, const Params& params, void* workspace, Launch& launch) {
    const AttentionSpec& spec = kernel.spec;
    constexpr std::int64_t worthwhile = 1 << 17;  // elements that take some 10 us
    const std::int64_t elements = std::int64_t{params.copy.heads} * spec.cached_columns();
    const std::int64_t least = std::max<std::int64_t>(1, worthwhile / elements);  // rows of a piece
    for_each_step(params, spec, workspace, [&](const char* function, const device::CopyParams& of_step) {
      StepLaunch& step = add_step(kernel, launch, function);
      make_params<device::CopyParams>(step, of_step);
      step.items.count = of_step.rows;
      step.items.pieces =
          std::clamp<std::int64_t>(of_step.rows / least, 1, 4 * std::int64_t{kernel.parallelism});
    });
  }

 private:
  // Calls add(function, params) for each step: rows go straight, or into the workspace and out of it.
  template <class Add>
  static void for_each_step(const Params& params, const AttentionSpec& spec, void* workspace, Add&& add) {
    if (!params.within) return add("flashjit_copy", params.copy);
    const device::CopiedRows gathered = rows_in(workspace, spec, params.copy);
    device::CopyParams into = params.copy, out = params.copy;
    put(into.to, gathered);
    add("flashjit_gather", into);
    put(out.from, gathered);
    add("flashjit_copy", out);
  }
  // The place of the rows; their slots are kept, which say whether a row is copied.
  static void put(device::CopiedRows& rows, const device::CopiedRows& place) {
    const device::i64* const slots = rows.slots;
    const device::i64 num_slots = rows.num_slots;
    rows = place;
    rows.slots = slots;
    rows.num_slots = num_slots;
  }
  static device::CopiedRows rows_in(void* workspace, const AttentionSpec& spec, const device::CopyParams& p) {
    const WorkspaceLayout layout(spec, static_cast<std::size_t>(p.rows), p.heads);
    auto* const memory = static_cast<char*>(workspace);
    const auto tensor = [&](std::size_t at, int dim) {
      return device::TensorView{memory + at, 0, device::i64{p.heads} * dim, dim};
    };
    const auto scales = [&](std::size_t at) {
      return device::KvScales{reinterpret_cast<const float*>(memory + at), 0, device::i64{p.heads}, 1};
    };
    device::CopiedRows rows{};
    rows.k = tensor(0, spec.head_dim);
    rows.v = tensor(layout.v, spec.head_dim_v);
    rows.k_scale = scales(layout.k_scale);
    rows.v_scale = scales(layout.v_scale);
    rows.in_workspace = true;
    return rows;
  }

  template <TensorMember k_member, TensorMember v_member, TensorMember k_scale_member,
            TensorMember v_scale_member>
  static device::CopiedRows check_caches(const AttentionSpec& spec, Device device,
                                         const AttentionArgs& args) {
    constexpr const char *k_name = argument_of(k_member).name, *v_name = argument_of(v_member).name;
    const Tensor& k = require<k_member>(spec, args, device);
    require_shape(k_name, k, 3, spec.head_dim, "the spec's head_dim");
    require_alignment(k_name, k);
    // Slots times the rows of a page are what Divisor divides rightly.
    if (const auto most = product_of({k.shape[0], k.shape[1], k.shape[1]}); !most)
      refuse_argument(k_name, " has shape ", shape_text(k), ": more rows than a launch can number");
    if (k.shape[2] > std::numeric_limits<int>::max())
      refuse_argument(k_name, " has shape ", shape_text(k), ": more heads than a launch can number");
    device::CopiedRows rows{};
    rows.k = view(k);
    rows.num_slots = k.shape[0] * k.shape[1];
    rows.page_size = divisor_of(k.shape[1]);
    const auto require_as_k = [&](const char* name, const Tensor& t) {
      const bool is_source = k_member != &AttentionArgs::k;
      for (int i = 0; i < 3; ++i) require_shape(name, t, i, k.shape[i], is_source ? "as k_from" : "as k");
    };
    if (!spec.v_in_k) {
      const Tensor& v = require<v_member>(spec, args, device);
      require_shape(v_name, v, 3, spec.head_dim_v, "the spec's head_dim_v");
      require_as_k(v_name, v);
      require_alignment(v_name, v);
      rows.v = view(v);
    }
    if (!moves_scales(spec)) return rows;
    const auto check_scales = [&](const char* name, const Tensor& t) -> device::KvScales {
      require_as_k(name, t);
      require_address(name, t, sizeof(float));
      return {static_cast<const float*>(t.data), stride(t, 0), stride(t, 1), stride(t, 2)};
    };
    rows.k_scale =
        check_scales(argument_of(k_scale_member).name, require<k_scale_member>(spec, args, device));
    if (!spec.v_in_k)
      rows.v_scale =
          check_scales(argument_of(v_scale_member).name, require<v_scale_member>(spec, args, device));
    return rows;
  }

  static bool is_within(const AttentionArgs& args) {
    for (const auto& source : {args.k_from, args.v_from, args.k_scale_from, args.v_scale_from})
      for (const auto& cache : {args.k, args.v, args.k_scale, args.v_scale})
        if (source && cache && share_addresses(*source, *cache)) return true;
    return false;
  }
};

}  // namespace

const OperationRuntime copy_kv_runtime = operation_runtime<CopyKv>;

}  // namespace flashjit
