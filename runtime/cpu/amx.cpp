#include "runtime/cpu/amx.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "cache/file.hpp"

namespace flashjit {

int request_amx() {
  constexpr long arch_req_xcomp_perm = 0x1023, tile_data = 18;
  return ::syscall(SYS_arch_prctl, arch_req_xcomp_perm, tile_data) == 0 ? 0 : errno;
}

CpuTarget cpu_target(Target native, RequestAmx request) {
  if (!native.amx) return {native, ""};
  const int error = request();
  if (error == 0) return {native, ""};
  native.amx = false;
  std::string note = "AMX is not used: the operating system refuses its tiles (" + error_text(error) + ")";
  if (error == ENOSPC) note += ", since a thread's alternate signal stack is too small";
  return {native, note};
}

}  // namespace flashjit
