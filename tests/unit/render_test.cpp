#include "codegen/render.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string>

#include "codegen/embedded_headers.hpp"
#include "codegen/families/kernel_family.hpp"
#include "codegen/families/search_space.hpp"
#include "shared/forward_sm80_params.h"
#include "shared/forward_sm90a_params.h"
#include "shared/layout.h"

namespace flashjit {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

const fs::path source_dir = FLASHJIT_SOURCE_DIR;

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The names in a text's #include "name" lines.
std::vector<std::string> includes(std::string_view text) {
  constexpr std::string_view start = "\n#include \"";
  std::string lines = "\n";
  lines += text;
  std::vector<std::string> names;
  for (std::size_t at = 0; (at = lines.find(start, at)) != std::string::npos;) {
    at += start.size();
    names.push_back(lines.substr(at, lines.find('"', at) - at));
  }
  return names;
}

struct Golden {
  const char* file;
  const char* spec;
  const char* target;
  KernelConfig config;
};

const Golden goldens[] = {
    {"bf16_d128.cu", R"({"op": "forward", "dtype": "bf16", "head_dim": 128})", "sm_90", {128, 64, 2, 4}},
    {"bf16_d64_causal.cu",
     R"({"op": "forward", "dtype": "bf16", "head_dim": 64, "mask": ["causal"]})",
     "sm_80",
     {128, 128, 1, 4}},
    {"bf16_d128_causal_sm90a.cu",
     R"({"op": "forward", "dtype": "bf16", "head_dim": 128, "mask": ["causal"]})",
     "sm_90a",
     {128, 128, 2, 12, true, true, TileOrder::sections}},
    {"fp16_d64_causal_dropout_sm90a.cu",
     R"({"op": "forward", "dtype": "fp16", "head_dim": 64, "mask": ["causal"], "dropout": true})",
     "sm_90a",
     {192, 96, 2, 16, true, true, TileOrder::sections}},
    {"fp16_d192_v128_masks_pinned.cu",
     R"({"op": "forward", "dtype": "fp16", "head_dim": 192, "head_dim_v": 128, "lse": false, "varlen": true,
         "mask": ["tree", {"kind": "block_sparse", "block_m": 64}, "causal"],
         "config": {"block_m": 64, "num_warps": 4}})",
     "sm_120",
     {64, 32, 1, 4}},
    {"fp32_d128_causal.cpp",
     R"({"op": "forward", "dtype": "fp32", "head_dim": 128, "mask": ["causal"]})",
     "x86-64-v4",
     {192, 128, 1, 1}},
    {"bf16_d80_top_left.cpp",
     R"({"op": "forward", "dtype": "bf16", "head_dim": 80, "mask": [{"kind": "causal", "align": "top_left"}]})",
     "x86-64-v3",
     {48, 64, 1, 1}},
    {"bf16_d128_paged.cu",
     R"({"op": "forward", "dtype": "bf16", "head_dim": 128, "mask": ["causal"], "varlen": true, "paged": true})",
     "sm_90",
     {128, 64, 2, 4}},
    {"fp16_d64_window_paged.cpp",
     R"({"op": "forward", "dtype": "fp16", "head_dim": 64, "mask": ["sliding_window"], "paged": true})",
     "x86-64-v3",
     {192, 128, 1, 1}},
    {"bf16_d128_decode_paged.cpp",
     R"({"op": "decode", "dtype": "bf16", "head_dim": 128, "mask": [{"kind": "sliding_window", "sinks": true}],
         "varlen": true, "paged": true})",
     "x86-64-v4",
     {64, 64, 1, 1}},
    {"bf16_d128_decode_fp8_paged.cu",
     R"({"op": "decode", "dtype": "bf16", "head_dim": 128, "paged": true, "kv_dtype": "fp8_e4m3",
         "kv_scale": "token_head"})",
     "sm_90",
     {16, 32, 2, 12}},
    {"bf16_d64_decode_append.cu",
     R"({"op": "decode", "dtype": "bf16", "head_dim": 64, "mask": ["causal"], "varlen": true, "paged": true,
         "append": true, "rotary": {"style": "half", "dim": 32, "q": true}})",
     "sm_90",
     {16, 32, 2, 8}},
    {"bf16_d128_backward.cu",
     R"({"op": "backward", "dtype": "bf16", "head_dim": 128, "mask": ["causal"]})",
     "sm_90",
     {64, 128, 2, 8}},
    {"fp16_d64_backward_deterministic.cu",
     R"({"op": "backward", "dtype": "fp16", "head_dim": 64, "mask": ["padding", "block_sparse"], "dropout": true,
         "grad_dtype": "fp32", "deterministic": true})",
     "sm_80",
     {64, 128, 2, 8}},
    {"bf16_d64_backward_sm90a.cu",
     R"({"op": "backward", "dtype": "bf16", "head_dim": 64, "mask": ["causal"], "varlen": true})",
     "sm_90a",
     {128, 128, 2, 12}},
    {"fp32_d128_backward.cpp",
     R"({"op": "backward", "dtype": "fp32", "head_dim": 128, "mask": ["causal"]})",
     "x86-64-v4",
     {0, 256, 1, 1}},
    {"bf16_d128_backward_amx.cpp",
     R"({"op": "backward", "dtype": "bf16", "head_dim": 128, "mask": ["causal", "padding"], "dropout": true})",
     "x86-64-v4+amx",
     {0, 512, 1, 1}},
};

