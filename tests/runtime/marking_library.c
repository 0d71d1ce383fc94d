/* A library that creates the file FLASHJIT_TEST_MARK when its code runs. It
   has the functions of an NVRTC 13.0 that compiles nothing. */
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

__attribute__((constructor)) static void mark(void) {
  const char* const path = getenv("FLASHJIT_TEST_MARK");
  if (path) close(open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644));
}

EXPORT int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return 0;
}
#define FUNCTION(name)    \
  EXPORT int name(void) { \
    return 1;             \
  }
FUNCTION(nvrtcGetErrorString)
FUNCTION(nvrtcGetNumSupportedArchs)
FUNCTION(nvrtcGetSupportedArchs)
FUNCTION(nvrtcCreateProgram)
FUNCTION(nvrtcDestroyProgram)
FUNCTION(nvrtcCompileProgram)
FUNCTION(nvrtcGetProgramLogSize)
FUNCTION(nvrtcGetProgramLog)
FUNCTION(nvrtcGetCUBINSize)
FUNCTION(nvrtcGetCUBIN)
FUNCTION(nvrtcGetPTXSize)
FUNCTION(nvrtcGetPTX)
