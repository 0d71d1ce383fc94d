// The two halves of the plugin behind its C table. Inside libflashjit-llvm.so only.
#pragma once

#include <llvm/ADT/ArrayRef.h>
#include <llvm/ADT/SmallVector.h>
#include <llvm/ADT/StringRef.h>

#include <string>

#include "runtime/llvm/plugin.h"

namespace flashjit::llvm_plugin {

// C++ text to a relocatable ELF object (or to assembly if the options say -S). False on errors; `log` gets
// the diagnostics either way. Wants 8 MiB of stack.
bool compile(const flashjit_llvm_source& source, llvm::SmallVectorImpl<char>& code, std::string& log);

// Puts the object into this process's memory: code is mapped read and execute only, data without execute. A
// null handle and a line in `log` on errors. The object may call what link.cpp lists and nothing else of the
// process.
void* load(llvm::StringRef object, llvm::ArrayRef<const char*> entries, void** addresses, std::string& log);
void unload(void* handle);

}  // namespace flashjit::llvm_plugin
