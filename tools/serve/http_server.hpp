// HTTP/1.1 on one thread: connections, their limits and their deadlines. What is answered is the handler's.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace flashjit::serve {

struct HttpLimits {
  std::size_t connections = 1024;  // beyond it, the one that was idle longest is closed
  std::size_t head_bytes = 8 << 10;
  std::size_t body_bytes = 64 << 10;          // of a request
  std::chrono::milliseconds request{30'000};  // from the end of the last answer to the end of a request
  std::chrono::milliseconds answer{30'000};   // for the client to take an answer
};

struct HttpRequest {
  std::string_view method, path, authorization, body;  // valid during the call
  std::string address;                                 // of the client; empty: a Unix socket
};

struct HttpAnswer {
  int status = 200;
  std::string_view type = "application/json";  // a literal
  std::vector<std::pair<std::string_view, std::string>> headers{};
  std::shared_ptr<const std::string> body{};
};
std::string_view reason_of(int status);

// One request that waits for its answer. On the server's thread only.
class Exchange {
 public:
  virtual ~Exchange() = default;
  // Once; later calls do nothing.
  virtual void answer(HttpAnswer answer) = 0;
  // Called if the client goes away before the answer.
  std::function<void()> on_gone;
};

class HttpServer {
 public:
  // Called on the server's thread. Throws nothing.
  using Handler = std::function<void(const HttpRequest&, std::shared_ptr<Exchange>)>;
  HttpServer(const HttpLimits& limits, Handler handler);
  ~HttpServer();

  // Serves connections to a socket that listens, which it owns from then on.
  void add_listener(int socket);
  // Calls `then` once after that time.
  void after(std::chrono::milliseconds time, std::function<void()> then);
  // Calls it on the server's thread; from any thread.
  void call(std::function<void()> function);
  // Calls it for SIGTERM and SIGINT.
  void on_signal(std::function<void(int number)> function);

  // Serves until stop().
  void run();
  // No further connections and requests; those whose answers are pending get them.
  void drain();
  void stop();

  std::size_t connections() const;
  std::size_t pending() const;      // requests without an answer
  std::uint64_t malformed() const;  // requests that were no HTTP, or beyond a limit

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Listens at "HOST:PORT", "[ADDRESS]:PORT" or "unix:PATH"; port 0 is any. Throws Error(invalid_argument).
int listen_at(const std::string& place);
// The sockets that systemd passes to this process (LISTEN_PID, LISTEN_FDS); the variables are unset.
std::vector<int> passed_sockets();
// The place where the socket listens, as listen_at() takes it.
std::string place_of(int socket);

}  // namespace flashjit::serve
