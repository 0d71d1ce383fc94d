#include <algorithm>
#include <limits>
#include <numbers>
#include <optional>
#include <utility>

#include "codegen/families/backward_kernels.hpp"
#include "codegen/formulas/formula_traits.hpp"
#include "codegen/spec/declarations.hpp"
#include "runtime/arguments/attention.hpp"
#include "runtime/arguments/checks.hpp"
#include "runtime/arguments/overlap.hpp"
#include "runtime/cuda/driver.hpp"
#include "runtime/cuda/tensor_maps.hpp"
#include "runtime/operations/backward_groups.hpp"
#include "runtime/operations/operations.hpp"
#include "runtime/step_params.hpp"
#include "templates/shared/backward_cpu_params.h"
#include "templates/shared/backward_cuda_params.h"
#include "templates/shared/backward_sm90a_layout.h"
#include "templates/shared/backward_sm90a_wide_layout.h"
#include "templates/shared/exact_sum.h"

namespace flashjit {
namespace {

using i64 = std::int64_t;

// A tensor that must have the sizes of another.
void require_like(const char* name, const Tensor& t, const char* like, const Tensor& other) {
  const std::string what = std::string("as ") + like;
  for (int i = 0; i < other.rank; ++i) require_shape(name, t, i, other.shape[i], what.c_str());
}

struct Backward {
  struct Params : device::BackwardParams {
    FormulaArguments formulas{};
    std::optional<device::OffsetParams> offsets{};
  };
  struct Checked {
    Params params{};
    Shape shape{};
    bool empty = false;
  };

  static Checked check(const AttentionSpec& spec, Device device, const AttentionArgs& args) {
    Checked checked;
    Params& p = checked.params;
    const CheckedAttention attention = check_attention(spec, device, args, longest_sequence, p);
    p.scale_log2 = attention.scale_log2;
    p.scale = attention.scale_log2 / std::numbers::log2e_v<float>;
    p.q = attention.q;
    p.k = attention.k;
    p.v = attention.v;
    p.o = attention.o;
    p.lse = attention.lse;

    const Tensor &q = *args.q, &k = *args.k, &v = *args.v, &o = *args.o, &lse = *args.lse;
    const Tensor& d_o = require<&AttentionArgs::d_o>(spec, args, device);
    require_like("do", d_o, "o", o);
    require_alignment("do", d_o);
    p.d_o = view(d_o);
    if (args.dlse) {
      const Tensor& dlse = require<&AttentionArgs::dlse>(spec, args, device);
      require_like("dlse", dlse, "lse", lse);
      require_contiguous_rows("dlse", dlse);
      require_address("dlse", dlse, sizeof(float));
      p.dlse = {dlse.data, spec.varlen ? 0 : stride(dlse, 0), 1, stride(dlse, lse.rank - 2)};
    }
    const Tensor& dq = require<&AttentionArgs::dq>(spec, args, device);
    const Tensor& dk = require<&AttentionArgs::dk>(spec, args, device);
    const Tensor& dv = require<&AttentionArgs::dv>(spec, args, device);
    const auto output = [&](const char* name, const Tensor& t, const char* like, const Tensor& other) {
      require_like(name, t, like, other);
      require_alignment(name, t);
      require_distinct_rows(name, t);
      return view(t);
    };
    p.dq = output("dq", dq, "q", q);
    p.dk = output("dk", dk, "k", k);
    p.dv = output("dv", dv, "v", v);

    p.formulas.formulas = check_formula_arguments(spec, device, args, p, attention.scale);
    p.formulas.gradients = check_gradient_arguments(spec, device, args);
    p.offsets = attention.offsets;
    check_data(spec, device, p, {}, p.offsets);
    checked.shape = attention.shape;
    checked.empty = (p.batch == 0 || p.num_heads_q == 0) || (p.seqlen_q == 0 && p.seqlen_k == 0);
    if (num_gradients(p.formulas) > 0) checked.empty = false;  // zeros are written at least
    if (spec.varlen) {
      checked.shape.total_q = p.total_q;
      checked.shape.total_k = p.total_k;
    }
    if (spec.varlen && device.kind == Device::Kind::cpu && p.batch > 0) {
      // The lengths that the sequences have, however long the tensors are. They have been checked, but
      // another thread may have written them since: each total is read once more, and the workspace serves
      // what is read now.
      int longest = 0, before = 0;
      for (int b = 0; b < p.batch; ++b) {
        const int end = std::clamp(p.cu_seqlens_q[b + 1], before, p.total_q);
        longest = std::max(longest, end - before);
        before = end;
      }
      p.total_q = before;
      p.total_k = std::clamp(p.cu_seqlens_k[p.batch], 0, p.total_k);
      p.seqlen_q = std::min(p.seqlen_q, longest);
      checked.shape.seqlen_q = longest;
      checked.shape.total_q = p.total_q;
    }
    return checked;
  }

