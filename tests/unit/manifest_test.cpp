// Manifests: the kernels that they ask for, the errors, and that their schema agrees.
#include <gmock/gmock.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "codegen/base/error.hpp"
#include "codegen/families/kernel_family.hpp"
#include "codegen/families/search_space.hpp"
#include "tools/manifest/manifest.hpp"
#include "tools/manifest/models.hpp"

namespace flashjit {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

const std::string small_spec = R"({"op": "forward", "dtype": "fp32", "head_dim": 16})";

std::string refusal(const std::string& text) {
  try {
    parse_manifest(text);
  } catch (const Error& error) {
    return std::string(to_string(error.code())) + ": " + error.message();
  }
  return "accepted";
}

std::string with_shape(const std::string& shape) {
  return R"({"kernels": [{"spec": )" + small_spec + R"(, "shapes": [)" + shape + "]}]}";
}

TEST(Manifest, ModelsSpecsAndShapes) {
  const auto items =
      parse_manifest(R"({"kernels": [{"model": "llama-3-70b"}, {"spec": )" + small_spec +
                     R"(, "shapes": [{"seqlen_q": 7}, {"batch": 2, "seqlen_q": 64, "seqlen_k": 128,
                                        "num_heads_q": 8, "num_heads_kv": 2, "page_size": 32}]}, {"spec": )" +
                     small_spec + "}]}");
  ASSERT_EQ(items.size(), 8u + 2u);
  EXPECT_TRUE(items[0].any_shape);
  EXPECT_EQ(items[0].shapes.front(), (Shape{1, 512, 512, 64, 8}));
  EXPECT_FALSE(items[8].any_shape);
  EXPECT_EQ(items[8].shapes, (std::vector<Shape>{{1, 7, 7, 1, 1}, {2, 64, 128, 8, 2, 32}}));
  EXPECT_TRUE(items[9].any_shape);
  EXPECT_EQ(items[8].spec, AttentionSpec::from_json(small_spec));
  EXPECT_EQ(parse_manifest(small_spec).size(), 1u);
  EXPECT_EQ(parse_manifest(" sdxl\n").size(), 8u);
}

// All operations have kernels for CPUs.
bool has_kernels(Operation op, const std::string& target) {
  try {
    return !search_space(AttentionSpec{.op = op, .dtype = DType::bf16, .head_dim = 64}.validated(),
                         Target::parse(target))
                .empty();
  } catch (const Error& error) {
    EXPECT_EQ(target[0], 's') << error.message();
    return false;
  }
}

TEST(Manifest, OperationsOfAModel) {
  const auto ops_of = [](const std::string& ops) {
    std::multiset<Operation> found;
    for (const ManifestItem& item : parse_manifest(R"({"kernels": [{"model": "llama-3-8b")" + ops + "}]}")) {
      found.insert(item.spec.op);
      EXPECT_TRUE(item.any_shape);
    }
    return std::pair(found.count(Operation::forward), found.count(Operation::backward));
  };
  EXPECT_EQ(ops_of(""), std::pair(8ul, 0ul)) << "who only infers gets what there was before";
  EXPECT_EQ(ops_of(R"(, "ops": ["forward", "backward"])"), std::pair(8ul, 4ul));
  EXPECT_EQ(ops_of(R"(, "ops": ["backward"])"), std::pair(0ul, 4ul));
}

TEST(Manifest, CachesOfAModel) {
  const auto items =
      parse_manifest(R"({"kernels": [{"model": "qwen3-8b", "ops": ["decode", "append_kv", "forward"],
                                                     "kv_dtype": "int8", "kv_scale": "token_head"}]})");
  std::map<Operation, int> count;
  for (const ManifestItem& item : items) {
    ++count[item.spec.op];
    const bool of_cache = item.spec.op != Operation::forward;
    EXPECT_EQ(item.spec.kv_dtype, of_cache ? std::optional(DType::int8) : std::nullopt);
    EXPECT_EQ(item.spec.kv_scale, of_cache ? std::optional(KvScale::token_head) : std::nullopt);
    EXPECT_EQ(item.spec.rotary.has_value(), item.spec.op == Operation::append_kv);
    for (const Shape& shape : item.shapes) EXPECT_EQ(shape.seqlen_q == 1, of_cache);
    for (const char* target : {"sm_90a", "sm_80", "x86-64-v4"})
      EXPECT_FALSE(search_space(item.spec, Target::parse(target)).empty()) << item.spec.to_json();
  }
  EXPECT_EQ(count, (std::map<Operation, int>{
                       {Operation::forward, 8}, {Operation::decode, 12}, {Operation::append_kv, 8}}));
}

