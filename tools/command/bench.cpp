// flashjit bench: kernels of specs, shapes and configs side by side.
#include "tools/command/bench.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iostream>
#include <memory>
#include <sstream>

#include "codegen/families/cpu_products.hpp"
#include "codegen/families/search_space.hpp"
#include "runtime/cuda/cold_launches.hpp"
#include "runtime/device.hpp"
#include "runtime/jobs.hpp"
#include "runtime/thread_pool.hpp"
#include "runtime/timing.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/peak_rates.hpp"
#include "tools/command/progress.hpp"
#include "tools/command/verbs.hpp"
#include "tools/command/workload.hpp"
#include "tools/verify/table.hpp"

namespace flashjit::command {
namespace {

// "64x128", "128x64x2" or "128x64x2x4": block_m, block_n, num_stages, num_warps. They replace those of
// `pins`. A kernel without block_m takes "x128".
PinnedConfig parse_config(const std::string& text, PinnedConfig pins) {
  std::optional<int>* const fields[] = {&pins.block_m, &pins.block_n, &pins.num_stages, &pins.num_warps};
  std::size_t count = 0;
  std::istringstream numbers(text);
  for (std::string number; std::getline(numbers, number, 'x'); ++count) {
    if (count == 0 && number.empty()) continue;
    int value = 0;
    const auto [end, failed] = std::from_chars(number.data(), number.data() + number.size(), value);
    if (count == std::size(fields) || failed != std::errc{} || end != number.data() + number.size())
      count = 99;
    if (count == 99) break;
    *fields[count] = value;
  }
  if (count < 2 || count > std::size(fields)) {
    throw Error(ErrorCode::invalid_argument,
                "config '" + text +
                    "' is not block_m x block_n [x num_stages [x num_warps]], as in 64x128 or "
                    "128x64x2x4; a kernel without block_m takes x128");
  }
  return pins;
}

std::vector<AttentionSpec> with_configs(const AttentionSpec& spec, const Target& target, const Shape& shape,
                                        const std::string& configs) {
  if (configs.empty()) return {spec};
  std::vector<AttentionSpec> specs;
  if (configs == "all") {
    for (const KernelConfig& c : search_space(spec, target, shape)) {
      specs.push_back(spec);
      specs.back().config = pinned(c);
    }
    return specs;
  }
  std::istringstream list(configs);
  for (std::string one; std::getline(list, one, ',');) {
    specs.push_back(spec);
    specs.back().config = parse_config(one, spec.config);
  }
  return specs;
}

struct Candidate {
  std::string spec_name;
  const Kernel* kernel;
  const Workload* work;
  PreparedLaunch launch;
  int times = 1;  // launches of one sample
  std::vector<double> samples;
};

struct Row : Measured {
  std::string spec_name;
  std::optional<double> fma_share, amx_share;  // on a CPU; amx_share only for kernels that use AMX
  double plain_gb_per_s = 0;                   // of the same traffic without the operation
  double plain_share() const { return gb_per_s / plain_gb_per_s; }
};

// The names that `bench` has for the rate of a launch and for the same traffic without the operation.
struct TrafficNames {
  const char *rate, *plain;
};
TrafficNames names_of(Traffic traffic) {
  switch (traffic) {
    case Traffic::none:
      break;
    case Traffic::reads_cache:
      return {"decoded_gb_per_s", "read"};
    case Traffic::copies_rows:
      return {"appended_gb_per_s", "copy"};
    case Traffic::moves_rows:
      return {"copied_gb_per_s", "copy"};
  }
  return {};
}

bool reads_and_writes(Traffic traffic) {
  return traffic == Traffic::copies_rows || traffic == Traffic::moves_rows;
}

Traffic traffic_of(const AttentionSpec& spec) {
  return info_of(spec.op).traffic;
}

// A plain read of a GPU's memory, of as many bytes as a decode reads, or a copy that reads and writes as many
// as an append does.
struct PlainRow {
  Shape shape;
  Traffic of;
  double bytes = 0, ms = 0, spread_percent = 0;
  double gb_per_s() const { return bytes / ms * 1e-6; }
  const char* name() const { return names_of(of).plain; }
  bool serves(const Workload& work) const {
    return bytes == work.bound_bytes() && of == traffic_of(work.spec());
  }
};

// Samples of decodes and appends, each after 256 MB were read, and of plain reads and copies of as many
// bytes, which are the yardstick. Launches of a sample are queued at once.
class ColdSamples {
 public:
  // Both must outlive this.
  ColdSamples(const cuda::Context& context, const std::vector<std::unique_ptr<Workload>>& works)
      : read_(context), launches_(context, &read_, cuda::ColdLaunches::Before::read) {
    double most = 0;
    for (const auto& work : works) {
      const double bytes = work->bound_bytes();
      most = std::max(most, bytes);
      const bool is_new =
          std::none_of(plain_.begin(), plain_.end(), [&](const PlainRow& r) { return r.serves(*work); });
      if (bytes > 0 && is_new) plain_.push_back({work->shape(), traffic_of(work->spec()), bytes});
    }
    samples_.resize(plain_.size());
    memory_ = cuda::DeviceBuffer(context, static_cast<std::size_t>(most));
    memory_.fill(1, launches_.stream().get());
  }

