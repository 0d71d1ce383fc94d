// flashjit bench --serve: answers measurement requests of another program, which measures its own kernels in
// between.
#include <algorithm>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "codegen/base/strict_json.hpp"
#include "runtime/cuda/cold_launches.hpp"
#include "runtime/cuda/driver.hpp"
#include "runtime/device.hpp"
#include "runtime/timing.hpp"
#include "tools/command/bench.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/progress.hpp"
#include "tools/command/workload.hpp"

namespace flashjit::command {
namespace {

struct Problem {
  Workload work;
  const Kernel* kernel;
  PreparedLaunch launch;
  double flops, bytes;
};

class Server {
 public:
  explicit Server(const BenchOptions& options)
      : options_(options), engine_(options.device.engine()), time_(nullptr, Clock::wall) {
    if (engine_.device().kind == Device::Kind::cuda)
      cleared_.emplace(context_.emplace(engine_.device().index), nullptr, cuda::ColdLaunches::Before::clear);
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
    for (Problem& problem : problems(std::move(entry))) {
      std::vector<double> samples = measure(problem, rounds);
      rows.push_back(
          to_json(measured(problem.work.shape(), *problem.kernel, samples, problem.flops, problem.bytes)));
    }
    return {{"model", device_model(engine_.device())}, {"target", engine_.target().str()}, {"rows", rows}};
  }

 private:
  // Tensors are kept: making them takes many times as long as measuring, and a GPU cools meanwhile.
  std::vector<Problem>& problems(nlohmann::json entry) {
    const auto [at, is_new] = problems_.try_emplace(entry.dump());
    if (!is_new) return at->second;
    try {
      add(std::move(entry), at->second);
    } catch (...) {
      problems_.erase(at);
      throw;
    }
    return at->second;
  }

  void add(nlohmann::json entry, std::vector<Problem>& problems) {
    const Progress progress("preparing " + entry.dump());
    MaskOptions masks = options_.masks;
    masks.lengths_k = take_lengths(entry);
    for (const ManifestItem& item :
         parse_manifest(nlohmann::json{{"kernels", nlohmann::json::array({entry})}}.dump())) {
      if (item.shapes.empty()) throw Error(ErrorCode::invalid_argument, "the request: it names no shapes");
      options_.dropout.check({item.spec});
      for (Shape shape : item.shapes) {
        if (!masks.lengths_k.empty()) {
          shape.batch = static_cast<int>(masks.lengths_k.size());
          shape.seqlen_k = *std::max_element(masks.lengths_k.begin(), masks.lengths_k.end());
        }
        Workload work = Workload::generate(item.spec, shape, options_.seed, masks,
                                           {.outlier_every = 0, .long_row_every = 0});
        work.set_dropout(options_.dropout);
        work.place(engine_.device());
        if (options_.heads_first) work.put_heads_first();
        work.compute_forward(engine_);
        const Kernel& kernel = engine_.get(item.spec, shape);
        PreparedLaunch launch = kernel.prepare(work.args_for(kernel));
        const double flops = work.flops(), bytes = work.bound_bytes();
        problems.push_back({std::move(work), &kernel, std::move(launch), flops, bytes});
      }
    }
  }

  static std::vector<std::int32_t> take_lengths(nlohmann::json& entry) {
    const auto given = entry.find("lengths_k");
    if (given == entry.end()) return {};
    std::vector<std::int32_t> lengths;
    const bool is_list = given->is_array() && !given->empty();
    for (const nlohmann::json& length : is_list ? *given : nlohmann::json::array({-1})) {
      if (!length.is_number_integer() || length < 0 || length > longest_sequence)
        throw Error(ErrorCode::invalid_argument, "the request: lengths_k is not a list of sequences' keys");
      lengths.push_back(length.get<std::int32_t>());
    }
    entry.erase(given);
    return lengths;
  }

  std::vector<double> measure(const Problem& problem, int rounds) {
    if (context_) return measure_on_gpu(problem, rounds);
    const int times = launches_of_a_sample(time_, problem.launch);
    std::vector<double> samples;
    for (int round = 0; round < rounds; ++round) samples.push_back(time_(problem.launch, times));
    return samples;
  }

  // As Triton's do_bench measures, with launches and what comes before them for about `ms` milliseconds.
  // Before a launch that memory bounds, 256 MB are read; before others they are cleared.
  std::vector<double> measure_on_gpu(const Problem& problem, double ms) {
    const bool is_bound = problem.work.bound_bytes() > 0;
    if (is_bound && !after_read_) {
      read_.emplace(*context_);
      after_read_.emplace(*context_, &*read_, cuda::ColdLaunches::Before::read);
    }
    cuda::ColdLaunches& cold = is_bound ? *after_read_ : *cleared_;
    const auto launch = [&](Stream stream) { problem.launch.launch(stream); };
    launch(cold.stream().get());  // a kernel's first launch may load it
    cold(launch, 5);
    const double once = std::max(cold.ms_with_preparation(), 1e-4);
    const int count = static_cast<int>(std::clamp(ms / once, 1.0, 100'000.0));
    for (int i = 0; i < std::max(count / 4, 1); ++i) launch(cold.stream().get());
    return cold(launch, count);
  }

  const BenchOptions& options_;
  Engine engine_;
  std::optional<cuda::Context> context_;  // on a GPU, as the next three
  std::optional<cuda::ColdLaunches> cleared_;
  std::optional<cuda::PlainRead> read_;
  std::optional<cuda::ColdLaunches> after_read_;
  LaunchTimer time_;  // on a CPU
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