  static std::size_t workspace_bytes(const PlannedKernel& kernel, const Shape& shape) {
    return with_sums(bytes_of_rows(kernel, shape), typical_sums(kernel, shape));
  }
  static std::size_t workspace_of(const PlannedKernel& kernel, const Checked& checked) {
    const i64 sums = has_exact_sums(kernel) ? num_gradients(checked.params.formulas) : 0;
    return with_sums(bytes_of_rows(kernel, checked.shape), sums);
  }

  static void plan_cuda(const PlannedKernel& kernel, const Params& params, void* workspace, Launch& launch) {
    device::CudaBackwardParams p{};
    static_cast<device::BackwardParams&>(p) = params;
    p.rows = device::backward_rows(params.batch, params.seqlen_q, kernel.spec.varlen ? params.total_q : -1);
    const i64 numbers = params.num_heads_q * p.rows;
    p.lse_log2 = static_cast<float*>(workspace);
    p.delta = p.lse_log2 + numbers;
    p.far_max = p.delta + numbers;
    float* rest = p.far_max + numbers;
    p.far_marks = reinterpret_cast<unsigned char*>(rest);
    rest += numbers / 16;
    const CudaBackwardKernels kernels = gpu(kernel);
    if (!kernels.separate_dq) {
      p.dq_sums = rest;
      rest += numbers * device::cuda_backward_row(kernel.spec.head_dim);
    }
    const auto blocks = [](i64 rows, int block) { return std::max((rows + block - 1) / block, i64{1}); };
    p.section = section(kernel, params.seqlen_q, blocks(params.seqlen_k, kernel.config.block_n));
    p.key_rows =
        device::backward_rows(params.batch, params.seqlen_k, kernel.spec.varlen ? params.total_k : -1);
    const BackwardGroups::Tile tile = BackwardGroups{kernel}.tile(params, p.key_rows);
    p.place_group = tile.heads;
    p.place_heads = params.num_heads_q / p.place_group;
    p.row_parts = tile.row_parts;
    p.part_rows = tile.rows;
    const bool has_key_sums = p.place_heads > params.num_heads_kv || p.row_parts > 1;
    if (has_key_sums) {
      const i64 keys = params.num_heads_kv * p.key_rows;
      p.dk_sums = rest;
      p.dv_sums = p.dk_sums + keys * device::cuda_backward_row(kernel.spec.head_dim);
      rest = p.dv_sums + keys * device::cuda_backward_row(kernel.spec.head_dim_v);
    }
    if (gpu(kernel).has_row_bits) {
      p.row_bits = rest;
      p.row_block = kernel.config.block_m;
      p.row_words = static_cast<int>(row_words(kernel, params.seqlen_q));
      rest += 2 * row_bits_of(kernel, params.num_heads_q, p.key_rows, params.seqlen_q);
    }
    const bool persistent = kernels.persistent;
    if (kernel.spec.dropout) p.place_dropout_scale(!has_derivatives(kernel.spec));
    if (persistent || kernels.orders_dq()) {
      p.next_turn = reinterpret_cast<device::u32*>(rest);
      p.places_done = p.next_turn + 1;
      rest += 1 + i64{p.schedule_heads()};
    }
    if (kernels.orders_dq()) {
      p.dq_blocks_added = reinterpret_cast<device::u32*>(rest);
      rest += device::backward_ordered_blocks(numbers);
    }
    FormulaArguments formulas = params.formulas;
    if (has_exact_sums(kernel)) place_sums(formulas, rest);
    // more: blocks beside those of heads.
    const AddedParams added{.formulas = if_any(formulas.formulas),
                            .gradients = if_any(formulas.gradients),
                            .offsets = if_any(params.offsets)};
    const auto add = [&](const char* function, i64 blocks_of_head, int heads, i64 more = 0) -> StepLaunch& {
      const auto count = product_of({blocks_of_head, params.batch, heads});
      if (!count || *count + more > most_blocks)
        refuse_argument("batch ", params.batch, " x ", heads, " heads x ", blocks_of_head,
                        " blocks of rows: a launch has at most ", most_blocks, "; split the batch");
      StepLaunch& step = add_step(kernel, launch, function);
      make_params<device::CudaBackwardParams>(step, p, added);
      step.grid.x = static_cast<unsigned>(*count + more);
      step.dependent = launch.size() > 1;
      if (step.described->params.second && *count > 0) {
        auto& maps = make_second<device::BackwardMaps>(step);
        const cuda::ContextScope scope(*kernel.context);
        cuda::encode_backward_maps(kernel.spec, p, maps);
      }
      return step;
    };
    const i64 row_units = blocks(params.seqlen_q, device::backward_row_unit);
    const int dq_rows = kernels.wide       ? device::Sm90aWideLayout::own
                        : kernels.by_wgmma ? device::Sm90aDqLayout::rows
                                           : device::backward_dq_rows(kernel.config.num_warps);
    // Gradients of tables are cleared in any case.
    const bool no_rows = params.batch == 0 || params.num_heads_q == 0;
    add("flashjit_backward_prepare", row_units * (device::backward_row_unit / device::backward_rows_of_block),
        params.num_heads_q, no_rows && formulas.gradients ? 1 : 0);
    Grid& grid = add("flashjit_backward",
                     blocks(params.seqlen_k, kernel.config.block_n) * (kernels.divides_sums ? 2 : 1),
                     p.place_heads * p.row_parts)
                     .grid;
    if (persistent)
      grid.x = std::min(grid.x, static_cast<unsigned>(kernel.parallelism * kernels.resident_blocks));
    const i64 sinks = kernel.spec.sink_logits ? params.num_heads_q : 0;
    if (!kernels.separate_dq) {
      const i64 key_units = has_key_sums ? params.batch * params.num_heads_kv *
                                               blocks(params.seqlen_k, device::backward_row_unit)
                                         : 0;
      // A persistent grid writes dQ itself.
      if (!persistent || sinks + key_units > 0)
        add("flashjit_backward_finish", persistent ? 0 : row_units, params.num_heads_q, sinks + key_units);
      return;
    }
    add("flashjit_backward_dq", blocks(params.seqlen_q, dq_rows), params.num_heads_q);
    if (kernels.finishes) add("flashjit_backward_finish", 0, params.num_heads_q, sinks);
    if (!kernels.has_exact_sums) return;
    i64 of_tables = 0;
    for (const device::GradientTable& gradient : formulas.gradients->tables)
      if (&gradient != &formulas.gradients->sink_logits())
        of_tables +=
            (gradient.count + device::backward_elements_of_block - 1) / device::backward_elements_of_block;
    StepLaunch& tables = add("flashjit_backward_tables", 0, params.num_heads_q, of_tables + sinks);
    tables.dependent = false;  // a step without blocks that wait may end before the one before it
  }