  void sample(const PreparedLaunch& launch, std::vector<double>& samples) {
    add(samples, [&](Stream stream) { launch.launch(stream); });
  }
  void sample_plain() {
    for (std::size_t i = 0; i < plain_.size(); ++i)
      add(samples_[i], [&](Stream stream) {
        const auto bytes = static_cast<std::size_t>(plain_[i].bytes);
        if (reads_and_writes(plain_[i].of))
          memory_.copy_within(bytes / 2, stream);
        else
          read_.launch(memory_.data(), bytes, stream);
      });
  }

  const std::vector<PlainRow>& plain() {
    for (std::size_t i = 0; i < plain_.size(); ++i) {
      plain_[i].ms = median(samples_[i]);
      plain_[i].spread_percent = spread_percent(samples_[i]);
    }
    return plain_;
  }
  const PlainRow& plain_of(const Workload& work) {
    return *std::find_if(plain().begin(), plain().end(), [&](const PlainRow& r) { return r.serves(work); });
  }

 private:
  void add(std::vector<double>& samples, const std::function<void(Stream)>& launch) {
    constexpr int launches = 5;
    const std::vector<double> more = launches_(launch, launches);
    samples.insert(samples.end(), more.begin(), more.end());
  }

  cuda::PlainRead read_;
  cuda::ColdLaunches launches_;
  cuda::DeviceBuffer memory_;
  std::vector<PlainRow> plain_;
  std::vector<std::vector<double>> samples_;  // of each
};

// The best of the rates that rounds measured. Other programs only slow a round down, so that it is nearest to
// what the CPU can do.
double best(const std::vector<double>& rates) {
  return rates.empty() ? 0 : *std::max_element(rates.begin(), rates.end());
}

class Bench {
 public:
  explicit Bench(const BenchOptions& options)
      : options_(options),
        engine_(options.device.engine()),
        on_cpu_(engine_.device().kind == Device::Kind::cpu),
        clock_(options.processor_time ? Clock::processor : Clock::wall),
        num_threads_(options.device.num_threads ? options.device.num_threads : available_cpus()) {
    if (options.processor_time && (!on_cpu_ || num_threads_ != 1)) {
      throw Error(ErrorCode::invalid_argument,
                  "--processor-time measures one CPU thread: give --device cpu --num-threads 1");
    }
    for (const std::string& argument : options.specs) specs_.push_back(read_spec(argument, options.op));
    options.dropout.check(specs_);
    options.masks.check(specs_);
    for (const AttentionSpec& spec : specs_) {
      any_paged_ |= spec.paged;
      any_reads_ |= traffic_of(spec) == Traffic::reads_cache;
      any_copies_ |= reads_and_writes(traffic_of(spec));
    }
  }

  // The shapes for the spec that takes the fewest rows.
  std::vector<Shape> shapes() const {
    const auto few_rows = [](const AttentionSpec& spec) { return info_of(spec.op).few_rows; };
    const auto found = std::find_if(specs_.begin(), specs_.end(), few_rows);
    return options_.shape.shapes(found == specs_.end() ? specs_.front() : *found, options_.seqlens);
  }

