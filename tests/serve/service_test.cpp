// `flashjit serve` as hosts meet it: by HTTP alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <memory>
#include <thread>

#include "tests/serve/service.hpp"

namespace flashjit::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::AnyOf;
using ::testing::HasSubstr;

// Whether the bytes are an entry of the request that the key has signed.
void expect_entry(const std::string& bytes, const Asked& asked, const NamedKey& key) {
  CacheEntry entry;
  ASSERT_EQ(decode_entry(bytes, entry), "");
  EXPECT_EQ(request_of(entry.key), asked.key);
  EXPECT_EQ(verifier(Trust::parse(key.trusted()))(DiskCache::name(entry.key), bytes), "");
}

TEST(Serve, CompilesWhatIsAskedForAndGivesItByName) {
  const Service service;
  const Asked asked(small_spec(0));
  HttpClient client(service.port);
  const std::string pointer = "/" + DiskCache::request_name(asked.key);
  const HttpReply missing = client.get(pointer);
  EXPECT_EQ(missing.status, 404);
  EXPECT_EQ(missing.header("Accept-Post"), "application/json");

  const HttpReply made = service.compile(asked);
  ASSERT_EQ(made.status, 200);
  expect_entry(made.body, asked, service.key);

  const std::string digest = client.get(pointer).body;
  const std::string name = "/" + DiskCache::name(asked.key.digest(), digest);
  EXPECT_EQ(client.get(name).body, made.body);
  EXPECT_EQ(client.ask("HEAD", name).header("Content-Length"), std::to_string(made.body.size()));
  EXPECT_EQ(service.compile(asked).body, made.body);  // not compiled again
  EXPECT_EQ(service.metric("flashjit_compiles_total{target=\"x86-64-v3\",result=\"compiled\"}"), 1);
  EXPECT_EQ(service.metric("flashjit_hits_total"), 4);
  for (const char* other :
       {"/v3/../log", "/v3/", "/..%2flog", "/tune/../../key", "/tune/a/../b.json", "//etc/passwd"})
    EXPECT_EQ(client.get(other).status, 404) << other;
  EXPECT_EQ(client.ask("PUT", name, "x").status, 405);
  EXPECT_EQ(client.get(name).body, made.body);
}

TEST(Serve, GivesWhatItsFolderHasAndSignsIt) {
  Service service;
  const Asked asked(small_spec(1));
  const HttpReply made = service.compile(asked);
  ASSERT_EQ(made.status, 200);
  service.process.stop();
  // Unsigned, as a prebuild without a key leaves it; and an entry of another's key, which is not given.
  const std::string folder = service.folder / "cache/v3/";
  for (const auto& file : std::filesystem::directory_iterator(folder))
    if (file.path().extension() == ".kernel")
      write_file(file.path(), std::string(split_signature(made.body).body));
  const NamedKey other("other");
  const CacheEntry foreign = signed_by(other, some_entry("code"));
  write_file(service.folder / ("cache/" + DiskCache::name(foreign.key)),
             bytes_of(foreign) + foreign.signature);
  service.start();
  HttpClient client(service.port);
  const std::string digest = client.get("/" + DiskCache::request_name(asked.key)).body;
  expect_entry(client.get("/" + DiskCache::name(asked.key.digest(), digest)).body, asked, service.key);
  EXPECT_EQ(client.get("/" + DiskCache::name(foreign.key)).status, 404);
}

