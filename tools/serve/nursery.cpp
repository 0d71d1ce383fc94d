#include "tools/serve/nursery.hpp"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <vector>

#include "cache/kernel_entry.hpp"
#include "cache/kernel_key.hpp"
#include "codegen/base/error_table.hpp"
#include "codegen/base/float_state.hpp"
#include "codegen/families/search_space.hpp"
#include "codegen/render.hpp"
#include "runtime/compiler.hpp"
#include "tools/serve/compile_request.hpp"
#include "tools/serve/sandbox.hpp"

namespace flashjit::serve {
namespace {

using std::chrono::steady_clock;

constexpr std::size_t most_result_bytes = std::size_t{300} << 20;
constexpr int cancel_poll_ms = 20;

// What a child writes to its socket: one octet, and text until its end. The nursery adds the child's status
// as waitpid() gives it, in four octets, when the child has ended.
constexpr char entry_follows = 'e', error_follows = 'x';

// ---- descriptors over sockets ----

bool send_descriptor(int socket, const void* bytes, std::size_t size, int descriptor) {
  iovec part{const_cast<void*>(bytes), size};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = "";
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  ssize_t sent = 0;
  do sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
  while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(size);
}

File receive_descriptor(int socket, void* bytes, std::size_t size) {
  iovec part{bytes, size};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = "";
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got = 0;
  do got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  while (got < 0 && errno == EINTR);
  const cmsghdr* const header = got == static_cast<ssize_t>(size) ? CMSG_FIRSTHDR(&message) : nullptr;
  if (!header || header->cmsg_type != SCM_RIGHTS) return {};
  int descriptor = -1;
  std::memcpy(&descriptor, CMSG_DATA(header), sizeof descriptor);
  return File(descriptor);
}

bool send_all(int socket, const void* bytes, std::size_t size) {
  const char* from = static_cast<const char*>(bytes);
  while (size > 0) {
    const ssize_t sent = ::send(socket, from, size, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    from += sent;
    size -= static_cast<std::size_t>(sent);
  }
  return true;
}

// ---- the child ----

std::string compile_entry(const std::string& text) {
  const CompileRequest request = parse_compile_request(text);
  const auto compiler = compiler_for(request.source.target);
  const CacheKey key = entry_key(request.key, compiler->options(request.source), compiler->identity());
  std::string why;
  std::optional<std::string> bytes =
      encode_entry(pack_kernel(key, compiler->compile(request.source), request.source), why);
  if (!bytes) throw Error(ErrorCode::compile_failed, why);
  return std::move(*bytes);
}

std::string error_text_of(const Error& error) {
  const nlohmann::json text = {
      {"code", static_cast<int>(error.code())}, {"message", error.message()}, {"detail", error.detail()}};
  return error_follows + text.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

[[noreturn]] void be_child(const File& socket, const ChildLimits& limits, pid_t nursery) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != nursery) ::_exit(1);
  std::string result;
  try {
    std::uint32_t size = 0;
    std::string text;
    if (!read_fully(socket.get(), reinterpret_cast<char*>(&size), sizeof size) || size > most_request_bytes)
      ::_exit(1);
    text.resize(size);
    if (!read_fully(socket.get(), text.data(), size)) ::_exit(1);
    enter_sandbox(limits);
    const DefaultFloatState state;
    result = entry_follows + compile_entry(text);
  } catch (const Error& error) {
    result = error_text_of(error);
  } catch (const std::bad_alloc&) {
    result = error_text_of(Error(
        ErrorCode::limit_exceeded,
        "the compilation needs more memory than its limit of " + std::to_string(limits.bytes) + " bytes"));
  } catch (const std::exception& error) {
    result = error_text_of(Error(ErrorCode::internal, error.what()));
  }
  send_all(socket.get(), result.data(), result.size());
  ::_exit(0);
}

// ---- the nursery ----

// Compiles a kernel with each compiler that there is, which reads headers and leaves memory as a compile
// needs it.
void warm_up() {
  const DefaultFloatState state;
  for (const char* name : {"x86-64-v3", "sm_90a"}) try {
      const Target target = Target::parse(name);
      const AttentionSpec spec = AttentionSpec::from_json(
          R"({"op": "forward", "dtype": "bf16", "head_dim": 64, "mask": ["causal"]})");
      compiler_for(target)->compile(render(spec, target, heuristic_configs(spec, target).front()));
    } catch (const Error&) {  // requests for such targets get the reason
    }
}

[[noreturn]] void be_nursery(const File& control) {
  ::prctl(PR_SET_NAME, "flashjit-nursery");
  sigset_t children;
  ::sigemptyset(&children);
  ::sigaddset(&children, SIGCHLD);
  ::sigprocmask(SIG_SETMASK, &children, nullptr);
  for (const int number : {SIGTERM, SIGINT, SIGHUP}) ::signal(number, SIG_IGN);  // the service ends it
  ::signal(SIGCHLD, SIG_DFL);
  ::signal(SIGPIPE, SIG_IGN);
  const File signals(::signalfd(-1, &children, SFD_CLOEXEC | SFD_NONBLOCK));
  warm_up();
  const pid_t self = ::getpid();
  std::map<pid_t, File> running;
  for (;;) {
    pollfd both[] = {{control.get(), POLLIN, 0}, {signals.get(), POLLIN, 0}};
    if (::poll(both, 2, -1) < 0) continue;
    if (both[1].revents) {
      signalfd_siginfo unused;
      while (::read(signals.get(), &unused, sizeof unused) > 0) {
      }
      int status = 0;
      for (pid_t child; (child = ::waitpid(-1, &status, WNOHANG)) > 0;) {
        const auto found = running.find(child);
        if (found == running.end()) continue;
        // Not waited for: the socket may be full of what nobody reads any more.
        (void)!::send(found->second.get(), &status, sizeof status, MSG_NOSIGNAL | MSG_DONTWAIT);
        running.erase(found);
      }
    }
    if (!both[0].revents) continue;
    ChildLimits limits;
    File socket = receive_descriptor(control.get(), &limits, sizeof limits);
    if (!socket) ::_exit(0);
    const pid_t child = ::fork();
    if (child == 0) {
      running.clear();
      ::sigemptyset(&children);
      ::sigprocmask(SIG_SETMASK, &children, nullptr);
      for (const int number : {SIGTERM, SIGINT, SIGHUP}) ::signal(number, SIG_DFL);
      ::close(control.get());
      ::close(signals.get());
      be_child(socket, limits, self);
    }
    if (child < 0) continue;
    const File process(static_cast<int>(::syscall(SYS_pidfd_open, child, 0)));
    const char begun = 'b';
    if (!process || !send_descriptor(socket.get(), &begun, 1, process.get())) ::kill(child, SIGKILL);
    running.emplace(child, std::move(socket));
  }
}

Error too_long(const ChildLimits& limits) {
  std::ostringstream text;
  text << "the compilation takes longer than its limit of " << limits.seconds << " s";
  return {ErrorCode::limit_exceeded, text.str()};
}

std::string how_it_ended(int status) {
  if (WIFSIGNALED(status))
    return "was ended by signal " + std::to_string(WTERMSIG(status)) + " (" + ::strsignal(WTERMSIG(status)) +
           ")";
  return "ended with status " + std::to_string(WEXITSTATUS(status));
}

// The result in what was read from a child's socket; nothing if the nursery was lost. Throws what the child
// did.
std::optional<std::string> result_of(std::string bytes, const ChildLimits& limits) {
  int status = 0;
  if (bytes.size() < sizeof status) return std::nullopt;
  std::memcpy(&status, bytes.data() + bytes.size() - sizeof status, sizeof status);
  bytes.resize(bytes.size() - sizeof status);
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGXCPU) throw too_long(limits);
  // Somebody kills it, perhaps since the machine has no memory: the spec need not be to blame.
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
    throw Error(ErrorCode::device_failed, "the process that compiles was killed");
  if (status != 0 || bytes.empty())
    throw Error(ErrorCode::compile_failed,
                "the process that compiles " + how_it_ended(status) +
                    "; the compiler may have crashed or asked for more memory than " +
                    std::to_string(limits.bytes) + " bytes");
  const char kind = bytes.front();
  bytes.erase(0, 1);
  if (kind == entry_follows) return bytes;
  const nlohmann::json error = nlohmann::json::parse(bytes, nullptr, false);
  const int code = error.is_object() ? error.value("code", 0) : 0;
  if (kind != error_follows || code < 1 || code > static_cast<int>(std::size(error_table)))
    throw Error(ErrorCode::compile_failed, "the process that compiles answered nonsense");
  throw Error(static_cast<ErrorCode>(code), error.value("message", ""), error.value("detail", ""));
}

}  // namespace

