// Decode's kernels compile without a spill or a warning, and have the intended instructions.
#include "codegen/families/decode_kernels.hpp"
#include "tests/compile/nvrtc_test.hpp"

namespace flashjit::nvrtc_testing {
namespace {

using testing::HasSubstr;
using testing::Not;

AttentionSpec decode_spec(DType dtype, int head_dim, int head_dim_v = 0, std::vector<Mask> masks = {}) {
  AttentionSpec spec;
  spec.op = Operation::decode;
  spec.dtype = dtype;
  spec.head_dim = head_dim;
  spec.head_dim_v = head_dim_v;
  spec.mask = std::move(masks);
  return spec.validated();
}

// The default for so many query rows of four heads for each key/value head.
Case case_for_rows(const AttentionSpec& spec, const Target& target, int seqlen_q) {
  const Shape shape{
      .batch = 16, .seqlen_q = seqlen_q, .seqlen_k = 8192, .num_heads_q = 32, .num_heads_kv = 8};
  return {spec, target, heuristic_config(spec, target, shape)};
}

void expect_sound_decode(const Case& c, const CompiledKernel& kernel) {
  EXPECT_THAT(kernel.log, Not(HasSubstr("C75"))) << c.name();
  EXPECT_THAT(kernel.log, Not(HasSubstr("warning"))) << c.name();
  const std::string type = c.spec.dtype == DType::bf16 && !c.spec.kv_dtype ? "bf16" : "f16";
  const bool by_forward = decodes_by_forward(c.spec, c.target, c.config);
  std::vector<std::string> instructions = {"wgmma.mma_async.sync.aligned", "cp.async.bulk.tensor",
                                           "setmaxnreg", "ex2.approx.ftz.f32"};
  if (decodes_by_keys_as_rows(c.spec, c.target, c.config))
    instructions = {"wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16",
                    "setmaxnreg",
                    "ldmatrix.sync.aligned.m8n8.x4.shared",
                    ".trans.shared.b16",
                    "cp.async.cg.shared.global",
                    "cp.async.mbarrier.arrive.noinc",
                    "ex2.approx.ftz.f32"};
  else if (!by_forward)
    instructions = {"mma.sync.aligned.m16n8k16.row.col.f32." + type + "." + type + ".f32",
                    "ldmatrix.sync.aligned.m8n8.x4.shared",
                    ".trans.shared.b16",
                    "cp.async.cg.shared.global",
                    "cp.async.mbarrier.arrive.noinc",
                    "ex2.approx.ftz.f32"};
  if (c.spec.kv_dtype == DType::fp8_e4m3 && c.target.level >= 89)
    instructions.push_back("cvt.rn.f16x2.e4m3x2");
  if (!by_forward && c.target.level >= 90)
    instructions.insert(instructions.end(),
                        {"mbarrier.try_wait", "griddepcontrol.launch_dependents", "griddepcontrol.wait"});
  for (const std::string& instruction : instructions)
    EXPECT_NE(kernel.assembly.find(instruction), std::string::npos) << c.name() << " has no " << instruction;
  EXPECT_EQ(kernel.steps.size(), 2u) << c.name();
  for (const CompiledStep& step : kernel.steps)
    EXPECT_EQ(step.spill_bytes, 0) << c.name() << " " << step.function << "\n" << kernel.log;
}

// Heads of more than 256 columns, whose output several warps share: on sm_90a those that the forward's kernel
// does not take.
TEST_F(NvrtcTest, DecodeOfWideHeads) {
  std::vector<Case> cases;
  std::size_t place = 0;
  for (const Target& target : cuda_targets())
    for (const auto& [dim, dim_v] : {std::pair{576, 512}, {512, 512}, {264, 328}, {64, 576}})
      for (const std::optional<DType> kv_dtype : {std::optional<DType>(), std::optional(DType::fp8_e4m3)})
        for (const bool own_scales : {false, true}) {
          AttentionSpec spec{.op = Operation::decode, .head_dim = dim, .head_dim_v = dim_v, .paged = true};
          spec.v_in_k = dim_v < dim;
          spec.mask = {CausalMask{}};
          spec.kv_dtype = kv_dtype;
          if (kv_dtype && own_scales) spec.kv_scale = KvScale::token_head;
          spec = spec.validated();
          const KernelConfig config = heuristic_config(spec, target, {64, 1, 8192, 16, 1, 64});
          if ((!kv_dtype && own_scales) || decodes_by_forward(spec, target, config)) continue;
          const bool latent = dim == 576 && (target.str() == "sm_80" || target.str() == "sm_90a");
          if (latent || has_turn(place++, 11)) cases.push_back({spec, target, config});
        }
  for_each_compiled(cases, expect_sound_decode);
}

// Latents whose consumers take turns at blocks.
TEST_F(NvrtcTest, DecodeByAlternatingConsumers) {
  const Target target = Target::parse("sm_90a");
  std::vector<Case> cases;
  std::size_t number = 0;
  const auto add = [&](AttentionSpec spec) {
    spec = spec.validated();
    spec.config = {.block_m = 64, .block_n = 64, .num_stages = 2, .ping_pong = true};
    const KernelConfig config = heuristic_config(spec, target, {64, 2, 8192, 128, 1, spec.paged ? 64 : 0});
    ASSERT_TRUE(config.ping_pong);
    if (has_turn(number++, 3)) cases.push_back({spec, target, config});
  };
  for (const auto& [dim, dim_v] : {std::pair{576, 512}, {448, 384}})
    for (const bool paged : {true, false}) {
      AttentionSpec spec{.op = Operation::decode, .head_dim = dim, .head_dim_v = dim_v, .paged = paged};
      spec.v_in_k = true;
      add(spec);
      spec.mask = {CausalMask{}};
      add(spec);
      spec.o_dtype = DType::fp32;
      add(spec);
      spec.dtype = DType::fp16;
      spec.varlen = paged;
      add(spec);
    }
  for_each_compiled(cases, expect_sound_decode);
}

// Few rows of 8-bit latents: each mask and kind of formula beside each kind of stored numbers.
TEST_F(NvrtcTest, DecodeOfLatentsWithKeysAsRows) {
  const std::vector<std::vector<Mask>> lists = {{},
                                                {CausalMask{}},
                                                {CausalMask{}, SlidingWindowMask{.sinks = true}},
                                                {TreeMask{}},
                                                {FormulaMask{"(row + key) % 3 != 0"}}};
  const Target target = Target::parse("sm_90a");
  std::vector<Case> cases;
  std::size_t place = 0;
  for (const DType kv_dtype : {DType::fp8_ds_mla, DType::fp8_e4m3, DType::fp8_e5m2, DType::int8})
    for (const auto& masks : lists)
      for (const auto& [dim, dim_v] : {std::pair{576, 512}, {320, 320}, {512, 448}, {576, 576}})
        for (const bool more : {false, true}) {
          if (kv_dtype == DType::fp8_ds_mla && dim_v != 512) continue;
          AttentionSpec spec{.op = Operation::decode, .head_dim = dim, .head_dim_v = dim_v, .paged = true};
          spec.v_in_k = true;
          spec.kv_dtype = kv_dtype;
          spec.mask = masks;
          if (more) {
            spec.varlen = spec.offsets = true;
            spec.score = {"30 * tanh(score / 30)"};
          }
          const bool usual = dim_v == 512 && masks.size() == 1 && !more;
          if (!usual && !has_turn(place++, 17)) continue;
          spec = spec.validated();
          const KernelConfig config = heuristic_config(spec, target, {64, 1, 8192, 16, 1, 64});
          ASSERT_TRUE(decodes_by_keys_as_rows(spec, target, config)) << spec.to_json();
          cases.push_back({spec, target, config});
        }
  for_each_compiled(cases, expect_sound_decode);
}

// The usual head dimensions for sm_90a, others and other targets in turns.
TEST_F(NvrtcTest, DefaultKernelsOfDecode) {
  std::vector<Case> cases;
  std::size_t place = 0;
  for (const Target& target : cuda_targets())
    for (const int seqlen_q : {1, 8, 64})
      for (int head_dim = 8; head_dim <= 256; head_dim += 8) {
        const bool usual = head_dim == 64 || head_dim == 128 || head_dim == 256;
        ++place;
        if ((usual && target.has(Instructions::wgmma) && seqlen_q != 8) || has_turn(place, usual ? 43 : 389))
          cases.push_back(case_for_rows(
              decode_spec(place % 3 ? DType::bf16 : DType::fp16, head_dim, place % 5 ? 0 : 264 - head_dim),
              target, seqlen_q));
      }
  for_each_compiled(cases, expect_sound_decode);
}

TEST_F(NvrtcTest, DefaultKernelsOfEveryOptionOfDecode) {
  const std::vector<std::vector<Mask>> lists = {
      {},
      {CausalMask{}},
      {SlidingWindowMask{}},
      {SlidingWindowMask{.sinks = true}},
      {TreeMask{}},
      {CausalMask{}, SlidingWindowMask{.sinks = true}},
      {CausalMask{}, TreeMask{}},
  };
  std::vector<Case> cases;
  std::size_t place = 0;
  for (const auto& masks : lists)
    for (const bool paged : {false, true})
      for (const bool varlen : {false, true})
        for (const int head_dim : {64, 128, 256})
          for (const int seqlen_q : {1, 8, 64})
            for (const char* target : {"sm_90a", "sm_80", "sm_89"}) {
              if (!has_turn(place++, 263)) continue;
              AttentionSpec spec = decode_spec(DType::bf16, head_dim, 0, masks);
              spec.paged = paged;
              spec.varlen = varlen;
              if (place % 3 == 0) spec.o_dtype = DType::fp32;
              cases.push_back(case_for_rows(spec.validated(), Target::parse(target), seqlen_q));
            }
  for_each_compiled(cases, expect_sound_decode);
}

// Heuristic configs, in turns the tuner's others. Every head dimension: rows of 8-bit columns end with half a
// chunk where 16 does not divide it. The whole table takes minutes for each target.
class NvrtcEightBitKeysOfDecode : public NvrtcTest, public testing::WithParamInterface<Target> {};

TEST_P(NvrtcEightBitKeysOfDecode, DoNotSpill) {
  std::vector<Case> cases;
  std::size_t place = 0;
  for (const DType kv_dtype : {DType::int8, DType::fp8_e4m3, DType::fp8_e5m2})
    for (const KvScale kv_scale : {KvScale::tensor, KvScale::head, KvScale::token_head})
      for (const bool paged : {false, true})
        for (const Target& target : cuda_targets())
          for (const int head_dim : {24, 64, 128, 200, 256}) {
            AttentionSpec spec = decode_spec(DType::bf16, head_dim, 0, {CausalMask{}});
            spec.dtype = ++place % 3 ? DType::bf16 : DType::fp16;
            spec.paged = paged;
            spec.varlen = place % 5 == 0;
            spec.kv_dtype = kv_dtype;
            spec.kv_scale = kv_scale;
            spec = spec.validated();
            if (target != GetParam()) continue;
            for (const int seqlen_q : {1, 8, 64})
              if (has_turn(3 * place + static_cast<std::size_t>(seqlen_q), 877))
                cases.push_back(case_for_rows(spec, target, seqlen_q));
            const std::vector<KernelConfig> space = search_space(spec, target);
            if (has_turn(place, 601)) cases.push_back({spec, target, space[place % space.size()]});
          }
  for_each_compiled(cases, expect_sound_decode);
}

INSTANTIATE_TEST_SUITE_P(On, NvrtcEightBitKeysOfDecode, testing::ValuesIn(cuda_targets()),
                         [](const auto& of) { return of.param.str(); });

// The tuner's other choices.
TEST_F(NvrtcTest, SearchSpaceOfDecode) {
  std::vector<Case> cases;
  std::size_t place = 0;
  for (const char* name : {"sm_90a", "sm_86"})
    for (const int head_dim : {64, 128, 256})
      for (const bool paged : {false, true}) {
        AttentionSpec spec = decode_spec(DType::bf16, head_dim, 0, {CausalMask{}});
        spec.paged = paged;
        const Target target = Target::parse(name);
        for (const KernelConfig& config : search_space(spec.validated(), target))
          if (has_turn(place++, 331)) cases.push_back({spec.validated(), target, config});
      }
  for_each_compiled(cases, expect_sound_decode);
}

}  // namespace
}  // namespace flashjit::nvrtc_testing
