// A client of HTTP that may misbehave.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>

#include "tests/remote/servers.hpp"

namespace flashjit::testing {

struct HttpReply {
  int status = 0;  // 0: the server closed the connection, or did not answer in time
  std::string head, body;
  std::string failure;  // why there is no answer
  // The value of a header; empty if it is not there.
  std::string header(const std::string& name) const {
    const std::size_t at = head.find("\r\n" + name + ": ");
    if (at == std::string::npos) return {};
    const std::size_t begin = at + name.size() + 4;
    return head.substr(begin, head.find("\r\n", begin) - begin);
  }
};

class HttpClient {
 public:
  explicit HttpClient(int port) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const sockaddr_in address = loopback(port);
    connected_ = ::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
    if (!connected_) failure_ = "no connection: " + error_text(errno);
  }
  bool connected() const { return connected_; }
  int socket() const { return socket_.get(); }

  bool send(std::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
    return true;
  }

  HttpReply receive(bool has_body = true, std::chrono::milliseconds patience = std::chrono::seconds(60)) {
    HttpReply reply;
    std::size_t end = 0;
    while ((end = buffer_.find("\r\n\r\n")) == std::string::npos)
      if (!read(patience)) return {0, {}, {}, failure_};
    reply.head = buffer_.substr(0, end + 2);
    buffer_.erase(0, end + 4);
    const std::size_t size = has_body ? std::strtoul(reply.header("Content-Length").c_str(), nullptr, 10) : 0;
    while (buffer_.size() < size)
      if (!read(patience)) return {0, {}, {}, failure_};
    reply.body = buffer_.substr(0, size);
    buffer_.erase(0, size);
    reply.status = std::atoi(reply.head.c_str() + 9);
    return reply;
  }
  HttpReply ask(const std::string& method, const std::string& path, const std::string& body = "",
                const std::string& headers = "") {
    send(method + " " + path + " HTTP/1.1\r\nHost: x\r\n" + headers +
         (body.empty() ? "" : "Content-Length: " + std::to_string(body.size()) + "\r\n") + "\r\n" + body);
    return receive(method != "HEAD");
  }
  HttpReply get(const std::string& path) { return ask("GET", path); }
  // Whether the server has closed the connection.
  bool is_closed(std::chrono::milliseconds patience = std::chrono::seconds(60)) {
    while (read(patience)) {
    }
    return ended_;
  }

 private:
  bool read(std::chrono::milliseconds patience) {
    pollfd one{socket_.get(), POLLIN, 0};
    if (connected_ && ::poll(&one, 1, static_cast<int>(patience.count())) <= 0) {
      failure_ = "nothing for " + std::to_string(patience.count()) + " ms";
      return false;
    }
    char part[64 << 10];
    const ssize_t count = ::recv(socket_.get(), part, sizeof part, 0);
    if (count <= 0) {
      if (connected_) failure_ = count == 0 ? "closed" : error_text(errno);
      return ended_ = true, false;
    }
    buffer_.append(part, static_cast<std::size_t>(count));
    return true;
  }

  const File socket_;
  std::string buffer_, failure_;
  bool connected_ = false, ended_ = false;
};

}  // namespace flashjit::testing
