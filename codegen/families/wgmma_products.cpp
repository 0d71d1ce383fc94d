#include "codegen/families/wgmma_products.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "codegen/families/backward_kernels.hpp"
#include "codegen/formulas/formula_traits.hpp"
#include "shared/backward_sm90a_wide_layout.h"
#include "shared/layout.h"

namespace flashjit {
namespace {

template <class Item>
std::string list(int count, Item item) {
  std::string text;
  for (int i = 0; i < count; ++i) text += (i ? ", " : "") + item(i);
  return text;
}
// The operands of the asm statement from `first` on: {%3, %4, ...}.
std::string registers(int first, int count) {
  return "{" + list(count, [&](int i) { return "%" + std::to_string(first + i); }) + "}";
}
// Code that sets the descriptor `to` to the operand's descriptor, advanced by `bytes`. A
// descriptor takes two operands, its low and its high word; the low word holds the address.
std::string advance(const std::string& to, int operand, int bytes) {
  return "\"add.u32 low, %" + std::to_string(operand) + ", " + std::to_string(bytes >> 4) + "; mov.b64 " +
         to + ", {low, %" + std::to_string(operand + 1) + "};\\n\"\n";
}
std::string words(const std::string& descriptor) {
  return "\"r\"(static_cast<u32>(" + descriptor + ")), \"r\"(static_cast<u32>(" + descriptor + " >> 32))";
}

struct Product {
  const char* name;
  const char* type;  // dtype of a and b
  int n, steps;
  bool a_in_registers, b_n_major;
  bool accumulates;     // if the caller says so; else overwrites d
  int panel_bytes = 0;  // of b, where n is more than one instruction has
  // Columns of an instruction. ptxas wants its registers within those of a launch: 128 of 512 threads.
  int most = 256;
  bool continues = false;  // the first step adds to d in any case

