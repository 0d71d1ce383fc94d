// The backward by products of bf16: its own code on any CPU, with the products of emulator/, against the
// float64 oracle; and the compiler's output for CPUs with AMX and with AVX512_BF16.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <iostream>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "codegen/families/search_space.hpp"
#include "runtime/operation.hpp"
#include "tests/cpu/emulated_code.hpp"
#include "tests/numerics/specs.hpp"
#include "tests/support/sampled_test.hpp"
#include "tests/support/workload.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/mask.hpp"

namespace flashjit::testing_support {
namespace {

using enum CausalAlign;

AttentionSpec backward_spec(int head_dim, std::vector<Mask> mask = {}, const SpecOptions& options = {}) {
  return attention_spec(Operation::backward, DType::bf16, head_dim, std::move(mask), options);
}
KernelConfig blocks_of(int block_n) {
  return {.block_n = block_n, .num_stages = 1, .num_warps = 1};
}

class EmulatedBackward {
 public:
  EmulatedBackward(AttentionSpec spec, const Target& target, const KernelConfig& config, int threads = 1)
      : spec_(std::move(spec)),
        target_(target),
        config_(config),
        threads_(threads),
        code_(render(spec_, target, config)) {}

  void launch(const Shape& shape, AttentionArgs args) const {
    const PlannedKernel kernel{
        .spec = spec_, .target = target_, .config = config_, .parallelism = threads_, .steps = code_.steps()};
    const std::size_t bytes = runtime_of(spec_.op).workspace_bytes(kernel, shape);
    const FilledMemory workspace(bytes);
    args.workspace =
        Tensor::contiguous(workspace.data(), DType::fp32, {}, {static_cast<std::int64_t>(bytes / 4)});
    Launch launch;
    runtime_of(spec_.op).plan(kernel, args, launch);
    for (std::size_t i = 0; i < launch.size(); ++i) {
      const FilledMemory scratch(static_cast<std::size_t>(code_.step(i).scratch));
      code_.run(i, launch[i].params.data(), launch[i].items.count, scratch.data());
      scratch.expect_canary();
    }
    workspace.expect_canary();
  }

 private:
  AttentionSpec spec_;
  Target target_;
  KernelConfig config_;
  int threads_;
  EmulatedCode code_;
};

class Bf16Backward : public SampledTest, public testing::WithParamInterface<const char*> {
 protected:
  Bf16Backward() : SampledTest(8) {}

  const Target target = Target::parse(GetParam());

  // Only lends its memory.
  TestDevice host{{Device::Kind::cpu, 0}, "x86-64-v3"};

