// flashjit doctor: what was found, what is missing and what to do.
#include <algorithm>
#include <iostream>
#include <memory>
#include <thread>

#include "cache/disk_cache.hpp"
#include "runtime/compiler.hpp"
#include "runtime/cuda/driver.hpp"
#include "runtime/device.hpp"
#include "runtime/llvm/plugin_client.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/options.hpp"
#include "tools/command/report.hpp"
#include "tools/command/verbs.hpp"

namespace flashjit::command {
namespace {

struct Finding {
  std::string name;  // "cpu", "llvm", "nvrtc", "gpu", "cache"
  bool ok = false;
  std::string text;  // what was found; or what is wrong and what helps
};

// The result of `find`, or the message of the Error that it throws.
template <class Find>
Finding look(const char* name, Find find) {
  try {
    return {name, true, find()};
  } catch (const Error& error) {
    return {name, false, error.message()};
  }
}

std::string describe_gpus() {
  std::string reason;
  const std::vector<CudaDevice> gpus = cuda_devices(&reason);
  if (gpus.empty()) throw Error(ErrorCode::target_unavailable, reason);
  std::string text = "driver for CUDA " + cuda_driver_version();
  for (const CudaDevice& gpu : gpus) {
    text += "; cuda:" + std::to_string(gpu.index) + " " + gpu.name + ", " + std::to_string(gpu.memory >> 30) +
            " GiB, " + Target::for_compute_capability(gpu.major, gpu.minor).str();
  }
  return text;
}

int examine(bool json, const std::optional<std::string>& cache_dir) {
  const Device cpu;
  const std::vector<Finding> findings = {
      look("cpu",
           [&] {
             return device_model(cpu) + ", " + std::to_string(std::thread::hardware_concurrency()) +
                    " threads, " + Target::native().str();
           }),
      look("llvm", [] { return std::string(llvm_plugin().identity); }),
      look("gpu", describe_gpus),
      look("nvrtc", [] { return nvrtc_compiler()->identity(); }),
      look("cache",
           [&] {
             const DiskCache cache(cache_dir.value_or(DiskCache::default_folder()));
             return cache.folder() + ", " + std::to_string(cache.list(false).size()) + " entries";
           }),
  };
  const auto ok = [&](std::string_view name) {
    return std::any_of(findings.begin(), findings.end(),
                       [&](const Finding& f) { return f.ok && f.name == name; });
  };
  const bool cpu_works = ok("cpu") && ok("llvm"), gpu_works = ok("gpu") && ok("nvrtc");

  if (json) {
    Json list = Json::array();
    for (const Finding& f : findings) {
      list.push_back({{"name", f.name}, {"ok", f.ok}, {f.ok ? "found" : "problem", f.text}});
    }
    print_json({{"version", version()},
                {"findings", list},
                {"devices", {{"cpu", cpu_works}, {"cuda", gpu_works}}},
                {"compiles_for_cuda", ok("nvrtc")}});
  } else {
    std::cout << "flashjit " << version() << '\n';
    for (const Finding& f : findings) {
      std::cout << (f.ok ? "  found    " : "  missing  ") << f.name << std::string(7 - f.name.size(), ' ')
                << f.text << '\n';
    }
    std::cout << "CPU kernels " << (cpu_works ? "run" : "do not run") << " here; GPU kernels "
              << (gpu_works     ? "run here"
                  : ok("nvrtc") ? "compile here and do not run"
                                : "neither compile nor run here")
              << ".\n";
  }
  return cpu_works || gpu_works ? exit_ok : static_cast<int>(ErrorCode::target_unavailable);
}

}  // namespace

Verb add_doctor(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand("doctor", "Say what was found, what is missing and what to do");
  const auto json = std::make_shared<bool>(false);
  const auto cache_dir = std::make_shared<std::optional<std::string>>();
  add_cache_dir(*app, *cache_dir);
  add_json(*app, *json);
  app->footer(
      "Examples:\n"
      "  flashjit doctor\n"
      "  flashjit doctor --json\n\n"
      "Exit code 4 if kernels run on no device of this machine.\n");
  return {app, [=] { return examine(*json, *cache_dir); }};
}

}  // namespace flashjit::command
