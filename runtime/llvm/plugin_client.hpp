// The core library's side of the LLVM plugin: finds and opens the plugin.
#pragma once

#include <string>

#include "runtime/llvm/plugin.h"

namespace flashjit {

struct LlvmPluginFile {
  std::string name;  // the name that it is opened by
  std::string path, build_id;
};

// The plugin's file. The first call finds it but does not open it, which
// would take milliseconds. Throws compiler_unavailable; the message says
// where it was looked for and what helps, and the next call looks again.
//
// If FLASHJIT_LLVM_PLUGIN is set, it names the file. Otherwise the places are: beside the
// library or program that holds this code, ../lib of that folder, and where the dynamic
// loader looks for libraries. A file that library_file.hpp does not trust is passed over.
const LlvmPluginFile& llvm_plugin_file();

// The plugin, opened at the first call and kept open. Throws compiler_unavailable.
const flashjit_llvm_plugin_api& llvm_plugin();

// Converts a plugin's text to a string and frees it.
std::string take_text(const flashjit_llvm_plugin_api& plugin, flashjit_llvm_text& text);

}  // namespace flashjit