  void SetUp() override {
    if (Target::native().level < 3) GTEST_SKIP() << "no AVX2";
  }
  void TearDown() override {
    std::cout << "  at most " << take_share_of_bound() << " of the bound" << std::endl;
    SampledTest::TearDown();
  }
  void expect(const Case& c, const EmulatedBackward& kernel) {
    if (!has_turn()) return;
    Workload workload(host, c);
    workload.reset();
    kernel.launch(c.shape(), workload.args());
    EXPECT_TRUE(workload.check()) << c.str();
  }
  void expect(const Case& c, int block_n, int threads = 1) {
    expect(c, EmulatedBackward(c.spec, target, blocks_of(block_n), threads));
  }
};

TEST_P(Bf16Backward, Lengths) {
  for (const auto& mask : {std::vector<Mask>{}, {CausalMask{bottom_right}}, {CausalMask{top_left}}}) {
    const AttentionSpec spec = backward_spec(40, mask);
    const EmulatedBackward kernel(spec, target, blocks_of(64));
    std::uint64_t seed = 0;
    for (const int rows : {1, 31, 32, 33, 128, 130})
      for (const int keys : {1, 15, 17, 32, 33, 64, 65, 200})
        expect({.spec = spec,
                .batch = 2,
                .heads_q = 3,
                .heads_kv = 1,
                .seqlen_q = rows,
                .seqlen_k = keys,
                .layout = static_cast<MemoryLayout>(seed % 6),
                .layout_kv = static_cast<MemoryLayout>(seed / 2 % 6),
                .poison = seed % 2 ? Poison::nan : Poison::infinity,
                .seed = ++seed},
               kernel);
  }
}

TEST_P(Bf16Backward, HeadDimsAndDtypesOfGradients) {
  for (const auto& [dim, dim_v] : {std::pair{8, 8}, {16, 24}, {72, 40}, {128, 128}, {8, 256}, {256, 8}})
    for (const bool fp32_gradients : {false, true}) {
      AttentionSpec spec = backward_spec(dim, {CausalMask{}}, {.head_dim_v = dim_v});
      if (fp32_gradients) spec.grad_dtype = DType::fp32;
      expect({.spec = spec.validated(), .heads_q = 2, .heads_kv = 1, .seqlen_q = 100, .seqlen_k = 170}, 96);
    }
}

TEST_P(Bf16Backward, WideHeads) {
  for (const auto& [dim, dim_v] : {std::pair{512, 512}, {1024, 1024}}) {
    const AttentionSpec spec = backward_spec(dim, {CausalMask{}}, {.head_dim_v = dim_v});
    expect({.spec = spec, .heads_q = 2, .heads_kv = 1, .seqlen_q = 70, .seqlen_k = 90}, 64);
  }
}

TEST_P(Bf16Backward, PackedSequencesAndPartsOfBlocks) {
  for (const auto& mask : {std::vector<Mask>{}, {CausalMask{}}})
    for (const int threads : {1, 3}) {
      const AttentionSpec spec = backward_spec(72, mask, {.varlen = true});
      expect({.spec = spec,
              .heads_q = 4,
              .heads_kv = 2,
              .lengths_q = {0, 5, 0, 300, 1, 64, 65, 0},
              .lengths_k = {7, 5, 0, 260, 130, 0, 64, 0},
              .spare_rows = 30},
             64, threads);
      expect({.spec = backward_spec(72, mask), .heads_q = 2, .heads_kv = 1, .seqlen_q = 150, .seqlen_k = 400},
             64, threads);
    }
}

// Formulas with and without derivatives, and what they learn.
TEST_P(Bf16Backward, Formulas) {
  for (
      const char* fields :
      {R"("score": ["softcap", "score * (1 + slope[head] / 8) + bias[min(abs(key - position), 5)]"], "dropout": true,
           "mask": ["causal", "key % 7 != 3"], "sink_logits": true,
           "tables": {"slope": {"dtype": "fp32", "shape": ["heads_q"], "grad": true},
                      "bias": {"dtype": "bf16", "shape": ["n"], "grad": true}})",
       R"("score": ["alibi"], "mask": ["key <= position && position - key < 50"])"}) {
    const AttentionSpec spec = AttentionSpec::from_json(
        std::string(R"({"op": "backward", "dtype": "bf16", "head_dim": 40, )") + fields + "}");
    expect({.spec = spec, .batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 70, .seqlen_k = 130}, 64, 3);
  }
}

TEST_P(Bf16Backward, MasksWithAndWithoutDropout) {
  const std::vector<Mask> masks[] = {{PaddingMask{}},
                                     {CausalMask{}, PaddingMask{}},
                                     {SlidingWindowMask{bottom_right, true}, PaddingMask{}},
                                     {BlockSparseMask{16, 16}},
                                     {BlockSparseMask{48, 80}, CausalMask{}},
                                     {BlockSparseMask{64, 64, true}, SlidingWindowMask{top_left}},
                                     {TreeMask{}, PaddingMask{}}};
  for (const auto& mask : masks)
    for (const bool dropout : {false, true}) {
      const AttentionSpec spec = backward_spec(40, mask, {.dropout = dropout});
      const EmulatedBackward kernel(spec, target, heuristic_config(spec, target, {}));
      for (const std::uint64_t seed : {1, 4})
        expect({.spec = spec,
                .batch = 2,
                .heads_q = 4,
                .heads_kv = 2,
                .seqlen_q = 150 - 20 * static_cast<int>(seed),
                .seqlen_k = 130 + 30 * static_cast<int>(seed),
                .poison = seed % 2 ? Poison::nan : Poison::infinity,
                .seed = seed},
               kernel);
    }
}

// Scores so far from 0 that float32 cannot hold their lse, with rows that share it and with random ones.
TEST_P(Bf16Backward, FarScores) {
  for (const char* fields : {R"_(, "score": ["score + (row < 40 ? -1e9 : 0)"], "sink_logits": true)_",
                             R"(, "mask": ["causal"], "varlen": true)"}) {
    const AttentionSpec spec = AttentionSpec::from_json(
        std::string(R"({"op": "backward", "dtype": "bf16", "head_dim": 40)") + fields + "}");
    const EmulatedBackward kernel(spec, target, blocks_of(64), 3);
    for (const float scale : {1.0f, 1e4f, 1e10f}) {
      if (!has_turn()) continue;
      Case c{.spec = spec, .batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 70, .seqlen_k = 130};
      c.softmax_scale = scale;
      if (spec.varlen) c.lengths_q = {3, 70}, c.lengths_k = {40, 130};
      Workload workload(host, c);
      workload.reset();
      kernel.launch(c.shape(), workload.args());
      EXPECT_TRUE(workload.fetch());
      const verify::Report report = workload.report();
      EXPECT_EQ(report.wrong, 0) << report.str();
    }
  }
}

// A NaN or infinity in an input reaches no gradient of rows and keys that do not see each other.
TEST_P(Bf16Backward, ValuesThatAreNotFinite) {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const auto& mask :
       {std::vector<Mask>{CausalMask{}}, {SlidingWindowMask{}}, {BlockSparseMask{16, 16}}}) {
    const AttentionSpec spec = backward_spec(40, mask);
    const EmulatedBackward kernel(spec, target, blocks_of(64));
    for (const auto& [input, value] : {std::pair{&AttentionArgs::q, nan},
                                       {&AttentionArgs::k, nan},
                                       {&AttentionArgs::k, inf},
                                       {&AttentionArgs::v, inf},
                                       {&AttentionArgs::d_o, nan},
                                       {&AttentionArgs::d_o, inf}}) {
      if (!has_turn()) continue;
      const Case c{.spec = spec,
                   .heads_q = 2,
                   .heads_kv = 1,
                   .seqlen_q = 70,
                   .seqlen_k = 130,
                   .masks = verify::MaskDataOptions{},
                   .seed = 3};
      Workload clean(host, c), spoiled(host, c);
      const verify::Sequence sequence = verify::sequences_of(spec, clean.host_args()).front();
      const auto sees = [&](int row, int key) {
        return verify::sees(spec, clean.host_args(), sequence, 0, row, key);
      };
      const bool of_keys = input == &AttentionArgs::k || input == &AttentionArgs::v;
      int at = of_keys ? c.seqlen_k : c.seqlen_q / 2;  // of keys the last one that any row sees
      for (bool seen = !of_keys; !seen && at > 0;) {
        --at;
        for (int row = 0; row < c.seqlen_q; ++row) seen |= sees(row, at);
      }
      const Tensor t = spoiled.tensor(input).on_host();
      verify::store_element(t.data, t.dtype, at * t.strides[1] + 7, value);  // of head 0
      spoiled.tensor(input).upload();
      for (Workload* workload : {&clean, &spoiled}) {
        workload->reset();
        kernel.launch(c.shape(), workload->args());
      }
      int left_out = 0, reached = 0;
      const auto compare = [&](const Tensor& was, const Tensor& is, auto may_change) {
        for (std::int64_t row = 0; row < was.shape[1]; ++row)
          for (std::int64_t head = 0; head < was.shape[2]; ++head)
            for (std::int64_t column = 0; column < was.shape[3]; ++column) {
              const std::int64_t i = row * was.strides[1] + head * was.strides[2] + column;
              const double before = verify::load_element(was.data, was.dtype, i);
              const double after = verify::load_element(is.data, is.dtype, i);
              if (may_change(static_cast<int>(row), static_cast<int>(head))) {
                reached += !std::isfinite(after);
                continue;
              }
              ++left_out;
              EXPECT_NEAR(after, before, 0.01 * (1 + std::abs(before)))
                  << row << " " << head << " " << column;
            }
      };
      const auto row_changes = [&](int row, int head) {
        return of_keys ? sees(row, at) : row == at && head == 0;
      };
      const auto key_changes = [&](int key, int) { return of_keys ? key == at : sees(at, key); };
      compare(*clean.host_args().dq, *spoiled.host_args().dq, row_changes);
      compare(*clean.host_args().dk, *spoiled.host_args().dk, key_changes);
      compare(*clean.host_args().dv, *spoiled.host_args().dv, key_changes);
      EXPECT_GT(reached, 0);
      EXPECT_GT(left_out, 0);
    }
  }
}

