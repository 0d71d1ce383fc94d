// flashjit audit --device cuda:N: the bytes that launches move between a GPU and its memory, by its counters.
#include <filesystem>
#include <fstream>
#include <iostream>

#include "runtime/cuda/driver.hpp"
#include "runtime/cuda/memory.hpp"
#include "runtime/device.hpp"
#include "tools/command/audit.hpp"
#include "tools/command/device_counters.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/progress.hpp"
#include "tools/command/report.hpp"
#include "tools/verify/table.hpp"

namespace flashjit::command {
namespace {

Workload generate(const AuditOptions& options, const AttentionSpec& spec) {
  Workload work = Workload::generate(spec, options.shape.shape(spec), 1, options.masks,
                                     {.outlier_every = 0, .long_row_every = 0});
  work.set_dropout({});
  return work;
}

// Launches once, so that everything is loaded, and then so many times between marks for a profiler.
void launch(const AuditOptions& options, Engine& engine, Workload& work) {
  work.place(engine.device());
  work.compute_forward(engine);
  const Kernel& kernel = engine.get(work.spec(), work.shape());
  const PreparedLaunch prepared = kernel.prepare(work.args_for(kernel));
  const cuda::OwnedStream stream(*work.context());
  prepared.launch(stream.get());
  stream.synchronize();
  const cuda::ContextScope scope(*work.context());
  if (!cuda::driver().ProfilerStart || !cuda::driver().ProfilerStop)
    throw Error(ErrorCode::device_failed, "this driver lacks cuProfilerStart");
  cuda::check(cuda::driver().ProfilerStart(), "starting the profiler");
  for (int i = 0; i < options.launches; ++i) prepared.launch(stream.get());
  stream.synchronize();
  cuda::check(cuda::driver().ProfilerStop(), "stopping the profiler");
}

// This process's own words with more behind them.
std::vector<std::string> this_command(std::initializer_list<std::string> more) {
  std::ifstream words("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> command;
  for (std::string word; std::getline(words, word, '\0');) command.push_back(word);
  if (command.empty()) throw Error(ErrorCode::device_failed, "/proc/self/cmdline cannot be read");
  command.front() = std::filesystem::read_symlink("/proc/self/exe");
  command.insert(command.end(), more);
  return command;
}

}  // namespace

int audit_on_device(const AuditOptions& options) {
  const AttentionSpec spec = read_spec(options.spec, options.op);
  if (!info_of(spec.op).attends)
    throw Error(ErrorCode::unsupported, std::string("audit counts no op ") + info_of(spec.op).name +
                                            "; op forward, backward and decode would work");
  options.masks.check({spec});
  Engine engine({.device = options.device, .target = options.target});
  Workload work = generate(options, spec);
  if (options.launches > 0) {
    launch(options, engine, work);
    return exit_ok;
  }
  if (options.spec == "-")
    throw Error(ErrorCode::invalid_argument,
                "ncu starts this command again, which cannot read '-' twice; a file would work");

  constexpr int launches = 4;
  const std::string ncu = options.ncu.empty() ? find_ncu() : options.ncu;
  CountedBytes counted;
  {
    const Progress progress("launching under ncu");
    counted = count_device_bytes(ncu, this_command({"--launches", std::to_string(launches)}));
  }
  const double read = counted.read / launches, written = counted.written / launches, all = read + written;
  const auto [least_in, least_out] = work.bytes_in_and_out();
  const auto least_read = static_cast<double>(least_in), least_written = static_cast<double>(least_out),
             least = least_read + least_written;
  const double standard = bytes_of_standard(work, least);
  const CudaDevice gpu = cuda_device(engine.device().index);
  const double order = order_of_bytes(work, gpu.max_shared_memory),
               order_of_l2 = order_of_bytes(work, static_cast<double>(gpu.l2_cache));
  if (options.json) {
    print_json({{"spec", Json::parse(spec.to_json())},
                {"device", options.device},
                {"model", gpu.name},
                {"target", engine.target().str()},
                {"config", config_json(engine.get(spec, work.shape()).info().config)},
                {"shape", shape_json(work.shape())},
                {"launches", launches},
                {"kernels", counted.kernels},
                {"read", read},
                {"written", written},
                {"of_least", all / least},
                {"least", {{"read", least_read}, {"written", least_written}}},
                {"n2_d2_over_m", {{"shared_memory", order}, {"l2_cache", order_of_l2}}},
                {"standard_attention", standard}});
    return exit_ok;
  }
  const auto mb = [](double bytes) { return number(bytes / 1e6); };
  std::cout << spec.to_json() << "\n"
            << gpu.name << ", " << engine.target().str() << ", the mean of " << launches << " launches of "
            << counted.kernels / launches << " kernels each\n\n";
  verify::Table table({"memory of the GPU", "MB read", "MB written", "MB", "of least"});
  table.add({"counted", mb(read), mb(written), mb(all), number(all / least)});
  table.add({"least possible", mb(least_read), mb(least_written), mb(least), "1"});
  table.add({"N^2 d^2 / M, M = " + mb(gpu.max_shared_memory) + " MB of shared memory", "", "", mb(order),
             number(order / least)});
  table.add({"N^2 d^2 / M, M = " + mb(static_cast<double>(gpu.l2_cache)) + " MB of L2", "", "",
             mb(order_of_l2), number(order_of_l2 / least)});
  table.add({"standard attention", "", "", mb(standard), number(standard / least)});
  std::cout << shown(table);
  return exit_ok;
}

}  // namespace flashjit::command
