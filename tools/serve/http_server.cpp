#include "tools/serve/http_server.hpp"

#include <sys/socket.h>

#include <array>
#include <boost/asio.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <list>
#include <optional>

namespace flashjit::serve {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using Socket = asio::generic::stream_protocol::socket;
using Listener = asio::basic_socket_acceptor<asio::generic::stream_protocol>;
using ErrorCode = boost::system::error_code;

constexpr std::size_t drained_bytes = 256 << 10;

std::string address_of(const Socket& socket) {
  ErrorCode error;
  const auto endpoint = socket.remote_endpoint(error);
  if (error) return {};
  const auto family = endpoint.protocol().family();
  char text[INET6_ADDRSTRLEN] = "";
  if (family == AF_INET)
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(endpoint.data())->sin_addr, text, sizeof text);
  else if (family == AF_INET6)
    ::inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(endpoint.data())->sin6_addr, text,
                sizeof text);
  return text;
}

std::string_view view(beast::string_view text) {
  return {text.data(), text.size()};
}

std::string head_of(const HttpAnswer& answer, bool keep_alive) {
  std::string head = "HTTP/1.1 ";
  head += std::to_string(answer.status);
  head += ' ';
  head += reason_of(answer.status);
  head += "\r\nContent-Type: ";
  head += answer.type;
  head += "\r\nContent-Length: ";
  head += std::to_string(answer.body ? answer.body->size() : 0);
  for (const auto& [name, value] : answer.headers) ((head += "\r\n").append(name) += ": ") += value;
  head += keep_alive ? "\r\n\r\n" : "\r\nConnection: close\r\n\r\n";
  return head;
}

}  // namespace

struct HttpServer::Impl {
  class Connection;

  Impl(const HttpLimits& given, Handler handles) : limits(given), handler(std::move(handles)) {}

  const HttpLimits limits;
  const Handler handler;
  // In the order in which their requests ended: the first was idle longest. The context's end destroys the
  // connections, so these outlive it.
  std::list<std::weak_ptr<Connection>> idle;
  std::size_t connections = 0, pending = 0;
  std::uint64_t malformed = 0;
  bool draining = false;
  asio::io_context context{1};
  std::list<Listener> listeners;
  std::optional<asio::signal_set> signals;

  void accept(Listener& listener);
  void await_signal(std::function<void(int)> function);
};

class HttpServer::Impl::Connection : public Exchange, public std::enable_shared_from_this<Connection> {
 public:
  Connection(Impl& server, Socket socket)
      : server_(server), stream_(std::move(socket)), address_(address_of(stream_.socket())) {
    ++server_.connections;
  }
  ~Connection() override {
    leave_idle();
    if (pending_) --server_.pending;
    --server_.connections;
  }

  void read() {
    parser_.emplace();
    parser_->header_limit(static_cast<std::uint32_t>(server_.limits.head_bytes));
    parser_->body_limit(server_.limits.body_bytes);
    stream_.expires_after(server_.limits.request);
    idle_ = server_.idle.insert(server_.idle.end(), weak_from_this());
    http::async_read(stream_, buffer_, *parser_,
                     [self = shared_from_this()](ErrorCode error, std::size_t) { self->was_read(error); });
  }
  void close() {
    ErrorCode ignored;
    (void)stream_.socket().close(ignored);
  }

  void answer(HttpAnswer answer) override {
    if (!pending_) return;
    pending_ = false;
    --server_.pending;
    on_gone = {};
    if (watched_) stream_.socket().cancel();
    write(std::move(answer), parser_->get().keep_alive() && !server_.draining,
          parser_->get().method() == http::verb::head);
  }

 private:
  void leave_idle() {
    if (idle_) server_.idle.erase(*std::exchange(idle_, std::nullopt));
  }

  void was_read(ErrorCode error) {
    leave_idle();
    if (error) return refuse(error);
    if (server_.draining) return close();
    pending_ = true;
    ++server_.pending;
    watched_ = false;
    const auto& message = parser_->get();
    const auto authorization = message.find(http::field::authorization);
    const HttpRequest request{
        view(message.method_string()), view(message.target()),
        authorization == message.end() ? std::string_view() : view(authorization->value()), message.body(),
        address_};
    stream_.expires_never();
    server_.handler(request, shared_from_this());
    if (pending_) watch();
  }

  // Notices that a client goes away while it waits.
  void watch() {
    watched_ = true;
    stream_.socket().async_wait(Socket::wait_read, [self = shared_from_this()](ErrorCode error) {
      char octet = 0;
      if (error || !self->pending_) return;
      if (::recv(self->stream_.socket().native_handle(), &octet, 1, MSG_PEEK | MSG_DONTWAIT) > 0) return;
      self->pending_ = false;
      --self->server_.pending;
      if (const auto gone = std::exchange(self->on_gone, {})) gone();
      self->close();
    });
  }

