// Every default CUDA kernel compiles without a spill or a performance warning, and has the
// intended instructions. FLASHJIT_TEST_ALL=1 takes every target and head dimension; otherwise
// FLASHJIT_TEST_SEED decides which of them have a turn. Needs NVRTC, but no GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <vector>

#include "codegen/families/kernel_family.hpp"
#include "tests/compile/nvrtc_test.hpp"

namespace flashjit::nvrtc_testing {
namespace {

using testing::HasSubstr;
using testing::Not;

// Head dimensions 64, 128 and 256 for sm_90 and sm_90a, bf16. All else in turns.
TEST_F(NvrtcTest, DefaultKernels) {
  std::vector<Case> cases;
  const std::vector<Target> targets = cuda_targets();
  std::size_t column = 0;  // counts pairs of target and dtype
  for (const Target& target : targets) {
    for (const DType dtype : {DType::bf16, DType::fp16}) {
      for (int head_dim = 8; head_dim <= 256; head_dim += 8) {
        const bool usual = (head_dim == 64 || head_dim == 128 || head_dim == 256) &&
                           ((target.level == 90 && dtype == DType::bf16) || has_turn(head_dim / 64 + column));
        if (usual || has_turn(head_dim / 8 + column, 6 * targets.size()))
          cases.push_back(default_case(make_spec(dtype, head_dim), target));
      }
      ++column;
    }
  }
  int most_registers = 0;
  double slowest = 0;
  for_each_compiled(cases, [&](const Case& c, const CompiledKernel& kernel) {
    expect_sound(c, kernel);
    expect_no_spill(c, kernel);
    most_registers = std::max(most_registers, step_of(kernel).registers);
    slowest = std::max(slowest, kernel.compile_ms);
  });
  std::cout << cases.size() << " default kernels: at most " << most_registers
            << " registers, slowest compile " << slowest << " ms\n";
}

// The options that change code besides the head dimension, and the heuristic's other
// branches, cause no spills either. Causal is tried for both targets, all else in turns. The seed decides
// whether top_left is tried with packed sequences.
TEST_F(NvrtcTest, DefaultKernelsOfEverySpecOption) {
  std::vector<Case> cases;
  std::size_t place = 0;
  const auto add = [&](int head_dim, const std::vector<Mask>& mask, bool varlen, std::vector<int> seqlens) {
    AttentionSpec spec = make_spec(DType::bf16, head_dim);
    spec.mask = mask;
    spec.varlen = varlen;
    const bool causal = !varlen && mask == std::vector<Mask>{CausalMask{}};
    for (std::size_t i = 0; i < seqlens.size(); ++i)
      for (const bool specific : {false, true})
        if ((causal && seqlens[i] == 4096) || has_turn(place + i + specific))
          cases.push_back(
              default_case(spec.validated(), Target::parse(specific ? "sm_90a" : "sm_90"), seqlens[i]));
    ++place;
  };
  for (const int head_dim : {64, 128, 256}) {
    for (const bool varlen : {false, true}) {
      add(head_dim, {CausalMask{}}, varlen, {64, 4096, 16384});
      if (varlen == (seed() % 2 == 1) || test_all())
        add(head_dim, {CausalMask{CausalAlign::top_left}}, varlen, {64, 4096, 16384});
    }
    add(head_dim, {CausalMask{}, PaddingMask{}, BlockSparseMask{.per_head = true}}, false, {4096});
    add(head_dim, {SlidingWindowMask{.sinks = true}, PaddingMask{}}, false, {4096});
    add(head_dim, {TreeMask{}, PaddingMask{}}, false, {4096});
  }
  for (const Mask& mask :
       {Mask(PaddingMask{}), Mask(SlidingWindowMask{}), Mask(SlidingWindowMask{.sinks = true}),
        Mask(BlockSparseMask{}), Mask(BlockSparseMask{.block_m = 64, .block_n = 64}), Mask(TreeMask{})}) {
    add(128, {mask}, false, {64, 4096});
  }
  for_each_compiled(cases, [&](const Case& c, const CompiledKernel& kernel) {
    expect_sound(c, kernel);
    expect_no_spill(c, kernel);
  });
}

bool is_usual(int head_dim) {
  return head_dim % 64 == 0 || head_dim == 8 || head_dim == 80 || head_dim == 96;
}

// Kernels that pack heads because each has few rows: the usual
// head dimensions, and other options that change code in turns.
TEST_F(NvrtcTest, DefaultKernelsThatPackHeads) {
  const Target target = Target::parse("sm_90a");
  std::vector<Case> cases;
  std::size_t place = 0;
  const auto add = [&](const AttentionSpec& spec, int seqlen_q) {
    const Shape shape{
        .batch = 8, .seqlen_q = seqlen_q, .seqlen_k = 4096, .num_heads_q = 32, .num_heads_kv = 8};
    cases.push_back({spec, target, heuristic_config(spec, target, shape)});
    EXPECT_TRUE(cases.back().config.pack_gqa) << cases.back().name();
  };
  for (int head_dim = 8; head_dim <= 256; head_dim += 8)
    if (is_usual(head_dim) || test_all())
      add(make_spec(head_dim % 16 ? DType::fp16 : DType::bf16, head_dim), head_dim % 24 ? 64 : 1);
  for (const std::vector<Mask>& masks :
       std::vector<std::vector<Mask>>{{CausalMask{}},
                                      {CausalMask{CausalAlign::top_left}, PaddingMask{}},
                                      {TreeMask{}},
                                      {TreeMask{}, PaddingMask{}},
                                      {SlidingWindowMask{.sinks = true}, PaddingMask{}, BlockSparseMask{}}})
    for (const int head_dim : {64, 128, 256})
      for (const int seqlen_q : {1, 64, 256}) {
        if (head_dim != 128 && seqlen_q != 64 && !test_all()) continue;
        if (!has_turn(place++)) continue;
        AttentionSpec spec = make_spec(DType::bf16, head_dim);
        spec.mask = masks;
        spec.varlen = seqlen_q == 256 && masks.size() == 1;
        add(spec.validated(), seqlen_q);
        spec.dropout = true;
        if (seqlen_q == 64) add(spec.validated(), seqlen_q);
      }
  for_each_compiled(cases, [&](const Case& c, const CompiledKernel& kernel) {
    expect_sound(c, kernel);
    expect_no_spill(c, kernel);
  });
}

// Heads of more than 256 columns: every config, with options that take registers, in turns.
TEST_F(NvrtcTest, WideHeads) {
  struct Options {
    std::vector<Mask> mask = {};
    std::vector<std::string> score = {};
    bool dropout = false, varlen = false, paged = false;
    std::optional<DType> kv_dtype = {};
  };
  const std::vector<Options> all_options = {
      {},
      {.mask = {CausalMask{}}},
      {.mask = {CausalMask{}}, .dropout = true},
      {.mask = {CausalMask{}}, .varlen = true},
      {.mask = {CausalMask{}}, .paged = true},
      {.mask = {TreeMask{}, PaddingMask{}}},
      {.mask = {TreeMask{}}, .dropout = true, .paged = true},
      {.mask = {SlidingWindowMask{.sinks = true}, BlockSparseMask{.per_head = true}}, .dropout = true},
      {.mask = {FormulaMask{"key % 3 != 1"}}, .score = {"softcap"}, .varlen = true},
      {.mask = {FormulaMask{"key % 3 != 1"}}, .score = {"softcap"}, .dropout = true, .paged = true},
      {.mask = {SlidingWindowMask{}}, .paged = true, .kv_dtype = DType::fp8_e4m3}};
  std::vector<Case> cases;
  std::size_t place = 0;
  struct Heads {
    int dim, dim_v;
    bool v_in_k = false;
  };
  for (const auto& [dim, dim_v, v_in_k] : {Heads{264, 264},
                                           {320, 320},
                                           {384, 384},
                                           {512, 512},
                                           {576, 512},
                                           {576, 512, true},
                                           {576, 576},
                                           {576, 8},
                                           {8, 576},
                                           {512, 128},
                                           {192, 328}})
    for (const Options& options : all_options) {
      AttentionSpec spec = make_spec(dim % 64 ? DType::fp16 : DType::bf16, dim, dim_v);
      spec.v_in_k = v_in_k;
      spec.mask = options.mask;
      spec.score = options.score;
      spec.dropout = options.dropout, spec.varlen = options.varlen, spec.paged = options.paged;
      spec.kv_dtype = options.kv_dtype;
      spec = spec.validated();
      for (const Target& target : cuda_targets()) {
        if (!why_unsupported(spec, target).empty()) continue;
        const bool by_wgmma = target.has(Instructions::wgmma);
        if (has_turn(place++, by_wgmma ? 13 : 61)) cases.push_back(default_case(spec, target));
        for (const KernelConfig& config : search_space(spec, target))
          if (has_turn(place++, by_wgmma ? 307 : 211)) cases.push_back({spec, target, config});
      }
    }
  for_each_compiled(cases, [&](const Case& c, const CompiledKernel& kernel) {
    expect_sound(c, kernel);
    expect_no_spill(c, kernel);
  });
}

// Merging is bound by memory, so launch bounds keep as many warps resident as registers allow.
TEST_F(NvrtcTest, Merge) {
  std::vector<Case> cases;
  std::size_t place = 0;
  for (const Target& target : cuda_targets()) {
    for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
      for (const int head_dim : {8, 128, 256, 576}) {
        AttentionSpec spec = make_spec(dtype, head_dim);
        spec.op = Operation::merge;
        for (const bool narrow : {false, true}) {
          if (narrow) spec.parts_dtype = dtype;
          for (const bool sum : {false, true}) {
            spec.sum = sum;
            for (const KernelConfig& config : search_space(spec.validated(), target))
              if (has_turn(place++, 17)) cases.push_back({spec.validated(), target, config});
          }
        }
      }
    }
  }
  for_each_compiled(cases, [&](const Case& c, const CompiledKernel& kernel) {
    EXPECT_THAT(kernel.log, Not(HasSubstr("warning"))) << c.name();
    // A sum may write where its first part is.
    const char* const load = c.spec.sum ? "ld.global.cg.v4" : "ld.global.nc.L1::no_allocate.v4";
    EXPECT_NE(kernel.assembly.find(load), std::string::npos) << c.name();
    expect_no_spill(c, kernel);
  });
}

// An append is bound by memory: no spill, and loads and stores of 16 bytes wherever halves of pairs lie
// alike; into 8-bit caches stores of 8.
TEST_F(NvrtcTest, Append) {
  std::vector<Case> cases;
  std::size_t place = 0, place_of_8_bits = 0;
  const std::optional<Rotary> rotaries[] = {{},
                                            Rotary{.q = true},
                                            Rotary{.style = RotaryStyle::interleaved, .dim = 64, .q = true},
                                            Rotary{.style = RotaryStyle::interleaved, .first = 64, .q = true},
                                            Rotary{.dim = 32, .tables = DType::fp32},
                                            Rotary{.dim = 20, .q = true}};
  for (const Target& target : cuda_targets())
    for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
      for (const std::optional<Rotary>& rotary : rotaries)
        for (const bool varlen : {false, true}) {
          AttentionSpec spec{.op = Operation::append_kv, .dtype = dtype, .head_dim = 128, .varlen = varlen};
          spec.rotary = rotary;
          spec.v_in_k = rotary && rotary->first;
          if (has_turn(place++, 31)) cases.push_back(default_case(spec.validated(), target));
          for (const DType kv_dtype : {DType::int8, DType::fp8_e4m3, DType::fp8_e5m2})
            for (const KvScale kv_scale : {KvScale::tensor, KvScale::head, KvScale::token_head}) {
              if (dtype == DType::fp32 || !has_turn(place_of_8_bits++, 251)) continue;
              spec.kv_dtype = kv_dtype;
              spec.kv_scale = kv_scale;
              cases.push_back(default_case(spec.validated(), target));
            }
        }
  for_each_compiled(cases, [&](const Case& c, const CompiledKernel& kernel) {
    const auto has = [&](const char* text) { return kernel.assembly.find(text) != std::string::npos; };
    EXPECT_THAT(kernel.log, Not(HasSubstr("warning"))) << c.name();
    EXPECT_TRUE(has("ld.global.nc.L1::no_allocate.v4")) << c.name();
    EXPECT_TRUE(has("st.global.v4") || (c.spec.kv_dtype && has("st.global.v2"))) << c.name();
    if (c.spec.kv_dtype && *c.spec.kv_dtype != DType::int8) {
      EXPECT_EQ(has("cvt.rn.satfinite.e"), c.target.level >= 89) << c.name();
    }
    EXPECT_FALSE(has(".f64")) << c.name();
    expect_no_spill(c, kernel);
  });
}

// A copy is bound by memory: no spill, and loads and stores of 16 bytes wherever they divide a row.
TEST_F(NvrtcTest, Copy) {
  std::vector<Case> cases;
  std::size_t place = 0;
  for (const Target& target : cuda_targets())
    for (const std::optional<DType> kv_dtype : {std::optional<DType>(), std::optional(DType::int8)})
      for (const KvScale kv_scale : {KvScale::tensor, KvScale::token_head})
        for (const int head_dim : {64, 128, 576}) {
          AttentionSpec spec{
              .op = Operation::copy_kv, .dtype = DType::bf16, .head_dim = head_dim, .head_dim_v = 64};
          spec.kv_dtype = kv_dtype;
          if (kv_dtype) spec.kv_scale = kv_scale;
          if (has_turn(place++, 17)) cases.push_back(default_case(spec.validated(), target));
        }
  for_each_compiled(cases, [&](const Case& c, const CompiledKernel& kernel) {
    EXPECT_THAT(kernel.log, Not(HasSubstr("warning"))) << c.name();
    for (const char* text : {"ld.global.cg.v4", "st.global.v4"})
      EXPECT_THAT(kernel.assembly, HasSubstr(text)) << c.name();
    expect_no_spill(c, kernel);
  });
}

// Lists of blocks by a formula with tables, and the forwards that take them: all tests of blocks are in
// registers.
TEST_F(NvrtcTest, BlockListsOfMasks) {
  const auto spec_of = [](const std::string& op, int head_dim, const std::string& more) {
    return AttentionSpec::from_json(R"({"op": ")" + op + R"(", "dtype": "bf16", "head_dim": )" +
                                    std::to_string(head_dim) +
                                    R"(, "mask": [{"kind": "block_sparse", "of_masks": true}, "causal",
                                                "document[key] == document[position]")" +
                                    more);
  };
  const std::string documents =
      R"(], "tables": {"document": {"dtype": "int32", "shape": ["batch", "seqlen_k"]}}})";
  std::vector<Case> cases;
  std::size_t place = 0;
  for (const Target& target : cuda_targets()) {
    const bool usual = target.str() == "sm_80" || target.str() == "sm_90a";
    if (usual || has_turn(place++))
      cases.push_back(default_case(spec_of("make_block_lists", 64, documents), target));
    for (const int head_dim : {64, 128, 256})
      if ((usual && head_dim == 128) || has_turn(place++, 7))
        cases.push_back(default_case(spec_of("forward", head_dim, documents), target));
  }
  for_each_compiled(cases, [&](const Case& c, const CompiledKernel& kernel) {
    EXPECT_THAT(kernel.log, Not(HasSubstr("warning"))) << c.name();
    expect_no_spill(c, kernel);
  });
}

