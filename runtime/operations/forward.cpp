#include <algorithm>
#include <cstring>
#include <numeric>

#include "codegen/families/forward_kernels.hpp"
#include "runtime/arguments/attention.hpp"
#include "runtime/arguments/checks.hpp"
#include "runtime/cpu/partition.hpp"
#include "runtime/cpu/parts.hpp"
#include "runtime/cuda/driver.hpp"
#include "runtime/cuda/tensor_maps.hpp"
#include "runtime/cuda/tile_plan.hpp"
#include "runtime/operations/operations.hpp"
#include "runtime/step_params.hpp"
#include "templates/shared/layout.h"
#include "templates/shared/paged_forward_params.h"

namespace flashjit {
namespace {

// A CPU's launch does not wait for keys.
void require_arrived(const device::GatheredKeys& gathered) {
  if (!gathered.arrived) return;
  for (int i = 0; i * gathered.piece_keys < gathered.keys; ++i)
    if (gathered.arrived[i] == 0)
      refuse_argument("arrived[", i, "] is 0, and a CPU's launch does not wait; all pieces must be there");
}

struct Forward {
  struct Params {
    device::ForwardParams forward;
    device::PageTable pages;  // with paged
    std::optional<device::FormulaParams> formulas;
    std::optional<CheckedKvScales> kv_scales;
    std::optional<device::OffsetParams> offsets;
    std::optional<device::GatheredKeys> gathered;
    AddedParams added() const {
      return {.formulas = if_any(formulas),
              .kv_scales = if_any(kv_scales),
              .offsets = if_any(offsets),
              .gathered = if_any(gathered)};
    }
  };
  struct Checked {
    Params params;
    Shape shape;
    bool empty;
  };

  static Checked check(const AttentionSpec& spec, Device device, const AttentionArgs& args) {
    const CheckedArguments checked = check_arguments(spec, device, args);
    return {{checked.params, checked.pages, checked.formulas, checked.kv_scales, checked.offsets,
             checked.gathered},
            checked.shape,
            checked.empty};
  }

  // On sm_90a for parts of tiles, where there are few tiles. CPU threads lend their own memory.
  static constexpr bool workspace_is_optional = true;
  static std::size_t workspace_bytes(const PlannedKernel& kernel, const Shape& shape) {
    if (!kernel.target.is_cuda() || forwards_by_mma(kernel.spec, kernel.target)) return 0;
    if (parts_follow_from_shapes(kernel.spec)) return 0;
    return cuda::PartsWorkspace(kernel.spec, kernel.config, kernel.parallelism, shape).bytes;
  }

  // Wide heads have no fixed parts.
  static bool parts_follow_from_shapes(const AttentionSpec& spec) {
    return spec.batch_invariant && !cuda::divides_fixed_parts(spec);
  }

  template <class Own>
  static Own& make_params(const PlannedKernel& kernel, const device::ForwardParams& params,
                          const device::PageTable& pages, const AddedParams& added, StepLaunch& step) {
    Own& made = flashjit::make_params<Own, true>(step, params, added);
    if (!kernel.spec.paged) return made;
    auto& p = static_cast<device::Paged<Own>&>(made);
    p.pages = pages;
    p.box_keys = std::gcd(pages.page_size, kernel.config.block_n);
    p.copying_warps = std::min(4, kernel.config.block_n / p.box_keys);
    if (kernel.spec.kv_dtype == DType::fp8_ds_mla && p.box_keys % 8 != 0)
      refuse_argument("page_size is ", pages.page_size,
                      ": sm_90a's copy engine takes pages of a multiple of 8 keys of fp8_ds_mla");
    return p;
  }

  static void plan_cuda(const PlannedKernel& kernel, const Params& params, void* workspace, Launch& launch) {
    plan_cuda_forward(kernel, params.forward, params.pages, params.added(), workspace, launch);
  }