  static void plan_cpu(const PlannedKernel& kernel, const Params& params, void* workspace, Launch& launch) {
    device::CpuBackwardParams p{};
    static_cast<device::BackwardParams&>(p) = params;
    const int row = device::cpu_backward_row(kernel.spec.head_dim);
    p.rows = rows_of_head(kernel.spec, params.batch, params.seqlen_q, params.total_q);
    const i64 items = i64{params.batch} * params.num_heads_kv;
    p.parts = parts(kernel, params.batch, params.num_heads_kv);
    const i64 rows = params.num_heads_q * p.rows;
    p.offsets = static_cast<float*>(workspace);
    p.maxima = p.offsets + rows;
    p.deltas = p.maxima + rows;
    p.sums = p.deltas + rows;
    FormulaArguments formulas = params.formulas;
    place_sums(formulas, p.sums + p.parts * rows * row);
    const AddedParams added{.formulas = if_any(formulas.formulas),
                            .gradients = if_any(formulas.gradients),
                            .offsets = if_any(params.offsets)};
    const auto add = [&](const char* function, i64 count, i64 work) {
      StepLaunch& step = add_step(kernel, launch, function);
      make_params<device::CpuBackwardParams>(step, p, added);
      step.items.count = count;
      // Smaller pieces would take less than some 10 us.
      constexpr i64 worthwhile = 1 << 17;
      step.items.pieces = std::clamp<i64>(work / worthwhile, 1, std::max<i64>(count, 1));
    };
    const i64 all_rows = i64{params.batch} * params.num_heads_q * params.seqlen_q;
    const i64 units = i64{params.batch} * params.num_heads_q * ((params.seqlen_q - 1) / rows_of_item + 1);
    i64 sums = 0;
    if (formulas.gradients)
      for (const device::GradientTable& gradient : formulas.gradients->tables)
        sums += (gradient.count + device::cpu_backward_sums_of_item - 1) / device::cpu_backward_sums_of_item;
    const i64 work_of_sums = sums * (device::cpu_backward_sums_of_item * device::exact_sum_words);
    add("flashjit_backward_rows", units + sums, all_rows * kernel.spec.head_dim_v + work_of_sums);
    add("flashjit_backward", items * p.parts, all_rows * params.seqlen_k / 4 * kernel.spec.head_dim);
    add("flashjit_backward_dq", units, all_rows * row * p.parts);
    if (formulas.gradients) add("flashjit_backward_tables", sums, work_of_sums);
  }

