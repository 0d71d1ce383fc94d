// The plugin's stores against real servers: Redis and nginx, plain and by TLS, that answer, die, hang, cut
// off, fill up, or show a wrong certificate.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include "runtime/remote/remote_client.hpp"
#include "tests/remote/keys.hpp"
#include "tests/remote/servers.hpp"

namespace flashjit::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

struct Environment {
  Environment(const char* name, const std::string& value) : name_(name) { ::setenv(name, value.c_str(), 1); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;
  ~Environment() { ::unsetenv(name_); }

 private:
  const char* const name_;
};

std::unique_ptr<RemoteStore> open_at(const std::string& url, int timeout_ms = 2000) {
  return open_remote_store({url, false, milliseconds(200), milliseconds(timeout_ms)});
}

std::string random_bytes(std::size_t size) {
  std::string bytes(size, '\0');
  std::minstd_rand random(7);
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

// The four calls.
void exercise(RemoteStore& store) {
  std::string bytes, why;
  ASSERT_EQ(store.get("v3/absent", bytes, why), Answer::no) << why;
  EXPECT_EQ(store.exists("v3/absent", why), Answer::no) << why;
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{60'000}, std::size_t{3} << 20}) {
    const std::string name = "v3/object-" + std::to_string(size) + ".kernel", sent = random_bytes(size);
    ASSERT_EQ(store.put(name, sent, why), Answer::yes) << why;
    EXPECT_EQ(store.exists(name, why), Answer::yes) << why;
    ASSERT_EQ(store.get(name, bytes, why), Answer::yes) << why;
    EXPECT_TRUE(bytes == sent) << size;
    ASSERT_EQ(store.put(name, "another", why), Answer::yes) << why;
    ASSERT_EQ(store.get(name, bytes, why), Answer::yes) << why;
    EXPECT_EQ(bytes, "another");
  }
  EXPECT_EQ(store.lease("lease/v3/a", "one", milliseconds(60'000), why), Answer::yes) << why;
  EXPECT_EQ(store.lease("lease/v3/a", "two", milliseconds(60'000), why), Answer::no) << why;
  EXPECT_EQ(store.exists("lease/v3/a", why), Answer::yes) << why;
  EXPECT_EQ(store.lease("lease/v3/b", "two", milliseconds(60'000), why), Answer::yes) << why;
  EXPECT_NE(store.lease("lease/v3/a", "one", milliseconds(0), why), Answer::failed) << why;
  EXPECT_EQ(store.lease("lease/v3/a", "two", milliseconds(60'000), why), Answer::yes) << why;
}

class Stores : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* program : {"redis-server", "nginx", "openssl"})
      if (!is_installed(program)) GTEST_SKIP() << program << " is not installed: tools/setup test";
  }
};

TEST_F(Stores, RedisAnswers) {
  const RedisServer server;
  exercise(*open_at(server.url()));
  exercise(*open_at(server.url() + "/3/fleet"));
}

TEST_F(Stores, NginxAnswers) {
  const NginxServer server;
  exercise(*open_at(server.url()));
  exercise(*open_at(server.url() + "/fleet/kernels"));
}

// A lease ends with its time, and the one that is given back is one's own.
TEST_F(Stores, LeasesEnd) {
  const RedisServer redis;
  const NginxServer nginx;
  std::string why;
  const std::unique_ptr<RemoteStore> stores[] = {open_at(redis.url()), open_at(nginx.url())};
  for (const auto& store : stores)
    ASSERT_EQ(store->lease("lease/v3/a", "one", milliseconds(500), why), Answer::yes) << why;
  EXPECT_EQ(stores[0]->lease("lease/v3/a", "two", milliseconds(0), why), Answer::no) << why;
  EXPECT_EQ(stores[0]->exists("lease/v3/a", why), Answer::yes) << "the lease of one, not of two";
  // The times of HTTP are whole seconds, and who asks says how old a lease may be.
  std::this_thread::sleep_for(milliseconds(1100));
  for (const auto& store : stores) {
    EXPECT_EQ(store->lease("lease/v3/a", "two", milliseconds(900), why), Answer::yes) << why;
    EXPECT_EQ(store->lease("lease/v3/a", "three", milliseconds(60'000), why), Answer::no) << why;
  }
}

TEST_F(Stores, TlsIsVerified) {
  const Certificate good, other, wrong_name("DNS:elsewhere.example");
  const RedisServer redis({}, &good), redis_elsewhere({}, &wrong_name);
  const NginxServer nginx({}, &good), nginx_elsewhere({}, &wrong_name);
  std::string bytes, why;
  {
    const Environment ca("FLASHJIT_REMOTE_CA", good.file());
    exercise(*open_at(redis.url()));
    exercise(*open_at(nginx.url()));
  }
  const auto refused = [&](const std::string& url, const std::string& ca_file) {
    const Environment ca("FLASHJIT_REMOTE_CA", ca_file);
    return open_at(url)->get("v3/absent", bytes, why) == Answer::failed;
  };
  for (const std::string& url : {redis.url(), nginx.url()}) {
    EXPECT_TRUE(refused(url, other.file())) << url;
    EXPECT_THAT(why, HasSubstr("certificate")) << url;
    EXPECT_EQ(open_at(url)->get("v3/absent", bytes, why), Answer::failed)
        << url << " by the system's certificates";
  }
  for (const std::string& url : {redis_elsewhere.url(), nginx_elsewhere.url()})
    EXPECT_TRUE(refused(url, wrong_name.file())) << url << ", whose certificate names another host";
}

TEST_F(Stores, TokensAreAskedForAndNotShown) {
  const RedisServer redis({"--requirepass", "sesame"});
  const NginxServer nginx("if ($http_authorization != \"Bearer sesame\") { return 401; }");
  std::string bytes, why;
  for (const std::string& url : {redis.url(), nginx.url()}) {
    EXPECT_EQ(open_at(url)->get("v3/absent", bytes, why), Answer::failed) << url;
    const Environment wrong("FLASHJIT_REMOTE_TOKEN", "open");
    EXPECT_EQ(open_at(url)->get("v3/absent", bytes, why), Answer::failed) << url;
    EXPECT_THAT(why, Not(HasSubstr("open")));
    const Environment right("FLASHJIT_REMOTE_TOKEN", "sesame");
    exercise(*open_at(url));
  }
  const NginxServer basic(
      "if ($http_authorization != \"Basic ZGVmYXVsdDpzZXNhbWU=\") { return 401; }");  // default:sesame
  for (const std::string& url : {redis.url(), basic.url()}) {
    const Environment right("FLASHJIT_REMOTE_TOKEN", "default:sesame");
    EXPECT_EQ(open_at(url)->get("v3/absent", bytes, why), Answer::no) << url << ": " << why;
  }
  Scratch folder;
  write_file(folder / "token", "sesame\n");
  ASSERT_EQ(::chmod((folder / "token").c_str(), 0600), 0);
  const Environment file("FLASHJIT_REMOTE_TOKEN_FILE", folder / "token");
  EXPECT_EQ(open_at(redis.url())->get("v3/absent", bytes, why), Answer::no) << why;
  ASSERT_EQ(::chmod((folder / "token").c_str(), 0644), 0);
  EXPECT_THROW(open_at(redis.url()), Error);
}

TEST_F(Stores, AServerThatWasRestartedIsFoundAgain) {
  RedisServer redis;
  NginxServer nginx;
  const auto check = [](auto& server) {
    const auto store = open_at(server.url());
    std::string bytes, why;
    ASSERT_EQ(store->put("v3/a", "bytes", why), Answer::yes) << why;
    server.process.stop(SIGKILL);
    EXPECT_EQ(store->get("v3/a", bytes, why), Answer::failed);
    server.start();
    EXPECT_NE(store->get("v3/a", bytes, why), Answer::failed) << why;
    server.process.stop(SIGKILL);
    server.start();
    EXPECT_NE(store->get("v3/a", bytes, why), Answer::failed)
        << why << ": an old connection counts against nobody";
  };
  check(redis);
  check(nginx);
}

TEST_F(Stores, FullServersSaySo) {
  const RedisServer redis({"--maxmemory", "2mb", "--maxmemory-policy", "noeviction"});
  const NginxServer nginx(
      "error_page 404 = @none; location @none { return 404; } location /v3/ { client_max_body_size 64k; }");
  for (const std::string& url : {redis.url(), nginx.url()}) {
    const auto store = open_at(url);
    std::string bytes, why;
    Answer answer = Answer::yes;
    for (int i = 0; i < 64 && answer == Answer::yes; ++i)
      answer = store->put("v3/" + std::to_string(i), random_bytes(100'000), why);
    EXPECT_EQ(answer, Answer::failed) << url;
    EXPECT_THAT(why, ::testing::AnyOf(HasSubstr("OOM"), HasSubstr("413"))) << url;
    EXPECT_NE(store->get("v3/0", bytes, why), Answer::failed) << url << ": " << why;
  }
}

// Whatever passes, the answer is whole or failed, and comes within the limit of time.
TEST_F(Stores, BadConnectionsGiveNothing) {
  const RedisServer redis;
  const NginxServer nginx;
  const std::string sent = random_bytes(200'000);
  for (const auto& [scheme, port] :
       {std::pair<std::string, int>{"redis", redis.port}, {"http", nginx.port}}) {
    FaultyConnection between(port);
    const auto store = open_at(scheme + "://127.0.0.1:" + std::to_string(between.port()), 300);
    std::string bytes, why;
    ASSERT_EQ(store->put("v3/a", sent, why), Answer::yes) << why;
    for (const std::size_t passed : {0, 1, 5, 100, 1000, 60'000}) {
      between.fault = FaultyConnection::Fault::cut;
      between.cut_after = passed;
      EXPECT_EQ(store->get("v3/a", bytes, why), Answer::failed) << scheme << ", cut after " << passed;
    }
    between.fault = FaultyConnection::Fault::none;
    ASSERT_EQ(store->get("v3/a", bytes, why), Answer::yes) << why;
    EXPECT_TRUE(bytes == sent);
    for (const auto fault : {FaultyConnection::Fault::silent, FaultyConnection::Fault::garbage}) {
      between.fault = fault;
      EXPECT_EQ(store->get("v3/a", bytes, why), Answer::failed) << scheme;
    }
    between.fault = FaultyConnection::Fault::slow;
    EXPECT_EQ(store->get("v3/absent", bytes, why), Answer::no) << scheme << " is slow, not lost: " << why;
    between.fault = FaultyConnection::Fault::none;
    EXPECT_EQ(store->get("v3/a", bytes, why), Answer::yes) << why;
  }
}

TEST_F(Stores, LargerThanAnyEntryIsRefused) {
  const RedisServer redis;
  const NginxServer nginx;
  for (const std::string& url : {redis.url(), nginx.url()}) {
    std::string why;
    ASSERT_EQ(open_at(url)->put("v3/a", random_bytes(2 << 20), why), Answer::yes) << why;
    const flashjit_remote_plugin_api& plugin = remote_plugin();
    const flashjit_remote_options options{url.c_str(), "", "", 200, 2000, 1 << 20};
    flashjit_remote_text text{};
    flashjit_remote_store* const store = plugin.open(&options, &text);
    ASSERT_NE(store, nullptr);
    flashjit_remote_text bytes{};
    EXPECT_EQ(plugin.get(store, "v3/a", &bytes, &text), FLASHJIT_REMOTE_FAILED) << url;
    EXPECT_THAT(take_text(plugin, text), HasSubstr("larger than any entry"));
    plugin.close(store);
  }
}

// In a network of their own, where packets to the store are lost or have no way at all.
TEST_F(Stores, NetworksThatLoseEverything) {
  if (!is_installed("ip")) GTEST_SKIP() << "ip is not installed";
  const pid_t child = start_child([] {
    const std::string user = std::to_string(::getuid());
    if (::unshare((::getuid() == 0 ? 0 : CLONE_NEWUSER) | CLONE_NEWNET) != 0)
      return true;  // not allowed here
    if (user != "0") write_file("/proc/self/uid_map", "0 " + user + " 1");
    std::string bytes, why;
    const auto ask = [&](const std::string& url) {
      const auto start = std::chrono::steady_clock::now();
      const bool failed = open_at(url)->get("v3/a", bytes, why) == Answer::failed;
      return failed && std::chrono::steady_clock::now() - start < std::chrono::seconds(10);
    };
    bool good = true;
    for (const char* scheme : {"redis", "http"})
      good = good && ask(std::string(scheme) + "://127.0.0.1:6379");
    // Packets to the other addresses come back to a host that has none of them.
    if (std::system(
            "ip link set lo up && ip address add 10.9.8.1/32 dev lo && ip route add 10.9.8.0/24 dev lo") != 0)
      return false;
    for (const char* scheme : {"redis", "http"}) good = good && ask(std::string(scheme) + "://10.9.8.7:6379");
    return good;
  });
  EXPECT_TRUE(child_succeeded(child));
}

}  // namespace
}  // namespace flashjit::testing
