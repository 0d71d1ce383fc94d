// A backward's kernels compile without a spill or a warning, and have the intended instructions.
#include <algorithm>
#include <random>

#include "codegen/families/backward_kernels.hpp"
#include "codegen/families/wgmma_products.hpp"
#include "codegen/formulas/formula_traits.hpp"
#include "codegen/spec/mask_rules.hpp"
#include "shared/backward_sm90a_wide_layout.h"
#include "tests/compile/nvrtc_test.hpp"

namespace flashjit::nvrtc_testing {
namespace {

using testing::HasSubstr;
using testing::Not;

AttentionSpec backward_spec(DType dtype, int head_dim, std::vector<Mask> masks = {}) {
  AttentionSpec spec;
  spec.op = Operation::backward;
  spec.dtype = dtype;
  spec.head_dim = head_dim;
  spec.mask = std::move(masks);
  return spec.validated();
}

void expect_sound_backward(const Case& c, const CompiledKernel& kernel) {
  EXPECT_THAT(kernel.log, Not(HasSubstr("C75"))) << c.name();
  EXPECT_THAT(kernel.log, Not(HasSubstr("warning"))) << c.name();
  const std::string type = c.spec.dtype == DType::bf16 ? "bf16" : "f16";
  const CudaBackwardKernels kernels(c.spec, c.config, true);
  const device::Sm90aBackwardLayout layout = backward_layout(c.spec, c.config);
  const int rows = kernels.wide ? device::Sm90aWideLayout::product_rows : layout.tile_rows;
  std::vector<std::string> instructions = {"ex2.approx.ftz.f32"};
  instructions.insert(
      instructions.end(),
      {"wgmma.mma_async.sync.aligned.m64n" + std::to_string(rows) + "k16.f32." + type + "." + type,
       "cp.async.bulk.tensor.4d.shared", "cp.async.bulk.shared", "mbarrier.try_wait", "setmaxnreg.inc",
       "setmaxnreg.dec", "griddepcontrol.launch_dependents", "griddepcontrol.wait"});
  if (kernels.orders_dq()) {
    instructions.push_back("ld.acquire.gpu.global.u32");
    instructions.push_back("st.release.gpu.global.u32");
  }
  if (!kernels.separate_dq) {
    instructions.push_back(layout.stages_dq ? "cp.reduce.async.bulk.global.shared" : "red.global.add.v4.f32");
    instructions.push_back("stmatrix.sync.aligned");
    // The consumers' turns.
    if (layout.ds_buffers > 2 && c.config.block_m > 64 && find_mask<BlockSparseMask>(c.spec.mask) == nullptr)
      instructions.push_back("bar.arrive");
  }
  for (const std::string& instruction : instructions)
    EXPECT_NE(kernel.assembly.find(instruction), std::string::npos) << c.name() << " has no " << instruction;
  // The compiler splits 16-byte stores into words where they are not instructions.
  if (!has_gradients(c.spec)) {
    const std::size_t at = kernel.assembly.find(".entry flashjit_backward(");
    const std::string entry = kernel.assembly.substr(at, kernel.assembly.find(".entry", at + 1) - at);
    EXPECT_EQ(entry.find("st.global.u32"), std::string::npos) << c.name() << " stores words";
  }
  const bool further = kernels.separate_dq && (kernels.finishes || kernels.has_exact_sums);
  EXPECT_EQ(kernel.steps.size(), further ? 4u : 3u) << c.name();
  // Dropout takes registers of consumers, and derivatives need them: up to 200 bytes of wide heads spill.
  if (c.spec.dropout && has_derivatives(c.spec)) return;
  // The thread that copies tiles spills where it has 24 registers, and the first step of narrow heads where
  // it finds far rows.
  const bool few_registers = kernel.assembly.find("setmaxnreg.dec.sync.aligned.u32 24") != std::string::npos;
  for (const CompiledStep& step : kernel.steps) {
    const int most = step.function == "flashjit_backward" && few_registers ? (c.spec.dropout ? 256 : 192)
                     : step.function == "flashjit_backward_prepare" && step.registers == 32 ? 412
                                                                                            : 0;
    EXPECT_LE(step.spill_bytes, most) << c.name() << " " << step.function << "\n" << kernel.log;
  }
}

// Head dimensions 64, 128 and 256 for sm_90a with a causal mask; every feature that changes code and others
// in turns.
TEST_F(NvrtcTest, DefaultKernelsOfBackward) {
  const Target target = Target::parse("sm_90a");
  std::vector<Case> cases;
  std::size_t place = 0;
  for (int head_dim = 8; head_dim <= 256; head_dim += 8) {
    const bool usual = head_dim == 64 || head_dim == 128 || head_dim == 256;
    for (int feature = 0; feature < 8; ++feature) {
      AttentionSpec spec = backward_spec(DType::bf16, head_dim);
      if (feature == 1) spec.mask = {CausalMask{}};
      if (feature == 2) spec.mask = {SlidingWindowMask{}}, spec.varlen = true;
      if (feature == 3) spec.mask = {CausalMask{}}, spec.dropout = true;
      if (feature == 4) spec.mask = {CausalMask{}}, spec.deterministic = true;
      if (feature == 5) spec.mask = {PaddingMask{}, BlockSparseMask{.per_head = true}};
      if (feature == 6) spec.mask = {SlidingWindowMask{.sinks = true}}, spec.grad_dtype = DType::fp32;
      if (feature == 7) {
        spec.mask = {CausalMask{}, PaddingMask{}, BlockSparseMask{}};
        spec.dtype = DType::fp16, spec.deterministic = spec.dropout = true;
      }
      const bool always = usual && feature == 1;
      if (always || has_turn(place, usual ? 7 : 107)) cases.push_back(default_case(spec.validated(), target));
      ++place;
    }
  }
  for_each_compiled(cases, expect_sound_backward);
}

// Blocks of 64 keys, two on a multiprocessor, whose threads have fewer registers.
TEST_F(NvrtcTest, BackwardOfFewKeys) {
  std::vector<Case> cases;
  for (const char* fields :
       {R"("mask": [])", R"("mask": ["causal"], "dropout": true)", R"("deterministic": true)",
        R"("mask": ["padding", {"kind": "block_sparse", "per_head": true}])", R"("score": ["softcap"])",
        R"("score": ["alibi", "softcap"], "sink_logits": true, "varlen": true, "mask": ["causal"])",
        R"("mask": ["tree"])", R"("mask": ["sliding_window"], "dropout": true, "varlen": true)",
        R"("score": ["softcap"], "dropout": true, "mask": ["causal"])"})
    for (const int head_dim : {32, 56, 64}) {
      const AttentionSpec spec =
          AttentionSpec::from_json(R"({"op": "backward", "dtype": "bf16", "head_dim": )" +
                                   std::to_string(head_dim) + ", " + fields + "}");
      cases.push_back(default_case(spec, Target::parse("sm_90a"), 49));
      EXPECT_EQ(cases.back().config.block_n, 64) << cases.back().name();
    }
  for_each_compiled(cases, expect_sound_backward);
}

// Heads of more than 256 columns: every feature that changes code, and columns that end within a chunk.
TEST_F(NvrtcTest, BackwardOfWideHeads) {
  std::vector<Case> cases;
  std::size_t place = 0;
  for (const char* heads : {R"("head_dim": 512)", R"("head_dim": 320)", R"("head_dim": 264, "head_dim_v": 8)",
                            R"("head_dim": 72, "head_dim_v": 504)"})
    for (const char* fields :
         {R"("mask": [])", R"("mask": ["causal"], "dropout": true)",
          R"("mask": ["sliding_window"], "varlen": true, "grad_dtype": "fp32")",
          R"("mask": ["padding", {"kind": "block_sparse", "per_head": true}], "dropout": true)",
          R"("mask": ["tree"], "deterministic": true)", R"("score": ["softcap"], "mask": ["causal"])",
          R"("score": ["alibi", "softcap"], "sink_logits": true, "varlen": true, "mask": ["causal"],
             "tables": {"alibi_slopes": {"dtype": "fp32", "shape": ["heads_q"], "grad": true}})",
          R"("score": ["softcap"], "dropout": true, "varlen": true, "mask": ["causal"])",
          R"("mask": [{"kind": "sliding_window", "sinks": true}], "offsets": true, "batch_invariant": true)",
          R"("mask": ["causal", "document[key] == document[position]"],
             "tables": {"document": {"dtype": "int32", "shape": ["batch", "seqlen_k"]}})"}) {
      const bool always = place < 2;
      if (!has_turn(place++, 9) && !always) continue;
      const AttentionSpec spec = AttentionSpec::from_json(R"({"op": "backward", "dtype": "bf16", )" +
                                                          std::string(heads) + ", " + fields + "}");
      cases.push_back(default_case(spec, Target::parse("sm_90a")));
      EXPECT_TRUE(CudaBackwardKernels(cases.back().spec, cases.back().config, true).wide);
    }
  for_each_compiled(cases, expect_sound_backward);
}

// They leave memory for a third buffer of dS, but no registers.
TEST_F(NvrtcTest, BackwardOfWideKeysAndNarrowValues) {
  AttentionSpec spec = backward_spec(DType::bf16, 256, {CausalMask{}});
  spec.head_dim_v = 64;
  const Case c = default_case(spec.validated(), Target::parse("sm_90a"));
  expect_sound_backward(c, compile(c));
}

// Its consumers have no register to spare.
TEST_F(NvrtcTest, BackwardWithAlibi) {
  const Case c = default_case(
      AttentionSpec::from_json(R"({"op": "backward", "dtype": "bf16", "head_dim": 64, "score": ["alibi"]})"),
      Target::parse("sm_90a"));
  expect_sound_backward(c, compile(c));
}

// With formulas: without derivatives, with them, and with gradients of what they read, which a thread adds
// up.
TEST_F(NvrtcTest, FormulasOfBackward) {
  constexpr const char* fields[] = {
      R"("score": ["alibi"])",
      R"("score": ["softcap"])",
      R"("score": ["alibi"], "tables": {"alibi_slopes": {"dtype": "fp32", "shape": ["heads_q"], "grad": true}})",
      R"("score": ["score + bias[bucket[min(max(position - key, 0), 127)], head]"],
         "tables": {"bias": {"dtype": "fp32", "shape": [32, "heads_q"], "grad": true},
                    "bucket": {"dtype": "uint8", "shape": [128]}})",
      R"("mask": ["causal", "document[key] == document[position]"],
         "tables": {"document": {"dtype": "int32", "shape": ["batch", "seqlen_k"]}})",
      R"("mask": ["key <= position && position - key < 1000"], "sink_logits": true)",
      R"("score": ["alibi", "softcap"], "deterministic": true, "sink_logits": true,
         "tables": {"alibi_slopes": {"dtype": "fp32", "shape": ["heads_q"], "grad": true}})",
      R"("score": ["softcap"], "dropout": true, "varlen": true, "mask": ["causal"])"};
  std::vector<Case> cases;
  std::size_t place = 0;
  for (const char* more : fields)
    for (const int head_dim : {64, 96, 128}) {
      const AttentionSpec spec =
          AttentionSpec::from_json(R"({"op": "backward", "dtype": "bf16", "head_dim": )" +
                                   std::to_string(head_dim) + ", " + more + "}");
      if (has_turn(place++, 8)) cases.push_back(default_case(spec, Target::parse("sm_90a")));
    }
  for_each_compiled(cases, expect_sound_backward);
}

// A sample of the wgmma kernel's search space. The register budget promises that nothing spills.
TEST_F(NvrtcTest, SearchSpaceOfBackwardOnSm90a) {
  std::mt19937 random(seed());
  const Target target = Target::parse("sm_90a");
  std::vector<Case> cases;
  std::size_t place = 0;
  for (const auto& [head_dim, head_dim_v] :
       {std::pair{64, 64}, {40, 72}, {72, 40}, {96, 96}, {128, 64}, {192, 128}, {256, 256}})
    for (const bool dropout : {false, true})
      for (const bool deterministic : {false, true}) {
        if (!has_turn(place++, 7)) continue;
        AttentionSpec spec = backward_spec(DType::bf16, head_dim, {CausalMask{}});
        spec.head_dim_v = head_dim_v;
        spec.dropout = dropout;
        spec.deterministic = deterministic;
        spec = spec.validated();
        std::vector<KernelConfig> space = search_space(spec, target);
        std::shuffle(space.begin(), space.end(), random);
        if (!test_all()) space.resize(1);
        for (const KernelConfig& config : space) cases.push_back({spec, target, config});
      }
  for_each_compiled(cases, expect_sound_backward);
}

}  // namespace
}  // namespace flashjit::nvrtc_testing
