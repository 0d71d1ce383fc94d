// Sockets that listen.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "cache/environment.hpp"
#include "cache/file.hpp"
#include "codegen/base/error.hpp"
#include "codegen/base/suggest.hpp"
#include "tools/serve/http_server.hpp"

namespace flashjit::serve {
namespace {

constexpr int backlog = 4096;
constexpr int first_passed_socket = 3;  // SD_LISTEN_FDS_START

[[noreturn]] void refuse(const std::string& place, const std::string& why) {
  throw Error(ErrorCode::invalid_argument, "cannot listen at " + in_quotes(place) + ": " + why);
}

int listen_at_path(const std::string& place, const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) refuse(place, "the path is empty or too long");
  std::memcpy(address.sun_path, path.data(), path.size());
  File socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto* const bare = reinterpret_cast<const sockaddr*>(&address);
  // The file of a service that has ended would be in the way.
  if (socket && ::connect(socket.get(), bare, sizeof address) != 0 && errno == ECONNREFUSED)
    ::unlink(path.c_str());
  socket = File(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket || ::bind(socket.get(), bare, sizeof address) != 0 || ::listen(socket.get(), backlog) != 0)
    refuse(place, error_text(errno));
  return ::fcntl(socket.get(), F_DUPFD_CLOEXEC, 0);
}

}  // namespace

int listen_at(const std::string& place) {
  if (place.starts_with("unix:")) return listen_at_path(place, place.substr(5));
  const std::size_t colon = place.rfind(':');
  if (colon == std::string::npos) refuse(place, "HOST:PORT, [ADDRESS]:PORT and unix:PATH would work");
  std::string host = place.substr(0, colon);
  const std::string port = place.substr(colon + 1);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (const int error = ::getaddrinfo(host.empty() ? nullptr : host.c_str(), port.c_str(), &hints, &found);
      error != 0)
    refuse(place, ::gai_strerror(error));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> freed(found, ::freeaddrinfo);
  int error = EADDRNOTAVAIL;
  for (const addrinfo* one = found; one; one = one->ai_next) {
    const File socket(::socket(one->ai_family, one->ai_socktype | SOCK_CLOEXEC, one->ai_protocol));
    const int yes = 1;
    if (socket && ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) == 0 &&
        ::bind(socket.get(), one->ai_addr, one->ai_addrlen) == 0 && ::listen(socket.get(), backlog) == 0)
      return ::fcntl(socket.get(), F_DUPFD_CLOEXEC, 0);
    error = errno;
  }
  refuse(place, error_text(error));
}

std::vector<int> passed_sockets() {
  const std::string process = environment_variable(Variable::listen_pid);
  const std::string count = environment_variable(Variable::listen_fds);
  std::vector<int> sockets;
  if (std::strtol(process.c_str(), nullptr, 10) == ::getpid()) {
    for (int i = 0; i < std::atoi(count.c_str()); ++i) {
      int listens = 0;
      socklen_t size = sizeof listens;
      const int socket = first_passed_socket + i;
      if (::getsockopt(socket, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || !listens)
        throw Error(ErrorCode::invalid_argument,
                    "LISTEN_FDS passes a descriptor that is no listening stream socket: the unit's socket "
                    "needs ListenStream and Accept=no");
      ::fcntl(socket, F_SETFD, FD_CLOEXEC);
      sockets.push_back(socket);
    }
  }
  for (const char* name : {"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"}) ::unsetenv(name);
  return sockets;
}

std::string place_of(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  char host[INET6_ADDRSTRLEN] = "";
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) return {};
  if (address.ss_family == AF_UNIX)
    return std::string("unix:") + reinterpret_cast<sockaddr_un&>(address).sun_path;
  if (address.ss_family == AF_INET6) {
    const auto& six = reinterpret_cast<const sockaddr_in6&>(address);
    return std::string("[") + ::inet_ntop(AF_INET6, &six.sin6_addr, host, sizeof host) +
           "]:" + std::to_string(::ntohs(six.sin6_port));
  }
  const auto& four = reinterpret_cast<const sockaddr_in&>(address);
  return ::inet_ntop(AF_INET, &four.sin_addr, host, sizeof host) +
         (":" + std::to_string(::ntohs(four.sin_port)));
}

}  // namespace flashjit::serve
