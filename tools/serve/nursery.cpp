#include "tools/serve/nursery.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string_view>
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
constexpr int cancel_poll_ms = 20, fork_pause_ms = 100;
// When a nursery is lost, the child that waits is lost with it, perhaps a moment later: the third may do.
constexpr int attempts = 3;

// A child writes one octet to its socket, the size of what follows, and that. The nursery adds the
// child's status as waitpid() gives it, in four octets, when the child has ended. A whole result is taken
// without it: the end of a child's memory takes some milliseconds.
constexpr char entry_follows = 'e', error_follows = 'x';
using ResultSize = std::uint64_t;
constexpr std::size_t result_at = 1 + sizeof(ResultSize);

std::string result_text(char kind, const std::string& content) {
  const ResultSize size = content.size();
  std::string text(result_at, kind);
  std::memcpy(text.data() + 1, &size, sizeof size);
  return text += content;
}

// Nothing, if it is not all there.
std::optional<std::string_view> content_of(std::string_view result) {
  ResultSize size = 0;
  if (result.size() < result_at) return std::nullopt;
  std::memcpy(&size, result.data() + 1, sizeof size);
  if (result.size() - result_at < size) return std::nullopt;
  return result.substr(result_at, size);
}

// ---- descriptors over sockets ----

// A message of one octet, with the socket to a child and the child.
struct ChildMessage {
  ChildMessage() {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
  }
  ChildMessage(const ChildMessage&) = delete;
  ChildMessage& operator=(const ChildMessage&) = delete;

  using Descriptors = std::array<int, 2>;
  char octet = 0;
  iovec part{&octet, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(Descriptors))] = "";
  msghdr header{};
};

bool send_child(int control, int socket, int process) {
  ChildMessage message;
  const ChildMessage::Descriptors descriptors = {socket, process};
  cmsghdr* const passed = CMSG_FIRSTHDR(&message.header);
  passed->cmsg_level = SOL_SOCKET;
  passed->cmsg_type = SCM_RIGHTS;
  passed->cmsg_len = CMSG_LEN(sizeof descriptors);
  std::memcpy(CMSG_DATA(passed), descriptors.data(), sizeof descriptors);
  return ::sendmsg(control, &message.header, MSG_NOSIGNAL) == 1;
}

// Both are empty if there was no such message.
std::array<File, 2> receive_child(int control) {
  ChildMessage message;
  ssize_t got = 0;
  do got = ::recvmsg(control, &message.header, MSG_CMSG_CLOEXEC);
  while (got < 0 && errno == EINTR);
  const cmsghdr* const passed = got == 1 ? CMSG_FIRSTHDR(&message.header) : nullptr;
  if (!passed || passed->cmsg_type != SCM_RIGHTS) return {};
  ChildMessage::Descriptors descriptors;
  std::memcpy(descriptors.data(), CMSG_DATA(passed), sizeof descriptors);
  return {File(descriptors[0]), File(descriptors[1])};
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
  return result_text(error_follows, text.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

[[noreturn]] void be_child(const File& socket, const ChildLimits& limits, pid_t nursery) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != nursery) ::_exit(1);
  std::string result;
  try {
    enter_sandbox(limits);
    std::uint32_t size = 0;
    std::string text;
    if (!read_fully(socket.get(), reinterpret_cast<char*>(&size), sizeof size) || size > most_request_bytes)
      ::_exit(1);
    text.resize(size);
    if (!read_fully(socket.get(), text.data(), size)) ::_exit(1);
    const DefaultFloatState state;
    result = result_text(entry_follows, compile_entry(text));
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

// A child for the next request, of which `control` is told; false if there is no room for a process now. The
// nursery's end of the child's socket goes to `running`.
bool fork_child(const File& control, const File& signals, const ChildLimits& limits, pid_t nursery,
                std::map<pid_t, File>& running) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) ::_exit(1);
  File services(ends[0]), childs(ends[1]);
  const pid_t child = ::fork();
  if (child == 0) {
    running.clear();
    services = File();
    sigset_t none;
    ::sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    for (const int number : {SIGTERM, SIGINT, SIGHUP, SIGPROF}) ::signal(number, SIG_DFL);
    ::close(control.get());
    ::close(signals.get());
    be_child(childs, limits, nursery);
  }
  if (child < 0) return false;
  const File process(static_cast<int>(::syscall(SYS_pidfd_open, child, 0)));
  if (!process || !send_child(control.get(), services.get(), process.get())) ::_exit(1);
  running.emplace(child, std::move(childs));
  return true;
}

// Each octet that comes by `control` asks for a child.
[[noreturn]] void be_nursery(const File& control, const ChildLimits& limits) {
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
  for (unsigned asked = 0;;) {
    pollfd both[] = {{control.get(), POLLIN, 0}, {signals.get(), POLLIN, 0}};
    if (::poll(both, 2, asked > 0 ? fork_pause_ms : -1) < 0) continue;
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
    if (both[0].revents) {
      char octet = 0;
      if (::recv(control.get(), &octet, 1, 0) != 1) ::_exit(0);
      ++asked;
    }
    if (asked > 0 && fork_child(control, signals, limits, self, running)) --asked;
  }
}