TEST(Manifest, UsesOfAModel) {
  const auto specs_of_entry = [](const std::string& more) {
    std::multiset<std::string> specs;
    for (const ManifestItem& item : parse_manifest(R"({"kernels": [{"model": "llama-3-8b", )" + more + "}]}"))
      specs.insert(item.spec.to_json());
    return specs;
  };
  EXPECT_EQ(specs_of_entry(R"("use": ["train"])"), specs_of_entry(R"("ops": ["forward", "backward"])"));
  const auto serve = specs_of_entry(R"("use": ["serve"])");
  EXPECT_EQ(serve.size(), std::set<std::string>(serve.begin(), serve.end()).size()) << "each spec once";
  const auto has = [](const std::multiset<std::string>& specs, const std::string& json) {
    return specs.count(AttentionSpec::from_json(json).to_json()) == 1;
  };
  const std::string start = R"("dtype": "bf16", "head_dim": 128, )",
                    fp8 = R"("kv_dtype": "fp8_e4m3", "kv_scale": "token_head")";
  // The specs of a server's loop, with pages and 8-bit caches.
  for (const std::string& spec : std::vector<std::string>{
           R"({"op": "forward", "mask": ["causal"], "lse": false, "varlen": true, "paged": true, )" + start +
               fp8 + "}",
           R"({"op": "decode", "lse": false, "paged": true, )" + start + fp8 + "}",
           R"({"op": "decode", "mask": ["causal"], "paged": true, "varlen": true, )" + start + fp8 + "}",
           R"({"op": "append_kv", "paged": true, "rotary": {"style": "half", "q": true}, )" + start + fp8 +
               "}",
           R"({"op": "append_kv", "varlen": true, "paged": true, )" + start + fp8 + "}",
           R"({"op": "decode", "mask": ["causal"], "dtype": "fp16", "head_dim": 128})",
           R"({"op": "forward", "mask": ["causal"], "paged": true, "dtype": "fp16", "head_dim": 128})"})
    EXPECT_TRUE(has(serve, spec)) << spec;
  const auto only = specs_of_entry(R"("use": ["serve"], "kv_dtype": "int8", "tree": true)");
  EXPECT_TRUE(has(only, R"({"op": "decode", "mask": ["tree"], "paged": true, "dtype": "bf16", "head_dim": 128,
                            "kv_dtype": "int8"})"));
  for (const std::string& spec : only)
    EXPECT_TRUE(spec.find("fp8") == std::string::npos &&
                (spec.find("int8") != std::string::npos || spec.find("forward") != std::string::npos))
        << spec;
  for (const std::string& spec : serve)
    for (const char* target : {"sm_90a", "sm_80", "x86-64-v4"})
      EXPECT_FALSE(search_space(AttentionSpec::from_json(spec), Target::parse(target)).empty()) << spec;
  EXPECT_EQ(specs_of_entry(R"("ops": ["decode"], "tree": true)").size(), 24u);

  const auto refused = [](const std::string& more) {
    return refusal(R"({"kernels": [{"model": "llama-3-8b", )" + more + "}]}");
  };
  EXPECT_THAT(refused(R"("use": ["serv"])"),
              HasSubstr("kernels[0].use has \"serv\"; known: train and serve"));
  EXPECT_THAT(refused(R"("use": "serve")"), HasSubstr("kernels[0].use is not a list of uses"));
  EXPECT_THAT(refused(R"("use": ["serve", "serve"])"), HasSubstr("twice"));
  EXPECT_THAT(refused(R"("use": ["serve"], "ops": ["decode"])"), HasSubstr("has a use beside ops"));
  EXPECT_THAT(refused(R"("use": ["train"], "kv_dtype": "int8")"),
              HasSubstr("\"use\": [\"serve\"] would work"));
  EXPECT_THAT(refused(R"("tree": true)"), HasSubstr("\"ops\": [\"decode\"] would work"));
  EXPECT_THAT(refused(R"("ops": ["decode"], "tree": 1)"), HasSubstr("neither true nor false"));
  EXPECT_THAT(refusal(R"({"kernels": [{"model": "sdxl", "use": ["serve"]}]})"), HasSubstr("keeps no cache"));
}

