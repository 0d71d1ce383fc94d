// flashjit bench --start: from a fresh process to the first result, then engine.get again and again.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <iostream>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "runtime/cuda/driver.hpp"
#include "runtime/cuda/memory.hpp"
#include "runtime/device.hpp"
#include "runtime/timing.hpp"
#include "tools/command/bench.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/report.hpp"
#include "tools/command/workload.hpp"
#include "tools/verify/table.hpp"

namespace flashjit::command {
namespace {

using Time = std::chrono::steady_clock::time_point;

Time now() {
  return std::chrono::steady_clock::now();
}
double milliseconds(Time from, Time to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

// Nanoseconds of one engine.get() of a kernel in memory, while `threads` threads ask at once: the mean of the
// slowest thread.
double hot_ns(Engine& engine, const AttentionSpec& spec, const Shape& shape, int num_threads) {
  constexpr int times = 1'000'000;
  engine.get(spec, shape);
  std::atomic<int> ready = 0;
  std::vector<double> ns(num_threads);
  const auto work = [&](int thread) {
    ++ready;
    while (ready < num_threads) std::this_thread::yield();
    const Time start = now();
    for (int i = 0; i < times; ++i) engine.get(spec, shape);
    ns[thread] = milliseconds(start, now()) * 1e6 / times;
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < num_threads; ++i) threads.emplace_back(work, i);
  work(0);
  for (std::thread& thread : threads) thread.join();
  return *std::max_element(ns.begin(), ns.end());
}

struct Start {
  double context_ms = 0, engine_ms = 0, get_ms = 0, launch_ms = 0;
  KernelInfo kernel;
};

// Measures the first result of the process. Tensors are in place before the clock starts; CUDA's context is
// counted apart.
Start measure_start(const EngineOptions& options, const AttentionSpec& spec, const Shape& shape,
                    std::uint64_t seed, std::optional<cuda::Context>& context) {
  Start start;
  Workload workload = Workload::generate(spec, shape, seed, {});
  workload.compute_forward();
  const Device device = Device::parse(options.device);
  const Time begin = now();
  if (device.kind == Device::Kind::cuda) {
    context.emplace(device.index);
    start.context_ms = milliseconds(begin, now());
  }
  workload.place(device);

  const Time at_engine = now();
  Engine engine(options);
  const Time at_get = now();
  const Kernel& kernel = engine.get(spec, shape);
  const Time at_launch = now();
  kernel.launch(workload.args_for(kernel));
  if (context) cuda::synchronize(*context);
  const Time end = now();
  start.engine_ms = milliseconds(at_engine, at_get);
  start.get_ms = milliseconds(at_get, at_launch);
  start.launch_ms = milliseconds(at_launch, end);
  start.kernel = kernel.info();
  return start;
}

}  // namespace

int bench_start(const BenchOptions& options) {
  if (options.specs.size() != 1)
    throw Error(ErrorCode::invalid_argument,
                "bench --start takes one spec, because only the first kernel of a process counts");
  const AttentionSpec spec = read_spec(options.specs.front(), options.op);
  const Shape shape = options.shape.shape(spec);
  const EngineOptions engine_options = options.device.engine();
  std::optional<cuda::Context> context;
  const Start start = measure_start(engine_options, spec, shape, options.seed, context);
  const double first_ms = start.engine_ms + start.get_ms + start.launch_ms;

  std::vector<double> warm_ms;
  for (int round = 0; round < options.rounds; ++round)
    warm_ms.push_back(Engine(engine_options).get(spec, shape).info().get_ms);
  const double warm = median(warm_ms);
  Engine engine(engine_options);
  const double alone_ns = hot_ns(engine, spec, shape, 1);
  const double together_ns = hot_ns(engine, spec, shape, options.threads);

  if (options.json) {
    print_json({{"origin", to_string(start.kernel.origin)},
                {"path", start.kernel.path},
                {"context_ms", start.context_ms},
                {"engine_ms", start.engine_ms},
                {"get_ms", start.get_ms},
                {"launch_ms", start.launch_ms},
                {"first_result_ms", first_ms},
                {"rounds", options.rounds},
                {"warm_ms", warm},
                {"warm_spread_percent", spread_percent(warm_ms)},
                {"hot_ns", alone_ns},
                {"threads", options.threads},
                {"hot_ns_together", together_ns}});
    return exit_ok;
  }
  verify::Table table({"what", "time"});
  table.add({"CUDA context", number(start.context_ms) + " ms"});
  table.add({"engine", number(start.engine_ms) + " ms"});
  table.add({"first get, from " + std::string(to_string(start.kernel.origin)), number(start.get_ms) + " ms"});
  table.add({"first launch, to its end", number(start.launch_ms) + " ms"});
  table.add({"first result beyond the context", number(first_ms) + " ms"});
  table.add({"get by a new engine, median of " + std::to_string(options.rounds), number(warm) + " ms"});
  table.add({"get in memory, one thread", number(alone_ns) + " ns"});
  table.add({"get in memory, " + std::to_string(options.threads) + " threads at once",
             number(together_ns) + " ns"});
  std::cout << device_model(Device::parse(engine_options.device)) << ", " << where_cached(start.kernel)
            << "\n\n"
            << shown(table);
  return exit_ok;
}

}  // namespace flashjit::command