KernelSource render(const Golden& golden) {
  return render(AttentionSpec::from_json(golden.spec), Target::parse(golden.target), golden.config);
}

TEST(Render, PinsChangeNothingButTheConfig) {
  const Target target = Target::parse("sm_80");
  AttentionSpec spec = AttentionSpec{.head_dim = 64}.validated();
  const KernelConfig config = heuristic_config(spec, target, {});
  const std::string text = render(spec, target, config).text;
  spec.config = pinned(config);
  EXPECT_EQ(render(spec, target, config).text, text);
}

// To accept changed output of render(): run with FLASHJIT_UPDATE_GOLDEN=1, then review the diff.
TEST(Render, Golden) {
  for (const Golden& golden : goldens) {
    const fs::path path = source_dir / "tests/golden" / golden.file;
    const std::string text = render(golden).text;
    if (std::getenv("FLASHJIT_UPDATE_GOLDEN") != nullptr) std::ofstream(path, std::ios::binary) << text;
    EXPECT_EQ(text, read(path)) << golden.file << "; to accept it, run with FLASHJIT_UPDATE_GOLDEN=1";
  }
}

TEST(Render, IsAFunctionOfItsArguments) {
  std::set<std::string> texts;
  for (const Golden& golden : goldens) {
    const KernelSource source = render(golden);
    EXPECT_EQ(source.text, render(golden).text);
    EXPECT_EQ(source.target.str(), golden.target);
    EXPECT_EQ(source.config, golden.config);
    EXPECT_TRUE(texts.insert(source.text).second);
    for (int KernelConfig::* choice : {&KernelConfig::block_m, &KernelConfig::block_n,
                                       &KernelConfig::num_stages, &KernelConfig::num_warps}) {
      if (golden.config.*choice == 0) continue;  // a CPU's backward has no block_m
      Golden other = golden;
      other.config.*choice += 1;
      EXPECT_TRUE(texts.insert(render(other).text).second);
    }
    if (!source.target.has(Instructions::wgmma) ||
        AttentionSpec::from_json(golden.spec).op == Operation::backward)
      continue;
    for (bool KernelConfig::* choice :
         {&KernelConfig::q_in_registers, &KernelConfig::ping_pong, &KernelConfig::pack_gqa}) {
      Golden other = golden;
      other.config.*choice = !(other.config.*choice);
      EXPECT_TRUE(texts.insert(render(other).text).second);
    }
    Golden other = golden;
    other.config.tile_order = TileOrder::heads;
    EXPECT_TRUE(texts.insert(render(other).text).second);
  }
}

