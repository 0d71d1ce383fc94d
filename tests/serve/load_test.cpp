// Mixed load for an hour: clients that ask rightly and get all that they ask for, and clients that do not.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <mutex>
#include <random>
#include <thread>

#include "tests/serve/service.hpp"

namespace flashjit::testing {
namespace {

using std::chrono::steady_clock;

int load_seconds() {
  const char* const given = std::getenv("FLASHJIT_TEST_LOAD_SECONDS");
  return given ? std::atoi(given) : 3600;
}

// A spec of its own for each number.
AttentionSpec numbered_spec(int n) {
  return AttentionSpec::from_json(R"({"op": "forward", "dtype": "fp32", "head_dim": 8, "score": ["score * )" +
                                  std::to_string(n + 1) + ".5\"]}");
}

// Kernels that clients asked for and did not get, for the report.
class Lost {
 public:
  void note(const std::string& client, const HttpReply& reply) {
    const std::lock_guard lock(mutex_);
    if (++count_ > most_told) return;
    text_ += client + ": status " + std::to_string(reply.status) + ", " +
             (reply.status == 0 ? reply.failure : std::to_string(reply.body.size()) + " octets: ") +
             (reply.status == 200 ? "" : reply.body) + "\n";
  }
  const std::string& text() const { return text_; }

 private:
  static constexpr int most_told = 20;
  std::mutex mutex_;
  int count_ = 0;
  std::string text_;
};

TEST(ServeLoad, LosesNothingAndKeepsItsMemory) {
  // With small bounds for the kernels in memory and on disk, which a slow machine fills in time, too.
  const Service service(
      {"--jobs", "2", "--compile-seconds", "120", "--client-queue", "10000", "--memory", "4194304"},
      "export FLASHJIT_CACHE_MAX_BYTES=8388608; ");
  const auto end = steady_clock::now() + std::chrono::seconds(load_seconds());
  std::atomic<int> asked = 0, got = 0, made = 0, again = 0;
  Lost lost;
  const auto goes_on = [&] { return steady_clock::now() < end; };
  std::vector<std::thread> threads;
  // New kernels, each until it is there.
  for (int i = 0; i < 2; ++i)
    threads.emplace_back([&] {
      while (goes_on()) {
        const int n = made++;
        const Asked one(numbered_spec(n));
        ++asked;
        HttpReply reply;
        for (;;) {
          reply = service.compile(one, 1000);
          if (reply.status == 202) continue;
          const int pause = std::atoi(reply.header("Retry-After").c_str());
          if ((reply.status != 429 && reply.status != 503) || pause == 0) break;
          ++again;
          std::this_thread::sleep_for(std::chrono::seconds(pause));
        }
        if (reply.status == 200)
          ++got;
        else
          lost.note("kernel " + std::to_string(n), reply);
      }
    });
  // Kernels that are there.
  const Asked known(small_spec(0));
  const std::size_t known_bytes = service.compile(known).body.size();
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      while (goes_on()) {
        HttpClient client(service.port);
        for (int n = 0; n < 100; ++n) {
          ++asked;
          const HttpReply reply = client.ask("POST", "/compile?wait_ms=1000", known.text);
          if (reply.body.size() == known_bytes)
            ++got;
          else
            lost.note("the kernel that is there, request " + std::to_string(n) + " of a connection", reply);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      }
    });
  // Nonsense, halves of requests, clients that go away.
  for (unsigned seed = 0; seed < 2; ++seed)
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      while (goes_on()) {
        std::string text =
            "POST /compile?wait_ms=60000 HTTP/1.1\r\nContent-Length: " + std::to_string(known.text.size()) +
            "\r\n\r\n" + known.text;
        for (unsigned n = random() % 8; n > 0; --n)
          text[random() % text.size()] = static_cast<char>(random());
        HttpClient client(service.port);
        client.send(std::string_view(text).substr(0, random() % (text.size() + 1)));
        std::this_thread::sleep_for(std::chrono::milliseconds(random() % 20));
      }
    });
  // The first reading waits until memory holds as many kernels as it may, so that some have left it again.
  std::this_thread::sleep_for(std::chrono::seconds(load_seconds()) / 4);
  const char* const compiled = R"(flashjit_compiles_total{target="x86-64-v3",result="compiled"})";
  const auto is_full = [&] { return service.metric("flashjit_objects") < service.metric(compiled); };
  while (goes_on() && !is_full()) std::this_thread::sleep_for(std::chrono::seconds(1));
  const auto left = end - steady_clock::now();
  const double service_before = service.metric("flashjit_resident_bytes"),
               nursery_before = service.metric("flashjit_nursery_resident_bytes");
  for (std::thread& thread : threads) thread.join();
  std::cout << asked << " requests, " << made << " of them for new kernels; " << again
            << " times asked again after 429 or 503\n";
  EXPECT_EQ(got, asked) << lost.text();
  EXPECT_EQ(service.metric(compiled), made + 1) << "a kernel that was there was compiled again";
  EXPECT_GE(left, std::chrono::seconds(load_seconds()) / 2) << "too few compiles to see memory grow";
  EXPECT_LE(service.metric("flashjit_resident_bytes"), 1.2 * service_before);
  EXPECT_LE(service.metric("flashjit_nursery_resident_bytes"), 1.2 * nursery_before);
  EXPECT_EQ(service.metric("flashjit_nurseries_total"), 1);
}

}  // namespace
}  // namespace flashjit::testing
