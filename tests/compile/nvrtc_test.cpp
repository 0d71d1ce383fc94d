// Every default CUDA kernel compiles without a spill or a performance warning, and is made of the
// instructions meant; so does a seeded pairwise sample of specs x configs x targets. FLASHJIT_TEST_ALL=1:
// every target and head dimension, and a larger sample. FLASHJIT_TEST_SEED: another sample. Needs NVRTC, no
// GPU.
#include "runtime/cuda/nvrtc.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

#include "codegen/error.hpp"
#include "codegen/render.hpp"
#include "codegen/search_space.hpp"

namespace flashjit {
namespace {

using testing::HasSubstr;
using testing::Not;

bool test_all() {
  const char* value = std::getenv("FLASHJIT_TEST_ALL");
  return value && std::string(value) == "1";
}

unsigned seed() {
  const char* value = std::getenv("FLASHJIT_TEST_SEED");
  return value ? static_cast<unsigned>(std::strtoul(value, nullptr, 10)) : 20260101u;
}

// Every n-th place has a turn, and every place with FLASHJIT_TEST_ALL=1; the seed says which is first.
bool has_turn(std::size_t place, std::size_t n = 2) {
  return test_all() || (place + seed()) % n == 0;
}

std::vector<Target> cuda_targets() {
  std::vector<Target> targets;
  for (const Target& target : Target::all()) {
    if (target.is_cuda()) targets.push_back(target);
  }
  return targets;
}

AttentionSpec make_spec(DType dtype, int head_dim, int head_dim_v = 0) {
  AttentionSpec spec;
  spec.dtype = dtype;
  spec.head_dim = head_dim;
  spec.head_dim_v = head_dim_v;
  return spec.validated();
}

struct Case {
  AttentionSpec spec;
  Target target;
  KernelConfig config;
  std::string name() const { return target.str() + " " + spec.to_json() + " " + to_json(config); }
};

Case default_case(const AttentionSpec& spec, const Target& target, int seqlen = 4096) {
  const Shape shape{
      .batch = 2, .seqlen_q = seqlen, .seqlen_k = seqlen, .num_heads_q = 16, .num_heads_kv = 16};
  return {spec, target, heuristic_config(spec, target, shape)};
}

class NvrtcTest : public testing::Test {
 protected:
  void SetUp() override {
    try {
      compiler_ = nvrtc_compiler();
    } catch (const Error& error) {
      GTEST_SKIP() << error.message() << "\n" << error.detail();
    }
  }

  CompiledKernel compile(const Case& c) const {
    return compiler_->compile(render(c.spec, c.target, c.config), /*keep_assembly=*/true);
  }

  // Compiles what differs, on two threads, as many as the smallest machine that runs this has, and checks
  // each result in turn.
  void for_each_compiled(const std::vector<Case>& all,
                         const std::function<void(const Case&, const CompiledKernel&)>& check) const {
    std::vector<Case> cases;
    std::set<std::string> seen;
    for (const Case& c : all)
      if (seen.insert(c.name()).second) cases.push_back(c);
    std::cout << cases.size() << " kernels, " << all.size() - cases.size() << " more are the same\n";
    std::atomic<std::size_t> next = 0;
    std::mutex checking;
    const auto work = [&] {
      for (std::size_t i; (i = next++) < cases.size();) {
        try {
          const CompiledKernel kernel = compile(cases[i]);
          const std::lock_guard lock(checking);
          check(cases[i], kernel);
        } catch (const Error& error) {
          const std::lock_guard lock(checking);
          ADD_FAILURE() << cases[i].name() << ": " << error.message() << "\n" << error.detail();
        }
      }
    };
    std::thread second(work);
    work();
    second.join();
  }

