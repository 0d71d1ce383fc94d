// NVRTC as a Compiler: opened at run time. Headers are handed over in memory; nothing is searched on disk.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/compiler.hpp"

namespace flashjit {

// The places where nvrtc_compiler() looks, in order: paths of libraries, or names that the
// loader resolves. If FLASHJIT_NVRTC (a file or a folder) is set, only that; else CUDA_HOME
// and CUDA_PATH, the loader's own places, a folder `nvrtc` beside flashjit, /usr/local/cuda.
std::vector<std::string> nvrtc_candidates();

// Opens the first candidate that can be opened and is new enough. Throws
// compiler_unavailable; the detail has one line for each candidate.
std::shared_ptr<const Compiler> open_nvrtc(const std::vector<std::string>& candidates);

}  // namespace flashjit
