// flashjit run: computes a spec's result, measures each step and, on request, verifies the result.
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <memory>
#include <utility>

#include "runtime/timing.hpp"
#include "tools/command/devices.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/options.hpp"
#include "tools/command/progress.hpp"
#include "tools/command/report.hpp"
#include "tools/command/session.hpp"
#include "tools/command/verbs.hpp"
#include "tools/command/workload.hpp"
#include "tools/verify/forward_bound.hpp"
#include "tools/verify/report.hpp"
#include "tools/verify/table.hpp"

namespace flashjit::command {
namespace {

struct RunOptions {
  std::string spec, op;
  DeviceOptions device;
  ShapeOptions shape;
  MaskOptions masks;
  DropoutOptions dropout;
  std::string tensors;  // folder
  TensorFiles files, outputs;
  std::uint64_t seed = 1;
  std::optional<float> softmax_scale;
  bool verify = false, cold = false;
  std::int64_t verify_rows = -1;
  bool json = false;
};

struct Result {
  Device device;
  KernelInfo kernel;
  Shape shape;
  GetTimes get;
  double ms = 0, flops = 0;
  std::optional<verify::Report> report;

  verify::Verdict verdict() const { return report ? report->verdict() : verify::Verdict::right; }
  double tflops() const { return ms > 0 ? flops / ms * 1e-9 : 0; }
};

// Median milliseconds of launches for about a tenth of a second.
double measure_launch(const Kernel& kernel, Workload& work) {
  const PreparedLaunch launch = kernel.prepare(work.args_for(kernel));
  LaunchTimer time(work.context(), Clock::wall);
  std::vector<double> samples;
  const double end = now_ms(Clock::wall) + 100;
  do {
    samples.push_back(time(launch));
  } while (now_ms(Clock::wall) < end && samples.size() < 1000);
  return median(samples);
}

// How many rows the oracle checks: all if that takes seconds, else a spread of them.
std::int64_t rows_to_verify(const RunOptions& options, const Workload& work) {
  if (options.verify_rows >= 0) return options.verify_rows;
  constexpr double budget = 2e10;  // floating-point operations of the oracle
  const double work_flops = work.flops();
  if (work_flops <= budget) return 0;
  return std::max<std::int64_t>(
      1, static_cast<std::int64_t>(budget / work_flops * static_cast<double>(work.query_rows())));
}

bool reads_tensors(const RunOptions& options) {
  return std::any_of(std::begin(arguments), std::end(arguments), [&](const flashjit::Argument& argument) {
    return argument.tensor() && argument.role != Role::table && !options.files[argument].empty();
  });
}

std::string input_option(const flashjit::Argument& argument) {
  std::string name = std::string("--") + argument.name;
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

// The layout, and the operations if they are not all that attend.
std::string description_of(const flashjit::Argument& argument) {
  std::string text = argument.layout.text.text;
  if (std::string_view(argument.layout.packed.text) != text && !argument.layout.of_scales)
    text += std::string("; varlen: ") + argument.layout.packed.text;
  constexpr unsigned attention = argument_table::attention | argument_table::backward;
  if ((argument.operations & attention) == attention) return text;
  std::string operations;
  for (const OperationInfo& row : operation_table)
    if (argument.operations >> static_cast<int>(row.op) & 1 &&
        (argument.role != Role::output || argument.read_by >> static_cast<int>(row.op) & 1))
      operations += (operations.empty() ? "" : ", ") + std::string(row.name);
  return operations + ": " + text;
}

// "--out", "--lse-out", "--dq-out": the option that names the output's file.
std::string output_option(const flashjit::Argument& argument) {
  return argument.tensor() == &AttentionArgs::o ? "--out" : input_option(argument) + "-out";
}

// Throws invalid_argument for a file of a tensor that the spec does not read or write.
void check_files(const AttentionSpec& spec, const RunOptions& options) {
  std::string written;
  for (const flashjit::Argument& argument : arguments)
    if (argument.written_in(spec) && has_argument(spec, argument))
      written += (written.empty() ? "" : ", ") + output_option(argument);
  for (const flashjit::Argument& argument : arguments) {
    const bool reads = is_read(spec, argument) && has_argument(spec, argument);
    const bool writes = argument.written_in(spec) && has_argument(spec, argument);
    if (!options.files[argument].empty() && argument.role != Role::table && !reads)
      throw Error(ErrorCode::invalid_argument, input_option(argument) + " was given, but op " +
                                                   to_string(spec.op) + " does not read it: leave it out");
    if (!options.files[argument].empty() && writes && !reads)
      throw Error(ErrorCode::invalid_argument, input_option(argument) + " was given, but op " +
                                                   to_string(spec.op) + " writes it; " +
                                                   output_option(argument) + " would work");
    if (!options.outputs[argument].empty() && !writes)
      throw Error(
          ErrorCode::invalid_argument,
          output_option(argument) + " was given, but the spec does not write it; " + written + " would work");
  }
}

Result run_on(Device device, const AttentionSpec& spec, Workload& work, const RunOptions& options) {
  Result result;
  result.device = device;
  result.shape = work.shape();
  result.flops = work.flops();
  EngineOptions engine_options = options.device.engine();
  engine_options.device = device.str();
  {
    Engine engine(engine_options);
    const Kernel* kernel = nullptr;
    {
      const Progress progress("getting the kernel for " + engine.target().str());
      kernel = &engine.get(spec, work.shape());
    }
    result.kernel = kernel->info();
    work.place(device);
    if (!reads_tensors(options)) work.compute_forward(engine);
    work.poison();
    kernel->launch(work.args_for(*kernel));
    work.fetch();
    work.write_outputs(options.outputs);
    const Progress progress("timing on " + device.str());
    result.ms = measure_launch(*kernel, work);
  }
  result.get = measure_get(engine_options, spec, work.shape(), result.kernel, options.cold);
  if (options.verify) {
    const Progress progress("verifying against the float64 oracle");
    verify::OracleOptions oracle;
    oracle.max_rows = rows_to_verify(options, work);
    oracle.largest_score = verify::largest_score(result.kernel.target);
    oracle.rounds_keys = verify::rounds_keys(spec, result.kernel.target);
    result.report = verify::verify_outputs(spec, work.host_args(), oracle);
  }
  return result;
}

Json describe(const Result& result) {
  Json json = {{"device", result.device.str()},
               {"model", device_model(result.device)},
               {"target", result.kernel.target.str()},
               {"config", config_json(result.kernel.config)},
               {"shape", shape_json(result.shape)},
               {"origin", to_string(result.kernel.origin)},
               {"cold_ms", nullptr},
               {"warm_ms", nullptr},
               {"hot_us", result.get.hot_us},
               {"ms", result.ms},
               {"tflops", result.tflops()},
               {"max_error", nullptr},
               {"error_bound", nullptr},
               {"ok", nullptr},
               {"kernel", kernel_json(result.kernel)}};
  if (result.get.cold_ms) json["cold_ms"] = *result.get.cold_ms;
  if (result.get.warm_ms) json["warm_ms"] = *result.get.warm_ms;
  if (result.report) {
    const std::vector<verify::Worst>& worst = result.report->worst;
    json["max_error"] = worst.front().error;
    json["error_bound"] = worst.front().bound;
    json["ok"] = result.report->ok();
    json["verification"] = {{"verdict", to_string(result.verdict())},
                            {"rows", result.report->rows},
                            {"wrong", result.report->wrong},
                            {"undecided", result.report->undecided},
                            {"where", worst.front().where}};
    for (std::size_t i = 1; i < worst.size(); ++i) {
      json["verification"][worst[i].output + "_error"] = worst[i].error;
      json["verification"][worst[i].output + "_error_bound"] = worst[i].bound;
    }
  }
  return json;
}

void print_text(const std::vector<Result>& results) {
  using verify::digits;
  const Shape& s = results.front().shape;
  std::cout << results.front().kernel.spec.to_json() << "\nbatch " << s.batch << ", seqlen " << s.seqlen_q
            << " x " << s.seqlen_k << ", heads " << s.num_heads_q << " over " << s.num_heads_kv << "\n\n";
  verify::Table table({"device", "target", "config", "from", "cold ms", "warm ms", "hot us", "run ms",
                       "GFLOP/s", "max error", "bound", "verified"});
  for (const Result& r : results) {
    table.add({r.device.str(), r.kernel.target.str(), to_text(r.kernel.config, r.kernel.target),
               to_string(r.kernel.origin), r.get.cold_ms ? number(*r.get.cold_ms) : "-",
               r.get.warm_ms ? number(*r.get.warm_ms) : "-", number(r.get.hot_us), number(r.ms),
               number(1e3 * r.tflops()), r.report ? digits(r.report->worst.front().error) : "-",
               r.report ? digits(r.report->worst.front().bound) : "-",
               !r.report             ? "no"
               : r.report->ok()      ? std::to_string(r.report->rows) + " rows"
               : r.report->wrong > 0 ? "WRONG"
                                     : "CANNOT TELL"});
  }
  std::cout << shown(table) << '\n';
  for (const Result& r : results) {
    std::cout << r.device.str() << ": " << device_model(r.device) << "; " << where_cached(r.kernel) << '\n';
    if (r.verdict() != verify::Verdict::right)
      std::cerr << "flashjit: " << r.device.str() << ": " << r.report->str() << '\n';
  }
}

// The files of --tensors that the spec reads. Throws invalid_argument for a folder that has none.
void take_folder(const AttentionSpec& spec, RunOptions& options) {
  if (options.tensors.empty()) return;
  const auto file_of = [&](const std::string& name) {
    const std::string path = options.tensors + "/" + name + ".npy";
    return std::filesystem::exists(path) ? path : std::string();
  };
  for (const flashjit::Argument& argument : arguments) {
    if (!argument.tensor() || !options.files[argument].empty() || !has_argument(spec, argument)) continue;
    if (is_read(spec, argument) || argument.role_in(spec) == Role::table)
      options.files[argument] = file_of(argument.name);
  }
  if (!reads_tensors(options))
    throw Error(ErrorCode::invalid_argument,
                "--tensors " + options.tensors + " has no tensor of op " + to_string(spec.op) +
                    "; a folder that generate wrote for the same spec would work");
  for (const DeclaredTable& table : spec.tables) {
    const auto is_given = [&](const std::string& value) { return value.starts_with(table.name + "="); };
    std::vector<std::string>& named = options.masks.named;
    if (const std::string path = file_of(table.name);
        !path.empty() && std::none_of(named.begin(), named.end(), is_given))
      named.push_back(table.name + "=" + path);
  }
}

int run(RunOptions options) {
  const AttentionSpec spec = read_spec(options.spec, options.op);
  take_folder(spec, options);
  options.dropout.check({spec});
  options.masks.check({spec});
  check_files(spec, options);
  const std::vector<Device> devices = parse_devices(options.device.device);
  MaskOptions masks = options.masks;
  masks.lengths_k = options.shape.lengths();
  Workload work = reads_tensors(options)
                      ? Workload::read(spec, options.files, masks)
                      : Workload::generate(spec, options.shape.shape(spec), options.seed, masks);
  if (options.softmax_scale) work.set_softmax_scale(*options.softmax_scale);
  work.set_dropout(options.dropout);

  std::vector<Result> results;
  for (const Device device : devices) results.push_back(run_on(device, spec, work, options));
  if (options.json) {
    Json json = Json::array();
    for (const Result& result : results) json.push_back(describe(result));
    print_json(json.size() == 1 ? json.front() : json);
  } else {
    print_text(results);
  }
  verify::Verdict worst = verify::Verdict::right;
  for (const Result& result : results) worst = std::max(worst, result.verdict());
  return worst == verify::Verdict::right   ? exit_ok
         : worst == verify::Verdict::wrong ? exit_verification_failed
                                           : exit_verification_undecided;
}

}  // namespace

Verb add_run(const Arguments& parent) {
  const Arguments app = parent.add_subcommand("run", "Compute attention on generated or your own tensors");
  const auto options = std::make_shared<RunOptions>();
  add_spec(app, options->spec);
  add_op(app, options->op);
  options->device.add(app);
  app.get_option("--device").description("\"cpu\", \"cuda:N\", several with commas, or \"all\"");

  const std::string own = "Your tensors (.npy)", generated = "Generated tensors, without any of yours";
  app.add_option("--tensors", options->tensors,
                 "Folder with NAME.npy for each input and table, as generate writes them; options for single "
                 "ones win")
      .group(own);
  for (const flashjit::Argument& argument : arguments) {
    if (!argument.tensor() || argument.role == Role::workspace) continue;
    if (argument.role == Role::output && argument.read_by == 0) continue;
    app.add_option(input_option(argument), options->files[argument], description_of(argument)).group(own);
  }
  // These come together in every operation.
  app.get_option("--q").needs(app.get_option("--k"));
  app.get_option("--parts-o").needs(app.get_option("--parts-lse"));
  app.get_option("--parts-lse").needs(app.get_option("--parts-o"));

  options->shape.add(app);
  options->shape.add_lengths(app);
  options->masks.add(app);
  options->dropout.add(app);
  app.add_option("--seed", options->seed, "Seed of the random numbers").capture_default_str();
  for (const char* name : {"--batch", "--seqlen-q", "--seqlen-k", "--lengths-k", "--heads-q", "--heads-kv",
                           "--page-size", "--seed"})
    app.get_option(name).group(generated);
  // Tensors that are read have sizes and lists of their own.
  for (const char* name : {"--batch", "--seqlen-q", "--seqlen-k", "--lengths-k", "--heads-q", "--heads-kv",
                           "--page-size", "--seed", "--density", "--partial", "--document-length"}) {
    app.get_option(name).excludes(app.get_option("--tensors"));
    for (const flashjit::Argument& argument : arguments)
      if (argument.tensor() && argument.role == Role::input)
        app.get_option(name).excludes(app.get_option(input_option(argument)));
  }

  app.add_option("--softmax-scale", options->softmax_scale, "[1 / sqrt(head_dim)]");
  for (const flashjit::Argument& argument : arguments)
    if (argument.role == Role::output || argument.written_by != 0)
      app.add_option(output_option(argument), options->outputs[argument],
                     std::string("Write ") + argument.name + " to this .npy file");
  app.add_flag("--verify", options->verify,
               "Compare with the float64 oracle; exit code 20: outside the error bound, 21: undecided");
  app.add_option("--verify-rows", options->verify_rows,
                 "Rows to compare; 0: all [all if that takes seconds, else a spread of them]")
      .at_least(0);
  app.add_flag("--cold", options->cold,
               "Compile a kernel that was on disk once more, in an empty temporary cache, and tell the time");
  add_output(app, options->json);
  app.footer(
      "cold: nothing cached, spec to launchable. warm: a new engine, the kernel on disk. hot: in memory.\n"
      "run: median of one launch.\n\n"
      "Examples:\n"
      "  flashjit run tools/examples/causal_bf16.json --seqlen-q 2048 --heads-q 8 --heads-kv 2 --verify\n"
      "  flashjit generate spec.json --out tensors && flashjit run spec.json --tensors tensors --verify\n"
      "  flashjit run spec.json --device cuda:0 --q q.npy --k k.npy --v v.npy --out o.npy\n"
      "  flashjit run tools/examples/causal_bf16.json --op backward --seqlen-q 512 --verify\n"
      "  flashjit run spec.json --device all --verify --json\n\n"
      "--json prints {device, model, target, config, shape, origin, cold_ms, warm_ms, hot_us, ms, tflops, "
      "max_error,\n"
      "error_bound, ok, kernel, verification}; a list of these for several devices. What was not measured is "
      "null.\n");
  return {app, [options] { return run(*options); }};
}

}  // namespace flashjit::command