Nursery::Nursery() {
  start();
}

Nursery::~Nursery() {
  control_ = File();  // ends it, and that its children
  if (process_ <= 0) return;
  ::kill(process_, SIGKILL);
  int status = 0;
  ::waitpid(process_, &status, 0);
}

void Nursery::start() {
  if (process_ > 0) {
    ::kill(process_, SIGKILL);
    int status = 0;
    ::waitpid(process_, &status, 0);
  }
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
    throw Error(ErrorCode::device_failed, "no socket for the processes that compile: " + error_text(errno));
  File ours(ends[0]), theirs(ends[1]);
  std::fflush(nullptr);
  process_ = ::fork();
  if (process_ < 0)
    throw Error(ErrorCode::device_failed, "no process for compilers can be started: " + error_text(errno));
  if (process_ == 0) {
    // Nothing of the service's is open here: its listeners, its clients, its cache.
    const int kept = ::fcntl(theirs.get(), F_DUPFD_CLOEXEC, 3);
    if (kept > 3) ::close_range(3, static_cast<unsigned>(kept) - 1, 0);
    ::close_range(static_cast<unsigned>(kept) + 1, ~0u, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    be_nursery(File(kept));
  }
  control_ = std::move(ours);
  ++started_;
}

Nursery::Child Nursery::begin(const ChildLimits& limits) {
  const std::lock_guard lock(mutex_);
  for (int i = 0; i < 2; ++i) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
      throw Error(ErrorCode::device_failed, "no socket for a process that compiles: " + error_text(errno));
    File ours(ends[0]), theirs(ends[1]);
    const bool sent = send_descriptor(control_.get(), &limits, sizeof limits, theirs.get());
    theirs = File();
    char begun = 0;
    if (sent)
      if (File process = receive_descriptor(ours.get(), &begun, 1))
        return {std::move(ours), std::move(process)};
    // It was killed, or has crashed.
    start();
  }
  throw Error(ErrorCode::device_failed, "the process that starts compilers does not answer");
}