// A decode that appends: dependent launches from sm_90 on, except before the forward's kernel.
TEST_F(NvrtcTest, DecodeThatAppends) {
  std::vector<Case> cases;
  for (const char* target : {"sm_80", "sm_90a"})
    for (const int seqlen_q : {1, 32}) {
      AttentionSpec spec{.op = Operation::decode, .head_dim = 128, .paged = true, .append = true};
      spec.rotary = Rotary{.q = true};
      if (seqlen_q == 1 || std::string_view(target) == "sm_90a")
        cases.push_back(
            {spec.validated(), Target::parse(target),
             heuristic_config(spec.validated(), Target::parse(target), {64, seqlen_q, 4096, 32, 8})});
    }
  for_each_compiled(cases, [&](const Case& c, const CompiledKernel& kernel) {
    const auto has = [&](const char* text) { return kernel.assembly.find(text) != std::string::npos; };
    EXPECT_THAT(kernel.log, Not(HasSubstr("warning"))) << c.name();
    EXPECT_EQ(has("griddepcontrol.launch_dependents"), c.target.level >= 90) << c.name();
    EXPECT_EQ(has("griddepcontrol.wait"), c.target.level >= 90) << c.name();
    EXPECT_TRUE(has("flashjit_append")) << c.name();
    expect_no_spill(c, kernel);
  });
}

