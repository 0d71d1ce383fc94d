// The keys of kernels, and kernels stored as entries.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "cache/kernel_entry.hpp"
#include "cache/kernel_key.hpp"
#include "codegen/families/search_space.hpp"
#include "codegen/render.hpp"

namespace flashjit {
namespace {

using nlohmann::json;

struct Request {
  AttentionSpec spec;
  KernelSource source;
};

Request make_request() {
  Request request;
  request.spec.head_dim = 64;
  request.spec = request.spec.validated();
  request.source.target = Target::parse("sm_90");
  request.source.config = {64, 128, 2, 4};
  request.source.text = "the text";
  request.source.headers = {{"a.h", "text of a"}, {"b.h", "text of b"}};
  request.source.steps = {{"flashjit_forward", 128, 65536, 0}};
  return request;
}

CompiledKernel make_compiled() {
  CompiledKernel compiled;
  compiled.code = std::string(
      "\x7f"
      "ELF\0code",
      9);
  compiled.compiler = "nvrtc 13.0.88";
  compiled.steps = {{"flashjit_forward", 168, 8, 16}, {"flashjit_merge", 32, 0, 0}};
  compiled.compile_ms = 271.25;
  compiled.log = "a \"log\"\nin two lines";
  return compiled;
}

// The keys of kernels in caches and bundles. Digests of headers are left out: each change of a template
// changes them. To accept other keys: run with FLASHJIT_UPDATE_GOLDEN=1, then review the diff.
TEST(KernelKey, Golden) {
  constexpr std::pair<const char*, const char*> kernels[] = {
      {"sm_80", R"({"op": "forward", "dtype": "bf16", "head_dim": 64, "mask": ["causal"]})"},
      {"sm_89", R"({"op": "forward", "dtype": "fp16", "head_dim": 80, "dropout": true})"},
      {"sm_90a", R"({"op": "forward", "dtype": "bf16", "head_dim": 128, "mask": ["causal"]})"},
      {"sm_90a",
       R"({"op": "forward", "dtype": "bf16", "head_dim": 128, "paged": true, "kv_dtype": "fp8_e4m3"})"},
      {"sm_90a", R"({"op": "forward", "dtype": "bf16", "head_dim": 64, "score": ["alibi"], "varlen": true})"},
      {"sm_90a", R"({"op": "backward", "dtype": "bf16", "head_dim": 128, "mask": ["causal"]})"},
      {"sm_80", R"({"op": "backward", "dtype": "fp16", "head_dim": 64, "deterministic": true})"},
      {"sm_90", R"({"op": "decode", "dtype": "bf16", "head_dim": 128, "append": true})"},
      {"sm_90", R"({"op": "append_kv", "dtype": "bf16", "head_dim": 128, "rotary": {"style": "half"}})"},
      {"sm_90", R"({"op": "merge", "dtype": "bf16", "head_dim": 128})"},
  };
  std::string text;
  for (const auto& [name, json_text] : kernels) {
    const AttentionSpec spec = AttentionSpec::from_json(json_text);
    const Target target = Target::parse(name);
    const Shape shape{.batch = 2, .seqlen_q = 512, .seqlen_k = 4096, .num_heads_q = 32, .num_heads_kv = 8};
    const CacheKey key = request_key(spec, render(spec, target, heuristic_config(spec, target, shape)));
    for (const CacheKeyField& field : key.fields())
      if (!field.label.starts_with("header ")) text += field.label + ": " + field.value + "\n";
    text += "\n";
  }
  const std::string path = FLASHJIT_SOURCE_DIR "/tests/golden/keys.txt";
  if (std::getenv("FLASHJIT_UPDATE_GOLDEN") != nullptr) std::ofstream(path, std::ios::binary) << text;
  std::ifstream file(path, std::ios::binary);
  EXPECT_EQ(text, std::string(std::istreambuf_iterator<char>(file), {}));
}

TEST(KernelKey, EveryInputChangesTheDigest) {
  const auto digest_after = [](auto change) {
    Request request = make_request();
    change(request.spec, request.source);
    return request_key(request.spec, request.source).digest();
  };
  using S = AttentionSpec;
  using K = KernelSource;
  const std::vector<std::string> digests = {
      digest_after([](S&, K&) {}),
      digest_after([](S& s, K&) { s.op = Operation::backward; }),
      digest_after([](S& s, K&) { s.dtype = DType::fp16; }),
      digest_after([](S& s, K&) { s.head_dim = 72; }),
      digest_after([](S& s, K&) { s.head_dim_v = 128; }),
      digest_after([](S& s, K&) { s.mask = {CausalMask{}}; }),
      digest_after([](S& s, K&) { s.mask = {CausalMask{CausalAlign::top_left}}; }),
      digest_after([](S& s, K&) { s.dropout = true; }),
      digest_after([](S& s, K&) { s.lse = false; }),
      digest_after([](S& s, K&) { s.varlen = true; }),
      digest_after([](S& s, K&) { s.paged = true; }),
      digest_after([](S& s, K&) { s.deterministic = true; }),
      digest_after([](S&, K& k) { k.target = Target::parse("sm_80"); }),
      digest_after([](S&, K& k) { k.target = Target::parse("x86-64-v4"); }),
      digest_after([](S&, K& k) { k.config.block_m = 128; }),
      digest_after([](S&, K& k) { k.config.block_n = 64; }),
      digest_after([](S&, K& k) { k.config.num_stages = 3; }),
      digest_after([](S&, K& k) { k.config.num_warps = 8; }),
      digest_after([](S&, K& k) { k.text += " "; }),
      digest_after([](S&, K& k) { k.headers[0].text = "text of A"; }),
      digest_after([](S&, K& k) { k.headers[1].name = "c.h"; }),
      digest_after([](S&, K& k) { k.headers.pop_back(); }),
      digest_after([](S&, K& k) { std::swap(k.headers[0].text, k.headers[1].text); }),
      digest_after([](S&, K& k) { k.steps[0].function = "other"; }),
      digest_after([](S&, K& k) { k.steps[0].threads = 256; }),
      digest_after([](S&, K& k) { k.steps[0].shared_memory = 1; }),
      digest_after([](S&, K& k) { k.steps[0].scratch = 1; }),
      digest_after([](S&, K& k) { k.steps.push_back(k.steps[0]); }),
  };
  EXPECT_EQ(std::set<std::string>(digests.begin(), digests.end()).size(), digests.size());
}

// The texts of version 0.1.0. Whoever uses only what it had finds its kernels and tune records again: what a
// later version adds is left out of them where it is not asked for.
TEST(KernelKey, StaysThatOfKernelsThatKnowNoLaterChoice) {
  const Request request = make_request();
  const CacheKey key = request_key(request.spec, request.source);
  ASSERT_GE(key.fields().size(), 4u);
  std::vector<std::pair<std::string, std::string>> texts;
  for (std::size_t i = 0; i < 4; ++i) texts.emplace_back(key.fields()[i].label, key.fields()[i].value);
  EXPECT_EQ(texts,
            (decltype(texts){
                {"spec", R"({"op": "forward", "dtype": "bf16", "head_dim": 64})"},
                {"target", "sm_90"},
                {"config",
                 "block_m=64 block_n=128 num_stages=2 num_warps=4 q_in_registers=false ping_pong=false "
                 "tile_order=heads pack_gqa=false"},
                {"steps", "flashjit_forward threads=128 shared_memory=65536 scratch=0"}}));
}

TEST(KernelEntry, StaysThatOfKernelsThatKnowNoLaterChoice) {
  const json config = {{"block_m", 64},         {"block_n", 128},         {"num_stages", 2},
                       {"num_warps", 4},        {"q_in_registers", true}, {"ping_pong", false},
                       {"tile_order", "heads"}, {"pack_gqa", false}};
  Request request = make_request();
  request.source.config.q_in_registers = true;
  CacheEntry entry = pack_kernel(CacheKey(), make_compiled(), request.source);
  json metadata = json::parse(entry.metadata);
  EXPECT_EQ(metadata["config"], config);
  metadata["config"] = config;
  entry.metadata = metadata.dump();
  const auto kernel = unpack_kernel(entry);
  ASSERT_TRUE(kernel);
  EXPECT_EQ(kernel->config, request.source.config);
}

TEST(KernelKey, PinsAreNotPartOfIt) {
  Request request = make_request();
  const CacheKey unpinned = request_key(request.spec, request.source);
  request.spec.config.block_m = 64;
  EXPECT_EQ(request_key(request.spec, request.source), unpinned);
}

TEST(KernelKey, EntryAddsCompilerOptionsAndFormat) {
  const Request request = make_request();
  const CacheKey asked = request_key(request.spec, request.source);
  const CacheKey entry = entry_key(asked, "-O3", "nvrtc 13.0");
  EXPECT_EQ(explain_difference(asked, entry),
            "options: (absent) | -O3\ncompiler: (absent) | nvrtc 13.0\nformat: (absent) | 3\n");
  EXPECT_EQ(request_of(entry), asked);
  EXPECT_NE(entry_key(asked, "-O2", "nvrtc 13.0").digest(), entry.digest());
  EXPECT_NE(entry_key(asked, "-O3", "nvrtc 12.9").digest(), entry.digest());
}

TEST(KernelEntry, RoundTrip) {
  const Request request = make_request();
  const CompiledKernel compiled = make_compiled();
  const auto kernel = unpack_kernel(pack_kernel(CacheKey(), compiled, request.source));
  ASSERT_TRUE(kernel);
  EXPECT_EQ(kernel->target, request.source.target);
  EXPECT_EQ(kernel->config, request.source.config);
  EXPECT_EQ(kernel->steps, request.source.steps);
  EXPECT_EQ(kernel->compiled.code, compiled.code);
  EXPECT_EQ(kernel->compiled.compiler, compiled.compiler);
  EXPECT_EQ(kernel->compiled.steps, compiled.steps);
  EXPECT_EQ(kernel->compiled.compile_ms, compiled.compile_ms);
  EXPECT_EQ(kernel->compiled.log, compiled.log);
}

// Kernels without blocks of rows or keys have sizes of 0.
TEST(KernelEntry, RoundTripOfConfigsWithoutSizes) {
  Request request = make_request();
  for (const KernelConfig& config : {KernelConfig{.block_n = 128, .num_warps = 1}, KernelConfig{}}) {
    request.source.config = config;
    const auto kernel = unpack_kernel(pack_kernel(CacheKey(), make_compiled(), request.source));
    ASSERT_TRUE(kernel);
    EXPECT_EQ(kernel->config, config);
  }
}

TEST(KernelEntry, LogNeedNotBeUtf8) {
  CompiledKernel compiled = make_compiled();
  compiled.log = "caf\xe9: warning";
  const auto kernel = unpack_kernel(pack_kernel(CacheKey(), compiled, make_request().source));
  ASSERT_TRUE(kernel);
  EXPECT_NE(kernel->compiled.log.find(": warning"), std::string::npos);
}

TEST(KernelEntry, HostileMetadata) {
  const CacheEntry good = pack_kernel(CacheKey(), make_compiled(), make_request().source);
  const auto refused = [&good](const std::string& metadata) {
    CacheEntry entry = good;
    entry.metadata = metadata;
    return !unpack_kernel(entry);
  };
  for (const char* text : {"", "{", "null", "[]", "{}", "7", "\"text\"", "\xff\xfe"})
    EXPECT_TRUE(refused(text)) << text;
  EXPECT_TRUE(refused(std::string(100'000, '[')));

  const json metadata = json::parse(good.metadata);
  const json wrong[] = {nullptr,         true, -1, 1.5, "text", 4294967296, json::array(), json::object(),
                        json::array({1})};
  const json flat = metadata.flatten();
  for (const auto& [pointer, value] : flat.items()) {
    for (const json& other : wrong) {
      // Any other text is a valid text, and any other number
      // of milliseconds is valid; only a target is parsed.
      if (value.is_string() && other.is_string() && pointer != "/target") continue;
      if (value.is_number_float() && other.is_number()) continue;
      if (value.is_boolean() && other.is_boolean()) continue;
      json changed = metadata;
      changed[json::json_pointer(pointer)] = other;
      EXPECT_TRUE(refused(changed.dump())) << changed.dump();
    }
  }
  for (const auto& [name, value] : metadata.items()) {
    json changed = metadata;
    changed.erase(name);
    EXPECT_TRUE(refused(changed.dump())) << "without " << name;
  }
  json changed = metadata;
  changed["steps"] = json::array();
  EXPECT_TRUE(refused(changed.dump()));
  CacheEntry empty = good;
  empty.payload.clear();
  EXPECT_FALSE(unpack_kernel(empty));
}

}  // namespace
}  // namespace flashjit
