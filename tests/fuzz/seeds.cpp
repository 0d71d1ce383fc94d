// seeds FOLDER OBJECT EXAMPLES...: writes the seeds that fuzzing begins with to FOLDER/TARGET/*.
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>

#include "cache/archive.hpp"
#include "cache/kernel_entry.hpp"
#include "cache/kernel_key.hpp"
#include "cache/tune_store.hpp"
#include "codegen/families/search_space.hpp"
#include "codegen/render.hpp"
#include "runtime/build.hpp"
#include "tools/manifest/models.hpp"

using namespace flashjit;

namespace {

void write(const std::filesystem::path& path, const std::string& bytes) {
  std::filesystem::create_directories(path.parent_path());
  if (!(std::ofstream(path, std::ios::binary) << bytes)) throw std::runtime_error(path.string());
}

std::string read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_seeds(const std::filesystem::path& to, const std::string& object) {
  std::string archive;
  const ByteSink sink = [&](const char* from, std::size_t size) {
    archive.append(from, size);
    return true;
  };
  for (const auto& [name, op] : {std::pair("sm_90a", Operation::forward),
                                 {"x86-64-v4", Operation::forward},
                                 {"x86-64-v3", Operation::backward}}) {
    const AttentionSpec spec = specs_of(models().front(), {op}).front();
    const Target target = Target::parse(name);
    const KernelConfig config = heuristic_config(spec, target, {1, 100, 100, 8, 2});
    const KernelSource source = render(spec, target, config);
    write(to / "compile_request" / name,
          compile_request_text(spec, target, config, request_key(spec, source).digest()));
    CompiledKernel compiled;
    compiled.code = object;
    const CacheEntry entry =
        pack_kernel(entry_key(request_key(spec, source), "-O2", "compiler"), compiled, source);
    std::string why;
    const std::string file = encode_entry(entry, why).value();
    write(to / "entry" / (std::string("file-") + name), file);
    write(to / "entry" / (std::string("metadata-") + name),
          entry.metadata + std::string(entry.metadata.size() / 3, ' '));
    write(to / "entry" / (std::string("key-") + name), entry.key.serialized());
    TuneRecord record;
    record.key = {spec.to_json(), name, "device", bucket({1, 100, 100, 8, 2})};
    record.chosen = record.heuristic = config;
    record.shape = record.key.bucket;
    record.candidates = {{config, Verdict::measured, "", {1.5, 1.25}},
                         {config, Verdict::dropped, "slow", {2.5}}};
    write(to / "tune_record" / name, to_json(record));
    write_member(sink, std::string("v3/") + name + ".kernel", file);
    write_member(sink, std::string(120, 'f') + "/record.json", to_json(record));
  }
  write_archive_end(sink);
  write(to / "archive/two", archive);
  for (const char number : {0, 1, 5, 9, 13, 15})
    write(to / "sizes" / std::to_string(number), std::string(64, number));
  write(to / "object/kernel", object);
  write(
      to / "spec/decode",
      R"({"op": "decode", "dtype": "bf16", "head_dim": 128, "mask": [{"kind": "sliding_window", "sinks": true}],)"
      R"( "varlen": true, "paged": true, "o_dtype": "fp32"})");
  write(
      to / "spec/formulas",
      R"({"op": "forward", "dtype": "bf16", "head_dim": 64, "mask": ["causal", "document[key] == document[position]",)"
      R"x( "key < 4 || (position - key) % 3 != 1 && !(abs(row / 7 - key) >= reach)", "prefix_lm",)x"
      R"( {"kind": "neighbourhood", "shape": [8, 9], "window": [3, 4], "dilation": [2, 1]}],)"
      R"x( "score": ["cap * tanh(score / cap)", "alibi", "key < 3 ? -inf : min(score, exp(-.5e1 * key)) + log(1.5)"],)x"
      R"( "tables": {"document": {"dtype": "uint8", "shape": ["batch or 1", "seqlen_k"]}},)"
      R"( "scalars": {"cap": "fp32", "reach": "int32"}, "sink_logits": true, "precise": true})");
  write(
      to / "spec/block_lists",
      R"({"op": "make_block_lists", "dtype": "bf16", "head_dim": 64, "varlen": true, "mask": ["causal",)"
      R"( {"kind": "block_sparse", "block_m": 64, "per_head": true, "of_masks": true}, "key % 3 != head"]})");
  write(
      to / "spec/append",
      R"({"op": "append_kv", "dtype": "fp16", "head_dim": 96, "varlen": true, "paged": true, "kv_dtype": "fp8_e5m2",)"
      R"( "kv_scale": "token_head", "rotary": {"style": "interleaved", "first": 8, "dim": 48, "q": true, "tables": "fp32"}})");
  write(
      to / "spec/backward",
      R"({"op": "backward", "dtype": "bf16", "head_dim": 64, "mask": ["causal", "padding"], "dropout": true,)"
      R"( "grad_dtype": "fp32", "deterministic": true, "config": {"block_n": 64}})");
  write(to / "manifest/training", R"({"kernels": [{"model": "sdxl", "ops": ["forward", "backward"]}]})");
  write(to / "manifest/decode",
        R"({"kernels": [{"spec": {"op": "decode", "dtype": "fp16", "head_dim": 64, "paged": )"
        R"(true}, "shapes": [{"batch": 4, "seqlen_q": 1, "seqlen_k": 99, "page_size": 16}]}]})");
  std::string all;
  for (const Model& model : models()) {
    write(to / "manifest" / model.name, std::string(model.name));
    all += (all.empty() ? "" : ", ") + std::string(R"({"model": ")") + std::string(model.name) + "\"}";
  }
  write(to / "manifest/models.json", R"({"kernels": [)" + all + "]}");
}

}  // namespace

int main(int argc, char** argv) try {
  const std::filesystem::path to = argv[1];
  write_seeds(to, read(argv[2]));
  for (int i = 3; i < argc; ++i) {
    const std::string spec = read(argv[i]);
    write(to / "spec" / std::to_string(i), spec);
    write(
        to / "manifest" / std::to_string(i),
        R"({"kernels": [{"spec": )" + spec +
            R"(, "shapes": [{"batch": 2, "seqlen_q": 64, "seqlen_k": 8, "num_heads_q": 8, "num_heads_kv": 2}]}]})");
  }
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
