// Measures what the compile service costs. Run by hand; prints the rows of tests/bench/serve.md.
//
//   serve_bench [hits] [gets] [cold] [COMPILES]
//
// Takes the parts that are named, or those three. After so many compiles the service's memory is looked at.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "runtime/flashjit.hpp"
#include "tests/serve/service.hpp"

namespace flashjit::testing {
namespace {

using std::chrono::steady_clock;

double seconds_since(steady_clock::time_point start) {
  return std::chrono::duration<double>(steady_clock::now() - start).count();
}

struct Spread {
  double least = 0, median = 0;
};
Spread spread(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return {times.front(), times[times.size() / 2]};
}
void row(const char* what, Spread times) {
  std::printf("| %s | %.1f ms | %.1f ms |\n", what, 1e3 * times.median, 1e3 * times.least);
}

constexpr int repeats = 11, connections = 16;

void hits(const Service& service) {
  const Asked asked(small_spec(0));
  const std::string bytes = service.compile(asked).body;
  CacheEntry entry;
  decode_entry(bytes, entry);
  const std::string request = "GET /" + DiskCache::name(entry.key) + " HTTP/1.1\r\nHost: x\r\n\r\n";
  std::vector<double> rates;
  for (int i = 0; i < repeats; ++i) {
    std::atomic<int> count = 0;
    std::atomic<bool> ends = false;
    std::vector<std::thread> threads;
    for (int n = 0; n < connections; ++n)
      threads.emplace_back([&] {
        HttpClient client(service.port);
        for (; !ends; ++count) {
          client.send(request);
          if (client.receive().body.size() != bytes.size()) std::abort();
        }
      });
    const auto start = steady_clock::now();
    std::this_thread::sleep_for(std::chrono::seconds(1));
    const int counted = count;
    rates.push_back(counted / seconds_since(start));
    ends = true;
    for (std::thread& thread : threads) thread.join();
  }
  std::sort(rates.begin(), rates.end());
  std::printf("| hits a second, %d connections, %zu bytes | %.0f | most %.0f |\n", connections, bytes.size(),
              rates[rates.size() / 2], rates.back());
}

// A compile for sm_90a by the service, and one in this process, in turns.
void cold(const Service& service) {
  ::unsetenv("FLASHJIT_NVRTC");
  std::vector<double> served, own, ratios;
  const Target target = Target::parse("sm_90a");
  for (int i = -1; i < repeats; ++i) {
    const AttentionSpec spec = AttentionSpec::from_json(
        R"({"op": "forward", "dtype": "bf16", "head_dim": 128, "mask": ["causal"], "score": ["score * )" +
        std::to_string(2 + i) + ".25\"]}");
    const Asked asked(spec, "sm_90a");
    auto start = steady_clock::now();
    if (service.compile(asked).status != 200) std::abort();
    const double by_service = seconds_since(start);
    start = steady_clock::now();
    compile(spec, target, Shape{1, 4096, 4096, 8, 8}, "", "");
    const double by_itself = seconds_since(start);
    if (i < 0) continue;  // both are warm from then on
    served.push_back(by_service);
    own.push_back(by_itself);
    ratios.push_back(by_service / by_itself);
  }
  row("cold compile of a forward for sm_90a by the service", spread(served));
  row("the same in the asker's process, warm", spread(own));
  std::printf("| ratio | %.2f | %.2f |\n", spread(ratios).median, spread(ratios).least);
}

// engine.get in a host without a compiler.
void gets(const Service& service) {
  std::vector<double> hit, made, beyond;
  for (int i = 0; i < repeats; ++i) {
    Shared<double[3]> times;
    const pid_t child = start_child([&] {
      ::setenv("FLASHJIT_LLVM_PLUGIN", "/nonexistent", 1);
      const Scratch folder;
      EngineOptions options{.target = "x86-64-v3"};
      options.cache_dir = folder.path();
      options.cache_path = "";
      options.num_threads = 1;
      options.cache_remote = service.url();
      options.cache_trust = service.key.trusted();
      Engine engine(options);
      engine.get(small_spec(0), {1, 16, 16, 1, 1});  // opens the plugin
      AttentionSpec fresh = small_spec(i);
      fresh.head_dim = 256 + 8 * i;
      auto start = steady_clock::now();
      const Kernel& kernel = engine.get(fresh.validated(), {1, 16, 16, 1, 1});
      (*times)[1] = seconds_since(start);
      (*times)[2] = kernel.info().compile_ms / 1e3;
      start = steady_clock::now();
      engine.get(small_spec(1), {1, 16, 16, 1, 1});
      (*times)[0] = seconds_since(start);
      return true;
    });
    if (!child_succeeded(child)) std::abort();
    if (i > 0) hit.push_back((*times)[0]);
    made.push_back((*times)[1]);
    beyond.push_back((*times)[1] - (*times)[2]);
  }
  row("engine.get without a compiler, plugin open: the service has it", spread(hit));
  row("the service compiles it", spread(made));
  row("the same beyond the compile", spread(beyond));
}

// Kernels that compile within a tenth of a second on an idle machine.
AttentionSpec copy_spec(int n) {
  const char* dtype = "fp32";
  for (int k = 1;; ++k) {
    if (k > 128) {
      k = 1;
      dtype = "bf16";
    }
    if (n < k)
      return AttentionSpec::from_json(std::string(R"({"op": "copy_kv", "dtype": ")") + dtype +
                                      R"(", "head_dim": )" + std::to_string(8 * k) + R"(, "head_dim_v": )" +
                                      std::to_string(8 * (n + 1)) + "}");
    n -= k;
  }
}

void memory(const Service& service, int compiles) {
  const auto now = [&] {
    return (service.metric("flashjit_resident_bytes") + service.metric("flashjit_nursery_resident_bytes")) /
           (1 << 20);
  };
  const auto compile_from = [&](int first, int end) {
    std::atomic<int> next = first;
    std::vector<std::thread> clients(2);
    for (std::thread& client : clients)
      client = std::thread([&] {
        for (int i; (i = next++) < end;)
          if (service.compile(Asked(copy_spec(i))).status != 200) std::abort();
      });
    for (std::thread& client : clients) client.join();
  };
  compile_from(0, 100);
  const double after_100 = now();
  compile_from(100, compiles);
  std::printf("| memory of the service after %d compiles; after 100 | %.0f MiB | %.0f MiB |\n", compiles,
              now(), after_100);
}

}  // namespace
}  // namespace flashjit::testing

int main(int argc, char** argv) {
  using namespace flashjit::testing;
  std::vector<std::string> parts(argv + 1, argv + argc);
  if (parts.empty()) parts = {"hits", "gets", "cold"};
  const Service service({}, "unset FLASHJIT_NVRTC; ");
  service.compile(Asked(small_spec(0)));
  std::printf("| what | median | least |\n| --- | --- | --- |\n");
  for (const std::string& part : parts) {
    if (part == "hits") hits(service);
    if (part == "gets") gets(service);
    if (part == "cold") cold(service);
    if (const int compiles = std::atoi(part.c_str())) memory(service, compiles);
  }
}
