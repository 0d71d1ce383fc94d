// Compiles a KernelSource to an object with Clang, through the LLVM plugin.
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "cache/fork.hpp"
#include "codegen/base/error.hpp"
#include "runtime/compile_watch.hpp"
#include "runtime/compiler.hpp"
#include "runtime/llvm/plugin_client.hpp"

namespace flashjit {
namespace {

// Clang's cc1 options. The instruction set comes only from the target, never from
// this machine's CPU, so that a cached object runs on every machine of its target.
std::vector<std::string> clang_options(const Target& target) {
  std::vector<std::string> options = {
      "-triple", "x86_64-unknown-linux-gnu", "-target-cpu", "x86-64-v" + std::to_string(target.level),
      // -O2 is for the code generator; `passes` below are the optimiser's.
      "-O2",
      // Kernels write out the order of operations, but not fused multiply-adds.
      "-ffp-contract=fast", "-x", "c++", "-std=c++20", "-ffreestanding", "-fno-rtti", "-nostdsysteminc",
      "-nobuiltininc", "-I", "templates",
      // An object may be loaded at any address, and is never unwound.
      "-mrelocation-model", "pic", "-pic-level", "2", "-mframe-pointer=none", "-fno-threadsafe-statics",
      // A host with control-flow enforcement calls only what begins with endbr64.
      "-fcf-protection=branch",
      // The templates are our own and tested, so passes are not verified and values have no names.
      "-disable-llvm-verifier", "-discard-value-names", "-disable-lifetime-markers", "-ferror-limit", "20",
      // Clang 22 by default allows nesting that overflows its stack.
      "-fbracket-depth", "256"};
  // The generic AVX-512 level would split 512-bit vectors to spare old CPUs a lower clock.
  if (target.level >= 4) options.push_back("-mprefer-vector-width=512");
  if (target.amx)
    options.insert(options.end(), {"-target-feature", "+amx-tile", "-target-feature", "+amx-bf16"});
  if (target.avx512_bf16) options.insert(options.end(), {"-target-feature", "+avx512bf16"});
  return options;
}

// The optimiser's passes. Kernels are blocked and vectorised in their source, and say what is inlined
// and unrolled. They only need simplification around both, and invariant code moved out of loops. The
// result is as fast as -O2's code for six tenths of its work, measured in instructions of the compiler.
constexpr const char* passes =
    "function(lower-expect,sroa,simplifycfg),always-inline,globaldce,"
    "function(sroa,early-cse,simplifycfg,loop(loop-rotate),loop(loop-unroll-full),"
    "sroa,early-cse<memssa>,instcombine<no-verify-fixpoint>,loop-mssa(licm),simplifycfg)";

// Functions that are compiled behind the text. By them the loader compares the params that kernels take with
// those that launches make. Keys do not cover them, so an object without them is as good.
std::string params_bytes(const KernelSource& source) {
  std::string text = R"(
namespace {
template <class Params, class... Rest>
constexpr unsigned bytes_of_params(void (*)(const Params*, Rest...)) {
  return sizeof(Params);
}
}  // namespace
)";
  for (const Step& step : source.steps)
    if (step.params.own)
      text += "extern \"C\" unsigned " + step.function + params_bytes_suffix +
              "() {\n  return bytes_of_params(" + step.function + ");\n}\n";
  return text;
}

std::string failure(const KernelSource& source, int status) {
  const std::string kernel = "the kernel for " + source.target.str();
  if (status == FLASHJIT_LLVM_NO_MEMORY)
    return "there is no memory, or no further thread, for Clang to compile " + kernel +
           "; free some, or raise the limit (ulimit -v, ulimit -u)";
  if (status == FLASHJIT_LLVM_EXHAUSTED)
    return "Clang could not compile " + kernel +
           ": it ran out of memory, now or before, and compiles nothing more in this process; "
           "cached and prebuilt kernels work as before, and a new process with more memory (ulimit -v) "
           "can compile";
  return "Clang could not compile " + kernel + "; its messages are in the detail";
}

class ClangCompiler final : public Compiler {
 public:
  // The plugin's build ID also identifies Clang's version. The
  // plugin is opened only when there is something to compile.
  ClangCompiler() : identity_("LLVM plugin, build " + llvm_plugin_file().build_id) {}

  const std::string& identity() const override { return identity_; }

  std::string options(const KernelSource& source) const override {
    std::string text = passes;
    for (const std::string& option : clang_options(source.target)) text += " " + option;
    return text;
  }

  void check(const CompileLimits&) const override {}

  CompiledKernel compile(const KernelSource& source, bool keep_assembly,
                         const CompileLimits& limits) const override {
    CompiledKernel kernel;
    kernel.compiler = llvm_plugin().identity;
    const auto start = std::chrono::steady_clock::now();
    CompileWatch watch(limits);
    kernel.code = run(source, "-emit-obj", kernel.log, watch);
    kernel.compile_ms =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    if (keep_assembly) {
      std::string repeated;
      kernel.assembly = run(source, "-S", repeated, watch);
    }
    return kernel;
  }

 private:
  static int asked_to_end(void* watch, std::uint64_t bytes) {
    return static_cast<CompileWatch*>(watch)->ends(bytes) ? 1 : 0;
  }

  std::string run(const KernelSource& source, const char* output, std::string& log,
                  CompileWatch& watch) const {
    std::vector<std::string> names;
    names.reserve(source.headers.size());
    const std::string text = source.text + params_bytes(source);
    std::vector<flashjit_llvm_file> files = {{"kernel.cpp", text.data(), text.size()}};
    for (const EmbeddedHeader& header : source.headers) {
      names.push_back("templates/" + std::string(header.name));
      files.push_back({names.back().c_str(), header.text.data(), header.text.size()});
    }
    const std::vector<std::string> texts = clang_options(source.target);
    std::vector<const char*> options = {output};
    for (const std::string& option : texts) options.push_back(option.c_str());

    const flashjit_llvm_source request{files.data(), files.size(), options.data(), options.size(), passes};
    flashjit_llvm_text code{}, said{};
    const flashjit_llvm_plugin_api& plugin = llvm_plugin();
    const flashjit_llvm_watch watching{asked_to_end, &watch};
    const int status = plugin.compile(&request, watch.can_end() ? &watching : nullptr, &code, &said);
    log = take_text(plugin, said);
    std::string result = take_text(plugin, code);
    if (status == FLASHJIT_LLVM_ENDED) watch.check("the kernel for " + source.target.str());
    if (status != FLASHJIT_LLVM_OK) throw Error(ErrorCode::compile_failed, failure(source, status), log);
    return result;
  }

  const std::string identity_;
};

}  // namespace

std::shared_ptr<const Compiler> clang_compiler() {
  static constinit std::atomic<const std::shared_ptr<const Compiler>*> compiler = nullptr;
  return opened_once(compiler, [] { return std::make_shared<const ClangCompiler>(); });
}

}  // namespace flashjit
