// flashjit doctor: says which parts were found, which are missing, and how to get them.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <set>
#include <sstream>

#include "cache/bundle.hpp"
#include "cache/disk_cache.hpp"
#include "cache/environment.hpp"
#include "cache/tune_store.hpp"
#include "codegen/families/kernel_family.hpp"
#include "runtime/build.hpp"
#include "runtime/compiler.hpp"
#include "runtime/cpu/amx.hpp"
#include "runtime/cuda/driver.hpp"
#include "runtime/device.hpp"
#include "runtime/llvm/plugin_client.hpp"
#include "runtime/remote/plugin_client.hpp"
#include "runtime/remote/remote_client.hpp"
#include "runtime/thread_pool.hpp"
#include "runtime/timing.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/options.hpp"
#include "tools/command/report.hpp"
#include "tools/command/verbs.hpp"

namespace flashjit::command {
namespace {

struct Finding {
  std::string name;  // "cpu", "llvm", "gpu", "nvrtc", "layer" for each, "cache", "remote" for each
  bool ok = false;
  std::string text;         // the part that was found, or the problem and its remedy
  std::string detail = {};  // of a problem: a line for each place that was tried, or a compiler's log
};

// The result of `find`, or the message of the Error that it throws.
template <class Find>
Finding look(const char* name, Find find) {
  try {
    return {name, true, find()};
  } catch (const Error& error) {
    return {name, false, error.message(), error.detail()};
  }
}

// A compiler may be found and compile nothing, so it is tried on the least kernel.
std::string describe_compiler(const Compiler& compiler, const Target& target) {
  KernelSource least;
  least.target = target;
  least.text =
      target.is_cuda() ? "extern \"C\" __global__ void least() {}\n" : "extern \"C\" void least() {}\n";
  compiler.compile(least);
  return compiler.identity();
}

// Whether a folder has a kernel that a device of this target runs.
bool has_kernels(const std::vector<DiskCache>& folders, const Target& target) {
  const auto runs = [&](const Target& other) {
    return target.is_cuda() ? other.runs_on(target.level / 10, target.level % 10) : target.runs(other);
  };
  std::set<std::string> names;
  for (const Target& other : Target::all())
    if (runs(other)) names.insert(other.str());
  return std::any_of(folders.begin(), folders.end(), [&](const DiskCache& folder) {
    const std::vector<DiskCache::Listing> entries = folder.list(false);
    return std::any_of(entries.begin(), entries.end(), [&](const DiskCache::Listing& item) {
      const std::string* const of = item.entry ? item.entry->key.find("target") : nullptr;
      return of && names.contains(*of);
    });
  });
}

// Why kernels are not kept in a folder that is missing; empty if it can be made.
std::string why_not_made(const std::string& folder) {
  std::filesystem::path parent(folder);
  while (parent.has_relative_path() && ::access(parent.c_str(), F_OK) != 0) parent = parent.parent_path();
  return ::access(parent.c_str(), W_OK | X_OK) == 0 ? "" : error_text(errno);
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
  const bool is_layer = cache.access() == DiskCache::Access::read_only;
  if (!is_layer && ::access(cache.folder().c_str(), F_OK) != 0) {
    const std::string why = why_not_made(cache.folder());
    return cache.folder() + ", 0 entries, 0 tune records; " +
           (why.empty() ? "not there yet, the first kernel makes it"
                        : "cannot be made: " + why + ", so compiled kernels are not kept");
  }
  const std::vector<DiskCache::Listing> entries = cache.list(true);
  const auto damaged =
      std::count_if(entries.begin(), entries.end(), [](const auto& item) { return !item.entry; });
  std::string text = cache.folder() + ", " + std::to_string(entries.size() - damaged) + " entries, ";
  if (damaged > 0) text += std::to_string(damaged) + " damaged (see flashjit cache verify), ";
  text += std::to_string(records_of(cache).list().size()) + " tune records";
  if (!is_layer && ::access(cache.folder().c_str(), W_OK) != 0)
    text += "; compiled kernels are not kept: " + error_text(errno);
  return text;
}

std::string describe_user_cache(const std::optional<std::string>& cache_dir) {
  const std::string name = cache_dir.value_or(DiskCache::default_folder());
  if (name.empty())
    throw Error(ErrorCode::cache_failed,
                "every process compiles anew what it needs; FLASHJIT_CACHE_DIR names a folder to keep it in");
  return describe_cache(DiskCache(name, DiskCache::Access::inspect));
}

// Whether the store answers, how soon, and whether this host can use it.
std::string describe_store(const RemoteAddress& address) {
  const auto refuse = [&](const std::string& why) -> void {
    throw Error(ErrorCode::cache_failed, address.url + ": " + why);
  };
  const Trust trust = trusted_keys({});
  if (trust.names().empty())
    refuse("no key is trusted, so nothing of it is used; FLASHJIT_TRUST lists the keys");
  std::unique_ptr<RemoteStore> store;
  try {
    store = open_remote_store(address);
  } catch (const Error& error) {
    refuse(error.message());
  }
  std::string why;
  double ms = 0;
  for (int i = 0; i < 2; ++i) {  // the second request finds the connection made
    const double start = now_ms(Clock::wall);
    if (store->exists("v3/doctor", why) == Answer::failed) refuse(why);
    ms = now_ms(Clock::wall) - start;
  }
  std::string names;
  for (const auto& [key, name] : trust.names()) names += (names.empty() ? "" : ", ") + name;
  const std::string path = signing_key_path({});
  return address.url + ", answers in " + number(ms) + " ms; trusts " + names + "; " +
         (address.read_only || path.empty() ? "read only"
                                            : "stores what " + read_signing_key(path).name + " signs");
}

// The folders that an engine would search. Makes none. Throws cache_failed if an engine would not start,
// since the user named a folder that cannot be used.
std::vector<DiskCache> searched(const std::optional<std::string>& cache_dir,
                                const std::optional<std::string>& cache_path) {
  std::vector<DiskCache> folders = open_cache("", cache_path).layers;
  const bool is_named = cache_dir || !environment_variable(Variable::cache_dir).empty();
  const std::string name = cache_dir.value_or(DiskCache::default_folder());
  if (name.empty()) return folders;
  try {
    folders.emplace_back(name, DiskCache::Access::inspect);
    const std::string& folder = folders.back().folder();
    const std::string why = ::access(folder.c_str(), F_OK) == 0 ? "" : why_not_made(folder);
    if (!why.empty() && is_named)
      throw Error(ErrorCode::cache_failed, "cache folder " + folder + " cannot be made: " + why);
  } catch (const Error&) {
    if (is_named) throw;
  }
  return folders;
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
      look("llvm",
           [] {
             llvm_plugin();
             return describe_compiler(*clang_compiler(), Target::parse("x86-64-v3"));
           }),
      look("gpu", describe_gpus),
      look("nvrtc", [] { return describe_compiler(*nvrtc_compiler(), Target::parse("sm_90")); }),
  };
  // Layers come first, as in a search.
  for (const std::string& path : layer_paths(options.cache_path)) {
    findings.push_back(
        look("layer", [&] { return describe_cache(DiskCache(path, DiskCache::Access::read_only)); }));
  }
  findings.push_back(look("cache", [&] { return describe_user_cache(options.cache_dir); }));
  std::vector<RemoteAddress> stores;
  if (const Finding list = look("remote",
                                [&] {
                                  stores = parse_remotes(environment_variable(Variable::cache_remote));
                                  return std::string();
                                });
      !list.ok)
    findings.push_back(list);
  for (const RemoteAddress& store : stores)
    findings.push_back(look("remote", [&] { return describe_store(store); }));
  const auto ok = [&](std::string_view name) {
    return std::any_of(findings.begin(), findings.end(),
                       [&](const Finding& f) { return f.ok && f.name == name; });
  };
  std::vector<DiskCache> folders;
  const Finding engines = look("", [&] {
    folders = searched(options.cache_dir, options.cache_path);
    return std::string();
  });
  // The targets of the devices that were found.
  std::set<Target> targets;
  if (ok("cpu")) targets.insert(cpu_target().target);
  for (const CudaDevice& gpu : cuda_devices())
    targets.insert(Target::for_compute_capability(gpu.major, gpu.minor));
  // Kernels run if they can be had: compiled here, or found in a folder.
  const auto runs = [&](const char* device, const char* compiler, bool of_gpus) {
    return engines.ok && ok(device) &&
           (ok(compiler) || std::any_of(targets.begin(), targets.end(), [&](const Target& t) {
              return t.is_cuda() == of_gpus && has_kernels(folders, t);
            }));
  };
  const bool cpu_works = runs("cpu", "llvm", false), gpu_works = runs("gpu", "nvrtc", true);
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
      if (!f.detail.empty()) list.back()["detail"] = f.detail;
    }
    print_json({{"version", version()},
                {"findings", list},
                {"devices", {{"cpu", cpu_works}, {"cuda", gpu_works}}},
                {"operations", operations},
                {"compiles_for_cpu", ok("llvm")},
                {"compiles_for_cuda", ok("nvrtc")}});
  } else {
    std::cout << "flashjit " << version() << '\n';
    for (const Finding& f : findings) {
      std::cout << (f.ok ? "  found    " : "  missing  ") << f.name << std::string(7 - f.name.size(), ' ')
                << f.text << '\n';
      std::istringstream detail(f.detail);
      for (std::string line; std::getline(detail, line);)
        if (!line.empty()) std::cout << "             " << line << '\n';
    }
    const auto answer = [](bool works, bool compiles) {
      return works && compiles ? "run here"
             : works           ? "run here where they are prebuilt, and do not compile"
             : compiles        ? "do not run here, but compile"
                               : "neither compile nor run here";
    };
    std::cout << "CPU kernels " << answer(cpu_works, ok("llvm")) << "; GPU kernels "
              << answer(gpu_works, ok("nvrtc")) << ".\n"
              << (engines.ok ? "" : "No engine starts: " + engines.text + ".\n") << text;
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
  add_output(app, options->json);
  app.footer(
      "Examples:\n"
      "  flashjit doctor\n"
      "  flashjit doctor --json\n\n"
      "Exit code 4 if kernels run on no device of this machine.\n");
  return {app, [options] { return examine(*options); }};
}

}  // namespace flashjit::command
