// The core library's side of the LLVM plugin: finds and opens it.
#pragma once

#include <string>

#include "runtime/llvm/plugin.h"

namespace flashjit {

struct LlvmPluginFile {
  std::string name;  // by which it is opened
  std::string path, build_id;
};

// Found at the first call and not opened, which takes ms. Throws compiler_unavailable, saying where was
// looked and what helps; the next call looks again.
//
// Looked for: the file named by FLASHJIT_LLVM_PLUGIN, if set, and nothing else; beside the library or program
// that holds this code; in ../lib of that folder; where the dynamic loader looks for libraries. A file that
// library_file.hpp does not trust is passed over.
const LlvmPluginFile& llvm_plugin_file();

// That file, opened at the first call and kept open. Throws compiler_unavailable.
const flashjit_llvm_plugin_api& llvm_plugin();

// A plugin's text as a string; frees it.
std::string take_text(const flashjit_llvm_plugin_api& plugin, flashjit_llvm_text& text);

}  // namespace flashjit