// Dropout's words take registers and shared memory: the usual head dimensions in bf16
// for both targets; fp16, other head dimensions and masks in turns.
TEST_F(NvrtcTest, DefaultKernelsWithDropout) {
  std::vector<Case> cases;
  std::size_t place = 0;
  const auto add = [&](AttentionSpec spec, int seqlen) {
    spec.dropout = true;
    const bool usual = spec.head_dim == 64 || spec.head_dim == 128 || spec.head_dim == 256;
    for (const bool specific : {false, true})
      if ((usual && spec.mask.empty() && spec.dtype == DType::bf16) || has_turn(place + specific))
        cases.push_back(default_case(spec.validated(), Target::parse(specific ? "sm_90a" : "sm_90"), seqlen));
    ++place;
  };
  for (const DType dtype : {DType::bf16, DType::fp16}) {
    for (int head_dim = 8; head_dim <= 256; head_dim += 8) {
      if (is_usual(head_dim) || test_all()) add(make_spec(dtype, head_dim), 4096);
    }
  }
  for (const int head_dim : {64, 128, 256}) {
    AttentionSpec spec = make_spec(DType::bf16, head_dim);
    for (const auto& masks :
         std::vector<std::vector<Mask>>{{CausalMask{}},
                                        {CausalMask{}, PaddingMask{}, BlockSparseMask{.per_head = true}},
                                        {SlidingWindowMask{.sinks = true}, PaddingMask{}},
                                        {TreeMask{}, PaddingMask{}}}) {
      spec.mask = masks;
      for (const int seqlen : {64, 4096, 16384})
        if (head_dim == 64 || seqlen == 4096 || test_all()) add(spec, seqlen);
    }
    spec.mask = {CausalMask{}};
    spec.varlen = true;
    add(spec, 4096);
  }
  for_each_compiled(cases, [&](const Case& c, const CompiledKernel& kernel) {
    expect_sound(c, kernel);
    expect_no_spill(c, kernel);
  });
}

