// Real servers of Debian's packages on loopback, and a connection between that misbehaves.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "cache/file.hpp"
#include "tests/cache/support.hpp"

namespace flashjit::testing {

inline sockaddr_in loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
  address.sin_port = ::htons(static_cast<std::uint16_t>(port));
  return address;
}

// A port that nobody listens at.
inline int free_port() {
  const File socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = loopback(0);
  socklen_t size = sizeof address;
  if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0)
    throw std::runtime_error("bind");
  return ::ntohs(address.sin_port);
}

inline bool answers(int port) {
  const File socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in address = loopback(port);
  return ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
}

inline bool is_installed(const std::string& program) {
  for (const char* folder : {"/usr/bin/", "/usr/sbin/"})
    if (::access((folder + program).c_str(), X_OK) == 0) return true;
  return false;
}

// A server in a process of its own, which ends with the test.
class ServerProcess {
 public:
  ServerProcess() = default;
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;
  ~ServerProcess() { stop(SIGKILL); }

  void start(const std::vector<std::string>& command, int port, const std::string& log) {
    std::fflush(nullptr);
    const pid_t parent = ::getpid();
    child_ = ::fork();
    if (child_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(1);
      const int file = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
      ::dup2(file, 1);
      ::dup2(file, 2);
      std::vector<char*> words;
      for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
      words.push_back(nullptr);
      ::setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin", 1);
      ::execvp(words[0], words.data());
      ::_exit(127);
    }
    for (int i = 0; i < 2000 && !answers(port); ++i) {
      if (int status; ::waitpid(child_, &status, WNOHANG) == child_) {
        child_ = 0;
        throw std::runtime_error(command[0] + " ended: " + read_file(log));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  pid_t id() const { return child_; }
  void signal(int number) const {
    if (child_ > 0) ::kill(child_, number);
  }
  void stop(int number = SIGTERM) {
    if (child_ <= 0) return;
    ::kill(child_, number);
    int status = 0;
    ::waitpid(child_, &status, 0);
    child_ = 0;
  }

 private:
  pid_t child_ = 0;
};

// A key and a certificate for 127.0.0.1 that it signed itself.
struct Certificate {
  explicit Certificate(const std::string& names = "IP:127.0.0.1", int days = 2) {
    const std::string command =
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days " +
        std::to_string(days) + " -subj /CN=flashjit -addext subjectAltName=" + names + " -keyout " + key() +
        " -out " + file() + " >" + (folder / "log") + " 2>&1";
    if (std::system(command.c_str()) != 0) throw std::runtime_error(read_file(folder / "log"));
  }
  std::string file() const { return folder / "certificate"; }
  std::string key() const { return folder / "key"; }
  Scratch folder;
};

struct RedisServer {
  explicit RedisServer(std::vector<std::string> more = {}, const Certificate* tls = nullptr)
      : scheme(tls ? "rediss" : "redis") {
    command = {"redis-server",      "--bind", "127.0.0.1", "--save",      "",
               "--appendonly",      "no",     "--dir",     folder.path(), tls ? "--tls-port" : "--port",
               std::to_string(port)};
    if (tls)
      for (const std::string& word :
           {std::string("--port"), std::string("0"), std::string("--tls-cert-file"), tls->file(),
            std::string("--tls-key-file"), tls->key(), std::string("--tls-ca-cert-file"), tls->file(),
            std::string("--tls-auth-clients"), std::string("no")})
        command.push_back(word);
    command.insert(command.end(), more.begin(), more.end());
    start();
  }
  void start() { process.start(command, port, folder / "log"); }
  std::string url() const { return scheme + "://127.0.0.1:" + std::to_string(port); }

  const std::string scheme;
  Scratch folder;
  const int port = free_port();
  std::vector<std::string> command;
  ServerProcess process;
};

// nginx with WebDAV's PUT and DELETE.
struct NginxServer {
  explicit NginxServer(const std::string& more = {}, const Certificate* tls = nullptr)
      : scheme(tls ? "https" : "http") {
    std::filesystem::create_directory(folder / "data");
    const std::string listen = "listen 127.0.0.1:" + std::to_string(port) + (tls ? " ssl;" : ";");
    const std::string keys =
        tls ? "ssl_certificate " + tls->file() + "; ssl_certificate_key " + tls->key() + ";" : std::string();
    std::string user;
    // nginx's workers give up root otherwise.
    if (::getuid() == 0) user = "user root;\n";
    write_file(folder / "nginx.conf",
               user + "daemon off; master_process off; worker_processes 1; pid " + (folder / "pid") + ";\n" +
                   "error_log " + (folder / "error") + ";\nevents { worker_connections 512; }\nhttp {\n" +
                   "access_log off; client_body_temp_path " + (folder / "body") + "; proxy_temp_path " +
                   (folder / "proxy") + "; fastcgi_temp_path " + (folder / "fastcgi") + "; uwsgi_temp_path " +
                   (folder / "uwsgi") + "; scgi_temp_path " + (folder / "scgi") + ";\nserver { " + listen +
                   keys + " root " + (folder / "data") +
                   "; client_max_body_size 300m; dav_methods PUT DELETE; create_full_put_path on;" + more +
                   " }\n}\n");
    start();
  }
  void start() {
    process.start({"nginx", "-p", folder.path(), "-c", folder / "nginx.conf", "-e", folder / "error"}, port,
                  folder / "log");
  }
  std::string url() const { return scheme + "://127.0.0.1:" + std::to_string(port); }

  const std::string scheme;
  Scratch folder;
  const int port = free_port();
  ServerProcess process;
};

// Hands octets on between clients and a server, and does to the server's what it is told.
class FaultyConnection {
 public:
  enum class Fault { none, slow, cut, garbage, silent };
  explicit FaultyConnection(int server)
      : server_(server), listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = loopback(0);
    socklen_t size = sizeof address;
    ::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), size);
    ::listen(listener_.get(), 64);
    ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ::ntohs(address.sin_port);
    acceptor_ = std::thread([this] { accept_all(); });
  }
  ~FaultyConnection() {
    ends_ = true;
    acceptor_.join();
    for (std::thread& one : threads_) one.join();
  }
  int port() const { return port_; }
  std::atomic<Fault> fault{Fault::none};
  std::atomic<std::size_t> cut_after{100};  // octets of each of the server's answers that pass