 private:
  static CudaBackwardKernels gpu(const PlannedKernel& kernel) {
    return {kernel.spec, kernel.config, kernel.target};
  }
  // Whether gradients of tables are summed up in the workspace, so that their bits are equal run after run.
  static bool has_exact_sums(const PlannedKernel& kernel) {
    return kernel.target.is_cuda() ? gpu(kernel).has_exact_sums : has_gradients(kernel.spec);
  }
  static i64 num_gradients(const FormulaArguments& given) {
    i64 count = 0;
    if (given.gradients)
      for (const device::GradientTable& gradient : given.gradients->tables) count += gradient.count;
    return count;
  }
  // The same for tables of a shape: as large as they may be, but for sizes that only tensors say.
  static i64 typical_sums(const PlannedKernel& kernel, const Shape& shape) {
    constexpr i64 usual_size = 128, most_usual = i64{1} << 20;  // of a dimension, and of all of a table's own
    if (!has_exact_sums(kernel)) return 0;
    Shape sized = shape;
    sized.total_q = argument_table::total(shape.batch, shape.seqlen_q, shape.total_q);
    sized.total_k = argument_table::total(shape.batch, shape.seqlen_k, shape.total_k);
    i64 count = kernel.spec.sink_logits ? shape.num_heads_q : 0;
    for (const DeclaredTable& table : kernel.spec.tables) {
      if (!table.grad) continue;
      std::optional<i64> elements = 1;
      i64 own = 1;
      for (const TableDimension& dim : table.shape) {
        const auto size = size_in(sized, dim);
        if (!size) own = std::min(own * usual_size, most_usual);
        if (elements && size) elements = product_of({*elements, *size});
      }
      if (elements) elements = product_of({*elements, own});
      if (!elements || *elements > most_floats) refuse_workspace(shape);
      count += *elements;
    }
    return count;
  }
  // The exact sums begin at a multiple of 64 bytes.
  static constexpr std::size_t sums_alignment = 64;
  static std::size_t with_sums(std::size_t bytes, i64 sums) {
    if (sums == 0) return bytes;
    return (bytes + sums_alignment - 1) / sums_alignment * sums_alignment +
           static_cast<std::size_t>(sums) * device::exact_sum_words * sizeof(i64);
  }
  static void place_sums(FormulaArguments& given, const float* end) {
    if (!given.gradients) return;
    const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(end) + sums_alignment - 1;
    auto* next = reinterpret_cast<device::i64*>(at / sums_alignment * sums_alignment);
    for (device::GradientTable& gradient : given.gradients->tables) {
      gradient.sums = next;
      next += gradient.count * device::exact_sum_words;
    }
  }