  // Measures every spec and config at these sizes; their rounds are interleaved.
  void measure(Shape shape) {
    MaskOptions masks = options_.masks;
    masks.lengths_k = options_.shape.lengths();
    if (masks.lengths_k.empty() && options_.tokens > 0)
      shape.batch = std::max(1, options_.tokens / std::max(1, shape.seqlen_q));

    std::vector<std::unique_ptr<Workload>> works;
    std::vector<Candidate> candidates;
    for (std::size_t i = 0; i < specs_.size(); ++i) {
      shape.page_size = specs_[i].paged || !any_paged_ ? options_.shape.page_size : 0;
      works.push_back(std::make_unique<Workload>(Workload::generate(specs_[i], shape, options_.seed, masks)));
      works.back()->set_dropout(options_.dropout);
      works.back()->place(engine_.device());
      if (options_.heads_first) works.back()->put_heads_first();
      works.back()->compute_forward(engine_);
      const std::vector<AttentionSpec> specs =
          with_configs(specs_[i], engine_.target(), shape, options_.configs);
      get_all(specs, shape);
      for (const AttentionSpec& spec : specs) {
        const Kernel& kernel = engine_.get(spec, shape);
        candidates.push_back({options_.specs[i],
                              &kernel,
                              works.back().get(),
                              kernel.prepare(works.back()->args_for(kernel)),
                              1,
                              {}});
      }
    }
    if (candidates.empty()) return;
    if (on_cpu_ && any_reads_ && read_gb_per_s_ == 0)
      read_gb_per_s_ = 1e3 * measure_read_bandwidth(num_threads_);

    const cuda::Context* const context = works.front()->context();
    LaunchTimer time(context, clock_);
    for (Candidate& c : candidates) {
      c.times = launches_of_a_sample(time, c.launch);
    }
    const std::unique_ptr<ColdSamples> cold =
        context && (any_reads_ || any_copies_) ? std::make_unique<ColdSamples>(*context, works) : nullptr;
    const Target& target = engine_.target();
    std::vector<double> fma, amx;
    for (int round = 0; round < options_.rounds; ++round) {
      if (on_cpu_) fma.push_back(measure_fma_tflops(target.vector_bytes(), num_threads_, clock_));
      if (target.amx) amx.push_back(measure_amx_tflops(num_threads_, clock_));
      for (Candidate& c : candidates) {
        if (cold && c.work->bound_bytes() > 0)
          cold->sample(c.launch, c.samples);
        else
          c.samples.push_back(time(c.launch, c.times));
      }
      if (cold) cold->sample_plain();
    }
    const double fma_tflops = best(fma), amx_tflops = best(amx);
    fma_.insert(fma_.end(), fma.begin(), fma.end());
    amx_.insert(amx_.end(), amx.begin(), amx.end());
    for (Candidate& c : candidates) {
      Row row{measured(c.work->shape(), *c.kernel, c.samples, c.work->flops(), c.work->bound_bytes()),
              c.spec_name,
              {},
              {}};
      if (row.gb_per_s > 0 && cold)
        row.plain_gb_per_s = cold->plain_of(*c.work).gb_per_s();
      else if (traffic_of(c.work->spec()) == Traffic::reads_cache)
        row.plain_gb_per_s = read_gb_per_s_;
      if (uses_amx(row.kernel.spec, target))
        row.amx_share = row.tflops / amx_tflops;
      else if (on_cpu_)
        row.fma_share = row.tflops / fma_tflops;
      rows_.push_back(std::move(row));
    }
    if (cold) plain_.insert(plain_.end(), cold->plain().begin(), cold->plain().end());
  }