Error too_long(double seconds, const char* of) {
  std::ostringstream text;
  text << "the compilation takes longer than its limit of " << seconds << " s" << of;
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
std::optional<std::string> result_of(const std::string& bytes, const ChildLimits& limits) {
  const std::optional<std::string_view> content = content_of(bytes);
  if (!content) {
    int status = 0;
    if (bytes.size() < sizeof status) return std::nullopt;
    std::memcpy(&status, bytes.data() + bytes.size() - sizeof status, sizeof status);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGPROF)
      throw too_long(limits.seconds, " of processor time");
    // Somebody kills it, perhaps since the machine has no memory: the spec need not be to blame.
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
      throw Error(ErrorCode::device_failed, "the process that compiles was killed");
    throw Error(ErrorCode::compile_failed,
                "the process that compiles " + how_it_ended(status) +
                    "; the compiler may have crashed or asked for more memory than " +
                    std::to_string(limits.bytes) + " bytes");
  }
  const char kind = bytes.front();
  if (kind == entry_follows) return std::string(*content);
  const nlohmann::json error = nlohmann::json::parse(*content, nullptr, false);
  const int code = error.is_object() ? error.value("code", 0) : 0;
  if (kind != error_follows || code < 1 || code > static_cast<int>(std::size(error_table)))
    throw Error(ErrorCode::compile_failed, "the process that compiles answered nonsense");
  throw Error(static_cast<ErrorCode>(code), error.value("message", ""), error.value("detail", ""));
}

void check(const std::atomic<bool>& cancelled) {
  if (cancelled) throw Error(ErrorCode::cancelled, "the compilation was cancelled: nobody waits for it");
}

}  // namespace

Nursery::Nursery(const ChildLimits& limits) : limits_(limits) {
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
    be_nursery(File(kept), limits_);
  }
  control_ = std::move(ours);
  ask_for_child();
  ++started_;
}

// Another child for the next request. If the nursery is lost, that is noticed when the child is taken.
void Nursery::ask_for_child() const {
  const char octet = 0;
  (void)!::send(control_.get(), &octet, 1, MSG_NOSIGNAL);
}

Nursery::Child Nursery::take_child(const std::atomic<bool>& cancelled) {
  const std::lock_guard lock(mutex_);
  for (int i = 0; i < attempts; ++i) {
    for (pollfd one{control_.get(), POLLIN, 0}; ::poll(&one, 1, cancel_poll_ms) <= 0;) check(cancelled);
    auto [socket, process] = receive_child(control_.get());
    if (!process) {  // the nursery was killed, or has crashed
      start();
      continue;
    }
    ask_for_child();
    pollfd ended{process.get(), POLLIN, 0};
    if (::poll(&ended, 1, 0) == 0) return {std::move(socket), std::move(process)};
  }
  throw Error(ErrorCode::device_failed, "the process that starts compilers does not answer");
}

std::string Nursery::compile(const std::string& request, const std::atomic<bool>& cancelled) {
  for (int i = 0; i < attempts; ++i)
    if (std::optional<std::string> result = result_of(run(request, cancelled), limits_))
      return std::move(*result);
  throw Error(ErrorCode::device_failed,
              "the process that compiles was lost with its parent, again and again");
}

std::string Nursery::run(const std::string& request, const std::atomic<bool>& cancelled) {
  const Child child = take_child(cancelled);
  const auto deadline = steady_clock::now() +
                        std::chrono::milliseconds(static_cast<std::int64_t>(limits_.clock_seconds() * 1000));
  const auto kill = [&] { ::syscall(SYS_pidfd_send_signal, child.process.get(), SIGKILL, nullptr, 0); };
  // Whatever it does after its result: nobody waits for its end.
  const std::unique_ptr<const void, std::function<void(const void*)>> killed(&child,
                                                                             [&](const void*) { kill(); });
  const auto size = static_cast<std::uint32_t>(request.size());
  std::string result;
  if (!send_all(child.socket.get(), &size, sizeof size) ||
      !send_all(child.socket.get(), request.data(), request.size()))
    kill();
  for (std::vector<char> part(64 << 10); !content_of(result);) {
    check(cancelled);
    if (steady_clock::now() >= deadline) throw too_long(limits_.clock_seconds(), " by the clock");
    pollfd one{child.socket.get(), POLLIN, 0};
    if (::poll(&one, 1, cancel_poll_ms) <= 0) continue;
    const ssize_t count = ::recv(child.socket.get(), part.data(), part.size(), 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    result.append(part.data(), static_cast<std::size_t>(count));
    if (result.size() > most_result_bytes)
      throw Error(ErrorCode::limit_exceeded, "the compilation makes a kernel larger than any entry");
  }
  return result;
}

std::uint64_t Nursery::memory() const {
  std::uint64_t pages = 0, resident = 0;
  if (std::FILE* const file =
          std::fopen(("/proc/" + std::to_string(process_.load()) + "/statm").c_str(), "re")) {
    if (std::fscanf(file, "%lu %lu", &pages, &resident) != 2) resident = 0;
    std::fclose(file);
  }
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace flashjit::serve