  // But for exact sums.
  static std::size_t bytes_of_rows(const PlannedKernel& kernel, const Shape& shape) {
    check_sizes(shape);
    return kernel.target.is_cuda() ? cuda_workspace(kernel, shape) : cpu_workspace(kernel, shape);
  }

  // Throws where the workspace's size might need more than 64 bits, or the rows of a head more than 31: no
  // memory holds such a workspace.
  static void check_sizes(const Shape& shape) {
    constexpr i64 most = i64{1} << 48, longest = i64{1} << 44;
    const i64 rows = argument_table::total(shape.batch, shape.seqlen_q, shape.total_q);
    const auto of_heads = product_of({shape.num_heads_q, rows});
    if (rows > std::numeric_limits<int>::max() || !of_heads || *of_heads > most ||
        i64{shape.num_heads_q} * shape.seqlen_q > longest)
      refuse_workspace(shape);
  }

  static constexpr int rows_of_item = device::cpu_backward_rows_of_item;
  static constexpr i64 most_floats = i64{1} << 60;        // of a workspace
  static constexpr i64 most_blocks = (i64{1} << 31) - 1;  // of a grid

  [[noreturn]] static void refuse_workspace(const Shape& shape) {
    refuse_argument("batch ", shape.batch, " x num_heads_q ", shape.num_heads_q, " x seqlen_q ",
                    shape.seqlen_q, ": no memory holds the workspace; split the batch");
  }

  static constexpr int fixed_parts = 4;
  // Enough parts that every thread has several items, which differ if masks do. They order dQ's sums, so with
  // batch_invariant every launch has as many.
  static int parts(const PlannedKernel& kernel, int batch, int heads_kv) {
    if (kernel.spec.batch_invariant) return fixed_parts;
    const int threads = kernel.parallelism;
    const i64 items = std::max<i64>(i64{batch} * heads_kv, 1), wanted = threads == 1 ? 1 : i64{4} * threads;
    return static_cast<int>((wanted - 1) / items + 1);
  }

  // Heads whose keys the grid takes together. More even out the work, fewer stay in the cache. Masks of
  // lists need less order: half as many heads, so that dQ's sums are in the cache until they are converted.
  // Where dQ is added in order at least 8, as far as twice the cache holds them: with more heads fewer places
  // of each run at once, and wait for each other. Blocks that make dV alone do not keep pace with those that
  // wait, so that with them no more than the cache holds, half of it where rows see all keys, and at least 2.
  static unsigned section(const PlannedKernel& kernel, i64 seqlen_q, i64 blocks_of_head) {
    constexpr i64 most = 16;
    const CudaBackwardKernels kernels = gpu(kernel);
    const i64 share = kernels.has_row_bits ? 2 : 1;
    const i64 blocks = 256 / share;  // so that no multiprocessor is without work for long
    const i64 in_cache = BackwardGroups::rows_in_cache / share /
                         std::max(BackwardGroups::bytes_of_head(kernel.spec, seqlen_q), i64{1});
    if (kernels.orders_dq() && kernels.divides_sums) {
      const bool all_keys = std::ranges::all_of(
          kernel.spec.mask, [](const Mask& mask) { return std::holds_alternative<PaddingMask>(mask); });
      return static_cast<unsigned>(std::clamp(all_keys ? in_cache / 2 : in_cache, i64{2}, most / 2));
    }
    const i64 least = kernels.orders_dq() ? std::clamp(2 * in_cache, i64{1}, i64{8}) : 1;
    return static_cast<unsigned>(std::clamp(std::max(in_cache, blocks / blocks_of_head), least, most));
  }
  static i64 row_words(const PlannedKernel& kernel, i64 seqlen_q) {
    const i64 rows = i64{32} * kernel.config.block_m;
    return (seqlen_q + rows - 1) / rows;
  }
  // RowBits of a launch.
  static i64 row_bits_of(const PlannedKernel& kernel, i64 heads_q, i64 key_rows, i64 seqlen_q) {
    return heads_q * (key_rows / device::backward_row_unit) * row_words(kernel, seqlen_q);
  }

