/* The binary interface between the core library and the LLVM plugin (libflashjit-llvm.so). Plain C, so that
   neither side's C++ runtime or LLVM version matters to the other. The plugin exports one function,
   flashjit_llvm_plugin. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FLASHJIT_LLVM_PLUGIN_ABI 3

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

/* Results of compile(). */
enum {
  FLASHJIT_LLVM_OK = 0,
  FLASHJIT_LLVM_FAILED = 1,    /* the diagnostics say why */
  FLASHJIT_LLVM_NO_MEMORY = 2, /* for the call, or for its thread; another may work */
  FLASHJIT_LLVM_EXHAUSTED = 3  /* memory ran out in this call or one before: no other will work */
};

typedef struct {
  uint32_t abi_version;
  /* "clang 19.1.7 (Debian ...)": name, version and build; null if there was no memory to start */
  const char* identity;
  /* One of the above. OK gives a relocatable ELF object; OK and FAILED give diagnostics in `log`.
     Thread-safe, installs no signal handlers, touches no files, does not throw. */
  int (*compile)(const flashjit_llvm_source* source, flashjit_llvm_text* object, flashjit_llvm_text* log);
  void (*free_text)(flashjit_llvm_text* text);
} flashjit_llvm_plugin_api;

/* Null if this plugin does not speak `abi_version`. Starts LLVM; where that failed, the next call tries
 * again. */
const flashjit_llvm_plugin_api* flashjit_llvm_plugin(uint32_t abi_version);

#ifdef __cplusplus
}
#endif