  // Answers what is no request. A client that merely went away gets no answer.
  void refuse(ErrorCode error) {
    if (error == http::error::end_of_stream || error == beast::error::timeout ||
        error.category() != make_error_code(http::error::bad_target).category())
      return close();
    ++server_.malformed;
    HttpAnswer answer;
    answer.status = error == http::error::body_limit     ? 413
                    : error == http::error::header_limit ? 431
                    : error == http::error::bad_version  ? 505
                                                         : 400;
    answer.body = std::make_shared<const std::string>(
        R"({"error": {"code": "invalid_argument", "message": "no HTTP request within the limits: )" +
        error.message() + "\"}}\n");
    write(std::move(answer), false, false);
  }

  void write(HttpAnswer answer, bool keep_alive, bool head_only) {
    head_ = head_of(answer, keep_alive);
    body_ = head_only ? nullptr : std::move(answer.body);
    const std::array<asio::const_buffer, 2> parts = {asio::buffer(head_),
                                                     body_ ? asio::buffer(*body_) : asio::const_buffer()};
    stream_.expires_after(server_.limits.answer);
    asio::async_write(stream_, parts, [self = shared_from_this(), keep_alive](ErrorCode error, std::size_t) {
      self->body_.reset();
      if (error) return self->close();
      if (keep_alive && !self->server_.draining) return self->read();
      ErrorCode ignored;
      (void)self->stream_.socket().shutdown(Socket::shutdown_send, ignored);
      self->stream_.expires_after(std::chrono::seconds(1));
      self->discard(0);
    });
  }

  // Takes what a client still sends before the connection is closed: a reset would lose the answer.
  void discard(std::size_t taken) {
    buffer_.clear();
    stream_.async_read_some(buffer_.prepare(16 << 10),
                            [self = shared_from_this(), taken](ErrorCode error, std::size_t size) {
                              if (error || taken + size > drained_bytes) return self->close();
                              self->discard(taken + size);
                            });
  }

  Impl& server_;
  beast::basic_stream<asio::generic::stream_protocol> stream_;
  const std::string address_;
  beast::flat_buffer buffer_;
  std::optional<http::request_parser<http::string_body>> parser_;
  std::optional<std::list<std::weak_ptr<Connection>>::iterator> idle_;
  std::string head_;
  std::shared_ptr<const std::string> body_;
  bool pending_ = false, watched_ = false;
};

void HttpServer::Impl::accept(Listener& listener) {
  listener.async_accept([this, &listener](ErrorCode error, Socket socket) {
    if (draining || error == asio::error::operation_aborted) return;
    if (!error) {
      ErrorCode ignored;
      (void)socket.set_option(asio::ip::tcp::no_delay(true), ignored);
      if (connections >= limits.connections && !idle.empty())
        if (const auto oldest = idle.front().lock()) oldest->close();
      if (connections < limits.connections + 1)
        std::make_shared<Connection>(*this, std::move(socket))->read();
      return accept(listener);
    }
    // Out of descriptors or memory: others may be closed meanwhile.
    const auto pause = std::make_shared<asio::steady_timer>(context, std::chrono::milliseconds(50));
    pause->async_wait([this, &listener, pause](ErrorCode) {
      if (!draining) accept(listener);
    });
  });
}

void HttpServer::Impl::await_signal(std::function<void(int)> function) {
  signals->async_wait([this, function = std::move(function)](ErrorCode error, int number) {
    if (error) return;
    function(number);
    await_signal(function);
  });
}

HttpServer::HttpServer(const HttpLimits& limits, Handler handler)
    : impl_(std::make_unique<Impl>(limits, std::move(handler))) {}
HttpServer::~HttpServer() = default;

void HttpServer::add_listener(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size);
  Listener& listener = impl_->listeners.emplace_back(
      impl_->context,
      asio::generic::stream_protocol(address.ss_family, address.ss_family == AF_UNIX ? 0 : IPPROTO_TCP),
      socket);
  listener.non_blocking(true);
  impl_->accept(listener);
}

void HttpServer::after(std::chrono::milliseconds time, std::function<void()> then) {
  const auto timer = std::make_shared<asio::steady_timer>(impl_->context, time);
  timer->async_wait([timer, then = std::move(then)](ErrorCode error) {
    if (!error) then();
  });
}

void HttpServer::call(std::function<void()> function) {
  asio::post(impl_->context, std::move(function));
}

void HttpServer::on_signal(std::function<void(int)> function) {
  impl_->signals.emplace(impl_->context, SIGTERM, SIGINT);
  impl_->await_signal(std::move(function));
}

void HttpServer::run() {
  const auto goes_on = asio::make_work_guard(impl_->context);
  impl_->context.run();
}

void HttpServer::drain() {
  impl_->draining = true;
  for (Listener& listener : impl_->listeners) {
    ErrorCode ignored;
    (void)listener.close(ignored);
  }
  const auto idle = impl_->idle;
  for (const auto& one : idle)
    if (const auto connection = one.lock()) connection->close();
}

void HttpServer::stop() {
  impl_->context.stop();
}

std::size_t HttpServer::connections() const {
  return impl_->connections;
}
std::size_t HttpServer::pending() const {
  return impl_->pending;
}
std::uint64_t HttpServer::malformed() const {
  return impl_->malformed;
}

std::string_view reason_of(int status) {
  return std::string_view(http::obsolete_reason(static_cast<http::status>(status)).data(),
                          http::obsolete_reason(static_cast<http::status>(status)).size());
}

}  // namespace flashjit::serve
