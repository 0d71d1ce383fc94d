#include "runtime/cuda/nvrtc.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <type_traits>

#include "cache/environment.hpp"
#include "cache/fork.hpp"
#include "codegen/base/digest.hpp"
#include "codegen/base/error.hpp"
#include "runtime/build_id.hpp"
#include "runtime/compile_watch.hpp"
#include "runtime/library_file.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;

// The part of NVRTC's interface that we call, written from its documentation.
using nvrtcResult = int;
using nvrtcProgram = struct _nvrtcProgram*;

#define FLASHJIT_NVRTC_FUNCTIONS(X)                                                                    \
  X(Version, nvrtcResult(int*, int*))                                                                  \
  X(GetErrorString, const char*(nvrtcResult))                                                          \
  X(GetNumSupportedArchs, nvrtcResult(int*))                                                           \
  X(GetSupportedArchs, nvrtcResult(int*))                                                              \
  X(CreateProgram,                                                                                     \
    nvrtcResult(nvrtcProgram*, const char*, const char*, int, const char* const*, const char* const*)) \
  X(DestroyProgram, nvrtcResult(nvrtcProgram*))                                                        \
  X(CompileProgram, nvrtcResult(nvrtcProgram, int, const char* const*))                                \
  X(GetProgramLogSize, nvrtcResult(nvrtcProgram, std::size_t*))                                        \
  X(GetProgramLog, nvrtcResult(nvrtcProgram, char*))                                                   \
  X(GetCUBINSize, nvrtcResult(nvrtcProgram, std::size_t*))                                             \
  X(GetCUBIN, nvrtcResult(nvrtcProgram, char*))                                                        \
  X(GetPTXSize, nvrtcResult(nvrtcProgram, std::size_t*))                                               \
  X(GetPTX, nvrtcResult(nvrtcProgram, char*))

// In NVRTC 12.8 and newer.
using SetFlowCallback = nvrtcResult(nvrtcProgram, int (*)(void*, void*), void*);

struct NvrtcApi {
  SetFlowCallback* set_flow_callback = nullptr;
#define FLASHJIT_MEMBER(name, ...) std::add_pointer_t<__VA_ARGS__> name = nullptr;
  FLASHJIT_NVRTC_FUNCTIONS(FLASHJIT_MEMBER)
#undef FLASHJIT_MEMBER
};

constexpr int oldest_version = 1204;  // older versions lack __builtin_bit_cast
constexpr const char* sonames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};
constexpr nvrtcResult without_builtins = 7;  // NVRTC_ERROR_BUILTIN_OPERATION_FAILURE
std::string builtins_name(int major, int minor) {
  return "libnvrtc-builtins.so." + std::to_string(major) + "." + std::to_string(minor);
}

// ---- identity ----

std::string build_of(const std::string& path) {
  const std::string id = build_id(path);
  if (!id.empty()) return id;
  std::ifstream file(path, std::ios::binary);
  return digest(std::string(std::istreambuf_iterator<char>(file), {}));
}

// ---- the report of ptxas ----

// The number right before `unit`, or 0.
int number_before(std::string_view line, std::string_view unit) {
  const std::size_t end = line.find(unit);
  if (end == std::string_view::npos) return 0;
  std::size_t begin = end;
  while (begin > 0 && line[begin - 1] >= '0' && line[begin - 1] <= '9') --begin;
  int value = 0;
  std::from_chars(line.data() + begin, line.data() + end, value);
  return value;
}

// The kernel functions with their registers, spills and static shared memory. Reports
// of functions that were not inlined count for the kernel function before them.
std::vector<CompiledStep> read_ptxas_report(std::string_view log) {
  std::vector<CompiledStep> steps;
  while (!log.empty()) {
    const std::string_view line = log.substr(0, log.find('\n'));
    log.remove_prefix(std::min(line.size() + 1, log.size()));
    constexpr std::string_view compiling = "Compiling entry function '";
    if (const std::size_t at = line.find(compiling); at != std::string_view::npos) {
      const std::string_view name = line.substr(at + compiling.size());
      steps.push_back({.function = std::string(name.substr(0, name.find('\'')))});
    }
    if (steps.empty()) continue;
    CompiledStep& step = steps.back();
    step.registers = std::max(step.registers, number_before(line, " registers"));
    step.static_shared_memory = std::max(step.static_shared_memory, number_before(line, " bytes smem"));
    step.spill_bytes = std::max(step.spill_bytes, number_before(line, " bytes spill stores") +
                                                      number_before(line, " bytes spill loads"));
  }
  return steps;
}

