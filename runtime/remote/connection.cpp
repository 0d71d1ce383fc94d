#include "runtime/remote/connection.hpp"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/x509_vfy.h>
#include <poll.h>
#include <sys/socket.h>
#include <csignal>
#include <cstring>

#include "runtime/remote/store.hpp"

namespace flashjit::remote_plugin {
namespace {

using std::chrono::steady_clock;

constexpr std::size_t buffer_size = std::size_t{64} << 10;

std::chrono::nanoseconds time_left(Deadline deadline) {
  return std::max<std::chrono::nanoseconds>(deadline - steady_clock::now(), std::chrono::nanoseconds(0));
}

std::string tls_error() {
  char text[256] = "unknown error";
  if (const unsigned long code = ::ERR_get_error()) ::ERR_error_string_n(code, text, sizeof text);
  ::ERR_clear_error();
  return text;
}

// A question to the resolver, which goes on by itself if nobody waits for it any more.
struct Question {
  std::string host, port;
  addrinfo hints{};
  gaicb request{};
};

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

Addresses resolve(const std::string& host, const std::string& port, Deadline deadline) {
  auto question = std::make_unique<Question>();
  question->host = host;
  question->port = port;
  question->hints.ai_socktype = SOCK_STREAM;
  question->hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), port.c_str(), &question->hints, &found) == 0)
    return {found, &::freeaddrinfo};
  question->hints.ai_flags = AI_ADDRCONFIG | AI_NUMERICSERV;
  question->request.ar_name = question->host.c_str();
  question->request.ar_service = question->port.c_str();
  question->request.ar_request = &question->hints;
  gaicb* list[] = {&question->request};
  sigevent silent{};
  silent.sigev_notify = SIGEV_NONE;
  int status = ::getaddrinfo_a(GAI_NOWAIT, list, 1, &silent);
  while (status == 0) {
    const auto left = time_left(deadline).count();
    const timespec time{static_cast<time_t>(left / 1'000'000'000), static_cast<long>(left % 1'000'000'000)};
    status = ::gai_suspend(list, 1, &time);
    if (status == EAI_INTR) status = 0;
    if (status == EAI_ALLDONE || ::gai_error(&question->request) != EAI_INPROGRESS) {
      status = ::gai_error(&question->request);
      break;
    }
    if (left == 0 || status == EAI_AGAIN) {
      // The resolver's thread still writes to it.
      if (::gai_cancel(&question->request) != EAI_CANCELED) (void)question.release();
      throw Failure("the name " + host + " was not resolved in time");
    }
  }
  if (status != 0) throw Failure("the name " + host + " cannot be resolved: " + ::gai_strerror(status));
  return {question->request.ar_result, &::freeaddrinfo};
}

}  // namespace

TlsContext tls_context(const std::string& ca_file) {
  TlsContext context(::SSL_CTX_new(::TLS_client_method()), &::SSL_CTX_free);
  if (!context) throw Failure("TLS cannot start: " + tls_error());
  ::SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
  ::SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  const int loaded = ca_file.empty()
                         ? ::SSL_CTX_set_default_verify_paths(context.get())
                         : ::SSL_CTX_load_verify_locations(context.get(), ca_file.c_str(), nullptr);
  if (loaded != 1)
    throw Failure("the certificates of " + (ca_file.empty() ? "the system" : ca_file) +
                  " cannot be read: " + tls_error());
  return context;
}

Connection::Connection(const std::string& host, const std::string& port, const TlsContext& tls,
                       Deadline deadline) {
  const Addresses addresses = resolve(host, port, deadline);
  std::string reason = "it has no address";
  for (const addrinfo* at = addresses.get(); at && !socket_; at = at->ai_next) {
    socket_ = File(::socket(at->ai_family, at->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, at->ai_protocol));
    if (!socket_) {
      reason = error_text(errno);
      continue;
    }
    int error = 0;
    if (::connect(socket_.get(), at->ai_addr, at->ai_addrlen) != 0) error = errno;
    if (error == EINPROGRESS) {
      wait(POLLOUT, deadline);
      socklen_t size = sizeof error;
      ::getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    }
    if (error == 0) break;
    reason = error_text(error);
    socket_ = File();
  }
  if (!socket_) throw Failure("cannot connect: " + reason);
  const int on = 1;
  ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (!tls) return;

  tls_.reset(::SSL_new(tls.get()));
  BIO *in = ::BIO_new(::BIO_s_mem()), *out = ::BIO_new(::BIO_s_mem());
  if (!tls_ || !in || !out) throw Failure("TLS cannot start: " + tls_error());
  ::SSL_set_bio(tls_.get(), in, out);
  ::SSL_set_connect_state(tls_.get());
  // A certificate names hosts, or addresses.
  if (::X509_VERIFY_PARAM_set1_ip_asc(::SSL_get0_param(tls_.get()), host.c_str()) != 1 &&
      (::SSL_set1_host(tls_.get(), host.c_str()) != 1 ||
       ::SSL_set_tlsext_host_name(tls_.get(), host.c_str()) != 1))
    throw Failure("TLS cannot start: " + tls_error());
  if (tls_step([&] { return ::SSL_do_handshake(tls_.get()); }, deadline) != 1) {
    const long verdict = ::SSL_get_verify_result(tls_.get());
    throw Failure(verdict != X509_V_OK ? std::string("the server's certificate is refused: ") +
                                             ::X509_verify_cert_error_string(verdict)
                                       : "TLS fails: " + tls_error());
  }
}