  // a_step, b_step: bytes from the operand's beginning to the part that a step reads.
  template <class AStep, class BStep>
  std::string text(AStep a_step, BStep b_step) const {
    const auto number = [](int i) { return std::to_string(i); };
    // The operands where a and b begin, and `accumulate`.
    const int a = n / 2, b = a + (a_in_registers ? 4 * steps : 2), last = b + 2;
    const std::string indent = "        ";
    const char* const first = accumulates ? "p" : continues ? "1" : "0";  // whether the first step adds to d
    std::string text = std::string("  static FLASHJIT_FN void ") + name + "(float (&d)[" + number(n / 2) +
                       "], " + (a_in_registers ? "const u32 (&a)[" + number(steps) + "][4]" : "u64 a") +
                       ", u64 b" + (accumulates ? ", int accumulate" : "") + ") {\n    asm volatile(\n" +
                       indent + "\"{.reg .b32 low; .reg .b64 a, b; .reg .pred p;\\n\"\n";
    if (accumulates) text += indent + "\"setp.ne.b32 p, %" + number(last) + ", 0;\\n\"\n";
    for (int step = 0; step < steps; ++step) {
      if (!a_in_registers) text += indent + advance("a", a, a_step(step));
      for (int from = 0; from < n; from += most) {
        const int columns = std::min(n - from, most);
        text += indent + advance("b", b, b_step(step) + from / 64 * panel_bytes);
        text += indent + "\"wgmma.mma_async.sync.aligned.m64n" + number(columns) + "k16.f32." + type + "." +
                type + " " + registers(from / 2, columns / 2) + ", " +
                (a_in_registers ? registers(a + 4 * step, 4) : "a") + ", b, " + (step > 0 ? "1" : first) +
                ", 1, 1, " + (a_in_registers ? "" : "0, ") + (b_n_major ? "1" : "0") + ";\\n\"\n";
      }
    }
    text += indent + "\"}\"\n" + indent + ": " +
            list(n / 2, [&](int i) { return "\"+f\"(d[" + number(i) + "])"; }) + "\n" + indent + ": ";
    text +=
        a_in_registers
            ? list(4 * steps, [&](int i) { return "\"r\"(a[" + number(i / 4) + "][" + number(i % 4) + "])"; })
            : words("a");
    return text + ", " + words("b") + (accumulates ? ", \"r\"(accumulate)" : "") + ");\n  }\n";
  }
};

}  // namespace

std::string wgmma_products(const AttentionSpec& spec, const KernelConfig& config) {
  const device::Sm90aLayout layout(spec.head_dim, spec.head_dim_v, config.block_m, config.block_n,
                                   config.num_stages, spec.dropout);
  // As Sm90aShared has them (templates/cuda/forward_sm90a_shared.cuh).
  const bool scaled_rows = spec.kv_scale == KvScale::token_head;
  const char* const type = spec.dtype == DType::bf16 ? "bf16" : "f16";
  // The steps of Q K^T. Those of a second piece of K are a product of their own.
  const bool in_pieces = !spec.kv_dtype && !config.q_in_registers &&
                         device::Sm90aLayout::in_pieces(spec.head_dim_v, config.num_stages,
                                                        device::Converts::nothing, spec.v_in_k);
  const bool alternates = in_pieces && config.ping_pong;
  std::vector<int> steps, rest_steps;
  for (int step = 0; step < layout.qk_steps; ++step)
    (in_pieces && layout.in_second_piece(spec.head_dim_v, step) ? rest_steps : steps).push_back(step);
  const auto qk = [&](const char* name, const std::vector<int>& of, bool continues) {
    return Product{.name = name,
                   .type = spec.has_kv_scales() ? "f16" : type,
                   .n = config.block_n,
                   .steps = static_cast<int>(of.size()),
                   .a_in_registers = config.q_in_registers,
                   .b_n_major = false,
                   .accumulates = alternates,
                   .continues = continues}
        .text([&](int step) { return layout.q_step(of[static_cast<std::size_t>(step)]); },
              [&](int step) { return layout.k_step(of[static_cast<std::size_t>(step)]); });
  };
  const auto pv = [&](const char* name, int columns, bool from_registers = true) {
    return Product{.name = name,
                   .type = spec.has_kv_scales() && !scaled_rows ? "f16" : type,
                   .n = columns,
                   .steps = layout.pv_steps,
                   .a_in_registers = from_registers,
                   .b_n_major = true,
                   .accumulates = true,
                   .panel_bytes = layout.kv_panel,
                   .most = spec.v_in_k && spec.kv_dtype && config.num_warps == 16 ? 128 : 256}
        .text([&](int step) { return layout.q_step(step); }, [&](int step) { return layout.v_step(step); });
  };
  const int first = device::Sm90aLayout::first_columns(spec.head_dim_v), rest = spec.head_dim_v - first;
  return "struct WgmmaProducts {\n" + qk("qk", steps, false) +
         (rest_steps.empty() ? "" : qk("qk_rest", rest_steps, true)) + pv("pv", first) +
         (rest > 0 ? pv("pv_rest", rest) : "") +
         (alternates ? pv("pv_given", first, false) + pv("pv_rest_given", rest, false) : "") + "};\n\n";
}

namespace {

std::string dq_products(const AttentionSpec& spec, const char* type) {
  const device::Sm90aDqLayout layout(spec.head_dim, spec.head_dim_v, spec.dropout);
  const auto q_step = [&](int step) { return layout.q_step(step); };
  const auto k_step = [&](int step) { return layout.k_step(step); };
  const auto scores = [&](const char* name, int head_dim) {
    return Product{.name = name,
                   .type = type,
                   .n = layout.keys,
                   .steps = device::ceil_div(head_dim, 16),
                   .a_in_registers = false,
                   .b_n_major = false,
                   .accumulates = false}
        .text(q_step, k_step);
  };
  const Product dq{.name = "dq",
                   .type = type,
                   .n = spec.head_dim,
                   .steps = layout.keys / 16,
                   .a_in_registers = true,
                   .b_n_major = true,
                   .accumulates = true};
  return "struct DqProducts {\n" + scores("s", spec.head_dim) + scores("dp", spec.head_dim_v) +
         dq.text([](int) { return 0; }, device::Sm90aBackwardLayout::row_step) + "};\n\n";
}

}  // namespace

device::Sm90aBackwardLayout backward_layout(const AttentionSpec& spec, const KernelConfig& config) {
  return backward_layout(spec, config,
                         device::backward_divides_sums(spec.head_dim, spec.head_dim_v)
                             ? device::BackwardSums::dk
                             : device::BackwardSums::both);
}
device::Sm90aBackwardLayout backward_layout(const AttentionSpec& spec, const KernelConfig& config,
                                            device::BackwardSums sums) {
  return {spec.head_dim,
          spec.head_dim_v,
          config.block_m,
          config.block_n,
          sums == device::BackwardSums::dv ? device::backward_dv_stages : config.num_stages,
          spec.dropout,
          CudaBackwardKernels(spec, config, true).separate_dq,
          has_derivatives(spec),
          sums};
}

std::string wide_backward_products(const AttentionSpec& spec) {
  using Layout = device::Sm90aWideLayout;
  constexpr int whole = Layout::chunk_columns;
  const char* const type = spec.dtype == DType::bf16 ? "bf16" : "f16";
  const auto scores = [&](const char* name, int columns, bool own_in_registers = false) {
    return columns == 0 ? std::string()
                        : Product{.name = name,
                                  .type = type,
                                  .n = Layout::product_rows,
                                  .steps = device::ceil_div(columns, 16),
                                  .a_in_registers = own_in_registers,
                                  .b_n_major = false,
                                  .accumulates = true}
                              .text(Layout::own_step, Layout::streamed_step);
  };
  const auto sums = [&](const char* name, int columns, int rows) {
    return columns == 0 ? std::string()
                        : Product{.name = name,
                                  .type = type,
                                  .n = columns,
                                  .steps = rows / 16,
                                  .a_in_registers = true,
                                  .b_n_major = true,
                                  .accumulates = true}
                              .text([](int) { return 0; }, Layout::row_step);
  };
  const int rest = spec.head_dim % whole, rest_v = spec.head_dim_v % whole;
  return "struct BackwardProducts {\n" + scores("s", whole) + scores("s_own", whole, true) +
         scores("s_rest", rest) + scores("dp_rest", rest_v) + sums("dk", whole, Layout::product_rows) +
         sums("dk_rest", rest, Layout::product_rows) + sums("dv", whole, Layout::block) +
         sums("dv_rest", rest_v, Layout::block) + "};\n\n";
}

std::string backward_products(const AttentionSpec& spec, const KernelConfig& config) {
  const device::Sm90aBackwardLayout layout = backward_layout(spec, config);
  const char* const type = spec.dtype == DType::bf16 ? "bf16" : "f16";
  const auto q_step = [&](int step) { return layout.q_step(step); };
  const auto k_step = [&](int step) { return layout.k_step(step); };
  const auto row_step = device::Sm90aBackwardLayout::row_step;
  const auto scores = [&](const char* name, int head_dim, int rows) {
    return Product{.name = name,
                   .type = type,
                   .n = rows,
                   .steps = device::ceil_div(head_dim, 16),
                   .a_in_registers = false,
                   .b_n_major = false,
                   .accumulates = false}
        .text(k_step, q_step);
  };
  const auto gradient = [&](const char* name, int head_dim) {
    return Product{.name = name,
                   .type = type,
                   .n = head_dim,
                   .steps = layout.tile_rows / 16,
                   .a_in_registers = true,
                   .b_n_major = true,
                   .accumulates = true}
        .text([](int) { return 0; }, row_step);
  };
  const auto dq = [&](const char* name, int columns) {
    return Product{.name = name,
                   .type = type,
                   .n = columns,
                   .steps = config.block_n / 16,
                   .a_in_registers = false,
                   .b_n_major = true,
                   .accumulates = false}
        .text(q_step, row_step);
  };
  std::string text = "struct BackwardProducts {\n" + scores("s", spec.head_dim, layout.score_rows) +
                     scores("dp", spec.head_dim_v, layout.tile_rows) + gradient("dv", spec.head_dim_v) +
                     gradient("dk", spec.head_dim);
  const bool separate_dq = CudaBackwardKernels(spec, config, true).separate_dq;
  if (!separate_dq) {
    if (layout.divides_rows || layout.dq_pairs > 0) text += dq("dq", layout.dq_columns);
    if (!layout.divides_rows && !layout.joins_dq && layout.dq_parts > layout.dq_pairs)
      text += dq("dq_last", layout.dq_last_columns);
  }
  text += "};\n\n";
  return separate_dq ? text + dq_products(spec, type) : text;
}

}  // namespace flashjit
