// KernelSource -> object with Clang, through the LLVM plugin.
#include <chrono>
#include <string>
#include <vector>

#include "codegen/error.hpp"
#include "runtime/compiler.hpp"
#include "runtime/llvm/plugin_client.hpp"

namespace flashjit {
namespace {

// Clang's cc1 options. The instruction set comes from the target alone, never from this machine's
// CPU: an object in the cache runs wherever its target does.
std::vector<std::string> clang_options(const Target& target) {
  std::vector<std::string> options = {
      "-triple", "x86_64-unknown-linux-gnu", "-target-cpu", "x86-64-v" + std::to_string(target.level),
      // For the code generator; the optimiser's passes are below.
      "-O2",
      // Kernels state their own order of operations, not their fused multiply-adds.
      "-ffp-contract=fast", "-x", "c++", "-std=c++20", "-ffreestanding", "-fno-rtti", "-nostdsysteminc",
      "-nobuiltininc", "-I", "templates",
      // One object is linked anywhere in the address space, and never unwound.
      "-mrelocation-model", "pic", "-pic-level", "2", "-mframe-pointer=none", "-fno-threadsafe-statics",
      // Templates are our own and tested: no verification between passes, no names of values.
      "-disable-llvm-verifier", "-discard-value-names", "-disable-lifetime-markers", "-ferror-limit", "20",
      // Clang 22 allows nesting that overflows its stack.
      "-fbracket-depth", "256"};
  // The generic AVX-512 level would split 512-bit vectors to spare old CPUs their clock.
  if (target.level >= 4) options.push_back("-mprefer-vector-width=512");
  if (target.amx)
    options.insert(options.end(), {"-target-feature", "+amx-tile", "-target-feature", "+amx-bf16"});
  return options;
}

// The optimiser's passes. Kernels are blocked and vectorised in their source and say what is inlined and
// unrolled, so that simplifying around both and moving what is invariant out of loops is all they need: the
// speed of -O2's code for six tenths of its work, measured in instructions of the compiler.
constexpr const char* passes =
    "function(lower-expect,sroa,simplifycfg),always-inline,globaldce,"
    "function(sroa,early-cse,simplifycfg,loop(loop-rotate),loop(loop-unroll-full),"
    "sroa,early-cse<memssa>,instcombine<no-verify-fixpoint>,loop-mssa(licm),simplifycfg)";

std::string failure(const KernelSource& source, int status) {
  const std::string kernel = "the kernel for " + source.target.str();
  if (status == FLASHJIT_LLVM_NO_MEMORY)
    return "there is no memory, or no further thread, for Clang to compile " + kernel +
           "; free some, or raise the limit (ulimit -v, ulimit -u)";
  if (status == FLASHJIT_LLVM_EXHAUSTED)
    return "Clang could not compile " + kernel +
           ": it ran out of memory, now or before, and compiles nothing more in this process; cached and "
           "prebuilt kernels work as before, a new process with more memory (ulimit -v) can compile";
  return "Clang could not compile " + kernel + "; the detail is what it said";
}

class ClangCompiler final : public Compiler {
 public:
  // The build tells Clang's version too. Opening the plugin waits until there is something to compile.
  ClangCompiler() : identity_("LLVM plugin, build " + llvm_plugin_file().build_id) {}

  const std::string& identity() const override { return identity_; }

  std::string options(const KernelSource& source) const override {
    std::string text = passes;
    for (const std::string& option : clang_options(source.target)) text += " " + option;
    return text;
  }

  CompiledKernel compile(const KernelSource& source, bool keep_assembly) const override {
    CompiledKernel kernel;
    kernel.compiler = llvm_plugin().identity;
    const auto start = std::chrono::steady_clock::now();
    kernel.code = run(source, "-emit-obj", kernel.log);
    kernel.compile_ms =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    if (keep_assembly) {
      std::string repeated;
      kernel.assembly = run(source, "-S", repeated);
    }
    return kernel;
  }

 private:
  std::string run(const KernelSource& source, const char* output, std::string& log) const {
    std::vector<std::string> names;
    names.reserve(source.headers.size());
    std::vector<flashjit_llvm_file> files = {{"kernel.cpp", source.text.data(), source.text.size()}};
    for (const EmbeddedHeader& header : source.headers) {
      names.push_back("templates/" + std::string(header.name));
      files.push_back({names.back().c_str(), header.text.data(), header.text.size()});
    }
    const std::vector<std::string> texts = clang_options(source.target);
    std::vector<const char*> options = {output};
    for (const std::string& text : texts) options.push_back(text.c_str());

    const flashjit_llvm_source request{files.data(), files.size(), options.data(), options.size(), passes};
    flashjit_llvm_text code{}, said{};
    const flashjit_llvm_plugin_api& plugin = llvm_plugin();
    const int status = plugin.compile(&request, &code, &said);
    log = take_text(plugin, said);
    std::string result = take_text(plugin, code);
    if (status != FLASHJIT_LLVM_OK) throw Error(ErrorCode::compile_failed, failure(source, status), log);
    return result;
  }

  const std::string identity_;
};

}  // namespace

std::shared_ptr<const Compiler> clang_compiler() {
  static const auto compiler = std::make_shared<const ClangCompiler>();
  return compiler;
}

}  // namespace flashjit
