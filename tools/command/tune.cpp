// flashjit tune: finds the fastest config on this machine and records it for every engine on the cache
// folder.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <memory>
#include <optional>

#include "codegen/families/search_space.hpp"
#include "runtime/device.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/options.hpp"
#include "tools/command/progress.hpp"
#include "tools/command/report.hpp"
#include "tools/command/tune_report.hpp"
#include "tools/command/verbs.hpp"
#include "tools/verify/table.hpp"

namespace flashjit::command {
namespace {

struct TuneVerbOptions {
  std::string manifest;
  ModelOptions model;
  DeviceOptions device;
  ShapeOptions shape;
  std::vector<int> seqlens;
  std::string budget = "120s";
  int jobs = 0;
  bool again = false, explain = false, json = false;
  std::string report;
};

// "90", "90s", "5m", "0": seconds.
double parse_budget(const std::string& text) {
  double seconds = 0;
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  const std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  if (failed != std::errc{} || !(seconds >= 0) || !std::isfinite(seconds) ||
      (unit != "" && unit != "s" && unit != "m")) {
    throw Error(ErrorCode::invalid_argument,
                "budget '" + text + "' is not a time; 90s, 5m, or 0 for no limit would work");
  }
  return unit == "m" ? 60 * seconds : seconds;
}

std::atomic<bool> interrupted = false;

// The first Ctrl-C ends the measurement, the second the process.
class InterruptGuard {
 public:
  InterruptGuard()
      : before_(std::signal(SIGINT, [](int) {
          interrupted = true;
          std::signal(SIGINT, SIG_DFL);
        })) {}
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;
  ~InterruptGuard() { std::signal(SIGINT, before_); }

 private:
  void (*before_)(int);
};

// Progress on stderr. A terminal shows one line that changes; a file gets a line for each new stage.
class Status {
 public:
  Status(std::string prefix, const Target& target) : prefix_(std::move(prefix)), target_(target) {}
  Status(const Status&) = delete;
  Status& operator=(const Status&) = delete;
  ~Status() {
    if (columns_ && shown_) write("");
  }

  void show(const TuneProgress& p) {
    const auto now = std::chrono::steady_clock::now();
    if (is_quiet()) return;
    const bool is_new = !shown_ || p.stage != stage_ || p.shape_index != shape_;
    if (!is_new && (!columns_ || now - last_ < std::chrono::milliseconds(100))) return;
    last_ = now;
    stage_ = p.stage;
    shape_ = p.shape_index;
    shown_ = true;
    const std::string line = prefix_ + text(p);
    if (columns_) {
      write(line);
    } else {
      tell_progress(line);
    }
  }

 private:
  // Over the line before. Blanks do what an escape sequence would, on every terminal.
  void write(std::string line) {
    line.resize(columns_ - 1, ' ');
    std::fprintf(stderr, "\r%s%s", line.c_str(), line.front() == ' ' ? "\r" : "");
  }

  std::string text(const TuneProgress& p) const {
    std::string line = "[" + std::to_string(p.shape_index + 1) + "/" + std::to_string(p.num_shapes) + "] " +
                       to_text(p.shape) + ": " + to_string(p.stage);
    if (p.stage == TuneStage::waiting) return line + " for another process";
    if (p.stage == TuneStage::measuring) {
      line += ": round " + std::to_string(std::min(p.done + 1, p.total)) + " of at most " +
              std::to_string(p.total) + ", " + std::to_string(p.candidates) + " candidates";
      if (std::isfinite(p.best_ms)) {
        line += ", best " + to_text(p.best, target_) + " " + number(p.best_ms) + " ms (heuristic " +
                number(p.heuristic_ms) + ")";
      }
    } else {
      line += " " + std::to_string(p.done) + " of " + std::to_string(p.total) + " candidates";
    }
    if (std::isfinite(p.seconds_left)) line += ", " + number(p.seconds_left) + " s left";
    return line;
  }

