// flashjit bench --serve: answers measurement requests of another program, which measures its own kernels in
// between.
#include <algorithm>
#include <deque>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "codegen/strict_json.hpp"
#include "runtime/cuda/driver.hpp"
#include "runtime/cuda/memory.hpp"
#include "runtime/device.hpp"
#include "runtime/timing.hpp"
#include "tools/command/bench.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/progress.hpp"
#include "tools/command/workload.hpp"

namespace flashjit::command {
namespace {

// Times launches on a GPU as Triton's do_bench does: caches are cleared before each launch, events surround
// each, and all launches are queued at once, so that the GPU never waits for the host.
class ColdLaunches {
 public:
  explicit ColdLaunches(const cuda::Context& context)
      : context_(context), stream_(context), other_(context, std::size_t{256} << 20) {}

  // The milliseconds of each launch. Launches and the clearing before them take about `ms` in all.
  std::vector<double> operator()(const PreparedLaunch& launch, double ms) {
    const cuda::ContextScope scope(context_);
    launch.launch(stream_.get());  // a kernel's first launch may load it
    constexpr int few = 5;
    enqueue(launch, few);
    const double once = elapsed_ms(events_[0], events_[2 * few - 1]) / few;
    const int count = static_cast<int>(std::clamp(ms / std::max(once, 1e-4), 1.0, 100'000.0));
    for (int i = 0; i < std::max(count / 4, 1); ++i) launch.launch(stream_.get());
    enqueue(launch, count);
    std::vector<double> samples;
    for (int i = 0; i < count; ++i) samples.push_back(elapsed_ms(events_[2 * i], events_[2 * i + 1]));
    return samples;
  }

 private:
  void enqueue(const PreparedLaunch& launch, int count) {
    while (events_.size() < 2 * static_cast<std::size_t>(count)) events_.emplace_back(context_);
    for (int i = 0; i < count; ++i) {
      other_.fill(0, stream_.get());
      events_[2 * i].record(stream_.get());
      launch.launch(stream_.get());
      events_[2 * i + 1].record(stream_.get());
    }
  }

  const cuda::Context& context_;
  cuda::OwnedStream stream_;
  cuda::DeviceBuffer other_;
  std::deque<cuda::Event> events_;  // two for each launch; a deque, because its elements do not move
};

struct Problem {
  Workload work;
  const Kernel* kernel;
  PreparedLaunch launch;
  double flops, decoded_bytes;
};

class Server {
 public:
  explicit Server(const BenchOptions& options)
      : options_(options), engine_(options.device.engine()), time_(nullptr, Clock::wall) {
    if (engine_.device().kind == Device::Kind::cuda) cold_.emplace(context_.emplace(engine_.device().index));
  }

  Json answer(const std::string& line) {
    nlohmann::json entry = parse_strict_json(line, "the request", ErrorCode::invalid_argument);
    int rounds = options_.rounds;
    if (entry.contains("rounds")) {
      const nlohmann::json& given = entry["rounds"];
      if (!given.is_number_integer() || given < 1 || given > 100'000)
        throw Error(ErrorCode::invalid_argument, "the request: rounds is not a whole number of 1 to 100000");
      rounds = given.get<int>();
      entry.erase("rounds");
    }
    Json rows = Json::array();
    for (Problem& problem : problems(entry)) {
      std::vector<double> samples = measure(problem.launch, rounds);
      rows.push_back(to_json(
          measured(problem.work.shape(), *problem.kernel, samples, problem.flops, problem.decoded_bytes)));
    }
    return {{"model", device_model(engine_.device())}, {"target", engine_.target().str()}, {"rows", rows}};
  }

 private:
  // Tensors are kept: making them takes many times as long as measuring, and a GPU cools meanwhile.
  std::vector<Problem>& problems(const nlohmann::json& entry) {
    const auto [at, is_new] = problems_.try_emplace(entry.dump());
    if (!is_new) return at->second;
    try {
      add(entry, at->second);
    } catch (...) {
      problems_.erase(at);
      throw;
    }
    return at->second;
  }

  void add(const nlohmann::json& entry, std::vector<Problem>& problems) {
    const Progress progress("preparing " + entry.dump());
    for (const ManifestItem& item :
         parse_manifest(nlohmann::json{{"kernels", nlohmann::json::array({entry})}}.dump())) {
      if (item.shapes.empty()) throw Error(ErrorCode::invalid_argument, "the request: it names no shapes");
      options_.dropout.check({item.spec});
      for (const Shape& shape : item.shapes) {
        Workload work = Workload::generate(item.spec, shape, options_.seed, options_.masks,
                                           {.outlier_every = 0, .long_row_every = 0});
        work.set_dropout(options_.dropout);
        work.place(engine_.device());
        const Kernel& kernel = engine_.get(item.spec, shape);
        PreparedLaunch launch = kernel.prepare(work.args_for(kernel));
        const double flops = work.flops(), decoded_bytes = work.decoded_bytes();
        problems.push_back({std::move(work), &kernel, std::move(launch), flops, decoded_bytes});
      }
    }
  }

  std::vector<double> measure(const PreparedLaunch& launch, int rounds) {
    if (cold_) return (*cold_)(launch, rounds);
    const int times = launches_of_a_sample(time_, launch);
    std::vector<double> samples;
    for (int round = 0; round < rounds; ++round) samples.push_back(time_(launch, times));
    return samples;
  }

  const BenchOptions& options_;
  Engine engine_;
  std::optional<cuda::Context> context_;
  std::optional<ColdLaunches> cold_;  // on a GPU
  LaunchTimer time_;                  // on a CPU
  std::map<std::string, std::vector<Problem>> problems_;
};

}  // namespace

int bench_serve(const BenchOptions& options) {
  Server server(options);
  for (std::string line; std::getline(std::cin, line);) {
    Json answer;
    try {
      answer = server.answer(line);
    } catch (const Error& error) {
      answer = to_json(error);
    }
    std::cout << answer.dump(-1, ' ', false, Json::error_handler_t::replace) << std::endl;
  }
  return exit_ok;
}

}  // namespace flashjit::command