  std::shared_ptr<const Compiler> compiler_;
};

// The step of that name; without one the kernel's first.
const CompiledStep& step_of(const CompiledKernel& kernel, std::string_view entry = {}) {
  for (const CompiledStep& step : kernel.steps)
    if (entry.empty() || step.entry == entry) return step;
  throw Error(ErrorCode::internal, "ptxas said nothing of " + std::string(entry));
}

void expect_sound(const Case& c, const CompiledKernel& kernel) {
  EXPECT_THAT(kernel.code.substr(0, 4),
              "\x7f"
              "ELF")
      << c.name();
  EXPECT_THAT(kernel.log, Not(HasSubstr("C75"))) << c.name();
  EXPECT_THAT(kernel.log, Not(HasSubstr("warning"))) << c.name();
  EXPECT_GT(step_of(kernel).registers, 0) << c.name();
  const std::string type = c.spec.dtype == DType::bf16 ? "bf16" : "f16";
  std::vector<std::string> instructions = {"ex2.approx.ftz.f32"};
  if (c.target.arch_specific) {
    instructions.insert(
        instructions.end(),
        {"wgmma.mma_async.sync.aligned.m64n" + std::to_string(c.config.block_n) + "k16.f32." + type + "." +
             type,
         "cp.async.bulk.tensor.4d.shared", "mbarrier.try_wait", "setmaxnreg.inc", "setmaxnreg.dec"});
  } else {
    instructions.insert(
        instructions.end(),
        {"mma.sync.aligned.m16n8k16.row.col.f32." + type + "." + type + ".f32",
         "ldmatrix.sync.aligned.m8n8.x4.shared", ".trans.shared.b16", "cp.async.cg.shared.global"});
  }
  for (const std::string& instruction : instructions) {
    EXPECT_NE(kernel.assembly.find(instruction), std::string::npos) << c.name() << " has no " << instruction;
  }
}

void expect_no_spill(const Case& c, const CompiledKernel& kernel) {
  EXPECT_EQ(step_of(kernel).spill_bytes, 0) << c.name() << "\n" << kernel.log;
}

// ---- defaults ----

// 64, 128 and 256 for every target and dtype, the smallest for every target, and each of the others for one
// target in one dtype.
TEST_F(NvrtcTest, DefaultKernels) {
  std::cout << "FLASHJIT_TEST_SEED=" << seed() << "\n";
  std::vector<Case> cases;
  const std::vector<Target> targets = cuda_targets();
  std::size_t column = 0;  // a target and a dtype
  for (const Target& target : targets) {
    for (const DType dtype : {DType::bf16, DType::fp16}) {
      for (int head_dim = 8; head_dim <= 256; head_dim += 8) {
        const bool usual = head_dim == 64 || head_dim == 128 || head_dim == 256;
        const bool smallest = dtype == DType::bf16 && head_dim == 8;
        if (usual || smallest || has_turn(head_dim / 8 + column, 2 * targets.size()))
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

// Options that change code beside the head dimension, and the heuristic's other branches, do not spill
// either: causal for both targets, the others in turns for one of the two. The seed says whether top_left is
// of packed sequences.
TEST_F(NvrtcTest, DefaultKernelsOfEverySpecOption) {
  std::cout << "FLASHJIT_TEST_SEED=" << seed() << "\n";
  std::vector<Case> cases;
  std::size_t place = 0;
  const auto add = [&](int head_dim, const std::vector<Mask>& mask, bool varlen, std::vector<int> seqlens) {
    AttentionSpec spec = make_spec(DType::bf16, head_dim);
    spec.mask = mask;
    spec.varlen = varlen;
    const bool usual = !varlen && mask == std::vector<Mask>{CausalMask{}};
    for (std::size_t i = 0; i < seqlens.size(); ++i)
      for (const bool specific : {false, true})
        if (usual || has_turn(place + i + specific))
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
    add(head_dim, {TreeMask{}, SlidingWindowMask{.sinks = true}, PaddingMask{}}, false, {4096});
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

// Heads packed where each has few rows: usual head dimensions, and what else decides code in turns.
TEST_F(NvrtcTest, DefaultKernelsThatPackHeads) {
  std::cout << "FLASHJIT_TEST_SEED=" << seed() << "\n";
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

// Merging is bound by memory: launch bounds keep as many warps resident as registers allow.
TEST_F(NvrtcTest, Merge) {
  std::vector<Case> cases;
  std::size_t place = 0;
  for (const Target& target : cuda_targets()) {
    for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
      for (const int head_dim : {8, 128, 256}) {
        AttentionSpec spec = make_spec(dtype, head_dim);
        spec.op = Operation::merge;
        for (const bool narrow : {false, true}) {
          if (narrow) spec.parts_dtype = dtype;
          for (const KernelConfig& config : search_space(spec.validated(), target))
            if (has_turn(place++, 8)) cases.push_back({spec.validated(), target, config});
        }
      }
    }
  }
  for_each_compiled(cases, [&](const Case& c, const CompiledKernel& kernel) {
    EXPECT_THAT(kernel.log, Not(HasSubstr("warning"))) << c.name();
    EXPECT_NE(kernel.assembly.find("ld.global.nc.L1::no_allocate.v4"), std::string::npos) << c.name();
    expect_no_spill(c, kernel);
  });
}

// Words of dropout take registers and shared memory: usual head dimensions for both targets, the others and
// masks in turns for one of the two.
TEST_F(NvrtcTest, DefaultKernelsWithDropout) {
  std::cout << "FLASHJIT_TEST_SEED=" << seed() << "\n";
  std::vector<Case> cases;
  std::size_t place = 0;
  const auto add = [&](AttentionSpec spec, int seqlen) {
    spec.dropout = true;
    const bool usual = spec.head_dim == 64 || spec.head_dim == 128 || spec.head_dim == 256;
    for (const bool specific : {false, true})
      if ((usual && spec.mask.empty()) || has_turn(place + specific))
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
                                        {TreeMask{}, SlidingWindowMask{.sinks = true}, PaddingMask{}}}) {
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

// A row in float32 leaves by other stores, at the end, where registers are fullest: usual head dimensions for
// both targets, and heads packed.
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

// ---- a pairwise sample ----

// A point of the sample: an index into each axis.
using Point = std::vector<int>;

// Points that together show every pair of values of every two axes: greedy, the best of a few random points
// each time.
std::vector<Point> pairwise(const std::vector<int>& sizes, std::mt19937& random) {
  std::set<std::tuple<int, int, int, int>> missing;
  const int axes = static_cast<int>(sizes.size());
  for (int a = 0; a < axes; ++a) {
    for (int b = a + 1; b < axes; ++b) {
      for (int i = 0; i < sizes[a]; ++i) {
        for (int j = 0; j < sizes[b]; ++j) missing.insert({a, i, b, j});
      }
    }
  }
  const auto covered = [&](const Point& p) {
    std::vector<std::tuple<int, int, int, int>> pairs;
    for (int a = 0; a < axes; ++a) {
      for (int b = a + 1; b < axes; ++b) {
        if (missing.contains({a, p[a], b, p[b]})) pairs.push_back({a, p[a], b, p[b]});
      }
    }
    return pairs;
  };
  std::vector<Point> points;
  while (!missing.empty()) {
    Point best;
    std::size_t most = 0;
    for (int attempt = 0; attempt < 30; ++attempt) {
      Point p;
      for (const int size : sizes) p.push_back(std::uniform_int_distribution<>(0, size - 1)(random));
      const auto& [a, i, b, j] = *missing.begin();  // progress is certain
      p[a] = i;
      p[b] = j;
      if (const std::size_t count = covered(p).size(); count > most) {
        most = count;
        best = p;
      }
    }
    for (const auto& pair : covered(best)) missing.erase(pair);
    points.push_back(best);
  }
  return points;
}

TEST_F(NvrtcTest, PairwiseSample) {
  std::mt19937 random(seed());
  std::cout << "FLASHJIT_TEST_SEED=" << seed() << "\n";
  const std::vector<Target> targets = cuda_targets();
  const std::vector<int> head_dims = {8, 40, 64, 96, 128, 192, 256};
  const std::vector<std::vector<Mask>> masks = {{},
                                                {CausalMask{}},
                                                {CausalMask{CausalAlign::top_left}},
                                                {SlidingWindowMask{.sinks = true}},
                                                {CausalMask{}, BlockSparseMask{}},
                                                {TreeMask{}}};
  const std::vector<int> sizes = {static_cast<int>(targets.size()),
                                  static_cast<int>(head_dims.size()),
                                  static_cast<int>(head_dims.size()),
                                  static_cast<int>(masks.size()),
                                  /*dtype*/ 2,
                                  /*lse*/ 2,
                                  /*varlen*/ 2,
                                  /*dropout*/ 2,
                                  /*o_dtype*/ 2,
                                  /*third of the search space*/ 3};
  std::vector<Case> cases;
  for (int repeat = 0; repeat < (test_all() ? 4 : 1); ++repeat) {
    for (const Point& p : pairwise(sizes, random)) {
      AttentionSpec spec = make_spec(p[4] ? DType::fp16 : DType::bf16, head_dims[p[1]], head_dims[p[2]]);
      spec.mask = masks[p[3]];
      spec.lse = p[5];
      spec.varlen = p[6];
      spec.dropout = p[7];
      if (p[8]) spec.o_dtype = DType::fp32;
      spec = spec.validated();
      const Target target = targets[p[0]];
      const std::vector<KernelConfig> space = search_space(spec, target);
      const std::size_t begin = space.size() * p[9] / 3;
      const std::size_t end = std::max(begin + 1, space.size() * (p[9] + 1) / 3);
      cases.push_back(
          {spec, target, space[std::uniform_int_distribution<std::size_t>(begin, end - 1)(random)]});
    }
  }
  int spilling = 0;
  for_each_compiled(cases, [&](const Case& c, const CompiledKernel& kernel) {
    expect_sound(c, kernel);
    if (c.target.arch_specific) expect_no_spill(c, kernel);
    spilling += step_of(kernel).spill_bytes > 0;  // allowed elsewhere: the tuner measures, and takes another
  });
  std::cout << cases.size() << " kernels of the search space, " << spilling << " of them spill\n";
}

// A sample of sm_90a's search space at the head dimensions that matter most, all of it with
// FLASHJIT_TEST_ALL=1: its budgets promise that nothing spills.
TEST_F(NvrtcTest, SearchSpaceOfSm90a) {
  std::mt19937 random(seed());
  std::cout << "FLASHJIT_TEST_SEED=" << seed() << "\n";
  const Target target = Target::parse("sm_90a");
  std::vector<Case> cases;
  for (const auto& [head_dim, head_dim_v] :
       {std::pair{64, 64}, {80, 80}, {128, 128}, {192, 128}, {256, 256}}) {
    for (const DType dtype : {DType::bf16, DType::fp16}) {
      for (const bool causal : {false, true}) {
        for (const bool dropout : {false, true}) {
          for (const bool float_output : {false, true}) {
            AttentionSpec spec = make_spec(dtype, head_dim, head_dim_v);
            if (causal) spec.mask = {CausalMask{}};
            spec.dropout = dropout;
            if (float_output) spec.o_dtype = DType::fp32;
            std::vector<KernelConfig> space = search_space(spec, target);
            std::shuffle(space.begin(), space.end(), random);
            const int place = head_dim / 16 + (dtype == DType::fp16) + causal + dropout;
            if (!has_turn(static_cast<std::size_t>(2 * float_output + place), 4)) continue;
            if (!test_all()) space.resize(1);
            for (const KernelConfig& config : space) cases.push_back({spec, target, config});
          }
        }
      }
    }
  }
  for_each_compiled(cases, [&](const Case& c, const CompiledKernel& kernel) {
    expect_sound(c, kernel);
    expect_no_spill(c, kernel);
  });
}

// ---- the compiler itself ----

TEST_F(NvrtcTest, IdentityNamesVersionAndBuild) {
  EXPECT_THAT(compiler_->identity(), testing::MatchesRegex("NVRTC [0-9]+\\.[0-9]+ build [0-9a-f]+"));
  EXPECT_EQ(compiler_->identity(), open_nvrtc(nvrtc_candidates())->identity());
}

TEST_F(NvrtcTest, OptionsNameTheArchitecture) {
  const AttentionSpec spec = make_spec(DType::bf16, 64);
  const auto options = [&](const char* target) {
    const Case c = default_case(spec, Target::parse(target));
    return compiler_->options(render(c.spec, c.target, c.config));
  };
  EXPECT_THAT(options("sm_90"), HasSubstr("sm_90"));
  EXPECT_NE(options("sm_90"), options("sm_80"));
}

TEST_F(NvrtcTest, EqualSourcesGiveEqualCode) {
  const Case c = default_case(make_spec(DType::bf16, 64), Target::parse("sm_90"));
  EXPECT_EQ(compile(c).code, compile(c).code);
}

TEST_F(NvrtcTest, BadSourceIsRefusedWithTheLog) {
  const Case c = default_case(make_spec(DType::bf16, 64), Target::parse("sm_90"));
  KernelSource source = render(c.spec, c.target, c.config);
  source.text += "int broken = undeclared_name;\n";
  try {
    compiler_->compile(source);
    FAIL() << "compiled";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::compile_failed);
    EXPECT_THAT(error.message(), HasSubstr("sm_90"));
    EXPECT_THAT(error.detail(), HasSubstr("undeclared_name"));
  }
}

TEST_F(NvrtcTest, HeadersComeFromMemoryOnly) {
  const Case c = default_case(make_spec(DType::bf16, 64), Target::parse("sm_90"));
  KernelSource source = render(c.spec, c.target, c.config);
  source.headers.pop_back();
  EXPECT_THROW(compiler_->compile(source), Error);
}

TEST_F(NvrtcTest, UnknownArchitectureNamesTheKnownOnes) {
  Case c = default_case(make_spec(DType::bf16, 64), Target::parse("sm_90"));
  KernelSource source = render(c.spec, c.target, c.config);
  source.target.level = 999;
  try {
    compiler_->compile(source);
    FAIL() << "compiled";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::compiler_unavailable);
    EXPECT_THAT(error.message(), HasSubstr("sm_90"));
  }
}

TEST_F(NvrtcTest, StaticSharedMemoryIsReported) {
  KernelSource source;
  source.target = Target::parse("sm_80");
  source.text =
      "extern \"C\" __global__ void f(float* p) {\n"
      "  __shared__ float s[100];\n"
      "  s[threadIdx.x] = p[threadIdx.x];\n"
      "  __syncthreads();\n"
      "  p[threadIdx.x] = s[99 - threadIdx.x];\n"
      "}\n";
  const CompiledKernel kernel = compiler_->compile(source);
  ASSERT_EQ(kernel.steps.size(), 1u);
  EXPECT_EQ(kernel.steps[0].entry, "f");
  EXPECT_EQ(kernel.steps[0].static_shared_memory, 400);
  EXPECT_EQ(kernel.steps[0].spill_bytes, 0);
  EXPECT_TRUE(kernel.assembly.empty());
}

TEST_F(NvrtcTest, SpillsAreReported) {
  KernelSource source;
  source.target = Target::parse("sm_80");
  source.text =
      "extern \"C\" __global__ void __launch_bounds__(1024, 2) f(float* p) {\n"
      "  float v[64];\n"
      "#pragma unroll\n"
      "  for (int i = 0; i < 64; ++i) v[i] = p[i * 1024 + threadIdx.x];\n"
      "  for (int n = 0; n < 100; ++n) {\n"
      "#pragma unroll\n"
      "    for (int i = 0; i < 64; ++i) v[i] = v[i] * v[(i + 1) % 64] + p[n];\n"
      "  }\n"
      "#pragma unroll\n"
      "  for (int i = 0; i < 64; ++i) p[i * 1024 + threadIdx.x] = v[i];\n"
      "}\n";
  // The report on one entry is not that on another.
  source.text += "extern \"C\" __global__ void g(float* p) { p[0] = 1; }\n";
  const CompiledKernel kernel = compiler_->compile(source);
  EXPECT_GT(step_of(kernel, "f").spill_bytes, 0);
  EXPECT_EQ(step_of(kernel, "g").spill_bytes, 0);
  EXPECT_LT(step_of(kernel, "g").registers, step_of(kernel, "f").registers);
}

// ---- where it is looked for ----

TEST(NvrtcSearch, NowhereToBeFound) {
  try {
    open_nvrtc({"/nonexistent/libnvrtc.so.13", "libflashjit-no-such-library.so"});
    FAIL() << "opened";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::compiler_unavailable);
    EXPECT_THAT(error.message(), HasSubstr("FLASHJIT_NVRTC"));
    EXPECT_THAT(error.detail(), HasSubstr("/nonexistent/libnvrtc.so.13"));
    EXPECT_THAT(error.detail(), HasSubstr("libflashjit-no-such-library.so"));
  }
}

TEST(NvrtcSearch, AnotherLibraryIsNotNvrtc) {
  try {
    open_nvrtc({"libm.so.6"});
    FAIL() << "opened";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::compiler_unavailable);
    EXPECT_THAT(error.detail(), HasSubstr("nvrtcVersion"));
  }
}

class NvrtcEnvironment : public testing::Test {
 protected:
  void TearDown() override {
    if (had_) {
      setenv("FLASHJIT_NVRTC", before_.c_str(), 1);
    } else {
      unsetenv("FLASHJIT_NVRTC");
    }
  }
  const bool had_ = std::getenv("FLASHJIT_NVRTC") != nullptr;
  const std::string before_ = had_ ? std::getenv("FLASHJIT_NVRTC") : "";
};

TEST_F(NvrtcEnvironment, ChosenFileIsTheOnlyCandidate) {
  setenv("FLASHJIT_NVRTC", "/nonexistent/nvrtc.so", 1);
  EXPECT_THAT(nvrtc_candidates(), testing::ElementsAre("/nonexistent/nvrtc.so"));
}

TEST_F(NvrtcEnvironment, ChosenFolderHasTheUsualNames) {
  setenv("FLASHJIT_NVRTC", testing::TempDir().c_str(), 1);
  for (const std::string& candidate : nvrtc_candidates()) {
    EXPECT_THAT(candidate, testing::StartsWith(testing::TempDir()));
    EXPECT_THAT(candidate, HasSubstr("libnvrtc.so.1"));
  }
}

}  // namespace
}  // namespace flashjit
