// NVRTC behind the Compiler interface: opened at run time, headers handed over in memory, nothing searched on
// disk.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/compiler.hpp"

namespace flashjit {

// Where nvrtc_compiler() looks, in order: paths of libraries, or names that the loader resolves.
// FLASHJIT_NVRTC (a file or a folder) alone if it is set; else CUDA_HOME and CUDA_PATH, the loader's own
// places, a folder `nvrtc` beside flashjit, /usr/local/cuda.
std::vector<std::string> nvrtc_candidates();

// The first candidate that opens and is new enough. Throws compiler_unavailable; the detail has a line a
// candidate.
std::shared_ptr<const Compiler> open_nvrtc(const std::vector<std::string>& candidates);

}  // namespace flashjit