// Pages take registers of sm_90a's producer, and of every thread of other targets: the usual head dimensions
// for both, causal; packed sequences, packed heads, dropout and other masks in turns for one of the two.
TEST_F(NvrtcTest, DefaultKernelsWithPages) {
  std::vector<Case> cases;
  std::size_t place = 0;
  const auto add = [&](AttentionSpec spec, int seqlen_q, bool usual) {
    spec.paged = true;
    const Shape shape{
        .batch = 8, .seqlen_q = seqlen_q, .seqlen_k = 8192, .num_heads_q = 32, .num_heads_kv = 8};
    for (const char* name : {"sm_90", "sm_90a"}) {
      const Target target = Target::parse(name);
      if (usual || has_turn(place++, 109))
        cases.push_back({spec.validated(), target, heuristic_config(spec.validated(), target, shape)});
    }
    ++place;
  };
  for (int head_dim = 8; head_dim <= 256; head_dim += 8) {
    if (!is_usual(head_dim) && !test_all()) continue;
    AttentionSpec spec = make_spec(head_dim % 16 ? DType::fp16 : DType::bf16, head_dim);
    spec.mask = {CausalMask{}};
    add(spec, 4096, head_dim == 64 || head_dim == 128 || head_dim == 256);
  }
  for (const int head_dim : {64, 128, 256})
    for (const auto& masks : std::vector<std::vector<Mask>>{
             {},
             {CausalMask{}, PaddingMask{}},
             {SlidingWindowMask{}},
             {SlidingWindowMask{.sinks = true}, PaddingMask{}},
             {TreeMask{}},
             {CausalMask{}, PaddingMask{}, BlockSparseMask{}},
             {SlidingWindowMask{.sinks = true}, BlockSparseMask{.block_m = 64, .block_n = 64}}})
      for (const int seqlen_q : {1, 64, 4096}) {
        AttentionSpec spec = make_spec(DType::bf16, head_dim);
        spec.mask = masks;
        spec.varlen = place / 2 % 2 == 1;
        add(spec, seqlen_q, false);
        spec.dropout = true;
        add(spec, seqlen_q, false);
      }
  for_each_compiled(cases, [&](const Case& c, const CompiledKernel& kernel) {
    expect_sound(c, kernel);
    expect_no_spill(c, kernel);
  });
}

