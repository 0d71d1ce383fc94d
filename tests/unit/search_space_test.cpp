#include "codegen/families/search_space.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "codegen/families/decode_kernels.hpp"
#include "codegen/families/kernel_family.hpp"
#include "codegen/render.hpp"
#include "expect_error.h"
#include "tests/support/sample_seed.hpp"

namespace flashjit {
namespace {

bool holds(const std::vector<KernelConfig>& configs, const KernelConfig& config) {
  return std::find(configs.begin(), configs.end(), config) != configs.end();
}

// Calls body for every spec that a config may depend on.
template <class Body>
void for_each_spec(const Target& target, Body body) {
  std::uint64_t place = 0;
  for (DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
    if (target.is_cuda() && dtype == DType::fp32) continue;
    for (int head_dim = 8; head_dim <= 256; head_dim += 8) {
      for (int head_dim_v : {8, 64, head_dim, 256}) {
        for (const bool dropout : {false, true})
          if (testing_support::in_sample("specs for " + target.str(), place++, 3))
            body(AttentionSpec{
                .dtype = dtype, .head_dim = head_dim, .head_dim_v = head_dim_v, .dropout = dropout}
                     .validated());
      }
    }
  }
}

// Scratch and shared memory bound the tiles of the widest heads that a family takes: there are some for every
// list of blocks. On CPUs they have the preferred one, as it is.
TEST(SearchSpace, OfTheWidestHeads) {
  for (const Target& target : Target::all())
    for (const Operation op : operations_on(target)) {
      const KernelFamily& family = family_of(op, target);
      for (const auto& [dim, dim_v] : {std::pair{family.head_dim.last, family.head_dim_v.last},
                                       {family.head_dim.last, 8},
                                       {8, family.head_dim_v.last}})
        for (int block = 0; block <= 256; block += 16)
          for (const bool flag : {false, true}) {
            AttentionSpec spec{.op = op, .head_dim = dim, .head_dim_v = dim_v};
            const bool lists = op == Operation::make_block_lists;
            if (block && (lists || op == Operation::forward || op == Operation::backward))
              spec.mask = {BlockSparseMask{.block_m = block, .block_n = 272 - block, .of_masks = lists}};
            else if (block || lists)
              continue;
            if (lists) spec.mask.emplace_back(CausalMask{});
            spec.dropout = flag && op != Operation::decode;
            spec.batch_invariant = flag && info_of(op).attends;
            if (flag &&
                (op == Operation::merge || op == Operation::append_kv || op == Operation::copy_kv || lists))
              continue;
            spec = spec.validated();
            if (!family.refusal(spec, target).empty()) continue;
            SCOPED_TRACE(target.str() + " " + spec.to_json());
            const std::vector<KernelConfig> space = search_space(spec, target);
            ASSERT_FALSE(space.empty());
            if (target.is_cuda()) continue;
            for (const int seqlen : {1, 64, 8192})
              for (const int heads : {1, 128}) {
                const KernelConfig preferred = family.preferred(
                    spec, target,
                    {.seqlen_q = seqlen, .seqlen_k = seqlen, .num_heads_q = heads, .num_heads_kv = 1});
                EXPECT_EQ(misfit(spec, target, preferred), "");
                EXPECT_TRUE(holds(space, preferred));
              }
          }
    }
}

TEST(SearchSpace, HoldsFittingConfigsAndTheHeuristicOne) {
  for (const Target& target : Target::all()) {
    for_each_spec(target, [&](const AttentionSpec& spec) {
      const std::vector<KernelConfig> space = search_space(spec, target);
      ASSERT_FALSE(space.empty());
      for (const KernelConfig& config : space) ASSERT_EQ(misfit(spec, target, config), "");
      EXPECT_TRUE(std::is_sorted(space.begin(), space.end()));
      EXPECT_EQ(std::adjacent_find(space.begin(), space.end()), space.end()) << "twice the same";
      for (int seqlen : {1, 17, 64, 500, 8192}) {
        const KernelConfig config = heuristic_config(spec, target, {.seqlen_q = seqlen, .seqlen_k = seqlen});
        EXPECT_TRUE(holds(space, config)) << target.str() << " " << spec.to_json();
      }
    });
  }
}

// The same of backwards, with lists of blocks of every size, on the targets that have them: every config can
// be rendered, is found again by its pins, and is among the prebuilt ones.
TEST(SearchSpace, OfBackwards) {
  for (const Target& target : Target::all())
    for (const DType dtype : {DType::bf16, DType::fp32})
      for (const int head_dim : {8, 64, 128, 136, 256})
        for (int block = 0; block <= 256; block += 16)
          for (const bool deterministic : {false, true}) {
            AttentionSpec spec{.op = Operation::backward, .dtype = dtype, .head_dim = head_dim};
            if (block) spec.mask = {BlockSparseMask{.block_m = block, .block_n = block}};
            spec.deterministic = deterministic;
            spec = spec.validated();
            if (!why_unsupported(spec, target).empty()) continue;
            SCOPED_TRACE(target.str() + " " + spec.to_json());
            const std::vector<KernelConfig> space = search_space(spec, target);
            for (const KernelConfig& config : space) {
              EXPECT_EQ(misfit(spec, target, config), "");
              AttentionSpec with_pins = spec;
              with_pins.config = pinned(config);
              EXPECT_EQ(search_space(with_pins, target), std::vector{config});
            }
            for (const int seqlen : {1, 500, 8192}) {
              const KernelConfig config =
                  heuristic_config(spec, target, {.seqlen_q = seqlen, .seqlen_k = seqlen});
              EXPECT_TRUE(holds(space, config));
              EXPECT_FALSE(render(spec, target, config).text.empty());
            }
          }
}

// One line for all configs that differ only in block_n: "block_m 64, num_stages
// 2: block_n 64 80 96". Disabled choices, and one stage or warp, are left out.
std::string text_of(const std::vector<KernelConfig>& space) {
  std::map<KernelConfig, std::string> lines;
  for (KernelConfig config : space) {
    const std::string block_n = " " + std::to_string(std::exchange(config.block_n, 0));
    lines[config] += block_n;
  }
  const KernelConfig plain{.num_stages = 1, .num_warps = 1};
  std::string text;
  for (const auto& [config, block_n] : lines) {
    std::string choices;
    for_each_choice([&](const char* name, auto choice, auto) {
      if (config.*choice == plain.*choice) return;
      const std::string value = choice_text(config.*choice);
      choices += (choices.empty() ? "" : ", ") + (name + (value == "true" ? "" : " " + value));
    });
    text += "    " + choices + ": block_n" + block_n + "\n";
  }
  return text;
}

// The search spaces of all targets for the spec. Targets with the same space share it.
std::string spaces_of(const AttentionSpec& spec) {
  std::vector<std::pair<std::string, std::string>> spaces;  // each with its targets
  for (const Target& target : Target::all()) {
    if (target.is_cuda() && spec.dtype == DType::fp32) continue;
    const std::vector<KernelConfig> space = search_space(spec, target);
    const std::string text = std::to_string(space.size()) + " configs\n" + text_of(space);
    const auto same =
        std::find_if(spaces.begin(), spaces.end(), [&](const auto& s) { return s.first == text; });
    if (same == spaces.end()) {
      spaces.emplace_back(text, target.str());
    } else {
      same->second += ", " + target.str();
    }
  }
  std::string text;
  for (const auto& [space, targets] : spaces) text += "  " + targets + ": " + space;
  return text;
}

// The search space must not change by accident: the golden file has every
// config of some specs, and the number of configs of every head_dim. To
// accept a change: run with FLASHJIT_UPDATE_GOLDEN=1, then review the diff.
TEST(SearchSpace, Golden) {
  std::string text;
  for (const char* json :
       {R"({"op": "forward", "dtype": "bf16", "head_dim": 64})",
        R"({"op": "forward", "dtype": "bf16", "head_dim": 128})",
        R"({"op": "forward", "dtype": "bf16", "head_dim": 256})",
        R"({"op": "forward", "dtype": "bf16", "head_dim": 192, "head_dim_v": 128})",
        R"({"op": "forward", "dtype": "fp32", "head_dim": 128})",
        R"({"op": "forward", "dtype": "bf16", "head_dim": 64, "dropout": true, "mask": ["causal"]})",
        R"({"op": "forward", "dtype": "bf16", "head_dim": 256, "dropout": true, "mask": ["tree"]})",
        R"({"op": "forward", "dtype": "bf16", "head_dim": 128, "mask": ["block_sparse"]})"})
    text += std::string(json) + "\n" + spaces_of(AttentionSpec::from_json(json));
  text += "bf16, how many configs for head_dim 8, 16, ..., 256\n";
  for (const Target& target : Target::all()) {
    text += "  " + target.str() + ":";
    for (int head_dim = 8; head_dim <= 256; head_dim += 8) {
      const AttentionSpec spec = AttentionSpec{.head_dim = head_dim}.validated();
      text += " " + std::to_string(search_space(spec, target).size());
    }
    text += "\n";
  }
  const auto path = std::filesystem::path(FLASHJIT_SOURCE_DIR) / "tests/golden/search_space.txt";
  if (std::getenv("FLASHJIT_UPDATE_GOLDEN") != nullptr) std::ofstream(path, std::ios::binary) << text;
  std::ifstream file(path, std::ios::binary);
  const std::string golden{std::istreambuf_iterator<char>(file), {}};
  const auto at = static_cast<std::size_t>(
      std::mismatch(text.begin(), text.end(), golden.begin(), golden.end()).first - text.begin());
  const std::size_t line = at == 0 ? 0 : text.rfind('\n', at - 1) + 1;
  EXPECT_TRUE(text == golden) << "first in line " << 1 + std::count(text.begin(), text.begin() + line, '\n')
                              << ", now\n"
                              << text.substr(line, text.find('\n', line) - line)
                              << "\nto accept it, run with FLASHJIT_UPDATE_GOLDEN=1";
}

TEST(SearchSpace, EveryRejectionHasAReason) {
  for (const Target& target : Target::all()) {
    for (const int head_dim : {64, 128, 256}) {
      const AttentionSpec spec = AttentionSpec{.head_dim = head_dim, .mask = {CausalMask{}}}.validated();
      const std::vector<KernelConfig> space = search_space(spec, target);
      const std::vector<Rejection> rejected = rejections(spec, target);
      if (target.is_cuda()) {
        EXPECT_FALSE(rejected.empty()) << target.str();
      }
      for (const Rejection& r : rejected) {
        EXPECT_FALSE(holds(space, r.config));
        EXPECT_NE(r.reason, "") << target.str() << to_json(r.config);
      }
    }
  }
}

// Tiles have enough rows to share packed K and V, and little enough
// scratch to leave half of the second-level cache to other data.
TEST(SearchSpace, DefaultsWithAmx) {
  struct Default {
    int head_dim, rows, keys;
  };
  for (const auto& [head_dim, rows, keys] : {Default{64, 1024, 512}, {128, 1024, 192}, {256, 512, 128}}) {
    const AttentionSpec spec = AttentionSpec{.head_dim = head_dim}.validated();
    const KernelConfig config = heuristic_config(spec, Target::parse("x86-64-v4+amx"), {});
    EXPECT_EQ(config.block_m, rows) << head_dim;
    EXPECT_EQ(config.block_n, keys) << head_dim;
  }
}

TEST(SearchSpace, HonoursPins) {
  for (const Target& target : Target::all()) {
    AttentionSpec spec{.head_dim = 64};
    spec = spec.validated();
    for (const KernelConfig& config : search_space(spec, target)) {
      AttentionSpec pinned = spec;
      pinned.config = flashjit::pinned(config);
      EXPECT_EQ(search_space(pinned, target), std::vector{config});
      EXPECT_EQ(heuristic_config(pinned, target, {}), config);
      pinned.config = {.block_n = config.block_n};
      for (const KernelConfig& other : search_space(pinned, target)) EXPECT_EQ(other.block_n, config.block_n);
      EXPECT_EQ(heuristic_config(pinned, target, {}).block_n, config.block_n);
    }
  }
}

// A pinned value between those that the tuner tries is honoured, too.
TEST(SearchSpace, HonoursPinsOffTheAxes) {
  const AttentionSpec spec =
      AttentionSpec{.head_dim = 64, .config = {.block_m = 80, .block_n = 176}}.validated();
  const KernelConfig config = heuristic_config(spec, Target::parse("x86-64-v3"), {});
  EXPECT_EQ(config.block_m, 80);
  EXPECT_EQ(config.block_n, 176);
}

TEST(SearchSpace, RefusesPinsThatCannotFit) {
  const auto refused = [](const char* target, const PinnedConfig& pins,
                          std::initializer_list<const char*> parts) {
    SCOPED_TRACE(target);
    const AttentionSpec spec = AttentionSpec{.head_dim = 256, .config = pins}.validated();
    expect_error(ErrorCode::invalid_spec, parts, [&] { search_space(spec, Target::parse(target)); });
    expect_error(ErrorCode::invalid_spec, parts, [&] { heuristic_config(spec, Target::parse(target), {}); });
  };
  refused("sm_86", {.block_m = 128, .block_n = 128},
          {"sm_86", "bytes of shared memory", "101376", "would work"});
  refused("sm_90", {.block_n = 512}, {"block_n 512", "multiple of 16 up to 256", "would work"});
  refused("sm_90a", {.block_m = 96}, {"block_m 96", "64, 128 or 192", "would work"});
  refused("sm_90a", {.block_m = 128, .num_warps = 8}, {"num_warps 8 is not 12", "would work"});
  refused("sm_90a", {.block_n = 128, .q_in_registers = true}, {"values in registers", "would work"});
  refused("sm_90a", {.block_m = 64, .ping_pong = true}, {"block_m 64", "ping_pong", "would work"});
  refused("sm_90a", {.num_stages = 8}, {"bytes of shared memory", "would work"});
  refused("sm_90", {.q_in_registers = true}, {"is no choice of", "only of those for sm_90a", "would work"});
  refused("x86-64-v3", {.tile_order = TileOrder::sections},
          {"is no choice of", "only of those for sm_90a", "would work"});
  refused("x86-64-v4", {.pack_gqa = true},
          {"pack_gqa is no choice of", "only of those for sm_90a", "would work"});
  refused("sm_80", {.pack_gqa = true},
          {"pack_gqa is no choice of", "only of those for sm_90a", "would work"});
  refused("sm_80", {.block_m = 80}, {"block_m 80", "rows for each of 4 warps", "would work"});
  refused("sm_80", {.num_warps = 3}, {"num_warps 3", "4 or 8", "would work"});
  refused("sm_80", {.num_stages = 4}, {"num_stages 4", "would work"});
  refused("x86-64-v3", {.num_warps = 4}, {"num_warps 4", "not 1", "would work"});
  refused("x86-64-v4", {.num_stages = 2}, {"num_stages 2", "not 1", "would work"});
  refused("x86-64-v4", {.block_m = 512, .block_n = 1024}, {"bytes of scratch", "2097152", "would work"});
}

// Query heads share tiles if each has few rows and one walk serves all of them.
TEST(SearchSpace, PackedHeads) {
  const Target target = Target::parse("sm_90a");
  const AttentionSpec spec = AttentionSpec{.head_dim = 128, .mask = {TreeMask{}}}.validated();
  const auto heuristic = [&](int seqlen_q, int heads_q, int heads_kv) {
    return heuristic_config(spec, target,
                            {.batch = 8,
                             .seqlen_q = seqlen_q,
                             .seqlen_k = 4096,
                             .num_heads_q = heads_q,
                             .num_heads_kv = heads_kv});
  };
  EXPECT_TRUE(heuristic(64, 32, 8).pack_gqa);
  EXPECT_EQ(heuristic(64, 32, 8).block_m, 128);
  EXPECT_TRUE(heuristic(16, 32, 8).pack_gqa);
  EXPECT_EQ(heuristic(16, 32, 8).block_m, 64);
  EXPECT_TRUE(heuristic(1, 71, 1).pack_gqa);
  EXPECT_EQ(heuristic(1, 71, 1).block_m, 128);
  EXPECT_FALSE(heuristic(64, 8, 8).pack_gqa);
  EXPECT_FALSE(heuristic(4096, 32, 8).pack_gqa);

  const auto packed = [&](const AttentionSpec& s, const Shape& shape) {
    const std::vector<KernelConfig> space = search_space(s, target, shape);
    return std::count_if(space.begin(), space.end(), [](const KernelConfig& c) { return c.pack_gqa; });
  };
  const Shape few{.seqlen_q = 64, .seqlen_k = 4096, .num_heads_q = 32, .num_heads_kv = 8};
  Shape many = few, one_each = few;
  many.seqlen_q = 4096;
  one_each.num_heads_kv = 32;
  EXPECT_GT(packed(spec, few), 0);
  EXPECT_EQ(packed(spec, many), 0);
  EXPECT_EQ(packed(spec, one_each), 0);

  AttentionSpec pinned = spec;
  pinned.config.pack_gqa = true;
  EXPECT_GT(packed(pinned, one_each), 0);
  EXPECT_TRUE(heuristic_config(pinned, target, one_each).pack_gqa);
  pinned.mask = {BlockSparseMask{.per_head = true}};
  expect_error(ErrorCode::invalid_spec,
               {"pack_gqa", "block_sparse with per_head", "pack_gqa false", "would work"},
               [&] { search_space(pinned, target); });
  pinned.config = {};
  EXPECT_EQ(packed(pinned, few), 0);
  EXPECT_FALSE(heuristic_config(pinned, target, few).pack_gqa);
}

// A tune record may hold any numbers, such as so many stages that the sum of their bytes would overflow.
TEST(SearchSpace, MisfitTakesAnyConfig) {
  const AttentionSpec spec = AttentionSpec{.head_dim = 128}.validated();
  const Target target = Target::parse("sm_90a");
  KernelConfig config = search_space(spec, target).front();
  config.num_stages = 1 << 30;
  EXPECT_EQ(misfit(spec, target, config), "num_stages 1073741824 is not 2 to 8");
}

// Every block size of a list has a config on every target. For the usual sizes,
// a tile, or a unit of its rows, lies within one block.
TEST(SearchSpace, BlockSparse) {
  for (const Target& target : Target::all()) {
    for (const int head_dim : {64, 128, 256}) {
      for (int size = 16; size <= 256; size += 16) {
        AttentionSpec spec{.head_dim = head_dim, .mask = {BlockSparseMask{.block_m = size, .block_n = size}}};
        spec = spec.validated();
        const KernelConfig config =
            heuristic_config(spec, target, {.batch = 4, .seqlen_q = 8192, .seqlen_k = 8192});
        EXPECT_EQ(misfit(spec, target, config), "");
        // With wide heads a multiprocessor of 99 KB has room for only one shape of tile.
        const bool usual =
            (size == 64 || size == 128 || size == 256) && (head_dim < 256 || !target.is_cuda());
        if (!usual) continue;
        SCOPED_TRACE(target.str() + " " + std::to_string(head_dim) + " " + std::to_string(size) + " " +
                     to_json(config));
        EXPECT_TRUE(target.is_cuda() ? size % config.block_m == 0 : config.block_m % 32 == 0);
        EXPECT_EQ(size % config.block_n, 0);
      }
    }
  }
}

// The config that an error proposes is itself accepted.
TEST(SearchSpace, ProposesWhatWorks) {
  AttentionSpec spec = AttentionSpec{.head_dim = 128, .config = {.block_m = 96, .num_warps = 4}}.validated();
  try {
    search_space(spec, Target::parse("sm_89"));
    FAIL() << "no error";
  } catch (const Error& error) {
    const std::string message = error.message();
    KernelConfig works;
    const std::size_t at = message.rfind("; block_m ");
    ASSERT_NE(at, std::string::npos) << message;
    ASSERT_EQ(
        std::sscanf(message.c_str() + at, "; block_m %d, block_n %d, num_stages %d, num_warps %d would work",
                    &works.block_m, &works.block_n, &works.num_stages, &works.num_warps),
        4)
        << message;
    EXPECT_EQ(misfit(spec, Target::parse("sm_89"), works), "");
  }
}

// Whatever a tune record holds, a row's sums keep their order.
TEST(SearchSpace, BatchInvariantFixesBlocksOfKeys) {
  AttentionSpec spec =
      AttentionSpec{.op = Operation::decode, .head_dim = 128, .batch_invariant = true}.validated();
  for (const Target& target : Target::all()) {
    const int block_n = target.is_cuda() ? 32 : 64;
    for (const KernelConfig& config : search_space(spec, target)) EXPECT_EQ(config.block_n, block_n);
    KernelConfig config = heuristic_config(spec, target, {.seqlen_q = 1, .seqlen_k = 4096});
    EXPECT_EQ(misfit(spec, target, config), "");
    config.block_n = target.is_cuda() ? 16 : 128;
    EXPECT_THAT(misfit(spec, target, config), testing::HasSubstr("batch_invariant fixes the order of sums"))
        << target.str();
  }
}

// Configs that a tuner may choose among give the same bits: whatever the shape, blocks have as many keys, and
// those of a backward as many rows. Wherever a spec has a kernel, it has one with the field.
TEST(SearchSpace, BatchInvariantFixesBlocks) {
  for (const Target& target : Target::all())
    for_each_spec(target, [&](AttentionSpec spec) {
      const bool backward = spec.head_dim % 24 == 0;
      if (backward) spec.op = Operation::backward;
      spec.batch_invariant = true;
      spec = spec.validated();
      SCOPED_TRACE(target.str() + " " + spec.to_json());
      const std::vector<KernelConfig> space = search_space(spec, target);
      AttentionSpec any = spec;
      any.batch_invariant = false;
      // Narrow heads by wgmma have the blocks of short sequences, others those of long ones.
      const bool narrow =
          !backward && target.has(Instructions::wgmma) && std::max(spec.head_dim, spec.head_dim_v) <= 64;
      const int rows = narrow ? 1024 : 16384;
      const KernelConfig usual = heuristic_config(
          any, target,
          {.batch = 16384 / rows, .seqlen_q = rows, .seqlen_k = rows, .num_heads_q = 16, .num_heads_kv = 16});
      for (const KernelConfig& config : space) {
        EXPECT_EQ(config.block_n, usual.block_n);
        if (backward) {
          EXPECT_EQ(config.block_m, usual.block_m);
        }
      }
      for (const int seqlen : {1, 17, 500, 8192})
        for (const int heads : {1, 8}) {
          KernelConfig config = heuristic_config(
              spec, target,
              {.seqlen_q = seqlen, .seqlen_k = seqlen, .num_heads_q = heads, .num_heads_kv = 1});
          EXPECT_TRUE(holds(space, config));
          config.block_n *= 2;
          EXPECT_NE(misfit(spec, target, config), "");
        }
    });
}

// Every GPU has memory and registers for some tile of them: of all that any feature takes, and with it.
TEST(SearchSpace, GpusComputeWideHeads) {
  const auto compute = [](const Target& target, const AttentionSpec& spec) {
    SCOPED_TRACE(target.str() + " " + spec.to_json());
    const KernelFamily& family = family_of(spec.op, target);
    const std::vector<KernelConfig> space = search_space(spec, target);
    for (const KernelConfig& config : space) EXPECT_EQ(family.futility(spec, target, config), "");
    for (const int seqlen : {1, 100, 8192}) {
      const Shape shape{.batch = 2, .seqlen_q = seqlen, .seqlen_k = 8192, .num_heads_q = 8};
      EXPECT_TRUE(holds(space, family.preferred(spec, target, shape)));
    }
  };
  for (const Target& target : Target::all()) {
    if (!target.is_cuda() || target.has(Instructions::wgmma)) continue;
    for (const auto& [dim, dim_v] :
         {std::pair{264, 264}, {8, 512}, {512, 512}, {576, 8}, {8, 576}, {576, 256}, {576, 576}})
      for (const bool batch_invariant : {false, true}) {
        const AttentionSpec spec{.head_dim = dim, .head_dim_v = dim_v, .batch_invariant = batch_invariant};
        AttentionSpec drops = spec, in_pages = spec;
        drops.dropout = true;
        compute(target, drops.validated());
        in_pages.paged = true, in_pages.kv_dtype = DType::int8, in_pages.kv_scale = KvScale::token_head;
        compute(target, in_pages.validated());
      }
  }
}

// Every GPU has memory and registers for some tile of them. With batch_invariant, the groups of warps of all
// tiles can take turns at two streams of keys.
TEST(SearchSpace, GpusDecodeWideHeads) {
  for (const Target& target : Target::all()) {
    if (!target.is_cuda()) continue;
    for (const auto& [dim, dim_v] : {std::pair{264, 264}, {8, 512}, {576, 512}, {8, 576}, {576, 576}})
      for (const std::optional<DType> kv_dtype : {std::optional<DType>(), std::optional(DType::int8)})
        for (const bool flag : {false, true})
          for (const bool batch_invariant : {false, true}) {
            AttentionSpec spec = AttentionSpec{.op = Operation::decode,
                                               .head_dim = dim,
                                               .head_dim_v = dim_v,
                                               .v_in_k = flag && dim_v <= dim,
                                               .batch_invariant = batch_invariant,
                                               .kv_dtype = kv_dtype}
                                     .validated();
            if (flag && kv_dtype) spec.kv_scale = KvScale::token_head;
            SCOPED_TRACE(target.str() + " " + spec.to_json());
            int tiles = 0;
            for (const KernelConfig& config : search_space(spec, target)) {
              EXPECT_EQ(family_of(spec.op, target).futility(spec, target, config), "");
              const int groups = cuda_decode_layout(spec, config).groups;
              if (batch_invariant) {
                EXPECT_EQ(2 % groups, 0);
              }
              ++tiles;
            }
            EXPECT_GT(tiles, 0);
          }
  }
}

TEST(SearchSpace, Fp32NeedsACpu) {
  const AttentionSpec spec = AttentionSpec{.dtype = DType::fp32, .head_dim = 64}.validated();
  const Target target = Target::parse("sm_90");
  expect_error(ErrorCode::unsupported, {"fp32", "sm_90", "bf16 or fp16 would work", "x86-64-v3"},
               [&] { search_space(spec, target); });
  EXPECT_THAT(misfit(spec, target, {64, 64, 1, 4}), testing::HasSubstr("fp32"));
}

TEST(Bucket, IsItsLargestShapeAndKeepsTheWork) {
  EXPECT_EQ(bucket({.batch = 3, .seqlen_q = 1000, .seqlen_k = 1025, .num_heads_q = 32, .num_heads_kv = 8}),
            (Shape{.batch = 32, .seqlen_q = 1024, .seqlen_k = 2048, .num_heads_q = 4, .num_heads_kv = 1}));
  // Batch entries count like heads.
  const Shape one{.batch = 1, .seqlen_q = 512, .seqlen_k = 512, .num_heads_q = 32, .num_heads_kv = 32};
  const Shape many{.batch = 32, .seqlen_q = 512, .seqlen_k = 512};
  EXPECT_EQ(bucket(one), bucket(many));
  // The number of query heads per key/value head matters.
  const Shape grouped{.batch = 1, .seqlen_q = 512, .seqlen_k = 512, .num_heads_q = 32, .num_heads_kv = 4};
  EXPECT_NE(bucket(one), bucket(grouped));
}

// Shapes without totals keep their buckets: totals count only if they are given.
TEST(Bucket, PackedSequencesCountByTheirRows) {
  const Shape longest{.batch = 64, .seqlen_q = 1024, .seqlen_k = 1024, .num_heads_q = 4};
  const auto with = [&](std::int64_t total_q, std::int64_t total_k) {
    Shape shape = longest;
    shape.total_q = total_q;
    shape.total_k = total_k;
    return bucket(shape);
  };
  Shape four = longest;
  four.batch = 4;
  EXPECT_EQ(with(4096, 4096), bucket(four));
  EXPECT_EQ(with(100, 3073), bucket(four)) << "by the keys, if those are more";
  EXPECT_EQ(with(64 * 1024, 64 * 1024), bucket(longest));
  EXPECT_EQ(with(4096, 0), bucket(longest)) << "without both totals, batch x seqlen";
  EXPECT_EQ(with(1 << 30, 1 << 30), bucket(longest)) << "never more than there are";
  Shape paged = longest;
  paged.page_size = 16;
  EXPECT_NE(bucket(paged), bucket(longest));
}

TEST(Bucket, OfItselfIsItself) {
  for (const int batch : {0, 1, 3, 64, 100000}) {
    for (const int seqlen : {0, 1, 17, 4096, 1 << 20, 2147483647}) {
      for (const int heads_kv : {0, 1, 5, 128}) {
        for (const int heads_per_kv_head : {1, 7, 64}) {
          const Shape b = bucket({.batch = batch,
                                  .seqlen_q = seqlen,
                                  .seqlen_k = seqlen,
                                  .num_heads_q = heads_kv * heads_per_kv_head,
                                  .num_heads_kv = heads_kv});
          EXPECT_EQ(bucket(b), b) << batch << " " << seqlen << " " << heads_kv << " " << heads_per_kv_head;
          EXPECT_GE(b.batch, 1);
          EXPECT_GE(b.num_heads_q, 1);
          EXPECT_EQ(b.num_heads_kv, 1);
        }
      }
    }
  }
}

TEST(Bucket, WorkBeyondEnoughCountsNoMore) {
  const Shape enough{.batch = 64, .seqlen_q = 16384, .seqlen_k = 16384};
  Shape more = enough;
  more.batch = 4096;
  EXPECT_EQ(bucket(enough), bucket(more));
  more.batch = 32;
  EXPECT_NE(bucket(enough), bucket(more));
}

}  // namespace
}  // namespace flashjit
