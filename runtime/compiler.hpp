// KernelSource -> CompiledKernel. One implementation for NVRTC (runtime/cuda), one for Clang (runtime/llvm).
#pragma once

#include <memory>
#include <string>

#include "codegen/kernel_source.hpp"

namespace flashjit {

class Compiler {
 public:
  virtual ~Compiler() = default;
  // Name, version and build: two compilers that could make different code have different identities.
  virtual const std::string& identity() const = 0;
  // Everything but the source that decides the code; part of the cache key.
  virtual std::string options(const KernelSource& source) const = 0;
  // Throws compile_failed with the compiler's log as detail. Thread-safe. keep_assembly: fill
  // CompiledKernel::assembly.
  virtual CompiledKernel compile(const KernelSource& source, bool keep_assembly = false) const = 0;
};

// Opened on first use and shared by the process. Throw compiler_unavailable, saying where was looked and what
// helps.
std::shared_ptr<const Compiler> nvrtc_compiler();
std::shared_ptr<const Compiler> clang_compiler();
inline std::shared_ptr<const Compiler> compiler_for(const Target& target) {
  return target.is_cuda() ? nvrtc_compiler() : clang_compiler();
}

}  // namespace flashjit
