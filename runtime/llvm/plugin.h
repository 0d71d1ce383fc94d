/* The binary interface between the core library and the LLVM plugin (libflashjit-llvm.so). It is plain C, so
   that neither side depends on the other's C++ runtime or LLVM version. The plugin exports one function,
   flashjit_llvm_plugin. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FLASHJIT_LLVM_PLUGIN_ABI 4

/* A text in the plugin's memory; free_text frees it. */
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
  /* files[0] is the translation unit; the others are headers under these names */
  const flashjit_llvm_file* files;
  size_t num_files;
  /* Clang's cc1 options that decide the code: target features, -O */
  const char* const* options;
  size_t num_options;
  /* optimiser passes in the form of `opt -passes`, run instead of those of -O; or null */
  const char* passes;
} flashjit_llvm_source;

/* Results of compile. */
enum {
  FLASHJIT_LLVM_OK = 0,
  FLASHJIT_LLVM_FAILED = 1,    /* the diagnostics say why */
  FLASHJIT_LLVM_NO_MEMORY = 2, /* no memory for the call or its thread; another call may work */
  FLASHJIT_LLVM_EXHAUSTED = 3, /* memory ran out in this call or an earlier one: no further call will work */
  FLASHJIT_LLVM_ENDED = 4      /* the watch has ended the call */
};

/* Ends a call. */
typedef struct {
  /* Asked by the caller's thread about a hundred times a second; nonzero ends the call. `bytes`: the memory
     that the call has now. */
  int (*ends)(void* user, uint64_t bytes);
  void* user;
} flashjit_llvm_watch;

typedef struct {
  uint32_t abi_version;
  /* "clang 19.1.7 (Debian ...)": name, version and build; null if there was no memory to start */
  const char* identity;
  /* Returns one of the results above. OK gives a relocatable ELF object; OK and FAILED give diagnostics in
     `log`. `watch` may be null. Thread-safe; installs no signal handlers, touches no files, does not throw.
   */
  int (*compile)(const flashjit_llvm_source* source, const flashjit_llvm_watch* watch,
                 flashjit_llvm_text* object, flashjit_llvm_text* log);
  void (*free_text)(flashjit_llvm_text* text);
} flashjit_llvm_plugin_api;

/* The plugin's functions; null if the plugin has another ABI version. Starts LLVM; if that fails, the next
   call tries again. */
const flashjit_llvm_plugin_api* flashjit_llvm_plugin(uint32_t abi_version);

#ifdef __cplusplus
}
#endif
