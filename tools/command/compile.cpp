// flashjit compile: compiles a spec's kernel for any target, on any machine.
#include <iostream>
#include <memory>
#include <set>

#include "codegen/families/search_space.hpp"
#include "runtime/arguments/checks.hpp"
#include "runtime/build.hpp"
#include "runtime/compile_watch.hpp"
#include "tools/command/options.hpp"
#include "tools/command/progress.hpp"
#include "tools/command/report.hpp"
#include "tools/command/verbs.hpp"
#include "tools/verify/table.hpp"

namespace flashjit::command {
namespace {

struct CompileOptions {
  std::string spec, op;
  std::vector<std::string> targets = {"native"};
  ShapeOptions shape;
  std::optional<std::string> cache_dir, cache_path;
  CompileLimits limits;
  bool json = false;
};

int compile_targets(const CompileOptions& options) {
  const AttentionSpec spec = read_spec(options.spec, options.op);
  std::vector<Target> targets;
  for (const std::string& name : options.targets) targets.push_back(Target::parse(name));

  const Shape shape = options.shape.shape(spec);
  check_shape(spec, shape);
  const OpenedCache cache = open_cache(options.cache_dir, options.cache_path);
  Json reports = Json::array();
  std::set<std::string> notes;  // an unwritable folder gets one warning, not one for each kernel
  verify::Table table(
      {"target", "config", "origin", "ms", "registers", "spill bytes", "shared memory", "key"});
  for (const Target& target : targets) {
    const Progress progress("getting the kernel for " + target.str());
    check_limits(options.limits, target);
    const KernelInfo info =
        build_kernel(spec, target, heuristic_config(spec, target, bucket(shape)), cache, true, {},
                     options.limits,
                     [] { tell_progress("waiting for another process that builds the kernel ..."); })
            .info;
    reports.push_back(kernel_json(info));
    const auto on_gpu = [&](int n) { return target.is_cuda() ? std::to_string(n) : std::string("-"); };
    table.add({target.str(), to_text(info.config, target), to_string(info.origin), number(info.get_ms),
               on_gpu(info.registers), on_gpu(info.spill_bytes), on_gpu(info.shared_memory), info.cache_key});
    if (!info.cache_note.empty() && notes.insert(info.cache_note).second)
      tell_progress("flashjit: cache: " + info.cache_note);
  }
  if (!options.json) {
    std::cout << shown(table);
  } else {
    print_json(reports.size() == 1 ? reports.front() : reports);
  }
  return 0;
}

}  // namespace

Verb add_compile(const Arguments& parent) {
  const Arguments app =
      parent.add_subcommand("compile", "Compile a spec's kernel into the cache, or find it there");
  const auto options = std::make_shared<CompileOptions>();
  add_spec(app, options->spec);
  add_op(app, options->op);
  app.add_option("--target", options->targets,
                 "sm_80, ..., x86-64-v4+amx, native: this CPU; several with commas")
      .delimiter(',')
      .capture_default_str();
  options->shape.add(app);
  add_compile_limits(app, options->limits);
  add_cache_dir(app, options->cache_dir);
  add_cache_path(app, options->cache_path);
  add_output(app, options->json);
  app.footer(
      "Examples:\n"
      "  flashjit compile tools/examples/causal_bf16.json --target sm_80,sm_90\n"
      "  flashjit compile '{\"op\": \"forward\", \"dtype\": \"fp16\", \"head_dim\": 64}' --target native "
      "--json\n\n"
      "--json prints {cache_key, target, config, origin: compiled|disk, get_ms, compile_ms, steps, "
      "registers,\n"
      "spill_bytes, shared_memory, compiler, path, cache_note}; a list of these for several targets.\n");
  return {app, [options] { return compile_targets(*options); }};
}

}  // namespace flashjit::command
