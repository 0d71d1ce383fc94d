// Compiles a KernelSource to a CompiledKernel. NVRTC (runtime/cuda) and Clang (runtime/llvm) implement it.
#pragma once

#include <memory>
#include <string>

#include "codegen/families/kernel_source.hpp"
#include "runtime/compile_limits.hpp"

namespace flashjit {

// A CPU's object has a function for each step, of the step's name and this: the bytes of its kernel's params.
inline constexpr char params_bytes_suffix[] = "_params_bytes";

class Compiler {
 public:
  virtual ~Compiler() = default;
  // Name, version and build. Two compilers that could make different code have different identities.
  virtual const std::string& identity() const = 0;
  // Everything that decides the code, except the source; part of the cache key.
  virtual std::string options(const KernelSource& source) const = 0;
  // Throws unsupported if the compiler cannot keep these limits.
  virtual void check(const CompileLimits& limits) const = 0;
  // Throws compile_failed with the compiler's log as detail, cancelled and limit_exceeded.
  // Thread-safe. `keep_assembly`: fills CompiledKernel::assembly.
  virtual CompiledKernel compile(const KernelSource& source, bool keep_assembly = false,
                                 const CompileLimits& limits = {}) const = 0;
};

// Compilers are opened on first use and shared by the process. Throw
// compiler_unavailable; the message says where they were looked for and what helps.
std::shared_ptr<const Compiler> nvrtc_compiler();
std::shared_ptr<const Compiler> clang_compiler();
inline std::shared_ptr<const Compiler> compiler_for(const Target& target) {
  return target.is_cuda() ? nvrtc_compiler() : clang_compiler();
}

}  // namespace flashjit
