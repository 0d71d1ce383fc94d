// A rendered kernel, and what a compiler made of it.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "codegen/base/target.hpp"
#include "codegen/spec/config.hpp"

namespace flashjit {

// One header of templates/ as embedded in the library. `name`
// is the name in #include lines: "cuda/forward_sm80.cuh".
struct EmbeddedHeader {
  std::string_view name;
  std::string_view text;
};

// The type of a kernel's params (params_type.hpp makes it). The rendered text has it as C++, and the runtime
// makes a launch's params by it.
struct ParamsType {
  enum class Formulas { none, read, gradients };  // WithFormulas, WithGradients

  const void* own = nullptr;  // id_of_struct of the family's struct, which everything else is wrapped around
  std::string text = {};      // as C++; a kernel that appends names its type itself
  std::size_t bytes = 0;      // of the whole
  bool paged = false, quantised = false, last_keys = false, rotated = false, offsets = false;
  bool gathered = false;
  Formulas formulas = Formulas::none;
  // The struct of a second parameter, if the kernel has one.
  const void* second = nullptr;
  std::size_t second_bytes = 0;

  bool operator==(const ParamsType&) const = default;
};

// One kernel launch of a plan.
struct Step {
  std::string function;   // extern "C" name
  int threads = 0;        // cuda: threads of a block
  int shared_memory = 0;  // cuda: dynamic bytes of a block
  int scratch = 0;        // cpu: bytes that each thread lends to a call, with room for one packed block
  ParamsType params = {};
  bool operator==(const Step&) const = default;
};

struct KernelSource {
  Target target;
  KernelConfig config;
  std::string text;                     // the translation unit
  std::vector<EmbeddedHeader> headers;  // every header that the text reaches, in order of first use
  std::vector<Step> steps;
  std::vector<std::string> options;  // for the compiler, beyond the usual ones
};

// The compiler's report on one step (cuda).
struct CompiledStep {
  std::string function;
  int registers = 0;             // per thread
  int spill_bytes = 0;           // per thread, stores and loads
  int static_shared_memory = 0;  // of a block
  bool operator==(const CompiledStep&) const = default;
};

struct CompiledKernel {
  std::string code;                 // cubin (cuda) or relocatable ELF object (cpu)
  std::string compiler;             // identity of the compiler: name, version, build
  std::vector<CompiledStep> steps;  // cuda: in any order
  double compile_ms = 0;
  std::string log;       // the compiler's messages
  std::string assembly;  // cuda: PTX, if asked for; never cached
};

}  // namespace flashjit
