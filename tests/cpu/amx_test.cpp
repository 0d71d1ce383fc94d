// The forward for AMX, with the products for narrow and for wide heads. The first tests run its
// own code on any CPU, with tile registers that emulator/ keeps in memory, against the float64
// oracle. Others check the compiler's output for a CPU with AMX, and the permission to use AMX.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <iostream>
#include <limits>
#include <vector>

#include "codegen/families/cpu_products.hpp"
#include "codegen/families/search_space.hpp"
#include "codegen/render.hpp"
#include "runtime/arguments/attention.hpp"
#include "runtime/compiler.hpp"
#include "runtime/cpu/amx.hpp"
#include "runtime/cpu/object.hpp"
#include "runtime/cpu/partition.hpp"
#include "runtime/executable.hpp"
#include "templates/shared/layout.h"
#include "tests/cpu/emulated_code.hpp"
#include "tests/numerics/specs.hpp"
#include "tests/support/row_in_batches.hpp"
#include "tests/support/sampled_test.hpp"
#include "tests/support/workload.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/mask.hpp"
#include "tools/verify/oracle.hpp"

namespace flashjit::testing_support {
namespace {

using enum CausalAlign;

const Target amx = Target::parse("x86-64-v4+amx");

// A kernel for AMX with emulated instructions.
class EmulatedKernel {
 public:
  EmulatedKernel(const AttentionSpec& spec, const KernelConfig& config, int threads = 1)
      : config_(config), threads_(threads), code_(render(spec, amx, config)) {}

  // Launches the kernel; it keeps at most `most_blocks` packed blocks.
  void launch(const AttentionSpec& spec, const AttentionArgs& args,
              int most_blocks = std::numeric_limits<int>::max()) const {
    const CheckedArguments checked = check_arguments(spec, {Device::Kind::cpu, 0}, args);
    if (checked.empty) return;
    StepLaunch step;
    auto& p = step.make_params<device::CpuForwardParams>(checked.params);
    const Partition cut = partition(p, spec, amx, config_, threads_);
    p.packed_heads = cut.packed_heads;
    p.tile_rows = cut.tile_rows;
    p.key_parts = key_parts = cut.key_parts;
    std::vector<device::u32> arrived(static_cast<std::size_t>(cut.tiles));
    const auto part = static_cast<std::size_t>(device::cpu_part(p.tile_rows, spec.head_dim_v));
    const std::size_t parts = 4 * part * static_cast<std::size_t>(cut.tiles * cut.key_parts);
    const FilledMemory partials(parts);
    p.partials = reinterpret_cast<float*>(partials.data());
    p.arrived = arrived.data();
    packed_blocks = std::min(cut.packed_blocks, most_blocks);
    const auto bytes = static_cast<std::size_t>(code_.step(0).scratch +
                                                (packed_blocks - 1) * cpu_packed_block(spec, amx, config_));
    ASSERT_EQ(bytes % 64, 0u);
    const FilledMemory scratch(bytes);
    *reinterpret_cast<device::PackedHead*>(scratch.data()) = {.head = -1, .blocks = packed_blocks};
    code_.run(0, &p, cut.tiles * cut.key_parts, scratch.data());
    scratch.expect_canary();
  }

  mutable int key_parts = 0, packed_blocks = 0;  // values of the last launch

 private:
  KernelConfig config_;
  int threads_;  // threads that work is divided for
  EmulatedCode code_;
};

class EmulatedAmx : public SampledTest {
 protected:
  EmulatedAmx() : SampledTest(8) {}

  // Only lends its memory.
  TestDevice host{{Device::Kind::cpu, 0}, "x86-64-v3"};

  void SetUp() override {
    if (Target::native().level < 3) GTEST_SKIP() << "no AVX2";
  }
  void TearDown() override {
    std::cout << "  at most " << take_share_of_bound() << " of the bound" << std::endl;
    SampledTest::TearDown();
  }

