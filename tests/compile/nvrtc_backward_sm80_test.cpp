// The backward's kernels by mma.sync compile without a warning and without a spill. They have the intended
// instructions.
#include "tests/compile/nvrtc_test.hpp"

namespace flashjit::nvrtc_testing {
namespace {

using testing::HasSubstr;
using testing::Not;

AttentionSpec spec_with(int head_dim, int feature = 0) {
  AttentionSpec spec;
  spec.op = Operation::backward;
  spec.dtype = feature % 2 ? DType::bf16 : DType::fp16;
  spec.head_dim = head_dim;
  spec.varlen = feature == 3 || feature == 8;
  spec.dropout = feature == 4 || feature == 5 || feature == 9 || feature == 10;
  spec.deterministic = feature == 6 || feature == 7 || feature == 10;
  if (feature == 11) spec.grad_dtype = DType::fp32;
  if (feature == 1 || feature == 3 || feature == 5 || feature == 7) spec.mask = {CausalMask{}};
  if (feature == 2) spec.mask = {SlidingWindowMask{}};
  if (feature == 8) spec.mask = {TreeMask{}};
  if (feature == 9) spec.mask = {SlidingWindowMask{.sinks = true}, PaddingMask{}};
  if (feature == 10) spec.mask = {CausalMask{}, PaddingMask{}, BlockSparseMask{}};
  if (feature == 11) spec.mask = {PaddingMask{}, BlockSparseMask{.per_head = true}};
  return spec.validated();
}
constexpr int features = 12;

// With every set of features on every target; other head dimensions with one set on each target.
bool usual(int head_dim) {
  return head_dim == 64 || head_dim == 128;
}

void expect_sound_mma_sync(const Case& c, const CompiledKernel& kernel) {
  EXPECT_THAT(kernel.log, Not(HasSubstr("C75"))) << c.name();
  EXPECT_THAT(kernel.log, Not(HasSubstr("warning"))) << c.name();
  const std::string type = c.spec.dtype == DType::bf16 ? "bf16" : "f16";
  std::vector<std::string> instructions = {
      "mma.sync.aligned.m16n8k16.row.col.f32." + type + "." + type + ".f32",
      "ldmatrix.sync.aligned.m8n8.x4.shared", ".trans.shared.b16", "cp.async.cg.shared.global",
      "ex2.approx.ftz.f32"};
  if (c.target.level >= 90)
    instructions.insert(instructions.end(), {"griddepcontrol.launch_dependents", "griddepcontrol.wait"});
  const char* sums = c.target.level >= 90 ? "red.global.add.v4.f32" : "red.global.add.f32";
  if (!c.spec.deterministic) instructions.push_back(sums);
  for (const std::string& instruction : instructions)
    EXPECT_NE(kernel.assembly.find(instruction), std::string::npos) << c.name() << " has no " << instruction;
  EXPECT_EQ(kernel.assembly.find("red.global.add") == std::string::npos, c.spec.deterministic) << c.name();
  EXPECT_EQ(kernel.steps.size(), 3u) << c.name();
  for (const CompiledStep& step : kernel.steps)
    EXPECT_EQ(step.spill_bytes, 0) << c.name() << " " << step.function << "\n" << kernel.log;
}

bool by_mma_sync(const Target& target) {
  return !target.has(Instructions::wgmma);
}

// Head dimensions 64 and 128, full and causal, for sm_90; all else in turns.
TEST_F(NvrtcTest, DefaultKernelsOfBackwardByMmaSync) {
  std::vector<Case> cases;
  std::size_t place = 0;
  for (const Target& target : cuda_targets())
    for (int head_dim = 8; head_dim <= 256; head_dim += 8)
      for (int feature = 0; feature < features; ++feature) {
        if (!by_mma_sync(target)) continue;
        if (!usual(head_dim) && (head_dim / 8 + target.level) % features != feature) continue;
        ++place;
        if ((usual(head_dim) && feature < 2 && target.level == 90) ||
            has_turn(place, usual(head_dim) ? 71 : 113))
          cases.push_back(default_case(spec_with(head_dim, feature), target));
      }
  for_each_compiled(cases, expect_sound_mma_sync);
}

}  // namespace
}  // namespace flashjit::nvrtc_testing