  const std::string prefix_;
  const Target target_;
  const std::size_t columns_ = terminal_columns(STDERR_FILENO);  // 0: no terminal
  bool shown_ = false;
  TuneStage stage_ = TuneStage::waiting;
  std::size_t shape_ = 0;
  std::chrono::steady_clock::time_point last_{};
};

// The command line's sizes, else the manifest's, else the usual ones.
std::vector<Shape> shapes_of(const ManifestItem& item, const TuneVerbOptions& options) {
  if (options.seqlens.empty() && !item.shapes.empty()) return item.shapes;
  return options.shape.shapes(item.spec, options.seqlens);
}

void print_table(const std::vector<TunedShape>& shapes) {
  const verify::Table empty(
      {"shape", "heuristic", "ms", "chosen", "ms", "+-%", "gain %", "TFLOP/s", "% of peak", "tried", ""});
  verify::Table table = empty;
  const auto or_dash = [](double value) { return std::isfinite(value) ? number(value) : std::string("-"); };
  const AttentionSpec* spec = nullptr;
  for (const TunedShape& t : shapes) {
    if (!spec || *spec != t.spec) {
      if (spec) std::cout << shown(table) << '\n';
      table = empty;
      std::cout << t.spec.to_json() << "\n\n";
      spec = &t.spec;
    }
    const TuneRecord& r = t.result.record;
    table.add({to_text(r.shape), to_text(r.heuristic, t.target), or_dash(t.heuristic_ms()),
               to_text(r.chosen, t.target), or_dash(t.chosen_ms()), number(t.spread_percent()),
               number(t.gain_percent()), or_dash(t.tflops()),
               t.peak ? or_dash(100 * t.tflops() / t.peak->tflops) : "-", std::to_string(r.candidates.size()),
               t.state()});
  }
  std::cout << shown(table);
}

int run(const TuneVerbOptions& options) {
  std::vector<ManifestItem> items = read_manifest(options.manifest, options.model);
  const double budget = parse_budget(options.budget);
  std::optional<Engine> engine(std::in_place, options.device.engine());
  const Target target = engine->target();
  const std::string device = device_model(engine->device());
  const std::optional<Peak> peak = peak_of(*engine, options.device.num_threads);
  engine.reset();
  items = for_target(std::move(items), target);

  std::vector<TunedShape> shapes;
  std::vector<std::vector<Rejection>> rejected;  // of each item
  const InterruptGuard guard;
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < items.size() && !interrupted; ++i) {
    const AttentionSpec& spec = items[i].spec;
    rejected.push_back(rejections(spec, target));
    const double used = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    TuneOptions tuning{.engine = options.device.engine(), .jobs = options.jobs, .again = options.again};
    // The specs to come share the time that is left. The minimum lets known records still be shown.
    tuning.budget_seconds =
        budget == 0 ? 0 : std::max((budget - used) / static_cast<double>(items.size() - i), 0.1);
    std::vector<TuneResult> results;
    {
      Status status(
          items.size() > 1 ? "spec " + std::to_string(i + 1) + "/" + std::to_string(items.size()) + " " : "",
          target);
      results = tune(spec, shapes_of(items[i], options), tuning, [&](const TuneProgress& p) {
        status.show(p);
        return !interrupted;
      });
    }
    for (TuneResult& result : results) {
      if (!result.note.empty()) tell_progress("flashjit: " + result.note);
      if (!result.warning.empty())
        tell_progress("flashjit: " + to_text(result.record.shape) + ": " + result.warning);
      const Work work = tuned_work(spec, result.record.shape);
      shapes.push_back({spec, target, std::move(result), work, peak});
    }
  }