 private:
  void accept_all() {
    while (!ends_) {
      pollfd one{listener_.get(), POLLIN, 0};
      if (::poll(&one, 1, 20) <= 0) continue;
      threads_.emplace_back([this, client = File(::accept4(listener_.get(), nullptr, nullptr,
                                                           SOCK_CLOEXEC))] { hand_on(client.get()); });
    }
  }
  void hand_on(int client) {
    const File server(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const sockaddr_in address = loopback(server_);
    if (::connect(server.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) return;
    std::vector<char> bytes(64 << 10);
    while (!ends_) {
      pollfd both[] = {{client, POLLIN, 0}, {server.get(), POLLIN, 0}};
      if (::poll(both, 2, 20) <= 0) continue;
      if (both[0].revents) {
        const ssize_t size = ::recv(client, bytes.data(), bytes.size(), 0);
        if (size <= 0) return;
        ::send(server.get(), bytes.data(), static_cast<std::size_t>(size), MSG_NOSIGNAL);
      }
      if (both[1].revents) {
        ssize_t size = ::recv(server.get(), bytes.data(), bytes.size(), 0);
        if (size <= 0) return;
        const Fault now = fault;
        if (now == Fault::silent) continue;
        if (now == Fault::slow) std::this_thread::sleep_for(std::chrono::milliseconds(30));
        if (now == Fault::garbage) std::fill(bytes.begin(), bytes.begin() + size, '\x7f');
        if (now == Fault::cut) size = std::min<ssize_t>(size, static_cast<ssize_t>(cut_after.load()));
        ::send(client, bytes.data(), static_cast<std::size_t>(size), MSG_NOSIGNAL);
        if (now == Fault::cut) return;
      }
    }
  }

  const int server_;
  File listener_;
  int port_ = 0;
  std::atomic<bool> ends_{false};
  std::thread acceptor_;
  std::vector<std::thread> threads_;
};

}  // namespace flashjit::testing
