#include <algorithm>
#include <iostream>
#include <optional>

#include "runtime/cuda/driver.hpp"
#include "runtime/device.hpp"
#include "runtime/timing.hpp"
#include "tools/command/bench.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/progress.hpp"
#include "tools/command/report.hpp"
#include "tools/command/session.hpp"
#include "tools/verify/table.hpp"

namespace flashjit::command {
namespace {

struct CompileCandidate {
  std::string spec_name;
  AttentionSpec spec;
  Target target;
  bool loads = false;  // true: from spec to callable, on the device; false: from spec to machine code
  std::vector<double> cold_ms, warm_ms, hot_us;
};

void sample(CompileCandidate& c, const EngineOptions& device, const Shape& shape) {
  const TemporaryFolder empty;
  if (!c.loads) {
    c.cold_ms.push_back(compile(c.spec, c.target, shape, empty.path(), "").get_ms);
    c.warm_ms.push_back(compile(c.spec, c.target, shape, empty.path(), "").get_ms);
    return;
  }
  EngineOptions options = device;
  options.target = c.target.str();
  options.cache_dir = empty.path();
  c.cold_ms.push_back(Engine(options).get(c.spec, shape).info().get_ms);
  Engine engine(options);
  c.warm_ms.push_back(engine.get(c.spec, shape).info().get_ms);
  c.hot_us.push_back(measure_hot_us(engine, c.spec, shape));
}

}  // namespace

int bench_compile(const BenchOptions& options) {
  EngineOptions device = options.device.engine();
  device.cache_dir = device.cache_path = "";  // each sample uses its own folder
  const Target on_device = Engine(device).target();
  // Keeps a CUDA context alive. CUDA takes 0.1 s to make one, and that time is not the kernel's.
  std::optional<cuda::Context> held;
  if (on_device.is_cuda()) held.emplace(Device::parse(device.device).index);
  std::vector<CompileCandidate> candidates;
  for (const std::string& argument : options.specs) {
    for (const std::string& name : options.targets) {
      const Target target = Target::parse(name);
      // A CPU runs targets up to its own; a GPU runs targets of its major version.
      const bool loads = target.family == on_device.family && target <= on_device &&
                         (!target.is_cuda() || target.level / 10 == on_device.level / 10);
      candidates.push_back({argument, read_spec(argument, options.op), target, loads, {}, {}, {}});
    }
  }
  {
    const Progress progress("compiling " + std::to_string(options.rounds) + " times");
    // The first compile of a process also opens the compiler.
    for (CompileCandidate& c : candidates) {
      CompileCandidate warm_up = c;
      sample(warm_up, device, options.shape.shape(c.spec));
    }
    for (int round = 0; round < options.rounds; ++round) {
      for (CompileCandidate& c : candidates) sample(c, device, options.shape.shape(c.spec));
    }
  }

  Json rows = Json::array();
  verify::Table table({"spec", "target", "to", "cold ms", "+-%", "warm ms", "hot us"});
  for (CompileCandidate& c : candidates) {
    const double cold = median(c.cold_ms), warm = median(c.warm_ms);
    Json row = {{"spec", c.spec_name},
                {"target", c.target.str()},
                {"to", c.loads ? "callable" : "code"},
                {"cold_ms", cold},
                {"cold_spread_percent", spread_percent(c.cold_ms)},
                {"warm_ms", warm},
                {"hot_us", nullptr}};
    if (c.loads) row["hot_us"] = median(c.hot_us);
    rows.push_back(row);
    table.add({c.spec_name, c.target.str(), c.loads ? "callable" : "code", number(cold),
               number(spread_percent(c.cold_ms)), number(warm), c.loads ? number(median(c.hot_us)) : "-"});
  }
  if (options.json) {
    print_json({{"rounds", options.rounds}, {"rows", rows}});
  } else {
    std::cout << "medians of " << options.rounds << " rounds; " << device_model(Device{}) << "\n\n"
              << shown(table);
  }
  return exit_ok;
}

}  // namespace flashjit::command