  if (options.json) {
    Json rows = Json::array();
    for (const TunedShape& t : shapes) rows.push_back(tuned_json(t));
    Json json = {{"device", options.device.device},
                 {"model", device},
                 {"target", target.str()},
                 {"peak_tflops", nullptr},
                 {"peak_bandwidth", nullptr},
                 {"interrupted", interrupted.load()},
                 {"shapes", rows}};
    if (peak) {
      json["peak_tflops"] = peak->tflops;
      json["peak_bandwidth"] = peak->bandwidth;
    }
    if (options.explain) {
      json["rejected"] = Json::array();
      for (std::size_t i = 0; i < rejected.size(); ++i) {
        for (const Rejection& r : rejected[i])
          json["rejected"].push_back({{"spec", Json::parse(items[i].spec.to_json())},
                                      {"config", config_json(r.config)},
                                      {"reason", r.reason}});
      }
    }
    print_json(json);
  } else {
    std::cout << device << ", " << target.str()
              << (peak ? "; peak " + number(peak->tflops) + " TFLOP/s, " + number(peak->bandwidth) +
                             " TB/s (" + peak->source + ")"
                       : "")
              << "\n\n";
    print_table(shapes);
    for (std::size_t i = 0; options.explain && i < rejected.size(); ++i) {
      std::cout << "\nnot tried for " << items[i].spec.to_json() << ": " << rejected[i].size() << '\n';
      for (const Rejection& r : rejected[i])
        std::cout << "  " << to_text(r.config, target) << ": " << r.reason << '\n';
      for (const TunedShape& t : shapes) {
        if (t.spec != items[i].spec) continue;
        std::cout << to_text(t.result.record.shape) << ":\n";
        for (const TuneCandidate& c : t.result.record.candidates)
          std::cout << "  " << to_text(c.config, target) << ": " << to_string(c.verdict)
                    << (c.reason.empty() ? "" : ": " + c.reason) << '\n';
      }
    }
  }
  if (!options.report.empty() && !shapes.empty()) {
    write_tune_report(options.report, device + ", " + target.str(), shapes,
                      options.explain && items.size() == 1 ? rejected.front() : std::vector<Rejection>());
  }
  if (interrupted) {
    tell_progress("flashjit: interrupted; the samples are kept, and the same command goes on from there");
    return exit_interrupted;
  }
  return exit_ok;
}

}  // namespace

Verb add_tune(const Arguments& parent) {
  const Arguments app =
      parent.add_subcommand("tune", "Find the fastest configs on this machine, and record them");
  const auto options = std::make_shared<TuneVerbOptions>();
  add_manifest(app, options->manifest);
  options->model.add(app);
  options->device.add(app);
  options->shape.add(app);
  app.remove_option("--seqlen-q");
  app.get_option("--seqlen-k").description("Keys of a sequence [as many as query rows]");
  app.add_option("--seqlens", options->seqlens,
                 "Sequence lengths, with commas; keys as well unless --seqlen-k [the manifest's, else "
                 "512,1024,2048,4096]")
      .delimiter(',')
      .at_least(1);
  app.add_option("--budget", options->budget, "Time for everything together: 90s, 5m; 0: no limit")
      .capture_default_str();
  app.add_option("--jobs", options->jobs, "Candidates compiled at once; 0: as many as there are CPUs")
      .at_least(0)
      .capture_default_str();
  app.add_flag("--again", options->again, "Measure again even if a record exists");
  app.add_flag("--explain", options->explain,
               "List the configs that were not tried or did not win, with the reasons");
  app.add_option("--report", options->report, "Write a page with charts to this .html file");
  add_output(app, options->json);
  app.footer(
      "Candidates are compiled on all cores, checked against the heuristic config's output, and timed in\n"
      "interleaved rounds on inputs that are in no cache. Slow candidates drop out early. Another config is\n"
      "chosen only if it is faster beyond noise. The result is a record in the cache folder, for the\n"
      "device's model and the bucket of shapes.\n\n"
      "Ctrl-C keeps the samples (exit code 130), and the same command goes on from there. So it does after\n"
      "the budget ran out (\"not finished\", exit code 0).\n\n"
      "Examples:\n"
      "  flashjit tune tools/examples/causal_bf16.json --seqlens 1024,4096 --heads-q 32 --heads-kv 8\n"
      "  flashjit tune llama-3-8b --device cuda:0 --budget 10m --report tune.html\n"
      "  flashjit tune spec.json --explain --json\n\n"
      "--json prints {device, model, target, peak_tflops, peak_bandwidth, interrupted, shapes: [{spec,\n"
      "shape, bucket, state, complete, chosen, heuristic, chosen_ms, heuristic_ms, gain_percent, tflops,\n"
      "intensity, roof_tflops, peak_share, path, note, candidates}], rejected}.\n");
  return {app, [options] { return run(*options); }};
}

}  // namespace flashjit::command
