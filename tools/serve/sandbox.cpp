#include "tools/serve/sandbox.hpp"

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>

#include <array>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <system_error>
#include <vector>

namespace flashjit::serve {
namespace {

void require(bool done, const char* what) {
  if (!done) throw std::system_error(errno, std::generic_category(), what);
}

void limit(__rlimit_resource resource, rlim_t value) {
  const rlimit limits{value, value};
  require(::setrlimit(resource, &limits) == 0, "setrlimit");
}

#if defined(__x86_64__)
constexpr std::uint32_t architecture = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr std::uint32_t architecture = AUDIT_ARCH_AARCH64;
#else
#error "name this architecture as linux/audit.h does"
#endif

// The system calls of computing, memory, threads and an open socket. All others answer EPERM.
constexpr std::array allowed = {
    SYS_read,          SYS_write,        SYS_sendto,          SYS_recvfrom,     SYS_ppoll,
    SYS_close,         SYS_mmap,         SYS_munmap,          SYS_mremap,       SYS_mprotect,
    SYS_madvise,       SYS_brk,          SYS_futex,           SYS_membarrier,   SYS_set_robust_list,
    SYS_rseq,          SYS_exit,         SYS_exit_group,      SYS_rt_sigaction, SYS_rt_sigprocmask,
    SYS_rt_sigreturn,  SYS_sigaltstack,  SYS_restart_syscall, SYS_sched_yield,  SYS_sched_getaffinity,
    SYS_clock_gettime, SYS_clock_getres, SYS_clock_nanosleep, SYS_nanosleep,    SYS_gettimeofday,
    SYS_getpid,        SYS_gettid,       SYS_getrandom,       SYS_getrusage,    SYS_sysinfo,
    SYS_uname,
};

constexpr std::uint32_t word(std::size_t offset) {
  return static_cast<std::uint32_t>(offset);
}

// Threads may be started, since Clang compiles on one of its own, and processes not. clone3 hides its flags
// in memory, so it is absent here and the C library takes clone.
void forbid_calls() {
  constexpr std::uint32_t allow = SECCOMP_RET_ALLOW, end = SECCOMP_RET_KILL_PROCESS;
  constexpr std::uint32_t eperm = SECCOMP_RET_ERRNO | EPERM, absent = SECCOMP_RET_ERRNO | ENOSYS;
  std::vector<sock_filter> filter = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, word(offsetof(seccomp_data, arch))),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, architecture, 1, 0),
      BPF_STMT(BPF_RET | BPF_K, end),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, word(offsetof(seccomp_data, nr))),
#if defined(__x86_64__)
      // Calls of the x32 interface have numbers of their own.
      BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, end),
#endif
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, absent),
  };
  for (const long call : allowed) {
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<std::uint32_t>(call), 0, 1));
    filter.push_back(BPF_STMT(BPF_RET | BPF_K, allow));
  }
  filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, 3));
  filter.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, word(offsetof(seccomp_data, args[0]))));
  filter.push_back(BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, CLONE_THREAD, 0, 1));
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, allow));
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, eperm));
  const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  require(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "prctl");
  require(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) == 0, "seccomp");
}

}  // namespace

void enter_sandbox(const ChildLimits& limits) {
  limit(RLIMIT_CORE, 0);
  limit(RLIMIT_FSIZE, 0);
  limit(RLIMIT_NOFILE, 0);
  limit(RLIMIT_DATA, limits.bytes);
  // The signal says why the child ends. One that blocks it is killed a second later.
  const double whole = std::floor(limits.seconds);
  const itimerval time{
      {}, {static_cast<time_t>(whole), static_cast<suseconds_t>((limits.seconds - whole) * 1e6)}};
  require(::setitimer(ITIMER_PROF, &time, nullptr) == 0, "setitimer");
  limit(RLIMIT_CPU, static_cast<rlim_t>(std::ceil(limits.seconds)) + 1);
  forbid_calls();
}

}  // namespace flashjit::serve