void Connection::wait(short events, Deadline deadline) const {
  for (;;) {
    // Rounded up, so that the last part of a millisecond is not spent spinning.
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(time_left(deadline)).count();
    if (left == 0) throw Failure("no answer in time");
    pollfd one{socket_.get(), events, 0};
    const int ready = ::poll(&one, 1, static_cast<int>(left));
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) throw Failure(error_text(errno));
  }
}

void Connection::write(const char* from, std::size_t size, Deadline deadline) {
  while (size > 0) {
    const ssize_t count = ::send(socket_.get(), from, size, MSG_NOSIGNAL);
    if (count >= 0) {
      from += count;
      size -= static_cast<std::size_t>(count);
    } else if (errno == EAGAIN) {
      wait(POLLOUT, deadline);
    } else if (errno != EINTR) {
      throw Failure("the connection broke: " + error_text(errno));
    }
  }
}

std::size_t Connection::read(char* to, std::size_t size, Deadline deadline) {
  for (;;) {
    const ssize_t count = ::recv(socket_.get(), to, size, 0);
    if (count > 0) return static_cast<std::size_t>(count);
    if (count == 0) throw Failure("the server closed the connection");
    if (errno == EAGAIN)
      wait(POLLIN, deadline);
    else if (errno != EINTR)
      throw Failure("the connection broke: " + error_text(errno));
  }
}

void Connection::flush_tls(Deadline deadline) {
  char* data = nullptr;
  BIO* const out = ::SSL_get_wbio(tls_.get());
  const long size = BIO_get_mem_data(out, &data);
  if (size > 0) write(data, static_cast<std::size_t>(size), deadline);
  (void)BIO_reset(out);
}

void Connection::feed_tls(Deadline deadline) {
  char bytes[16 << 10];
  const std::size_t size = read(bytes, sizeof bytes, deadline);
  if (::BIO_write(::SSL_get_rbio(tls_.get()), bytes, static_cast<int>(size)) != static_cast<int>(size))
    throw Failure("TLS has no memory");
}

template <class Step>
int Connection::tls_step(Step step, Deadline deadline) {
  for (;;) {
    ::ERR_clear_error();
    const int result = step();
    const int error = result > 0 ? SSL_ERROR_NONE : ::SSL_get_error(tls_.get(), result);
    flush_tls(deadline);
    if (error != SSL_ERROR_WANT_READ) return result;
    feed_tls(deadline);
  }
}

void Connection::send(std::string_view bytes, Deadline deadline) {
  if (!tls_) return write(bytes.data(), bytes.size(), deadline);
  while (!bytes.empty()) {
    const int part = static_cast<int>(std::min<std::size_t>(bytes.size(), 1 << 20));
    const int count = tls_step([&] { return ::SSL_write(tls_.get(), bytes.data(), part); }, deadline);
    if (count <= 0) throw Failure("TLS fails: " + tls_error());
    bytes.remove_prefix(static_cast<std::size_t>(count));
  }
}

std::string_view Connection::receive(Deadline deadline) {
  buffer_.resize(buffer_size);
  if (!tls_) return {buffer_.data(), read(buffer_.data(), buffer_.size(), deadline)};
  const int count = tls_step(
      [&] { return ::SSL_read(tls_.get(), buffer_.data(), static_cast<int>(buffer_.size())); }, deadline);
  if (count <= 0) throw Failure("the server closed the connection");
  return {buffer_.data(), static_cast<std::size_t>(count)};
}

}  // namespace flashjit::remote_plugin
