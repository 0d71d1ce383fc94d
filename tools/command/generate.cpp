// flashjit generate: seeded tensors as .npy files.
#include <iostream>
#include <memory>

#include "tools/command/options.hpp"
#include "tools/command/verbs.hpp"
#include "tools/command/workload.hpp"

namespace flashjit::command {
namespace {

struct GenerateOptions {
  std::string spec, op, folder = ".";
  ShapeOptions shape;
  MaskOptions masks;
  std::uint64_t seed = 1;
};

int generate_tensors(const GenerateOptions& options) {
  const AttentionSpec spec = read_spec(options.spec, options.op);
  options.masks.check({spec});
  MaskOptions masks = options.masks;
  masks.lengths_k = options.shape.lengths();
  Workload work = Workload::generate(spec, options.shape.shape(spec), options.seed, masks);
  work.compute_forward();
  work.write_inputs(options.folder);
  return 0;
}

}  // namespace

Verb add_generate(const Arguments& parent) {
  const Arguments app = parent.add_subcommand("generate", "Write seeded tensors for a spec as .npy files");
  const auto options = std::make_shared<GenerateOptions>();
  add_spec(app, options->spec);
  add_op(app, options->op);
  app.add_option("--out", options->folder, "Folder for q.npy, k.npy, v.npy; varlen: cu_seqlens_{q,k}.npy too")
      .capture_default_str();
  options->shape.add(app);
  options->shape.add_lengths(app);
  options->masks.add(app);
  app.add_option("--seed", options->seed, "Seed of the random numbers").capture_default_str();
  app.footer(
      "The values are bell-shaped, with outliers and long rows. bf16 is written as float32, which holds it "
      "exactly.\n\n"
      "Examples:\n"
      "  flashjit generate tools/examples/causal_bf16.json --seqlen-q 2048 --heads-q 8 --heads-kv 2 --out "
      "/tmp/tensors\n");
  return {app, [options] { return generate_tensors(*options); }};
}

}  // namespace flashjit::command