  static void plan_on_gpu(const PlannedKernel& kernel, const device::ForwardParams& params,
                          const device::PageTable& pages, AddedParams added, void* workspace,
                          Launch& launch) {
    if (forwards_by_mma(kernel.spec, kernel.target)) {
      StepLaunch& step = add_step(kernel, launch, "flashjit_forward");
      auto& p = make_params<device::Sm80ForwardParams>(kernel, params, pages, added, step);
      step.grid = cuda::plan_tiles(kernel.spec, kernel.config, kernel.parallelism, p);
      return;
    }
    device::Sm90aForwardParams planned{};
    static_cast<device::ForwardParams&>(planned) = params;
    std::optional<device::GatheredKeys> gathered;
    if (added.gathered) {
      gathered = cuda::pad_gathered(kernel.config, *added.gathered, planned);
      added.gathered = &*gathered;
    }
    if (parts_follow_from_shapes(kernel.spec)) workspace = nullptr;
    const Grid grid = cuda::plan_tiles(kernel.spec, kernel.config, kernel.parallelism, workspace, planned, 0,
                                       gathered ? device::rows_without(*gathered) : 0);
    const auto add = [&](const char* function) -> StepLaunch& {
      StepLaunch& step = add_step(kernel, launch, function);
      static_cast<device::Sm90aForwardParams&>(
          make_params<device::Sm90aForwardParams>(kernel, params, pages, added, step)) = planned;
      return step;
    };
    StepLaunch& step = add("flashjit_forward");
    step.grid = grid;
    device::ForwardMaps& maps =
        gathered ? make_second<device::GatheredMaps>(step) : make_second<device::ForwardMaps>(step);
    {
      const cuda::ContextScope scope(*kernel.context);
      cuda::encode_tensor_maps(kernel.spec, kernel.config, step.params_as<device::Sm90aForwardParams>(),
                               maps);
      if (gathered)
        cuda::encode_gathered_maps(kernel.spec, kernel.config, step.params_as<device::Sm90aForwardParams>(),
                                   static_cast<device::GatheredMaps&>(maps));
    }
    if (planned.parts == 1) return;
    StepLaunch& merge = add("flashjit_forward_merge");
    merge.grid = cuda::merge_grid(kernel.spec, kernel.config, kernel.parallelism, planned);
    merge.dependent = true;
  }

  static void plan_cpu(const PlannedKernel& kernel, const Params& params, void*, Launch& launch) {
    if (params.gathered) require_arrived(*params.gathered);
    const Partition cut =
        partition(params.forward, kernel.spec, kernel.target, kernel.config, kernel.parallelism);
    StepLaunch& step = add_step(kernel, launch, "flashjit_forward");
    auto& p =
        make_params<device::CpuForwardParams>(kernel, params.forward, params.pages, params.added(), step);
    p.packed_heads = cut.packed_heads;
    p.tile_rows = cut.tile_rows;
    p.key_parts = cut.key_parts;
    Items& items = step.items;
    items.count = cut.tiles * cut.key_parts;
    items.pieces = std::min(cut.pieces, items.count);
    items.more_scratch = packed_room;  // the same for any lengths
    const device::PackedHead head = {.head = -1, .blocks = cut.packed_blocks};
    static_assert(sizeof head == sizeof items.scratch_head);
    std::memcpy(items.scratch_head.data(), &head, sizeof head);
    if (cut.key_parts == 1) return;
    // Bytes for the most items that any launch of this kernel may have.
    const auto most = static_cast<std::size_t>(most_items_in_parts(kernel.parallelism));
    const auto part =
        static_cast<std::size_t>(device::cpu_part(kernel.config.block_m, kernel.spec.head_dim_v));
    items.lent_bytes = partials_bytes(most, 1, sizeof(float) * part);
    items.lend = [](StepLaunch& lent, void* memory) {
      auto& to = lent.params_as<device::CpuForwardParams>();
      lend_partials(lent.items, memory, to.key_parts, to.arrived, to.partials);
    };
  }
};

}  // namespace

void plan_cuda_forward(const PlannedKernel& kernel, const device::ForwardParams& params,
                       const device::PageTable& pages, const AddedParams& added, void* workspace,
                       Launch& launch) {
  Forward::plan_on_gpu(kernel, params, pages, added, workspace, launch);
}

const OperationRuntime forward_runtime = operation_runtime<Forward>;

}  // namespace flashjit
