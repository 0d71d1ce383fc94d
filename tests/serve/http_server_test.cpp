// The server under clients that are wrong, slow, many, or gone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "tests/serve/http_client.hpp"
#include "tools/serve/http_server.hpp"

namespace flashjit::serve {
namespace {

using ::flashjit::testing::HttpClient;
using ::flashjit::testing::HttpReply;
using std::chrono::milliseconds;
using ::testing::AnyOf;
using ::testing::HasSubstr;

// Answers /big with much, /later after a while, /never never, and the rest with what was asked.
class Running {
 public:
  explicit Running(const HttpLimits& limits = {})
      : socket_(listen_at("127.0.0.1:0")),
        port(std::stoi(place_of(socket_).substr(10))),
        server(limits, [this](const HttpRequest& request, std::shared_ptr<Exchange> exchange) {
          ++requests;
          const std::string path(request.path);
          if (path == "/never") {
            exchange->on_gone = [this] { ++gone; };
            waiting_.push_back(std::move(exchange));
          } else if (path == "/later") {
            server.after(milliseconds(50), [exchange] { exchange->answer({}); });
          } else {
            const std::string text = path == "/big"
                                         ? std::string(64 << 20, 'x')
                                         : std::string(request.method) + path + std::string(request.body);
            exchange->answer({200, "text/plain", {}, std::make_shared<const std::string>(text)});
          }
        }) {
    server.add_listener(socket_);
    thread_ = std::thread([this] { server.run(); });
  }
  ~Running() {
    server.stop();
    thread_.join();
  }
  // The answer of `read`, called on the server's thread.
  template <class Read>
  auto of(Read read) {
    std::promise<decltype(read())> promise;
    server.call([&] { promise.set_value(read()); });
    return promise.get_future().get();
  }
  bool becomes(const std::function<bool()>& state) {
    for (int i = 0; i < 5000; ++i) {
      if (of(state)) return true;
      std::this_thread::sleep_for(milliseconds(2));
    }
    return false;
  }

 private:
  const int socket_;

 public:
  const int port;
  int requests = 0, gone = 0;  // on the server's thread
  HttpServer server;