// ---- compiler ----

// The compiles under way. Neither member is ever destroyed: compiles may outlast static objects.
class Compiles {
 public:
  // Throws if none can begin any more.
  void begin() {
    const std::lock_guard lock(process_mutex());
    if (of_ != forks()) {
      of_ = forks();
      lost_ = lost_ || count_ > 0;
      count_ = 0;
    }
    if (lost_)
      throw Error(ErrorCode::compiler_unavailable,
                  "this process was forked while NVRTC compiled in its parent, and NVRTC's locks are held "
                  "for ever here: compile in the parent, or fork before or after");
    check();
    ++count_;
  }
  void end() {
    const std::lock_guard lock(process_mutex());
    --count_;
    ended_.notify_all();
  }
  bool must_end() const noexcept { return ending_; }
  // Throws if all must end.
  void check() const {
    if (ending_)
      throw Error(ErrorCode::compiler_unavailable, "the process is ending, so that NVRTC compiles no more");
  }
  // exit() destroys first what was made last, and NVRTC makes static objects until it has compiled once. So
  // this is called again and again: end_all() is to come before them.
  void end_at_exit();
  void note_compiled() {
    end_at_exit();
    has_compiled_ = true;
  }
  void end_all() {
    std::unique_lock lock(process_mutex());
    ending_ = true;
    ended_.wait(lock, [&] { return count_ == 0 || of_ != forks(); });
  }

 private:
  std::condition_variable ended_;  // under process_mutex(), like all that are not atomic
  int count_ = 0;
  std::uint32_t of_ = forks();
  bool lost_ = false;
  std::atomic<bool> ending_ = false, has_compiled_ = false;
};
Compiles& compiles() {
  static Compiles& all = *new Compiles;
  return all;
}
void Compiles::end_at_exit() {
  if (!has_compiled_) std::atexit([] { compiles().end_all(); });
}

class CompileUnderWay {
 public:
  CompileUnderWay() { compiles().begin(); }
  ~CompileUnderWay() { compiles().end(); }
  CompileUnderWay(const CompileUnderWay&) = delete;
  CompileUnderWay& operator=(const CompileUnderWay&) = delete;
};

class Nvrtc final : public Compiler {
 public:
  Nvrtc(const NvrtcApi& api, int major, int minor, const std::string& build)
      : api_(api),
        version_(major * 100 + minor),
        builtins_(builtins_name(major, minor)),
        identity_("NVRTC " + std::to_string(major) + "." + std::to_string(minor) + " build " + build) {
    int count = 0;
    if (api_.GetNumSupportedArchs(&count) == 0 && count > 0) {
      architectures_.resize(static_cast<std::size_t>(count));
      api_.GetSupportedArchs(architectures_.data());
    }
  }

  const std::string& identity() const override { return identity_; }

  std::string options(const KernelSource& source) const override {
    std::string text;
    for (const std::string& option : option_list(source)) text += (text.empty() ? "" : " ") + option;
    return text;
  }

  void check(const CompileLimits& limits) const override {
    if (!limits.any() || api_.set_flow_callback) return;
    throw Error(ErrorCode::unsupported,
                "limits of a compilation and cancelling are not supported by " + identity_ +
                    ", which cannot be ended (it has no nvrtcSetFlowCallback); NVRTC 12.8 or newer "
                    "(FLASHJIT_NVRTC says which to use), or no limits, would work");
  }

  CompiledKernel compile(const KernelSource& source, bool keep_assembly,
                         const CompileLimits& limits) const override {
    require_architecture(source.target);
    check(limits);
    const CompileUnderWay under_way;
    const auto start = std::chrono::steady_clock::now();
    CompileWatch watch(limits);
    const Program program(api_, source);
    if (api_.set_flow_callback) api_.set_flow_callback(program.handle, must_end, &watch);
    const std::vector<std::string> options = option_list(source);
    std::vector<const char*> arguments;
    for (const std::string& option : options) arguments.push_back(option.c_str());
    const nvrtcResult result =
        api_.CompileProgram(program.handle, static_cast<int>(arguments.size()), arguments.data());

    watch.check("the kernel for " + source.target.str());
    compiles().check();
    CompiledKernel kernel;
    kernel.compiler = identity_;
    kernel.log = text(program.handle, api_.GetProgramLogSize, api_.GetProgramLog);
    if (result == without_builtins)
      throw Error(ErrorCode::compiler_unavailable,
                  identity_ + " compiles nothing, since its second library is missing: " + builtins_ +
                      " must lie beside it, or where the loader looks",
                  kernel.log);
    if (result != 0) {
      throw Error(ErrorCode::compile_failed,
                  identity_ + " refused the kernel for " + source.target.str() + " (" +
                      api_.GetErrorString(result) + ")",
                  kernel.log);
    }
    compiles().note_compiled();
    kernel.code = bytes(program.handle, api_.GetCUBINSize, api_.GetCUBIN);
    if (kernel.code.empty()) {
      throw Error(ErrorCode::compile_failed, identity_ + " made no machine code for " + source.target.str(),
                  kernel.log);
    }
    if (keep_assembly) kernel.assembly = text(program.handle, api_.GetPTXSize, api_.GetPTX);
    kernel.steps = read_ptxas_report(kernel.log);
    kernel.compile_ms =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    return kernel;
  }