TEST(Render, StepsOfADecodeThatAppends) {
  for (const Target& target : Target::all()) {
    const AttentionSpec spec =
        AttentionSpec{.op = Operation::decode, .head_dim = 64, .append = true}.validated();
    const std::vector<Step> steps =
        render(spec, target, heuristic_config(spec, target, {1, 1, 1000, 8, 2})).steps;
    ASSERT_EQ(steps.size(), target.is_cuda() ? 3u : 2u);
    EXPECT_EQ(steps[0].function, "flashjit_append");
    EXPECT_EQ(steps[0].threads, target.is_cuda() ? 128 : 0);
    EXPECT_EQ(steps[1].function, "flashjit_decode");
  }
}

TEST(Render, Steps) {
  const std::vector<Step> cuda = render(goldens[0]).steps;
  ASSERT_EQ(cuda.size(), 1u);
  EXPECT_EQ(cuda[0], (Step{.function = "flashjit_forward",
                           .threads = 128,
                           .shared_memory = device::cuda_forward_shared_memory(128, 128, 128, 64, 2, false),
                           .params = cuda[0].params}));
  EXPECT_EQ(cuda[0].params.text, "Sm80ForwardParams");
  EXPECT_EQ(cuda[0].params.bytes, sizeof(device::Sm80ForwardParams));
  const std::vector<Step> hopper = render(goldens[2]).steps;
  ASSERT_EQ(hopper.size(), 2u);
  EXPECT_EQ(hopper[0], (Step{.function = "flashjit_forward",
                             .threads = 384,
                             .shared_memory = device::Sm90aLayout(128, 128, 128, 128, 2, false).end,
                             .params = hopper[0].params}));
  EXPECT_EQ(hopper[1], (Step{.function = "flashjit_forward_merge",
                             .threads = device::forward_merge_threads,
                             .params = hopper[1].params}));
  EXPECT_EQ(hopper[0].params.second_bytes, sizeof(device::ForwardMaps));
  const std::vector<Step> dropout = render(goldens[3]).steps;
  ASSERT_EQ(dropout.size(), 2u);
  EXPECT_EQ(dropout[0].shared_memory, device::Sm90aLayout(64, 64, 192, 96, 2, true).end);
  // Dropout adds its key, and the words of the columns of four blocks.
  EXPECT_GE(dropout[0].shared_memory, device::Sm90aLayout(64, 64, 192, 96, 2, false).end + 16 + 4 * 96 * 4);
  const std::vector<Step> cpu = render(goldens[6]).steps;
  ASSERT_EQ(cpu.size(), 1u);
  EXPECT_EQ(cpu[0], (Step{.function = "flashjit_forward",
                          .scratch = device::cpu_forward_scratch(80, 80, 48, 64, false) +
                                     device::cpu_packed_block(80, 80, 64),
                          .params = cpu[0].params}));
}

TEST(Render, HeadersAreAllThatIsReached) {
  for (const Golden& golden : goldens) {
    const KernelSource source = render(golden);
    std::vector<std::string> listed;
    for (const EmbeddedHeader& header : source.headers) listed.emplace_back(header.name);
    std::set<std::string> reached;
    for (const std::string& name : includes(source.text)) reached.insert(name);
    EXPECT_EQ(listed.front(), includes(source.text).front());
    for (const EmbeddedHeader& header : source.headers) {
      EXPECT_THAT(reached, testing::Contains(std::string(header.name)))
          << "is listed before what includes it";
      for (const std::string& name : includes(header.text)) reached.insert(name);
    }
    EXPECT_THAT(listed, testing::UnorderedElementsAreArray(reached));
    for (const std::string& name : listed) {
      EXPECT_THAT(name, Not(testing::StartsWith(source.target.is_cuda() ? "cpu/" : "cuda/")));
    }
  }
}

