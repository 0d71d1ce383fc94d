// flashjit render: prints the translation unit that an engine would compile.
#include "codegen/render.hpp"

#include <iostream>
#include <memory>

#include "codegen/families/search_space.hpp"
#include "tools/command/options.hpp"
#include "tools/command/report.hpp"
#include "tools/command/verbs.hpp"

namespace flashjit::command {
namespace {

struct RenderOptions {
  std::string spec, op, target = "native";
  ShapeOptions shape;
  bool standalone = false, json = false;
};

int render_source(const RenderOptions& options) {
  const AttentionSpec spec = read_spec(options.spec, options.op);
  const Target target = Target::parse(options.target);
  const KernelSource source =
      render(spec, target, heuristic_config(spec, target, bucket(options.shape.shape(spec))));
  const std::string text = options.standalone ? standalone(source) : source.text;
  if (!options.json) {
    std::cout << text;
    return 0;
  }
  Json headers = Json::array();
  for (const EmbeddedHeader& header : source.headers) headers.push_back(header.name);
  Json steps = Json::array();
  for (const Step& step : source.steps) {
    steps.push_back({{"entry", step.function},
                     {"threads", step.threads},
                     {"shared_memory", step.shared_memory},
                     {"scratch", step.scratch}});
  }
  print_json({{"target", target.str()},
              {"config", config_json(source.config)},
              {"headers", headers},
              {"steps", steps},
              {"text", text}});
  return 0;
}

}  // namespace

Verb add_render(const Arguments& parent) {
  const Arguments app = parent.add_subcommand("render", "Print the source of a spec's kernel");
  const auto options = std::make_shared<RenderOptions>();
  add_spec(app, options->spec);
  add_op(app, options->op);
  app.add_option("--target", options->target, "sm_80, ..., x86-64-v4+amx, or native: this CPU")
      .capture_default_str();
  app.add_flag("--standalone", options->standalone,
               "Fold every header in: one file that nvcc or clang compiles");
  options->shape.add(app);
  add_output(app, options->json);
  app.footer(
      "Examples:\n"
      "  flashjit render tools/examples/causal_bf16.json --target sm_90\n"
      "  flashjit render '{\"op\": \"forward\", \"dtype\": \"bf16\", \"head_dim\": 128}' --target sm_80 "
      "--standalone > k.cu\n");
  return {app, [options] { return render_source(*options); }};
}

}  // namespace flashjit::command