 private:
  std::vector<std::shared_ptr<Exchange>> waiting_;
  std::thread thread_;
};

TEST(HttpServer, AnswersOneAfterTheOtherOnAConnection) {
  Running running;
  HttpClient client(running.port);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(client.get("/a").body, "GET/a");
  EXPECT_EQ(client.ask("POST", "/b", "body").body, "POST/bbody");
  const HttpReply head = client.ask("HEAD", "/c");
  EXPECT_EQ(head.header("Content-Length"), "6");
  EXPECT_EQ(client.get("/later").status, 200);
  // Two at once are answered in order.
  client.send("GET /1 HTTP/1.1\r\nHost: x\r\n\r\nGET /2 HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(client.receive().body, "GET/1");
  EXPECT_EQ(client.receive().body, "GET/2");
  EXPECT_EQ(client.ask("GET", "/d", "", "Connection: close\r\n").status, 200);
  EXPECT_TRUE(client.is_closed());
}

TEST(HttpServer, RefusesWhatIsNoRequest) {
  Running running({.body_bytes = 1000});
  const std::string endless(100'000, 'x');
  const std::pair<std::string, int> malformed[] = {
      {"nonsense\r\n\r\n", 400},
      {std::string("\x16\x03\x01\x00\xa5\x01\x00\x00", 8) + "\r\n\r\n", 400},  // TLS
      {"GET / HTTP/9.9\r\n\r\n", 505},
      {"GET /\x01 HTTP/1.1\r\n\r\n", 400},
      {"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400},
      {"GET / HTTP/1.1\r\nX: " + endless + "\r\n\r\n", 431},
      {"GET /" + endless + " HTTP/1.1\r\n\r\n", 431},
      {"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400},
      {"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400},
      {"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", 400},
      {"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400},
      {"POST / HTTP/1.1\r\nContent-Length: 5000000000\r\n\r\n" + endless, 413},
      {"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n186a0\r\n" + endless, 413},
      {"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400},
  };
  for (const auto& [bytes, status] : malformed) {
    HttpClient client(running.port);
    client.send(bytes);
    EXPECT_EQ(client.receive().status, status) << bytes.substr(0, 60);
    EXPECT_TRUE(client.is_closed());
  }
  EXPECT_EQ(running.of([&] { return running.server.malformed(); }), std::size(malformed));
  EXPECT_EQ(running.of([&] { return running.requests; }), 0);
  EXPECT_TRUE(running.becomes([&] { return running.server.connections() == 0; }));
  EXPECT_EQ(HttpClient(running.port).get("/").status, 200);
}

TEST(HttpServer, GigabytesThatNobodyAskedForAreNotTaken) {
  Running running;
  HttpClient client(running.port);
  client.send("POST / HTTP/1.1\r\nContent-Length: 4000000000\r\n\r\n");
  const std::string part(1 << 20, 'x');
  int sent = 0;
  while (sent < 64 && client.send(part)) ++sent;
  EXPECT_LT(sent, 64);
}

TEST(HttpServer, SlowClientsAreClosedAndHoldUpNobody) {
  Running running({.request = milliseconds(200), .answer = milliseconds(200)});
  std::vector<std::unique_ptr<HttpClient>> slow;
  for (int i = 0; i < 100; ++i) {
    slow.push_back(std::make_unique<HttpClient>(running.port));
    slow.back()->send(i % 2 ? "GET /sl" : "");
  }
  // They take nothing of a large answer.
  for (int i = 0; i < 4; ++i) {
    slow.push_back(std::make_unique<HttpClient>(running.port));
    slow.back()->send("GET /big HTTP/1.1\r\n\r\n");
  }
  EXPECT_EQ(HttpClient(running.port).get("/quick").body, "GET/quick");
  EXPECT_TRUE(running.becomes([&] { return running.server.connections() == 0; }));
}

TEST(HttpServer, BeyondItsConnectionsTheIdleOnesAreClosed) {
  Running running({.connections = 20});
  HttpClient works(running.port);
  works.send("GET /never HTTP/1.1\r\n\r\n");
  ASSERT_TRUE(running.becomes([&] { return running.server.pending() == 1; }));
  std::vector<std::unique_ptr<HttpClient>> idle;
  for (int i = 0; i < 200; ++i) {
    idle.push_back(std::make_unique<HttpClient>(running.port));
    ASSERT_EQ(idle.back()->get("/" + std::to_string(i)).status, 200);
  }
  EXPECT_LE(running.of([&] { return running.server.connections(); }), 21u);
  EXPECT_TRUE(idle.front()->is_closed());
  EXPECT_EQ(idle.back()->get("/again").status, 200);
  EXPECT_EQ(running.of([&] { return running.server.pending(); }), 1u);
}

TEST(HttpServer, NoticesClientsThatGoAway) {
  Running running;
  for (int i = 0; i < 10; ++i) HttpClient(running.port).send("GET /never HTTP/1.1\r\n\r\n");
  EXPECT_TRUE(running.becomes([&] { return running.gone == 10; }));
  EXPECT_EQ(running.of([&] { return running.server.pending(); }), 0u);
  HttpClient client(running.port);
  client.send("GET /later HTTP/1.1\r\n\r\n");  // answered when it is gone, or not at all
}

TEST(HttpServer, DrainsByAnsweringWhatIsPending) {
  Running running;
  HttpClient idle(running.port), works(running.port);
  ASSERT_EQ(idle.get("/").status, 200);
  works.send("GET /later HTTP/1.1\r\n\r\n");
  ASSERT_TRUE(running.becomes([&] { return running.server.pending() == 1; }));
  running.server.call([&] { running.server.drain(); });
  EXPECT_TRUE(idle.is_closed());
  const HttpReply last = works.receive();
  EXPECT_EQ(last.status, 200);
  EXPECT_EQ(last.header("Connection"), "close");
  EXPECT_FALSE(HttpClient(running.port).connected());
}

}  // namespace
}  // namespace flashjit::serve