// A change of the backward's code changes no key of other operations: keys hold the digests of all headers.
TEST(Render, NothingButABackwardReachesItsHeaders) {
  const auto reaches = [](const KernelSource& source) {
    return std::any_of(source.headers.begin(), source.headers.end(), [](const EmbeddedHeader& header) {
      return header.name.find("backward") != std::string_view::npos;
    });
  };
  const std::vector<std::vector<Mask>> masks = {
      {}, {CausalMask{}, SlidingWindowMask{.sinks = true}}, {PaddingMask{}, BlockSparseMask{}}, {TreeMask{}}};
  for (const Target& target : Target::all())
    for (const auto& mask : masks)
      for (const Operation op : operations_on(target)) {
        try {
          const AttentionSpec spec =
              AttentionSpec{.op = op, .dtype = DType::bf16, .head_dim = 64, .mask = mask}.validated();
          const KernelSource source = render(spec, target, heuristic_config(spec, target, {}));
          EXPECT_EQ(reaches(source), op == Operation::backward) << target.str();
        } catch (const Error&) {  // an operation has no such mask, or no such target
        }
      }
  EXPECT_TRUE(reaches(render(AttentionSpec{.op = Operation::backward, .head_dim = 64}.validated(),
                             Target::parse("x86-64-v4"), {.block_n = 64, .num_warps = 1})));
}

TEST(Render, StandaloneHoldsEveryHeaderOnce) {
  for (const Golden& golden : goldens) {
    const KernelSource source = render(golden);
    const std::string text = standalone(source);
    EXPECT_THAT(includes(text), testing::IsEmpty());
    EXPECT_THAT(text, Not(HasSubstr("#pragma once")));
    for (const EmbeddedHeader& header : source.headers) {
      const std::string mark = "// ---- " + std::string(header.name) + "\n";
      EXPECT_THAT(text, HasSubstr(mark));
      EXPECT_EQ(text.find(mark), text.rfind(mark));
      // Its longest line stands for the whole header.
      std::string longest;
      std::istringstream lines{std::string(header.text)};
      for (std::string line; std::getline(lines, line);)
        longest = line.size() > longest.size() ? line : longest;
      EXPECT_THAT(text, HasSubstr(longest));
    }
    EXPECT_THAT(text, testing::EndsWith(source.text.substr(source.text.find("namespace {"))));
  }
}

// render.cpp relies on this to find includes and to fold
// them: one spelling, no conditions, no system headers.
TEST(EmbeddedHeaders, IncludeEachOtherPlainly) {
  for (const EmbeddedHeader& header : embedded_headers()) {
    int depth = 0;
    std::istringstream lines{std::string(header.text)};
    for (std::string line; std::getline(lines, line);) {
      const std::size_t start = line.find_first_not_of(" \t");
      if (start == std::string::npos || line[start] != '#') continue;
      if (line.starts_with("#if")) ++depth;
      if (line.starts_with("#endif")) --depth;
      if (line.find("include", start) == std::string::npos) continue;
      EXPECT_TRUE(line.starts_with("#include \"") && depth == 0) << header.name << ": " << line;
    }
    EXPECT_EQ(depth, 0) << header.name;
  }
}

TEST(EmbeddedHeaders, AreTheFilesOfTemplates) {
  std::set<std::string> on_disk;
  for (const auto& file : fs::recursive_directory_iterator(source_dir / "templates")) {
    const fs::path extension = file.path().extension();
    if (extension == ".h" || extension == ".cuh") {
      on_disk.insert(fs::relative(file.path(), source_dir / "templates").generic_string());
    }
  }
  std::vector<std::string> embedded;
  for (const EmbeddedHeader& header : embedded_headers()) {
    embedded.emplace_back(header.name);
    EXPECT_EQ(header.text, read(source_dir / "templates" / header.name)) << header.name;
  }
  EXPECT_THAT(embedded, testing::ElementsAreArray(on_disk));
}

}  // namespace
}  // namespace flashjit
