// What is behind the plugin's C table. Inside libflashjit-llvm.so only.
#pragma once

#include <llvm/ADT/SmallVector.h>

#include <string>

#include "runtime/llvm/plugin.h"

namespace flashjit::llvm_plugin {

// C++ text to a relocatable ELF object (or to assembly if the options say -S). False on errors; `log` gets
// the diagnostics either way. Wants 8 MiB of stack.
bool compile(const flashjit_llvm_source& source, llvm::SmallVectorImpl<char>& code, std::string& log);

}  // namespace flashjit::llvm_plugin