// 8-bit pages: sm_90a's producer converts, and so do all threads of other targets.
TEST_F(NvrtcTest, DefaultKernelsWithEightBitPages) {
  std::vector<Case> cases;
  std::size_t place = 0;
  for (const char* name : {"sm_80", "sm_86", "sm_90", "sm_90a"})
    for (const DType kv_dtype : {DType::int8, DType::fp8_e4m3, DType::fp8_e5m2})
      for (const KvScale kv_scale : {KvScale::tensor, KvScale::head, KvScale::token_head})
        for (const int head_dim : {24, 64, 96, 128, 200, 256})
          for (const auto& masks : std::vector<std::vector<Mask>>{
                   {CausalMask{}}, {SlidingWindowMask{.sinks = true}, PaddingMask{}}, {TreeMask{}}})
            for (const int seqlen_q : {1, 64, 4096}) {
              if (!has_turn(++place, 199)) continue;
              AttentionSpec spec = make_spec(place % 2 ? DType::fp16 : DType::bf16, head_dim);
              spec.mask = masks;
              spec.varlen = place % 5 == 0;
              spec.paged = true;
              spec.kv_dtype = kv_dtype;
              spec.kv_scale = kv_scale;
              if (place % 7 == 0) spec.o_dtype = DType::fp32;
              spec = spec.validated();
              const Target target = Target::parse(name);
              cases.push_back({spec, target,
                               heuristic_config(spec, target,
                                                {.batch = 8,
                                                 .seqlen_q = seqlen_q,
                                                 .seqlen_k = 8192,
                                                 .num_heads_q = 32,
                                                 .num_heads_kv = 8,
                                                 .page_size = 16})});
            }
  for_each_compiled(cases, [&](const Case& c, const CompiledKernel& kernel) {
    expect_sound(c, kernel);
    expect_no_spill(c, kernel);
    const bool by_instruction = c.spec.kv_dtype == DType::fp8_e4m3 && c.target.level >= 89;
    EXPECT_EQ(kernel.assembly.find("cvt.rn.f16x2.e4m3x2") != std::string::npos, by_instruction) << c.name();
  });
}

