// Policies of a host against code that a process makes itself, for child processes of tests.
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>
#include <iterator>

namespace flashjit::testing {

// From now on this process may not make memory executable (mprotect), as under systemd's
// MemoryDenyWriteExecute, and, if `files` is false, not map files as executable either (mmap).
inline bool forbid_executable_memory(bool files) {
  const __u32 other_call = files ? SYS_mprotect : SYS_mmap;
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mprotect, 1, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, other_call, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[2])),
      BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, PROT_EXEC, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EACCES),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{.len = std::size(filter), .filter = filter};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// From now on the kernel refuses this process memory that is or becomes both writable and executable. False
// before Linux 6.3.
inline bool set_memory_deny_write_execute() {
  constexpr int set_mdwe = 65, refuse_exec_gain = 1;  // PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN
  return ::prctl(set_mdwe, refuse_exec_gain, 0, 0, 0) == 0;
}

}  // namespace flashjit::testing