  void expect(const Case& c, const EmulatedKernel& kernel) {
    if (has_turn()) expect_always(c, kernel);
  }
  void expect_always(const Case& c, const EmulatedKernel& kernel) {
    Workload workload(host, c);
    workload.reset();
    kernel.launch(c.spec, workload.args());
    EXPECT_TRUE(workload.check());
  }
  // expect(), and keeping packed blocks for other tiles changes no bit.
  void expect_kept(const Case& c, const EmulatedKernel& kernel) {
    if (!has_turn()) return;
    Workload workload(host, c);
    workload.reset();
    kernel.launch(c.spec, workload.args());
    EXPECT_TRUE(workload.check());
    EXPECT_GT(kernel.packed_blocks, 1);
    const auto bits = workload.outputs();
    workload.reset();
    kernel.launch(c.spec, workload.args(), 1);
    EXPECT_TRUE(workload.check());
    EXPECT_EQ(workload.outputs(), bits);
  }
  void expect(const Case& c, const KernelConfig& config) { expect(c, EmulatedKernel(c.spec, config)); }
};

KernelConfig tiles_of(int block_m, int block_n) {
  return {.block_m = block_m, .block_n = block_n, .num_stages = 1, .num_warps = 1};
}

TEST_F(EmulatedAmx, Lengths) {
  for (const auto& [dim, mask] : {std::pair{64, std::vector<Mask>{}},
                                  {64, {CausalMask{bottom_right}}},
                                  {64, {CausalMask{top_left}}},
                                  {72, {CausalMask{bottom_right}}}}) {
    const AttentionSpec spec = forward_spec(DType::bf16, dim, mask);
    const EmulatedKernel kernel(spec, tiles_of(64, 64));
    std::uint64_t seed = 0;
    for (const int rows : {1, 2, 31, 32, 33, 70, 130})
      for (const int keys : {1, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 200}) {
        ++seed;
        expect({.spec = spec,
                .batch = 2,
                .heads_q = 3,
                .heads_kv = 1,
                .seqlen_q = rows,
                .seqlen_k = keys,
                .layout = static_cast<MemoryLayout>(seed % 6),
                .layout_kv = static_cast<MemoryLayout>(seed / 2 % 6),
                .poison = seed / 2 % 2 ? Poison::nan : Poison::infinity,
                .seed = seed},
               kernel);
      }
  }
}

TEST_F(EmulatedAmx, HeadDims) {
  for (const auto& [dim, dim_v] : {std::pair{8, 8},
                                   {16, 24},
                                   {40, 40},
                                   {72, 72},
                                   {80, 80},
                                   {96, 96},
                                   {128, 128},
                                   {192, 128},
                                   {256, 256},
                                   {8, 256},
                                   {256, 8}}) {
    expect({.spec = forward_spec(DType::bf16, dim, {CausalMask{}}, {.head_dim_v = dim_v}),
            .heads_q = 2,
            .heads_kv = 1,
            .seqlen_q = 100,
            .seqlen_k = 170},
           tiles_of(64, 96));
  }
}

// A row has the same bits in any cut of its prompt, among any neighbours, by any tile and number of threads.
TEST_F(EmulatedAmx, BatchInvariantBits) {
  constexpr int position = 700;
  for (const auto& [dim, varlen] : {std::pair{64, false}, {72, true}}) {
    if (!in_sample("bits, AMX", varlen, 2)) continue;
    const AttentionSpec spec =
        forward_spec(DType::bf16, dim, {CausalMask{}}, {.varlen = varlen, .batch_invariant = true});
    std::vector<std::byte> expected;
    for (const KernelConfig& config : search_space(spec, amx))
      for (const int threads : {1, 64}) {
        if (!expected.empty() && !has_turn()) continue;
        const EmulatedKernel kernel(spec, config, threads);
        for (const Batch& batch :
             {Batch{{1}, 0, {}, 0}, Batch{{position + 1}, 0, {}, 0}, Batch{{100, 700, 3}, 37, {900, 5}, 0},
              Batch{{30, 1, 1}, 2, {10, 512}, 0, 2}}) {
          Workload workload(host, case_of(spec, batch, position));
          fill(workload, batch, Values::weightless_column);
          workload.reset();
          kernel.launch(spec, workload.args());
          EXPECT_TRUE(workload.check());
          const std::vector<std::byte> bits = bits_of_row(workload, batch);
          if (expected.empty()) expected = bits;
          EXPECT_TRUE(bits == expected)
              << workload.given().str() << ", block_m " << config.block_m << ", " << threads << " threads";
        }
      }
  }
}

TEST_F(EmulatedAmx, PackedSequences) {
  for (const auto& mask : {std::vector<Mask>{}, {CausalMask{}}}) {
    const AttentionSpec spec = forward_spec(DType::bf16, 72, mask, {.varlen = true});
    expect({.spec = spec,
            .heads_q = 4,
            .heads_kv = 2,
            .lengths_q = {0, 5, 0, 300, 1, 64, 65, 0},
            .lengths_k = {7, 5, 0, 260, 130, 0, 64, 0},
            .spare_rows = 30},
           tiles_of(96, 128));
  }
}

TEST_F(EmulatedAmx, PartsOfKeysAndSharedTiles) {
  for (const auto& mask : {std::vector<Mask>{},
                           {CausalMask{}},
                           {BlockSparseMask{32, 64}},
                           {PaddingMask{}, SlidingWindowMask{}}}) {
    for (const auto& [dim, block_n] : {std::pair{72, 64}, {56, 192}}) {
      const AttentionSpec spec = forward_spec(DType::bf16, dim, mask, {.head_dim_v = 40});
      const EmulatedKernel kernel(spec, tiles_of(64, block_n), 64);
      for (const int rows : {1, 5, 30}) {
        if (!has_turn()) continue;
        expect_always(
            {.spec = spec, .batch = 2, .heads_q = 6, .heads_kv = 2, .seqlen_q = rows, .seqlen_k = 3001},
            kernel);
        EXPECT_GT(kernel.key_parts, 1);
      }
    }
  }
}

TEST_F(EmulatedAmx, Masks) {
  const std::vector<Mask> masks[] = {{PaddingMask{}},
                                     {CausalMask{}, PaddingMask{}},
                                     {SlidingWindowMask{}},
                                     {SlidingWindowMask{bottom_right, true}, PaddingMask{}},
                                     {BlockSparseMask{16, 16}},
                                     {BlockSparseMask{48, 80}, CausalMask{}},
                                     {BlockSparseMask{64, 64, true}, SlidingWindowMask{top_left}},
                                     {TreeMask{}},
                                     {TreeMask{}, PaddingMask{}}};
  for (const auto& mask : masks) {
    for (const int dim : {40, 72}) {
      const AttentionSpec spec = forward_spec(DType::bf16, dim, mask);
      const EmulatedKernel one_tile(spec, heuristic_config(spec, amx, {})), several(spec, tiles_of(32, 96));
      for (const std::uint64_t seed : {1, 3, 4, 6}) {
        const Case c = {.spec = spec,
                        .batch = 2,
                        .heads_q = 4,
                        .heads_kv = 2,
                        .seqlen_q = 150 - 20 * static_cast<int>(seed),
                        .seqlen_k = 130 + 30 * static_cast<int>(seed),
                        .poison = seed % 2 ? Poison::nan : Poison::infinity,
                        .seed = seed};
        if (seed % 3 == 0)
          expect_kept(c, several);
        else
          expect(c, one_tile);
      }
    }
  }
}

TEST_F(EmulatedAmx, Dropout) {
  for (const auto& mask : {std::vector<Mask>{}, {SlidingWindowMask{}}, {BlockSparseMask{32, 64}}})
    for (const auto& [dim, varlen] : {std::pair{64, false}, {64, true}, {72, false}}) {
      if (varlen && !mask.empty()) continue;
      const AttentionSpec spec = forward_spec(DType::bf16, dim, mask, {.varlen = varlen, .dropout = true});
      const EmulatedKernel kernel(spec, heuristic_config(spec, amx, {}));
      for (const double p : {0.0, 0.2, 0.9, 1.0})
        expect({.spec = spec,
                .batch = 2,
                .heads_q = 2,
                .heads_kv = 2,
                .seqlen_q = 90,
                .seqlen_k = 301,
                .lengths_q = {90, 3, 40},
                .lengths_k = {301, 50, 7},
                .dropout_p = p,
                .seed = 5},
               kernel);
    }
}

TEST_F(EmulatedAmx, ScoresThatAreHardForAnOnlineSoftmax) {
  for (const auto& [dim, mask] :
       {std::pair{64, std::vector<Mask>{}}, {64, {CausalMask{}}}, {72, {}}, {72, {CausalMask{}}}}) {
    const AttentionSpec spec = forward_spec(DType::bf16, dim, mask);
    const EmulatedKernel kernel(spec, tiles_of(64, 64));
    for (const Data data :
         {Data::equal_scores, Data::rising, Data::falling, Data::huge_scores, Data::positive_v})
      expect({.spec = spec, .heads_q = 2, .heads_kv = 1, .seqlen_q = 140, .seqlen_k = 900, .data = data},
             kernel);
  }
}

TEST_F(EmulatedAmx, EveryConfigOfTheSearchSpace) {
  for (const int dim : {64, 72}) {
    const AttentionSpec spec = forward_spec(DType::bf16, dim, {CausalMask{}});
    std::vector<KernelConfig> configs = search_space(spec, amx);
    configs.push_back(tiles_of(48, 80));
    for (const KernelConfig& config : configs)
      expect({.spec = spec, .heads_q = 2, .heads_kv = 1, .seqlen_q = 150, .seqlen_k = 333}, config);
  }
}

// Rows that there are not are zeros as long as any head.
TEST_F(EmulatedAmx, WideHeads) {
  for (const auto& [dim, dim_v] : {std::pair{512, 512}, {576, 512}, {64, 1024}, {1024, 1024}}) {
    const AttentionSpec spec = forward_spec(DType::bf16, dim, {CausalMask{}}, {.head_dim_v = dim_v});
    expect({.spec = spec, .heads_q = 2, .heads_kv = 1, .seqlen_q = 70, .seqlen_k = 170},
           heuristic_config(spec, amx, {}));
  }
}

// A NaN or infinity in V at a key that a row does not see stays out of the row.
TEST_F(EmulatedAmx, ValuesThatAreNotFinite) {
  for (const auto& mask : {std::vector<Mask>{CausalMask{}}, {SlidingWindowMask{}}, {BlockSparseMask{16, 16}}})
    for (const auto& [dim, value] : {std::pair{40, std::numeric_limits<float>::quiet_NaN()},
                                     {40, std::numeric_limits<float>::infinity()},
                                     {72, std::numeric_limits<float>::infinity()}}) {
      if (!has_turn()) continue;
      const AttentionSpec spec = forward_spec(DType::bf16, dim, mask);
      const Case c{.spec = spec,
                   .heads_q = 2,
                   .heads_kv = 1,
                   .seqlen_q = 70,
                   .seqlen_k = 130,
                   .masks = verify::MaskDataOptions{},
                   .seed = 3};
      const EmulatedKernel kernel(spec, tiles_of(64, 64));
      Workload clean(host, c), spoiled(host, c);
      const verify::Sequence sequence = verify::sequences_of(spec, clean.host_args()).front();
      const auto sees = [&](int head, int row, int key) {
        return verify::sees(spec, clean.host_args(), sequence, head, row, key);
      };
      int key = c.seqlen_k;  // the last key that any row sees
      for (bool seen = false; !seen && key > 0;) {
        --key;
        for (int row = 0; row < c.seqlen_q; ++row) seen |= sees(0, row, key);
      }
      const Tensor v = spoiled.v().on_host();
      verify::store_element(v.data, v.dtype, key * v.strides[1] + 7, value);
      spoiled.v().upload();
      for (Workload* workload : {&clean, &spoiled}) {
        workload->reset();
        kernel.launch(spec, workload->args());
      }
      int reached = 0, left_out = 0;
      const Tensor o = *clean.host_args().o, spoiled_o = *spoiled.host_args().o;
      for (int head = 0; head < c.heads_q; ++head)
        for (int row = 0; row < c.seqlen_q; ++row) {
          const bool seen = sees(head, row, key);
          ++(seen ? reached : left_out);
          for (int column = 0; column < spec.head_dim; ++column) {
            const std::int64_t at = row * o.strides[1] + head * o.strides[2] + column;
            const double was = verify::load_element(o.data, o.dtype, at);
            const double is = verify::load_element(spoiled_o.data, o.dtype, at);
            if (seen && column == 7) {
              EXPECT_FALSE(std::isfinite(is)) << row;
            } else {
              EXPECT_NEAR(is, was, 0.01 * (1 + std::abs(was))) << row << " " << column;
            }
          }
        }
      EXPECT_GT(reached, 0);
      EXPECT_GT(left_out, 0);
    }
}

// The compiler's output for a CPU with AMX.
TEST(AmxKernel, MultipliesTilesAndCallsNobody) {
  for (const bool dropout : {false, true})
    for (const int dim : {40, 64, 128, 256}) {
      if (!in_sample("code for AMX", static_cast<std::uint64_t>(dim + dropout), 3)) continue;
      const AttentionSpec spec = forward_spec(DType::bf16, dim, {CausalMask{}}, {.dropout = dropout});
      const KernelSource source = render(spec, amx, heuristic_config(spec, amx, {}));
      const CompiledKernel kernel = clang_compiler()->compile(source, true);
      EXPECT_EQ(kernel.log, "");
      for (const char* instruction : {"ldtilecfg", "tilerelease", "tileloadd", "tilestored", "tdpbf16ps"})
        EXPECT_THAT(kernel.assembly, testing::HasSubstr(instruction));
      // Loading would fail for a function that does not exist.
      EXPECT_NO_THROW(LoadedObject(kernel.code).function(source.steps.front().function));
    }
}
TEST(AmxKernel, OfOtherDtypesIsThatForAvx512) {
  const Target pairs = Target::parse("x86-64-v4+bf16");
  for (const auto& [target, dtype] : {std::pair{amx, DType::fp16},
                                      {amx, DType::fp32},
                                      {pairs, DType::bf16},
                                      {pairs, DType::fp16},
                                      {pairs, DType::fp32}}) {
    const AttentionSpec spec = forward_spec(dtype, 64);
    const KernelConfig config = heuristic_config(spec, target, {});
    const auto without_title = [](const std::string& text) { return text.substr(text.find('\n')); };
    EXPECT_EQ(config, heuristic_config(spec, Target::parse("x86-64-v4"), {}));
    const KernelSource with = render(spec, target, config),
                       without = render(spec, Target::parse("x86-64-v4"), config);
    EXPECT_EQ(without_title(with.text), without_title(without.text));
    // Numerics tests run only one of the two.
    EXPECT_EQ(clang_compiler()->compile(with).code, clang_compiler()->compile(without).code);
  }
}

TEST(AmxPermission, IsAskedForWhereTheCpuHasIt) {
  static int asked;
  asked = 0;
  const auto granted = [] { return ++asked, 0; };
  EXPECT_EQ(cpu_target(amx, granted).target, amx);
  EXPECT_EQ(cpu_target(amx, granted).note, "");
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(cpu_target(Target::parse("x86-64-v4"), granted).target, Target::parse("x86-64-v4"));
  EXPECT_EQ(asked, 2);
}
TEST(AmxPermission, RefusedMeansAvx512) {
  const CpuTarget small_stack = cpu_target(amx, [] { return ENOSPC; });
  EXPECT_EQ(small_stack.target, Target::parse("x86-64-v4"));
  EXPECT_THAT(small_stack.note, testing::HasSubstr("alternate signal stack"));
  const CpuTarget old_kernel = cpu_target(amx, [] { return EINVAL; });
  EXPECT_EQ(old_kernel.target, Target::parse("x86-64-v4"));
  EXPECT_THAT(old_kernel.note, testing::HasSubstr("Invalid argument"));
}

// Whether this thread carries the state of tiles along: XINUSE, bits 17 and 18.
__attribute__((target("xsave"))) bool tiles_in_use() {
  return (__builtin_ia32_xgetbv(1) & (3 << 17)) != 0;
}
TEST(AmxHost, LaunchesLeaveNoTilesBehind) {
  if (!cpu_target().target.amx) GTEST_SKIP() << "no AMX here";
  TestDevice device({Device::Kind::cpu, 0}, amx.str());
  const auto engine = device.make_engine({.num_threads = 1});
  Workload workload(
      device,
      {.spec = forward_spec(DType::bf16, 64), .heads_q = 2, .heads_kv = 1, .seqlen_q = 70, .seqlen_k = 90});
  workload.reset();
  workload.kernel(*engine).launch(workload.args());
  EXPECT_FALSE(tiles_in_use());
  EXPECT_TRUE(workload.check());
}

}  // namespace
}  // namespace flashjit::testing_support