std::string Nursery::compile(const std::string& request, const ChildLimits& limits,
                             const std::atomic<bool>& cancelled) {
  for (int i = 0; i < 2; ++i) {
    std::string bytes = run(request, limits, cancelled);
    if (std::optional<std::string> result = result_of(std::move(bytes), limits)) return std::move(*result);
  }
  throw Error(ErrorCode::device_failed, "the process that compiles was lost with its parent, twice");
}

std::string Nursery::run(const std::string& request, const ChildLimits& limits,
                         const std::atomic<bool>& cancelled) {
  const Child child = begin(limits);
  const auto deadline =
      steady_clock::now() + std::chrono::milliseconds(static_cast<std::int64_t>(limits.seconds * 1000));
  const auto kill = [&] { ::syscall(SYS_pidfd_send_signal, child.process.get(), SIGKILL, nullptr, 0); };
  const auto size = static_cast<std::uint32_t>(request.size());
  std::string result;
  if (!send_all(child.socket.get(), &size, sizeof size) ||
      !send_all(child.socket.get(), request.data(), request.size()))
    kill();
  for (std::vector<char> part(64 << 10);;) {
    if (cancelled) {
      kill();
      throw Error(ErrorCode::cancelled, "the compilation was cancelled: nobody waits for it");
    }
    if (steady_clock::now() >= deadline) {
      kill();
      throw too_long(limits);
    }
    pollfd one{child.socket.get(), POLLIN, 0};
    if (::poll(&one, 1, cancel_poll_ms) <= 0) continue;
    const ssize_t count = ::recv(child.socket.get(), part.data(), part.size(), 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return result;
    result.append(part.data(), static_cast<std::size_t>(count));
    if (result.size() > most_result_bytes) {
      kill();
      throw Error(ErrorCode::limit_exceeded, "the compilation makes a kernel larger than any entry");
    }
  }
}

std::uint64_t Nursery::memory() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t pages = 0, resident = 0;
  if (std::FILE* const file = std::fopen(("/proc/" + std::to_string(process_) + "/statm").c_str(), "re")) {
    if (std::fscanf(file, "%lu %lu", &pages, &resident) != 2) resident = 0;
    std::fclose(file);
  }
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace flashjit::serve
