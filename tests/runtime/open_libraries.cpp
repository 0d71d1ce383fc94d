// Opens the plugin and NVRTC wherever they are looked for, and prints the cache
// folders. library_file_test.cpp runs this program with a set-user-id bit.
#include <sys/auxv.h>
#include <unistd.h>
#include <cstdio>

#include "cache/disk_cache.hpp"
#include "codegen/base/error.hpp"
#include "runtime/cuda/nvrtc.hpp"
#include "runtime/llvm/plugin_client.hpp"

int main() {
  using namespace flashjit;
  std::printf("secure %lu\n", getauxval(AT_SECURE));
  std::printf("cache [%s] [%s]\n", DiskCache::default_folder().c_str(), DiskCache::default_layers().c_str());
  for (const std::string& candidate : nvrtc_candidates()) std::printf("candidate %s\n", candidate.c_str());
  try {
    llvm_plugin();
  } catch (const Error& error) {
    std::printf("plugin %s\n", error.what());
  }
  try {
    open_nvrtc(nvrtc_candidates());
  } catch (const Error& error) {
    std::printf("nvrtc %s\n%s\n", error.what(), error.detail().c_str());
  }
  std::fflush(stdout);
  _exit(0);  // leak checkers cannot inspect such a process
}