// Prompts expand keys and values, caches are latent.
TEST(Manifest, LatentCachesOfAModel) {
  for (const auto& [name, heads] : {std::pair{"deepseek-v3", 128}, {"kimi-k2", 64}, {"glm-5", 64}}) {
    const auto items =
        parse_manifest(R"({"kernels": [{"model": ")" + std::string(name) + R"(", "use": ["serve"]}]})");
    std::map<Operation, int> latent;
    int eight_bits = 0;
    for (const ManifestItem& item : items) {
      const AttentionSpec& spec = item.spec;
      const bool of_cache = spec.op != Operation::forward || spec.paged;
      EXPECT_EQ(spec.v_in_k, of_cache) << spec.to_json();
      EXPECT_EQ(item.optional, spec.kv_dtype.has_value()) << spec.to_json();
      eight_bits += item.optional;
      for (const Shape& shape : item.shapes) EXPECT_EQ(shape.num_heads_q, heads);
      if (!of_cache) continue;
      ++latent[spec.op];
      EXPECT_EQ(std::pair(spec.head_dim, spec.head_dim_v), std::pair(576, 512));
      EXPECT_EQ(spec.kv_scale, std::nullopt) << "one scale, if any";
      for (const Shape& shape : item.shapes)
        EXPECT_EQ(std::pair(shape.num_heads_kv, shape.page_size), std::pair(1, 64));
      if (spec.rotary) {
        EXPECT_EQ(std::pair(spec.rotary->first, spec.rotary->style),
                  std::pair(512, RotaryStyle::interleaved));
      }
      // Every target has kernels for caches of q's dtype, or the use's name would be an error there.
      const bool moves = spec.op == Operation::append_kv || spec.op == Operation::copy_kv;
      for (const auto& [target, has_kernel] :
           {std::pair{"sm_80", moves}, {"sm_90a", moves || !item.optional}, {"x86-64-v3", true}})
        if (has_kernel) {
          EXPECT_EQ(why_unsupported(spec, Target::parse(target)), "");
        }
    }
    EXPECT_EQ(latent, (std::map<Operation, int>{{Operation::forward, 16},
                                                {Operation::decode, 48},
                                                {Operation::append_kv, 32},
                                                {Operation::copy_kv, 4}}));
    EXPECT_EQ(eight_bits, 50);
  }
  // Nothing that is named is left out.
  for (const ManifestItem& item :
       parse_manifest(R"({"kernels": [{"model": "deepseek-v3", "use": ["serve"], "kv_dtype": "fp8_e4m3"}]})"))
    EXPECT_FALSE(item.optional);
}

TEST(Manifest, AModelIsBothTypesLengthsAndOutputs) {
  for (const Model& model : models()) {
    for (const Operation op : {Operation::forward, Operation::backward}) {
      std::set<std::string> distinct;
      for (const AttentionSpec& spec : specs_of(model, {op})) {
        distinct.insert(spec.to_json());
        EXPECT_EQ(spec.op, op);
        EXPECT_EQ(spec.mask.empty(), !model.causal);
        for (const char* target : {"sm_90a", "sm_80", "x86-64-v4"})
          if (has_kernels(op, target) &&
              (model.head_dim <= 256 || why_unsupported(spec, Target::parse(target)).empty())) {
            EXPECT_FALSE(search_space(spec, Target::parse(target)).empty()) << model.name;
          }
      }
      EXPECT_EQ(distinct.size(), op == Operation::forward ? 8u : 4u) << model.name;
    }
    for (const Shape& shape : model.shapes)
      EXPECT_EQ(shape.num_heads_q % shape.num_heads_kv, 0) << model.name;
    EXPECT_NE(model.source.find("config.json"), std::string_view::npos) << model.name;
  }
}