 private:
  // NVRTC asks on any of its threads, and ends the compile for an answer that is not 0.
  static int must_end(void* watch, void*) {
    compiles().end_at_exit();
    return compiles().must_end() || static_cast<CompileWatch*>(watch)->ends(0) ? 1 : 0;
  }

  struct Program {
    Program(const NvrtcApi& nvrtc, const KernelSource& source) : api(nvrtc) {
      // NVRTC takes zero-terminated strings; the embedded texts are views.
      std::vector<std::string> names, texts;
      for (const EmbeddedHeader& header : source.headers) {
        names.emplace_back(header.name);
        texts.emplace_back(header.text);
      }
      std::vector<const char*> name_pointers, text_pointers;
      for (std::size_t i = 0; i < names.size(); ++i) {
        name_pointers.push_back(names[i].c_str());
        text_pointers.push_back(texts[i].c_str());
      }
      const nvrtcResult result =
          api.CreateProgram(&handle, source.text.c_str(), "flashjit.cu", static_cast<int>(names.size()),
                            text_pointers.data(), name_pointers.data());
      if (result != 0) {
        throw Error(ErrorCode::compile_failed,
                    std::string("nvrtcCreateProgram: ") + api.GetErrorString(result));
      }
    }
    ~Program() { api.DestroyProgram(&handle); }
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;

    const NvrtcApi& api;
    nvrtcProgram handle = nullptr;
  };

  using SizeOf = nvrtcResult (*)(nvrtcProgram, std::size_t*);
  using Get = nvrtcResult (*)(nvrtcProgram, char*);

  static std::string bytes(nvrtcProgram program, SizeOf size_of, Get get) {
    std::size_t size = 0;
    if (size_of(program, &size) != 0) return {};
    std::string result(size, '\0');
    if (get(program, result.data()) != 0) return {};
    return result;
  }

  // NVRTC's sizes count the terminator of a text.
  static std::string text(nvrtcProgram program, SizeOf size_of, Get get) {
    std::string result = bytes(program, size_of, get);
    while (!result.empty() && result.back() == '\0') result.pop_back();
    return result;
  }

  std::vector<std::string> option_list(const KernelSource& source) const {
    std::vector<std::string> list = {
        "--gpu-architecture=" + source.target.str(),
        "--std=c++20",
        "--modify-stack-limit=false",  // the default raises the whole process's stack limit
        "--ptxas-options=-v",          // registers and spills in the log
        "--diag-suppress=177",         // a Spec may have constants that its kernel does not read
    };
    if (version_ >= 1209) list.push_back("--no-cache");  // flashjit has its own cache
    list.insert(list.end(), source.options.begin(), source.options.end());
    return list;
  }

  void require_architecture(const Target& target) const {
    const std::string name = target.str();
    int level = 0;
    std::from_chars(name.data() + std::strlen("sm_"), name.data() + name.size(), level);
    if (std::find(architectures_.begin(), architectures_.end(), level) != architectures_.end()) return;
    std::string known;
    for (int a : architectures_) known += " sm_" + std::to_string(a);
    throw Error(ErrorCode::compiler_unavailable,
                identity_ + " does not know " + name + ", only" + known +
                    "; install a newer NVRTC (FLASHJIT_NVRTC says which to use)");
  }

  NvrtcApi api_;
  int version_;
  std::string builtins_;
  std::string identity_;
  std::vector<int> architectures_;
};

// ---- opening ----