  // Three numbers of each row and a byte for four of them; unless dQ has a kernel of its own, a row of its
  // sums; sums of dK and dV where groups are divided; bits of rows for some masks; on sm_90a counters of
  // turns, of each head's places and, where dQ is added in order, of blocks of rows.
  static std::size_t cuda_workspace(const PlannedKernel& kernel, const Shape& shape) {
    const bool packed = kernel.spec.varlen;
    const i64 total_q = argument_table::total(shape.batch, shape.seqlen_q, shape.total_q);
    const i64 rows = device::backward_rows(shape.batch, shape.seqlen_q, packed ? total_q : -1);
    const int row = gpu(kernel).separate_dq ? 0 : device::cuda_backward_row(kernel.spec.head_dim);
    const auto floats = product_of({shape.num_heads_q, rows / 16, 16 * (3 + row) + 1});
    const i64 key_rows = device::backward_rows(
        shape.batch, shape.seqlen_k,
        packed ? argument_table::total(shape.batch, shape.seqlen_k, shape.total_k) : -1);
    if (!product_of({shape.num_heads_kv, key_rows})) refuse_workspace(shape);
    const auto sums =
        product_of({BackwardGroups{kernel}.rows_of_sums(shape.num_heads_q, shape.num_heads_kv, key_rows,
                                                        packed ? total_q : shape.seqlen_q),
                    device::cuda_backward_row(kernel.spec.head_dim) +
                        device::cuda_backward_row(kernel.spec.head_dim_v)});
    if (!floats || !sums || *floats > most_floats / 2 || *sums > most_floats / 4) refuse_workspace(shape);
    i64 words = 0;
    if (gpu(kernel).has_row_bits) {
      const auto bits = product_of({2, shape.num_heads_q, key_rows / device::backward_row_unit,
                                    row_words(kernel, packed ? total_q : shape.seqlen_q)});
      if (!bits || *bits > std::numeric_limits<std::uint32_t>::max()) refuse_workspace(shape);
      words = *bits;
    }
    i64 counters = gpu(kernel).by_wgmma ? 1 + i64{shape.batch} * shape.num_heads_q : 1;
    counters += BackwardGroups{kernel}.most_row_parts(i64{shape.batch} * shape.num_heads_q,
                                                      packed ? total_q : shape.seqlen_q);
    if (gpu(kernel).orders_dq()) counters += device::backward_ordered_blocks(shape.num_heads_q * rows);
    return 4 * static_cast<std::size_t>(*floats + *sums + words + counters);
  }

  // Rows of a head in the workspace.
  static i64 rows_of_head(const AttentionSpec& spec, i64 batch, i64 seqlen_q, i64 total_q) {
    return spec.varlen ? device::cpu_backward_packed_rows(total_q, batch)
                       : batch * rows_of_entry(spec, seqlen_q);
  }
  // At least those of a batch entry.
  static i64 rows_of_entry(const AttentionSpec& spec, i64 seqlen_q) {
    constexpr i64 group = device::cpu_backward_group;
    return spec.varlen ? seqlen_q + group : (seqlen_q + group - 1) / group * group;
  }

  // parts <= 4 threads / (batch * heads_kv) + 1. So parts * rows of dQ are at most
  // 4 threads * rows of a batch entry / heads_kv + rows, which grows with each size.
  static std::size_t cpu_workspace(const PlannedKernel& kernel, const Shape& shape) {
    const i64 heads_kv = std::max(shape.num_heads_kv, 1), heads_q = shape.num_heads_q;
    const i64 total_q = argument_table::total(shape.batch, shape.seqlen_q, shape.total_q);
    const i64 rows = rows_of_head(kernel.spec, shape.batch, shape.seqlen_q, total_q);
    const i64 threads = kernel.parallelism == 1 ? 0 : i64{4} * kernel.parallelism;
    const i64 sums =
        kernel.spec.batch_invariant
            ? fixed_parts * heads_q * rows
            : (threads * rows_of_entry(kernel.spec, shape.seqlen_q) + heads_kv * rows) * (heads_q / heads_kv);
    const auto floats = product_of({sums, device::cpu_backward_row(kernel.spec.head_dim)});
    const auto stats = product_of({3, heads_q, rows});
    if (!floats || !stats || *floats > most_floats || *stats > most_floats) refuse_workspace(shape);
    return 4 * static_cast<std::size_t>(*stats + *floats);
  }
};

}  // namespace

const OperationRuntime backward_runtime = operation_runtime<Backward>;

}  // namespace flashjit