TEST(Serve, EqualRequestsAreCompiledOnce) {
  const Service service({"--jobs", "2"});
  constexpr int clients = 40, kernels = 4;
  std::vector<std::thread> threads;
  std::atomic<int> right = 0;
  for (int i = 0; i < clients; ++i)
    threads.emplace_back([&, i] {
      for (int n = 0; n < kernels; ++n)
        right += service.compile(Asked(small_spec((i + n) % kernels))).status == 200;
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, clients * kernels);
  EXPECT_EQ(service.metric("flashjit_compiles_total{target=\"x86-64-v3\",result=\"compiled\"}"), kernels);
}

// Each asks as an engine without a compiler does: for the newest entry, and by POST if there is none.
TEST(Serve, SimulatedClientsCostOneCompileForEachKernel) {
  const bool all = std::getenv("FLASHJIT_TEST_ALL") != nullptr;
  const int clients = all ? 1000 : 100, kernels = all ? 40 : 4;
  constexpr int connections = 16;
  const Service service;
  std::vector<Asked> asked;
  for (int n = 0; n < kernels; ++n) asked.emplace_back(small_spec(n));
  std::atomic<int> next = 0, got = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < connections; ++i)
    threads.emplace_back([&] {
      HttpClient connection(service.port);
      for (int client; (client = next++) < clients;)
        for (int n = 0; n < kernels; ++n) {
          const Asked& one = asked[static_cast<std::size_t>((client + n) % kernels)];
          const HttpReply newest = connection.get("/" + DiskCache::request_name(one.key));
          HttpReply entry;
          if (newest.status == 200)
            entry = connection.get("/" + DiskCache::name(one.key.digest(), newest.body));
          else
            do entry = connection.ask("POST", "/compile?wait_ms=100", one.text);
            while (entry.status == 202);
          got += entry.status == 200 && !entry.body.empty();
        }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(got, clients * kernels);
  EXPECT_EQ(service.metric("flashjit_compiles_total{target=\"x86-64-v3\",result=\"compiled\"}"), kernels);
}

TEST(Serve, SaysWhatItCannotServe) {
  const Service service;
  const auto expect = [&](const std::string& text, int status, const char* part) {
    const HttpReply reply = HttpClient(service.port).ask("POST", "/compile", text);
    EXPECT_EQ(reply.status, status) << text;
    EXPECT_THAT(reply.body, HasSubstr(part));
    EXPECT_FALSE(nlohmann::json::parse(reply.body, nullptr, false).is_discarded());
  };
  expect("{}", 400, "no text");
  nlohmann::json request = nlohmann::json::parse(Asked(small_spec(0)).text);
  request["request"] = std::string(32, 'a');
  expect(request.dump(), 409, "makes another kernel");
  request.erase("request");
  request["version"] = "0.0.1";
  expect(request.dump(), 409, "the asker is flashjit \\\"0.0.1\\\"");
  request["spec"]["head_dim"] = 7;
  expect(request.dump(), 422, "head_dim");
  EXPECT_EQ(HttpClient(service.port).ask("POST", "/elsewhere", "{}").status, 404);
  EXPECT_EQ(HttpClient(service.port).get("/").status, 200);
  EXPECT_THAT(HttpClient(service.port).get("/").body, HasSubstr("makes another kernel"));  // who was refused
}

TEST(Serve, ACompileHasNoMoreThanItsLimits) {
  {
    const Service service({"--compile-seconds", "0.1"});
    const Asked large(large_spec());
    const HttpReply late = service.compile(large);
    EXPECT_EQ(late.status, 422) << late.body;
    EXPECT_THAT(late.body, HasSubstr("longer than its limit of 0.1 s of processor time"));
    EXPECT_EQ(service.compile(large).status, 422);  // not tried again for a while
    EXPECT_EQ(service.metric("flashjit_compiles_total{target=\"x86-64-v3\",result=\"limit_exceeded\"}"), 1);
  }
  // More than what a compile finds free in its nursery's memory.
  const Service service({"--compile-bytes", "1000000"});
  const HttpReply large = service.compile(Asked(large_spec()));
  ASSERT_EQ(large.status, 422);
  EXPECT_THAT(large.body, HasSubstr("memory"));
  EXPECT_EQ(service.metric("flashjit_nurseries_total"), 1);
}

// A busy machine lets a compile wait for its processors; here it is stopped.
TEST(Serve, TheTimeOfACompileIsThatOfItsProcessors) {
  const auto service_with_stopped_child = [](const char* seconds, pid_t& child) {
    auto service = std::make_unique<Service>(std::vector<std::string>{"--compile-seconds", seconds});
    const std::vector<pid_t> nursery = service->children_of(service->process.id());
    // The child waits for its request.
    for (int i = 0; i < 6000 && child == 0; ++i) {
      for (const pid_t parent : nursery)
        for (const pid_t one : service->children_of(parent)) child = one;
      std::this_thread::sleep_for(milliseconds(10));
    }
    ::kill(child, SIGSTOP);
    return service;
  };
  {
    pid_t child = 0;
    const auto service = service_with_stopped_child("3", child);
    ASSERT_NE(child, 0);
    HttpReply reply;
    std::thread client([&] { reply = service->compile(Asked(small_spec(0))); });
    EXPECT_TRUE(service->becomes("flashjit_running", 1));
    std::this_thread::sleep_for(milliseconds(3500));
    ::kill(child, SIGCONT);
    client.join();
    EXPECT_EQ(reply.status, 200) << reply.body;
  }
  pid_t child = 0;
  const auto service = service_with_stopped_child("0.1", child);
  ASSERT_NE(child, 0);
  const HttpReply reply = service->compile(Asked(small_spec(0)));
  EXPECT_EQ(reply.status, 422);
  EXPECT_THAT(reply.body, HasSubstr("longer than its limit of 1 s by the clock"));
}

TEST(Serve, TokensSayWhoAsksAndWhoMayNot) {
  const Scratch folder;
  write_file(folder / "tokens", "farm=0123456789abcdef\nlab=fedcba9876543210\n");
  ::chmod((folder / "tokens").c_str(), 0600);
  const Service service({"--tokens", folder / "tokens", "--jobs", "1", "--client-queue", "1"});
  const std::string farm = "Authorization: Bearer 0123456789abcdef\r\n",
                    lab = "Authorization: Bearer fedcba9876543210\r\n";
  HttpClient client(service.port);
  EXPECT_EQ(client.get("/healthz").status, 200);
  for (const char* path : {"/", "/metrics", "/v3/x"}) EXPECT_EQ(client.get(path).status, 401) << path;
  EXPECT_EQ(client.ask("GET", "/v3/x", "", farm).status, 404);
  EXPECT_EQ(service.compile(Asked(small_spec(0)), 0).status, 401);

  // The farm has one compile that runs and one that waits; the lab's turn comes all the same.
  EXPECT_EQ(service.compile(Asked(large_spec()), 0, farm).status, 202);
  EXPECT_EQ(service.compile(Asked(small_spec(1)), 0, farm).status, 202);
  const HttpReply full = service.compile(Asked(small_spec(2)), 0, farm);
  EXPECT_EQ(full.status, 429);
  EXPECT_GE(std::atoi(full.header("Retry-After").c_str()), 1);
  EXPECT_EQ(service.compile(Asked(small_spec(3)), 0, lab).status, 202);
  EXPECT_EQ(service.compile(Asked(small_spec(3)), 60'000, lab).status, 200);
}

TEST(Serve, WhatNobodyWaitsForIsEnded) {
  const Service service({"--jobs", "1"});
  {
    HttpClient gone(service.port);
    const Asked asked(large_spec());
    gone.send("POST /compile?wait_ms=60000 HTTP/1.1\r\nContent-Length: " + std::to_string(asked.text.size()) +
              "\r\n\r\n" + asked.text);
    ASSERT_TRUE(service.becomes("flashjit_running", 1));
  }
  EXPECT_TRUE(service.becomes("flashjit_running", 0));
  EXPECT_EQ(service.compile(Asked(small_spec(0))).status, 200);
}

TEST(Serve, ReadOnlyCompilesNothing) {
  Service service;
  const Asked asked(small_spec(0));
  ASSERT_EQ(service.compile(asked).status, 200);
  service.process.stop();
  Service reader({"--read-only"});
  const HttpReply refused = reader.compile(asked);
  EXPECT_EQ(refused.status, 403);
  EXPECT_EQ(HttpClient(reader.port).get("/" + DiskCache::request_name(asked.key)).header("Accept-Post"), "");
  EXPECT_EQ(reader.metric("flashjit_nurseries_total"), 0);
}

TEST(Serve, KilledChildrenCostTheirCompileAtMost) {
  const Service service({"--jobs", "1"});
  // The process that compiles: no fault of the spec, so it is compiled when it is asked for again.
  const Asked large(large_spec());
  ASSERT_EQ(service.compile(large, 0).status, 202);
  ASSERT_TRUE(service.becomes("flashjit_running", 1));
  const std::vector<pid_t> nursery = service.children_of(service.process.id());
  ASSERT_EQ(nursery.size(), 1u);
  // It is warm first. One child compiles then, and one waits for a request.
  const auto kill_children = [&] {
    std::vector<pid_t> children;
    for (int i = 0; i < 6000 && children.empty(); ++i) {
      children = service.children_of(nursery[0]);
      std::this_thread::sleep_for(milliseconds(10));
    }
    for (const pid_t child : children) ::kill(child, SIGKILL);
    return children.size();
  };
  ASSERT_GE(kill_children(), 1u);
  const HttpReply killed = service.compile(large);
  EXPECT_THAT(killed.status, AnyOf(500, 200));
  // The one that waits, killed above if it was there already, and in any case here: no request is lost by
  // that.
  ASSERT_TRUE(service.becomes("flashjit_running", 0));
  EXPECT_EQ(service.compile(Asked(small_spec(1))).status, 200);
  EXPECT_GE(kill_children(), 1u);
  EXPECT_EQ(service.compile(Asked(small_spec(2))).status, 200);
  EXPECT_EQ(service.metric("flashjit_nurseries_total"), 1);
  // The nursery, while it compiles and while it does not: another takes its place.
  ASSERT_THAT(service.compile(large, 0).status, AnyOf(202, 200));
  ::kill(nursery[0], SIGKILL);
  EXPECT_EQ(service.compile(large).status, 200);
  EXPECT_EQ(service.compile(Asked(small_spec(0))).status, 200);
  EXPECT_GE(service.metric("flashjit_nurseries_total"), 2);
}

TEST(Serve, AFullDiskCostsTheFileOnly) {
  // No file may be larger than 16 KiB, which an entry is.
  const Service service({}, "ulimit -f 32; ");
  const Asked asked(small_spec(0));
  const HttpReply made = service.compile(asked);
  ASSERT_EQ(made.status, 200);
  ASSERT_GT(made.body.size(), 16u << 10);
  expect_entry(made.body, asked, service.key);
  EXPECT_EQ(service.compile(asked).body, made.body);  // from memory
  EXPECT_THAT(service.log(), HasSubstr("cannot store"));
}

TEST(Serve, StopsWhenItsCompilesHaveEnded) {
  Service service({"--jobs", "1"});
  const Asked large(large_spec()), small(small_spec(0));
  HttpReply of_large, of_small;
  std::thread first([&] { of_large = service.compile(large); });
  ASSERT_TRUE(service.becomes("flashjit_running", 1));
  std::thread second([&] { of_small = service.compile(small); });
  ASSERT_TRUE(service.becomes("flashjit_queued", 1));
  service.process.stop(SIGTERM);
  first.join();
  second.join();
  EXPECT_EQ(of_large.status, 200);
  EXPECT_EQ(of_small.status, 503);  // handed back
  EXPECT_EQ(of_small.header("Retry-After").empty(), false);
  EXPECT_THAT(service.log(), HasSubstr("\"event\":\"stop\""));
  service.start();
  EXPECT_EQ(HttpClient(service.port).get("/" + DiskCache::request_name(large.key)).status, 200);
}

}  // namespace
}  // namespace flashjit::testing