TEST_P(Bf16Backward, EveryConfigOfTheSearchSpace) {
  const AttentionSpec spec = backward_spec(64, {CausalMask{}});
  for (const KernelConfig& config : search_space(spec, target))
    expect({.spec = spec, .heads_q = 2, .heads_kv = 1, .seqlen_q = 150, .seqlen_k = 333},
           EmulatedBackward(spec, target, config));
}

// The compiler's output.
TEST_P(Bf16Backward, MultipliesBf16AndCallsNobody) {
  const std::vector<const char*> instructions =
      target.amx ? std::vector{"ldtilecfg", "tilerelease", "tileloadd", "tilestored", "tdpbf16ps"}
                 : std::vector{"vdpbf16ps"};
  for (const bool dropout : {false, true})
    for (const int dim : {40, 128}) {
      const AttentionSpec spec = backward_spec(dim, {CausalMask{}}, {.dropout = dropout});
      const KernelSource source = render(spec, target, heuristic_config(spec, target, {}));
      const CompiledKernel kernel = clang_compiler()->compile(source, true);
      EXPECT_EQ(kernel.log, "");
      for (const char* instruction : instructions)
        EXPECT_THAT(kernel.assembly, testing::HasSubstr(instruction));
      // Loading would fail for a function that does not exist.
      for (const Step& step : source.steps)
        EXPECT_NO_THROW(LoadedObject(kernel.code).function(step.function));
    }
}

INSTANTIATE_TEST_SUITE_P(Amx, Bf16Backward, testing::Values("x86-64-v4+amx"));
INSTANTIATE_TEST_SUITE_P(Pairs, Bf16Backward, testing::Values("x86-64-v4+bf16"));

}  // namespace
}  // namespace flashjit::testing_support