// Opens NVRTC's second library, libnvrtc-builtins, before NVRTC does. NVRTC opens it by
// its bare name, which fails if both are in a folder that the loader does not search,
// such as a Python wheel's; the loader finds an open library by name. Returns false, with
// the reason in *why, if the file is there but cannot be opened; then NVRTC must not try.
bool load_builtins(const std::string& nvrtc, int major, int minor, std::string* why) {
  const fs::path file = fs::path(nvrtc).parent_path() / builtins_name(major, minor);
  std::error_code ignored;
  if (!fs::exists(file, ignored) || open_library(file, why)) return true;
  *why = file.string() + ": " + *why;
  return false;
}

std::shared_ptr<const Compiler> open_one(const std::string& name, std::string& why_not) {
  void* const library = open_library(name, &why_not);
  if (!library) return nullptr;
  NvrtcApi api;
  const auto find = [&](auto& function, const char* symbol) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
    if (!function && why_not.empty()) why_not = std::string("has no ") + symbol;
  };
#define FLASHJIT_FIND(name, ...) find(api.name, "nvrtc" #name);
  FLASHJIT_NVRTC_FUNCTIONS(FLASHJIT_FIND)
#undef FLASHJIT_FIND
  api.set_flow_callback = reinterpret_cast<SetFlowCallback*>(dlsym(library, "nvrtcSetFlowCallback"));
  int major = 0, minor = 0;
  if (why_not.empty() && api.Version(&major, &minor) != 0) why_not = "does not tell its version";
  if (why_not.empty() && major * 100 + minor < oldest_version) {
    why_not =
        "is version " + std::to_string(major) + "." + std::to_string(minor) + ", 12.4 or newer is needed";
  }
  if (!why_not.empty()) return nullptr;
  const std::string path = path_of(library);
  std::string problem;
  // The loader then finds libnvrtc-builtins as well.
  const bool found_by_loader = name.find('/') == std::string::npos;
  if (!load_builtins(path, major, minor, &problem) && !found_by_loader) {
    why_not = problem;
    return nullptr;
  }
  compiles().end_at_exit();
  return std::make_shared<Nvrtc>(api, major, minor, build_of(path));
}

}  // namespace

std::vector<std::string> nvrtc_candidates() {
  std::vector<std::string> candidates;
  const auto add_folder = [&](const fs::path& folder) {
    for (const char* name : sonames) candidates.push_back(folder / name);
  };
  if (const std::string chosen = environment_variable(Variable::nvrtc); !chosen.empty()) {
    std::error_code ignored;
    if (fs::is_directory(chosen, ignored)) {
      add_folder(chosen);
    } else {
      candidates.push_back(chosen);
    }
    return candidates;
  }
  for (const Variable variable : {Variable::cuda_home, Variable::cuda_path}) {
    if (const std::string home = environment_variable(variable); !home.empty())
      add_folder(fs::path(home) / "lib64");
  }
  for (const char* name : sonames) candidates.push_back(name);
  std::string ignored;
  if (const fs::path own = own_folder(&ignored); !own.empty()) {
    add_folder(own / "nvrtc");
    add_folder(own.parent_path() / "lib" / "nvrtc");  // for a program in bin/ that holds the library
  }
  add_folder("/usr/local/cuda/lib64");
  return candidates;
}

std::shared_ptr<const Compiler> open_nvrtc(const std::vector<std::string>& candidates) {
  std::string tried, passed_over;
  for (const std::string& path : candidates) {
    std::string why_not;
    if (auto compiler = open_one(path, why_not)) return compiler;
    const std::string reason = path + ": " + why_not;
    tried += reason + "\n";
    // A file that is there and was not taken says more than places without one.
    if (why_not.find("cannot open shared object file") == std::string::npos)
      passed_over += (passed_over.empty() ? "" : "; ") + reason;
  }
  throw Error(ErrorCode::compiler_unavailable,
              "NVRTC, the CUDA run-time compiler, " +
                  (passed_over.empty()
                       ? "was not found in " + std::to_string(candidates.size()) + " places (see the detail)"
                       : "was found and cannot be used (" + passed_over + ")") +
                  "; install the package cuda-nvrtc-13-0 (NVIDIA's apt repository), "
                  "run tools/quickstart, which fetches NVRTC from PyPI, "
                  "or set FLASHJIT_NVRTC to a libnvrtc.so.12 or .13 or its folder. "
                  "Kernels that are cached or prebuilt need no compiler",
              tried);
}

std::shared_ptr<const Compiler> nvrtc_compiler() {
  // After an exception the next call tries again.
  static constinit std::atomic<const std::shared_ptr<const Compiler>*> compiler = nullptr;
  return opened_once(compiler, [] { return open_nvrtc(nvrtc_candidates()); });
}

}  // namespace flashjit
