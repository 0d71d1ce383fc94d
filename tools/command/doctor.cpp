// flashjit doctor: says which parts were found, which are missing, and how to get them.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iostream>
#include <memory>
#include <optional>
#include <set>

#include "cache/disk_cache.hpp"
#include "cache/tune_store.hpp"
#include "codegen/families/kernel_family.hpp"
#include "runtime/build.hpp"
#include "runtime/compiler.hpp"
#include "runtime/cpu/amx.hpp"
#include "runtime/cuda/driver.hpp"
#include "runtime/device.hpp"
#include "runtime/llvm/plugin_client.hpp"
#include "runtime/thread_pool.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/options.hpp"
#include "tools/command/report.hpp"
#include "tools/command/verbs.hpp"

namespace flashjit::command {
namespace {

struct Finding {
  std::string name;  // "cpu", "llvm", "gpu", "nvrtc", "layer" for each, "cache"
  bool ok = false;
  std::string text;  // the part that was found, or the problem and its remedy
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

std::string describe_cache(const DiskCache& cache) {
  const std::vector<DiskCache::Listing> entries = cache.list(false);
  const auto damaged =
      std::count_if(entries.begin(), entries.end(), [](const auto& item) { return !item.entry; });
  std::string text = cache.folder() + ", " + std::to_string(entries.size() - damaged) + " entries, ";
  if (damaged > 0) text += std::to_string(damaged) + " damaged (see flashjit cache verify), ";
  text += std::to_string(TuneStore(cache.folder()).list().size()) + " tune records";
  if (cache.access() == DiskCache::Access::read_write && ::access(cache.folder().c_str(), W_OK) != 0)
    text += "; compiled kernels are not kept: " + error_text(errno);
  return text;
}

std::string describe_user_cache(const std::optional<std::string>& cache_dir) {
  const std::string name = cache_dir.value_or(DiskCache::default_folder());
  if (name.empty())
    throw Error(ErrorCode::cache_failed,
                "every process compiles anew what it needs; FLASHJIT_CACHE_DIR names a folder to keep it in");
  return describe_cache(DiskCache(name));
}

struct DoctorOptions {
  bool json = false;
  std::optional<std::string> cache_dir, cache_path;
};

int examine(const DoctorOptions& options) {
  const Device cpu;
  std::vector<Finding> findings = {
      look("cpu",
           [&] {
             const auto [target, note] = cpu_target();
             return device_model(cpu) + ", " + std::to_string(available_cpus()) + " threads, " +
                    target.str() + (note.empty() ? "" : "; " + note);
           }),
      look("llvm", [] { return std::string(llvm_plugin().identity); }),
      look("gpu", describe_gpus),
      look("nvrtc", [] { return nvrtc_compiler()->identity(); }),
  };
  // Layers come first, as in a search.
  for (const std::string& path : layer_paths(options.cache_path)) {
    findings.push_back(
        look("layer", [&] { return describe_cache(DiskCache(path, DiskCache::Access::read_only)); }));
  }
  findings.push_back(look("cache", [&] { return describe_user_cache(options.cache_dir); }));
  const auto ok = [&](std::string_view name) {
    return std::any_of(findings.begin(), findings.end(),
                       [&](const Finding& f) { return f.ok && f.name == name; });
  };
  // An engine does not start if a folder that the user named cannot be used.
  const bool starts = look("", [&] { return open_cache(options.cache_dir, options.cache_path).note; }).ok;
  const bool cpu_works = starts && ok("cpu") && ok("llvm"), gpu_works = starts && ok("gpu") && ok("nvrtc");

  // The targets of the devices that were found.
  std::set<Target> targets;
  if (ok("cpu")) targets.insert(cpu_target().target);
  for (const CudaDevice& gpu : cuda_devices())
    targets.insert(Target::for_compute_capability(gpu.major, gpu.minor));
  Json operations = Json::object();
  std::string text;
  for (const Target& target : targets) {
    Json names = Json::array();
    text += target.str() + " has op";
    for (const Operation op : operations_on(target)) {
      text += (names.empty() ? " " : ", ") + std::string(to_string(op));
      names.push_back(to_string(op));
    }
    text += ".\n";
    operations[target.str()] = names;
  }

  if (options.json) {
    Json list = Json::array();
    for (const Finding& f : findings) {
      list.push_back({{"name", f.name}, {"ok", f.ok}, {f.ok ? "found" : "problem", f.text}});
    }
    print_json({{"version", version()},
                {"findings", list},
                {"devices", {{"cpu", cpu_works}, {"cuda", gpu_works}}},
                {"operations", operations},
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
              << ".\n"
              << text;
  }
  return cpu_works || gpu_works ? exit_ok : static_cast<int>(ErrorCode::target_unavailable);
}

}  // namespace

Verb add_doctor(const Arguments& parent) {
  const Arguments app = parent.add_subcommand(
      "doctor", "Check this machine: which parts are found, which are missing, and how to get them");
  const auto options = std::make_shared<DoctorOptions>();
  add_cache_dir(app, options->cache_dir);
  add_cache_path(app, options->cache_path);
  add_json(app, options->json);
  app.footer(
      "Examples:\n"
      "  flashjit doctor\n"
      "  flashjit doctor --json\n\n"
      "Exit code 4 if kernels run on no device of this machine.\n");
  return {app, [options] { return examine(*options); }};
}

}  // namespace flashjit::command
