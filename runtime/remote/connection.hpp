// A connection to a server, plain or by TLS, whose every step ends at a deadline.
#pragma once

#include <openssl/ssl.h>
#include <chrono>
#include <memory>
#include <string>
#include <string_view>

#include "cache/file.hpp"

namespace flashjit::remote_plugin {

using Deadline = std::chrono::steady_clock::time_point;

// Settings of TLS that all connections to a server share.
using TlsContext = std::shared_ptr<SSL_CTX>;
// Verifies the server's certificate against `ca_file`, or, if that is empty, the system's certificates.
// Throws Failure.
TlsContext tls_context(const std::string& ca_file);

class Connection {
 public:
  // `tls` may be null: a plain connection. Throws Failure.
  Connection(const std::string& host, const std::string& port, const TlsContext& tls, Deadline deadline);

  void send(std::string_view bytes, Deadline deadline);
  // Some octets, at least one. Throws Failure at the end of the stream, too.
  std::string_view receive(Deadline deadline);

 private:
  void wait(short events, Deadline deadline) const;
  void write(const char* from, std::size_t size, Deadline deadline);
  std::size_t read(char* to, std::size_t size, Deadline deadline);
  void flush_tls(Deadline deadline);
  void feed_tls(Deadline deadline);
  // Repeats a function of OpenSSL until it needs nothing from the network; returns its result.
  template <class Step>
  int tls_step(Step step, Deadline deadline);

  File socket_;
  std::unique_ptr<SSL, void (*)(SSL*)> tls_{nullptr, &SSL_free};
  std::string buffer_;
};

}  // namespace flashjit::remote_plugin