// A float32 row is written by other stores, at the end, where registers are
// fullest: the usual head dimensions for both targets, and packed heads.
TEST_F(NvrtcTest, DefaultKernelsWithFloatOutput) {
  std::vector<Case> cases;
  std::size_t place = 0;
  for (const int head_dim : {40, 64, 128, 192, 256})
    for (const bool causal : {false, true}) {
      AttentionSpec spec = make_spec(causal ? DType::bf16 : DType::fp16, head_dim);
      if (causal) spec.mask = {CausalMask{}, PaddingMask{}};
      spec.o_dtype = DType::fp32;
      for (const char* target : {"sm_90", "sm_90a"})
        for (const int seqlen : {64, 4096})
          if ((seqlen == 4096 && has_turn(place++)) || test_all())
            cases.push_back(default_case(spec.validated(), Target::parse(target), seqlen));
      const Shape few{.batch = 8, .seqlen_q = 16, .seqlen_k = 4096, .num_heads_q = 32, .num_heads_kv = 8};
      const Target packs = Target::parse("sm_90a");
      if (has_turn(place++)) cases.push_back({spec, packs, heuristic_config(spec, packs, few)});
    }
  for_each_compiled(cases, [&](const Case& c, const CompiledKernel& kernel) {
    expect_sound(c, kernel);
    expect_no_spill(c, kernel);
  });
}