TEST(Manifest, RefusalsSayWhereAndWhatWouldWork) {
  EXPECT_THAT(refusal(""), HasSubstr("empty"));
  EXPECT_THAT(refusal("llama-3-8"), HasSubstr("llama-3-8b"));
  EXPECT_THAT(refusal("{"), HasSubstr("not valid JSON"));
  EXPECT_THAT(refusal(R"({"kernels": []})"), HasSubstr("kernels is not a list"));
  EXPECT_THAT(refusal(R"({"kernels": {}})"), HasSubstr("kernels is not a list"));
  EXPECT_THAT(refusal(R"({"kernels": [3]})"), HasSubstr("kernels[0] is not an object"));
  EXPECT_THAT(refusal(R"({"kernels": [{}]})"), HasSubstr("either a \"model\" or a \"spec\""));
  EXPECT_THAT(refusal(R"({"kernels": [{"model": 3}]})"), HasSubstr("kernels[0].model is not a name"));
  EXPECT_THAT(refusal(R"({"kernels": [{"model": "sdxl", "shapes": []}]})"), HasSubstr("has its own"));
  for (const char* ops : {"3", "[]", "\"backward\""})
    EXPECT_THAT(refusal(std::string(R"({"kernels": [{"model": "sdxl", "ops": )") + ops + "}]}"),
                HasSubstr("kernels[0].ops is not a list of operations"));
  EXPECT_THAT(
      refusal(R"({"kernels": [{"model": "sdxl", "ops": ["merge"]}]})"),
      HasSubstr(
          "kernels[0].ops has \"merge\"; a model has forward, backward, decode, append_kv and copy_kv"));
  EXPECT_THAT(refusal(R"({"kernels": [{"model": "qwen3-8b", "ops": ["decode", "forward", "decode"]}]})"),
              HasSubstr("kernels[0].ops has \"decode\" twice"));
  const auto many = [](const std::string& entry) {
    std::string text = entry;
    for (int i = 0; i < 4096; ++i) text += ", " + entry;
    return text;
  };
  EXPECT_THAT(refusal(R"({"kernels": [)" + many("3") + "]}"), HasSubstr("kernels has 4097 entries"));
  EXPECT_THAT(refusal(with_shape(many("3"))), HasSubstr("shapes has 4097 entries"));
  EXPECT_THAT(refusal("{" + std::string(std::size_t{4} << 20, '[')),
              HasSubstr("the manifest has 4194305 bytes; at most 4194304"));
  EXPECT_THAT(
      refusal(R"({"kernels": [{"model": "sdxl", "ops": ["decode"]}]})"),
      HasSubstr(
          "kernels[0].model sdxl keeps no cache of keys and values, so it has no decode; these do: llama"));
  EXPECT_THAT(refusal(R"({"kernels": [{"model": "qwen3-8b", "kv_dtype": "int8"}]})"),
              HasSubstr("\"ops\": [\"decode\", \"append_kv\", \"copy_kv\"] would work"));
  EXPECT_THAT(refusal(R"({"kernels": [{"model": "qwen3-8b", "ops": ["decode"], "kv_dtype": "int4"}]})"),
              HasSubstr("kv_dtype"));
  EXPECT_THAT(refusal(R"({"kernels": [{"spec": {"op": "decode"}, "kv_dtype": "int8"}]})"),
              HasSubstr("has kv_dtype beside a spec"));
  EXPECT_THAT(refusal(R"({"kernels": [{"spec": )" + small_spec + R"(, "ops": ["forward"]}]})"),
              HasSubstr("has ops beside a spec"));
  EXPECT_THAT(refusal(R"({"kernels": [{"modle": "sdxl"}]})"),
              HasSubstr("unknown field \"modle\"; known: model"));
  EXPECT_THAT(refusal(R"({"kernels": [{"model": "sdxl"}], "kernels": []})"), HasSubstr("given twice"));
  EXPECT_THAT(refusal(R"({"kernels": [{"model": "sdxl"}, {"spec": {"op": "forward"}}]})"),
              HasSubstr("invalid_spec: manifest: kernels[1].spec: "));
  EXPECT_THAT(refusal(R"({"kernels": [{"spec": )" + std::string(1000, '[') + std::string(1000, ']') + "}]}"),
              HasSubstr("nests deeper"));
  EXPECT_THAT(refusal(with_shape("{}")), HasSubstr("shapes[0] has no seqlen_q"));
  EXPECT_THAT(refusal(with_shape(R"({"seqlen_q": 1, "heads_q": 2})")),
              HasSubstr("unknown field \"heads_q\""));
  for (const char* value : {"0", "-1", "1.5", "2147483648", "1e99", "true", "null", "\"1\""}) {
    EXPECT_THAT(refusal(with_shape(std::string(R"({"seqlen_q": )") + value + "}")),
                HasSubstr("shapes[0].seqlen_q is not a whole number"));
  }
  EXPECT_THAT(refusal(with_shape(R"({"seqlen_q": 1, "num_heads_q": 3, "num_heads_kv": 2})")),
              HasSubstr("not a multiple of num_heads_kv"));
}

