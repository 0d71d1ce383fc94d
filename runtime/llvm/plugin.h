/* The binary interface between the core library and the LLVM plugin (libflashjit-llvm.so). Plain C, so that
   neither side's C++ runtime or LLVM version matters to the other. The plugin exports one function,
   flashjit_llvm_plugin. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FLASHJIT_LLVM_PLUGIN_ABI 2

/* Memory owned by the plugin until given to free_text. */
typedef struct {
  char* data;
  size_t size;
} flashjit_llvm_text;

typedef struct {
  const char* name;
  const char* data;
  size_t size;
} flashjit_llvm_file;

typedef struct {
  const flashjit_llvm_file*
      files; /* files[0] is the translation unit; the rest are headers, at these names for -I */
  size_t num_files;
  const char* const* options; /* Clang driver-less (cc1) options that decide the code: target features, -O */
  size_t num_options;
  const char*
      passes; /* optimiser passes, as `opt -passes` takes them, to run in place of those of -O; or null */
} flashjit_llvm_source;

typedef struct {
  uint32_t abi_version;
  /* "clang 19.1.7 (Debian ...)": name, version and build */
  const char* identity;
  /* 0 and a relocatable ELF object, or 1; `log` holds diagnostics either way. Thread-safe, installs no signal
     handlers, touches no files. */
  int (*compile)(const flashjit_llvm_source* source, flashjit_llvm_text* object, flashjit_llvm_text* log);
  void (*free_text)(flashjit_llvm_text* text);
} flashjit_llvm_plugin_api;

/* Null if this plugin does not speak `abi_version`. */
const flashjit_llvm_plugin_api* flashjit_llvm_plugin(uint32_t abi_version);

#ifdef __cplusplus
}
#endif