  void print_table() {
    std::cout << device_model(engine_.device()) << ", " << engine_.target().str();
    if (on_cpu_) {
      std::cout << ", " << num_threads_ << (num_threads_ == 1 ? " thread, " : " threads, ")
                << number(best(fma_)) << " TFLOP/s of float32 multiply-adds in registers";
      if (!amx_.empty()) std::cout << ", " << number(best(amx_)) << " of bf16 products by AMX";
    }
    if (read_gb_per_s_ > 0) std::cout << ", " << number(read_gb_per_s_) << " GB/s of plain reads";
    std::cout << "; " << clock_name() << "; medians of " << options_.rounds << " rounds\n\n";
    std::vector<std::string> columns = {"spec", "batch", "seqlen", "config", "ms", "+-%", "TFLOP/s"};
    columns.push_back(on_cpu_ ? "of FMA" : "registers");
    if (!amx_.empty()) columns.push_back("of AMX");
    const bool has_rates = any_reads_ || any_copies_;
    if (has_rates)
      columns.insert(columns.end(),
                     {"K, V GB/s", any_copies_ ? any_reads_ ? "of plain" : "of copy" : "of read"});
    verify::Table table(columns);
    for (const Row& r : rows_) {
      std::vector<std::string> cells = {
          r.spec_name,
          std::to_string(r.shape.batch),
          std::to_string(r.shape.seqlen_q) + " x " + std::to_string(r.shape.seqlen_k),
          to_text(r.kernel.config, r.kernel.target),
          number(r.ms),
          number(r.spread_percent),
          number(r.tflops),
          !on_cpu_      ? std::to_string(r.kernel.registers)
          : r.fma_share ? number(*r.fma_share)
                        : ""};
      if (!amx_.empty()) cells.push_back(r.amx_share ? number(*r.amx_share) : "");
      if (has_rates && r.gb_per_s > 0)
        cells.insert(cells.end(), {number(r.gb_per_s), r.plain_gb_per_s > 0 ? number(r.plain_share()) : ""});
      cells.resize(columns.size());
      table.add(cells);
    }
    for (const PlainRow& r : plain_) {
      table.add({r.name(), std::to_string(r.shape.batch),
                 std::to_string(r.shape.seqlen_q) + " x " + std::to_string(r.shape.seqlen_k), "",
                 number(r.ms), number(r.spread_percent), "", "", number(r.gb_per_s()), number(1)});
    }
    std::cout << shown(table);
  }

  void print_json() {
    Json rows = Json::array();
    for (const Row& r : rows_) {
      Json row = to_json(r);
      row["spec_name"] = r.spec_name;
      row["fma_share"] = r.fma_share ? Json(*r.fma_share) : Json();
      row["amx_share"] = r.amx_share ? Json(*r.amx_share) : Json();
      if (r.plain_gb_per_s > 0) {
        const std::string plain = names_of(traffic_of(r.kernel.spec)).plain;
        row[plain + "_gb_per_s"] = r.plain_gb_per_s;
        row[plain + "_share"] = r.plain_share();
      }
      rows.push_back(row);
    }
    Json json = {{"device", engine_.device().str()},
                 {"model", device_model(engine_.device())},
                 {"target", engine_.target().str()},
                 {"num_threads", nullptr},
                 {"clock", clock_name()},
                 {"rounds", options_.rounds},
                 {"fma_tflops", nullptr},
                 {"amx_tflops", nullptr},
                 {"rows", rows}};
    if (on_cpu_) {
      json["num_threads"] = num_threads_;
      json["fma_tflops"] = best(fma_);
    }
    if (!amx_.empty()) json["amx_tflops"] = best(amx_);
    command::print_json(json);
  }

 private:
  // Compiles the missing kernels on all cores.
  void get_all(const std::vector<AttentionSpec>& specs, const Shape& shape) {
    const Progress progress("getting the kernels for " + engine_.target().str());
    run_jobs(specs.size(), 0, [&](std::size_t i) { engine_.get(specs[i], shape); });
  }

  const char* clock_name() const {
    return !on_cpu_ ? "events" : clock_ == Clock::wall ? "wall time" : "processor time";
  }