// The schema has the parser's words.
TEST(Manifest, Schema) {
  std::ifstream file(FLASHJIT_SOURCE_DIR "/tools/manifest.schema.json");
  const Json schema = Json::parse(file);
  const Json& entries = schema["properties"]["kernels"]["items"]["anyOf"];
  std::vector<std::string> names;
  for (const Model& model : models()) names.emplace_back(model.name);
  EXPECT_EQ(entries[0]["properties"]["model"]["enum"].get<std::vector<std::string>>(), names);
  EXPECT_EQ(entries[0]["properties"]["ops"]["items"]["enum"],
            Json({"forward", "backward", "decode", "append_kv", "copy_kv"}));
  EXPECT_EQ(entries[0]["properties"]["use"]["items"]["enum"], Json({"train", "serve"}));
  std::ifstream spec_file(FLASHJIT_SOURCE_DIR "/tools/spec.schema.json");
  const Json spec = Json::parse(spec_file)["properties"];
  const Json& model = entries[0]["properties"];
  EXPECT_EQ(model["kv_scale"]["enum"], spec["kv_scale"]["enum"]);
  for (const Json& name : model["kv_dtype"]["enum"])  // a spec may name the dtype of q, too
    EXPECT_THAT(spec["kv_dtype"]["enum"], testing::Contains(name));
  for (const auto& [name, rule] : entries[1]["properties"]["shapes"]["items"]["properties"].items())
    EXPECT_EQ(refusal(with_shape(R"({"seqlen_q": 6, ")" + name + R"(": 1})")),
              name == "seqlen_q" ? "invalid_argument: field \"seqlen_q\" is given twice; once would work"
                                 : "accepted")
        << name;
}

// any_shape promises that the config for every later shape is among the prebuilt ones.
TEST(Manifest, HeuristicConfigsAreThoseOfEveryShape) {
  const unsigned seed = std::random_device()();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  const auto size = [&](int max_log2) {
    return 1 + static_cast<int>(random() % (1u << random() % static_cast<unsigned>(max_log2 + 1)));
  };
  for (const Model& model : models()) {
    for (const char* name : {"sm_90a", "sm_90", "sm_80", "x86-64-v3"}) {
      const Target target = Target::parse(name);
      const Operation op =
          has_kernels(Operation::backward, name) && random() % 2 ? Operation::backward : Operation::forward;
      const bool decodes = model.cached.head_dim > 0 && random() % 2;
      const AttentionSpec spec = specs_of(model, {decodes ? Operation::decode : op})[random() % 4];
      if (spec.head_dim > 256 && !why_unsupported(spec, target).empty()) continue;
      const std::vector<KernelConfig> configs = heuristic_configs(spec, target);
      EXPECT_LE(configs.size(), 8u);
      for (int i = 0; i < 100; ++i) {
        const int heads_kv = size(6);
        const Shape shape{size(12), size(decodes ? 6 : 22),  size(22), heads_kv * size(7),
                          heads_kv, spec.paged ? size(8) : 0};
        const KernelConfig config = heuristic_config(spec, target, bucket(shape));
        EXPECT_TRUE(std::binary_search(configs.begin(), configs.end(), config))
            << model.name << " " << name << " " << to_json(config);
      }
    }
  }
}

}  // namespace
}  // namespace flashjit