// Formulas of known variants spill nothing. The seed decides which of them have a turn.
TEST_F(NvrtcTest, Formulas) {
  constexpr const char* forwards[] = {
      R"("mask": ["causal"], "score": ["alibi"])",
      R"("score": ["softcap"])",
      R"("score": ["softcap"], "precise": true)",
      R"("mask": ["causal"], "score": ["score + bias[head, min(abs(key - position), 127)]"],
         "tables": {"bias": {"dtype": "fp32", "shape": ["heads_q", 128]}})",
      R"("mask": ["position - key < 1024 && key <= position"], "sink_logits": true)",
      R"("mask": ["prefix_lm"])",
      R"("mask": ["causal", "document[key] == document[position]"],
         "tables": {"document": {"dtype": "int32", "shape": ["batch", "seqlen_k"]}})"};
  std::vector<Case> cases;
  std::size_t place = 0;
  const auto add = [&](const char* op, const std::string& fields, int head_dim, const char* target) {
    if (!has_turn(place++, 7)) return;
    cases.push_back(
        default_case(AttentionSpec::from_json(std::string(R"({"op": ")") + op + R"(", "dtype": "bf16",
                                 "head_dim": )" +
                                              std::to_string(head_dim) + ", " + fields + "}"),
                     Target::parse(target), op == std::string("decode") ? 1 : 8192));
  };
  for (const int head_dim : {64, 128})
    for (const char* const fields : forwards)
      for (const char* const target : {"sm_90a", "sm_80"}) add("forward", fields, head_dim, target);
  // Every operation, also of the score with itself.
  constexpr const char* all_operations = R"spec({"op": "forward", "dtype": "bf16", "head_dim": 64, "score": [
      "score + score * score - score / score + min(score, score) - max(score, score) - -score",
      "score < score ? score : score <= key || score == score ? abs(score) : floor(score)",
      "sqrt(score) + exp(score) + log(score) + tanh(score) + score * 2 + 3 - score + row % (key + 1)"]})spec";
  cases.push_back(default_case(AttentionSpec::from_json(all_operations), Target::parse("sm_90a"), 8192));
  for (const char* const fields : {R"("score": ["alibi"])", R"("score": ["softcap"], "sink_logits": true)"})
    for (const char* const target : {"sm_90a", "sm_80"}) add("decode", fields, 128, target);
  for_each_compiled(cases, [&](const Case& c, const CompiledKernel& kernel) {
    if (c.spec.op == Operation::forward) expect_sound(c, kernel);
    expect_no_spill(c, kernel);
  });
}

}  // namespace
}  // namespace flashjit::nvrtc_testing