  const BenchOptions& options_;
  Engine engine_;
  const bool on_cpu_;
  const Clock clock_;
  const int num_threads_;
  std::vector<AttentionSpec> specs_;
  bool any_paged_ = false, any_reads_ = false, any_copies_ = false;
  double read_gb_per_s_ = 0;       // of a CPU's memory, for decode
  std::vector<double> fma_, amx_;  // TFLOP/s
  std::vector<Row> rows_;
  std::vector<PlainRow> plain_;
};

int bench_kernels(const BenchOptions& options) {
  Bench bench(options);
  for (const Shape& shape : bench.shapes()) {
    const Progress progress("seqlen " + std::to_string(shape.seqlen_q) + " x " +
                            std::to_string(shape.seqlen_k));
    bench.measure(shape);
  }
  if (options.json) {
    bench.print_json();
  } else {
    bench.print_table();
  }
  return exit_ok;
}

}  // namespace

int launches_of_a_sample(LaunchTimer& time, const PreparedLaunch& launch) {
  time(launch);  // the first launch touches new memory, and is not counted
  constexpr double least_ms = 1;
  return static_cast<int>(std::clamp(std::ceil(least_ms / std::max(time(launch), 1e-4)), 1.0, 1000.0));
}

Measured measured(const Shape& shape, const Kernel& kernel, std::vector<double>& samples, double flops,
                  double bytes) {
  const double ms = median(samples);
  return {shape, kernel.info(), ms, spread_percent(samples), flops / ms * 1e-9, bytes / ms * 1e-6};
}

Json to_json(const Measured& m) {
  Json json = {{"spec", Json::parse(m.kernel.spec.to_json())}};
  json.update(shape_json(m.shape));
  json.update({{"config", config_json(m.kernel.config)},
               {"ms", m.ms},
               {"spread_percent", m.spread_percent},
               {"tflops", m.tflops},
               {"registers", m.kernel.registers},
               {"spill_bytes", m.kernel.spill_bytes},
               {"shared_memory", m.kernel.shared_memory},
               {"smem_bytes", m.kernel.shared_memory}});  // its name in version 0.1
  if (const char* const rate = names_of(traffic_of(m.kernel.spec)).rate) json[rate] = m.gb_per_s;
  return json;
}

Verb add_bench(const Arguments& parent) {
  const Arguments app =
      parent.add_subcommand("bench", "Measure kernels over shapes and configs, or the way to them");
  const auto options = std::make_shared<BenchOptions>();
  const Arguments what = app.add_choice("Measurement");
  what.add_option("SPEC", options->specs, "One or more: files, '-' for standard input, or JSON text");
  add_op(app, options->op);
  const Argument serve = what.add_flag(
      "--serve", options->serve,
      "Answer requests on standard input, one JSON value a line, by a line each; kernels and tensors stay");
  options->device.add(app);
  options->shape.add(app);
  options->shape.add_lengths(app);
  options->masks.add(app);
  options->dropout.add(app);
  app.remove_option("--seqlen-q");
  app.get_option("--seqlen-k").description("Keys of a sequence [as many as query rows]");
  app.add_option("--seqlens", options->seqlens,
                 "Sequence lengths, with commas; keys as well unless --seqlen-k [512,1024,2048,4096; op "
                 "decode: one row against so many keys]")
      .delimiter(',')
      .at_least(0);
  app.add_option("--tokens", options->tokens,
                 "Choose the batch so that it has about this many query rows in all")
      .at_least(0);
  const Argument configs =
      app.add_option("--configs", options->configs,
                     "\"all\", or a list: block_m x block_n [x num_stages [x num_warps]], as in "
                     "64x128,128x64x2x4; without block_m x64 [the config that an engine takes]");
  app.add_option("--rounds", options->rounds, "Samples of each kernel; kernels take turns")
      .at_least(1)
      .capture_default_str();
  app.add_option("--seed", options->seed, "Seed of the random numbers").capture_default_str();
  app.add_flag(
      "--heads-first", options->heads_first,
      "K and V of a decode lie as [batch, heads, seqlen, head_dim]; pages as [heads, page_size, head_dim]");
  app.add_flag("--processor-time", options->processor_time,
               "Measure processor time, blind to other processes; with --num-threads 1 only");
  const Argument compile = app.add_flag("--compile", options->compile,
                                        "Measure engine.get instead: cold, warm and hot, for each --targets");
  app.add_option("--targets", options->targets, "Targets of --compile, with commas: sm_80, ..., native")
      .delimiter(',')
      .needs(compile)
      .capture_default_str();
  compile.excludes(configs);
  const Argument start =
      app.add_flag("--start", options->start,
                   "Measure this process up to its first result instead, and then engine.get "
                   "from disk and from memory");
  app.add_option("--threads", options->threads, "Threads of --start that ask at once for a kernel in memory")
      .between(1, max_num_threads)
      .needs(start)
      .capture_default_str();
  start.excludes(configs).excludes(compile);
  const Argument gpus = app.add_option("--gpus", options->gpus,
                                       "Measure GPUs 0 to N - 1 together, each with its part of the "
                                       "sequence, beside GPU 0 alone, at rest "
                                       "and sustained")
                            .between(2, 64)
                            .excludes(configs)
                            .excludes(compile)
                            .excludes(start);
  app.add_option("--layout", options->layout,
                 "With --gpus: how the sequence is divided: contiguous, zigzag, heads or best")
      .needs(gpus)
      .capture_default_str();
  for (const char* name : {"--batch", "--seqlen-k", "--lengths-k", "--heads-q", "--heads-kv", "--seqlens",
                           "--tokens", "--configs", "--op", "--processor-time", "--compile", "--start"})
    serve.excludes(app.get_option(name));
  add_output(app, options->json);
  app.footer(
      "TFLOP/s count 2 (head_dim + head_dim_v) operations for each query head and each pair that the\n"
      "mask keeps, and 2.5 times as many in a backward. +-% is half the distance between the quartiles. On a "
      "CPU the same rounds measure the\n"
      "rates of multiply-adds in registers and of AMX; kernels are compared with the best of them.\n"
      "K, V GB/s count each key that the rows of a decode see, once for each key/value head. \"of read\" is\n"
      "their share of a plain read's rate: on a CPU of memory beyond its caches, on a GPU of as many bytes. "
      "On a\n"
      "GPU 256 MB are read before each launch of a decode and before each plain read, whose row is "
      "\"read\".\n"
      "For op append_kv and copy_kv they count the bytes of rows and scales that are read and written, and "
      "\"of copy\" is their share\nof the rate of the driver's copy, whose row is \"copy\".\n"
      "Pages are in random order.\n\n"
      "A request of --serve is an entry of a manifest (a spec with its shapes) and may have \"rounds\":\n"
      "  {\"spec\": {...}, \"shapes\": [{\"batch\": 2, \"seqlen_q\": 8192}], \"rounds\": 40}\n"
      "The answer has \"rows\", one for each shape, or \"error\". The tensors' numbers are bell-shaped,\n"
      "without the outliers of other verbs. On a CPU a round is a sample, as without --serve. On a GPU\n"
      "rounds are milliseconds in which every launch is a sample. The GPU clears 256 MB before each launch, "
      "or\n"
      "reads them before a decode. A decode may have \"lengths_k\": [100000, 500], its sequences' keys. The "
      "host waits only at the end, so that the GPU is always busy. A quarter as many launches warm it\n"
      "up.\n\n"
      "Examples:\n"
      "  flashjit bench spec.json --seqlens 1024,4096 --num-threads 1\n"
      "  flashjit bench full.json causal.json --device cuda:0 --seqlens 8192 --tokens 16384 --heads-q 16\n"
      "  flashjit bench spec.json --configs all --seqlens 4096 --json\n"
      "  flashjit bench decode.json --seqlens 1 --seqlen-k 8192 --batch 16 --heads-q 32 --heads-kv 8\n"
      "  flashjit bench paged.json --seqlens 1 --lengths-k 1x100000,63x500 --page-size 16 --heads-q 32 "
      "--heads-kv 8\n"
      "  flashjit bench spec.json --compile --targets native,sm_90\n"
      "  flashjit bench spec.json --start --device cuda:0 --cache-path kernels --cache-dir ''\n"
      "  flashjit bench spec.json --gpus 2 --seqlens 32768,65536 --heads-q 16\n"
      "  flashjit bench --serve --device cuda:0\n");
  return {app, [options] {
            if (options->gpus) return bench_gpus(*options);
            if (options->serve) return bench_serve(*options);
            if (options->start) return bench_start(*options);
            return options->compile ? bench_compile(*options) : bench_kernels(*options);
          }};
}

}  // namespace flashjit::command
