// Times of engines that take kernels from real stores on loopback, each in a process of its own with an empty
// folder.
//   remote_bench   prints the median and the least of 11 processes
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>

#include "runtime/flashjit.hpp"
#include "runtime/remote/remote_client.hpp"
#include "tests/remote/keys.hpp"
#include "tests/remote/servers.hpp"

namespace flashjit::testing {
namespace {

constexpr int num_kernels = 40, num_processes = 11;

AttentionSpec bench_spec(int n) {
  AttentionSpec spec{.dtype = DType::fp32, .head_dim = 8 * (n % 10 + 1)};
  if (n / 10 % 2) spec.mask = {CausalMask{}};
  spec.lse = n / 20 % 2;
  return spec.validated();
}

struct NamedTrust {
  std::string trusted, path;
};

EngineOptions bench_host(const Scratch& folder, const NamedTrust& key, const std::string& url, bool signs) {
  EngineOptions options;
  options.cache_dir = folder.path();
  options.cache_path = "";
  options.num_threads = 1;
  options.cache_remote = url;
  options.cache_trust = key.trusted;
  options.signing_key = signs ? key.path : std::string();
  return options;
}

double ms_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

// The work of a process of its own, so that it has opened nothing yet: its first argument, then the store and
// the keys.
int child(const std::string& what, const std::string& url, const NamedTrust& keys) {
  double times[3] = {};
  if (what == "store") {
    const Scratch folder;
    Engine maker(bench_host(folder, keys, url, true));
    for (int n = 0; n < num_kernels; ++n) maker.get(bench_spec(n), {1, 16, 16, 1, 1});
  } else if (what == "get") {
    const Scratch folder;
    auto start = std::chrono::steady_clock::now();
    remote_plugin();
    open_remote_store({url});
    times[0] = ms_since(start);
    Engine engine(bench_host(folder, keys, url, false));
    start = std::chrono::steady_clock::now();
    for (int n = 0; n < num_kernels; ++n) {
      const KernelInfo& info = engine.get(bench_spec(n), {1, 16, 16, 1, 1}).info();
      if (info.origin != Origin::remote) throw std::runtime_error("not from the store: " + info.cache_note);
      if (n == 0) times[1] = ms_since(start);
    }
    times[2] = ms_since(start);
  } else if (what == "disk") {
    // The same kernels once they are in the folder.
    const Scratch folder;
    Engine filler(bench_host(folder, keys, url, false));
    for (int n = 0; n < num_kernels; ++n) filler.get(bench_spec(n), {1, 16, 16, 1, 1});
    Engine engine(bench_host(folder, keys, "", false));
    const auto start = std::chrono::steady_clock::now();
    for (int n = 0; n < num_kernels; ++n) {
      engine.get(bench_spec(n), {1, 16, 16, 1, 1});
      if (n == 0) times[1] = ms_since(start);
    }
    times[2] = ms_since(start);
  } else {
    const auto remote = remote_cache(url, verifier(Trust::parse(keys.trusted)), {}, "", "");
    remote_plugin();
    for (std::size_t i = 0; i < 2; ++i) {
      const auto start = std::chrono::steady_clock::now();
      if (remote->get("v3/" + std::to_string(i), {}).answer != Answer::failed)
        throw std::runtime_error("not lost");
      times[i] = ms_since(start);
    }
  }
  std::printf("%g %g %g\n", times[0], times[1], times[2]);
  return 0;
}

using Times = std::array<double, 3>;
Times run_child(const std::string& what, const std::string& url, const NamedTrust& keys) {
  const std::string command = "/proc/" + std::to_string(::getpid()) + "/exe " + what + " " + url + " " +
                              keys.trusted + " " + keys.path;
  FILE* const output = ::popen(command.c_str(), "r");
  Times times{};
  const int read = output ? std::fscanf(output, "%lf %lf %lf", &times[0], &times[1], &times[2]) : 0;
  if (!output || ::pclose(output) != 0 || read != 3) throw std::runtime_error(command);
  return times;
}

struct Figures {
  Times median, least;
};
Figures figures_of(const std::string& what, const std::string& url, const NamedTrust& keys) {
  std::array<std::vector<double>, 3> all;
  for (int i = 0; i < num_processes; ++i) {
    const Times times = run_child(what, url, keys);
    for (std::size_t t = 0; t < 3; ++t) all[t].push_back(times[t]);
  }
  Figures result;
  for (std::size_t t = 0; t < 3; ++t) {
    std::sort(all[t].begin(), all[t].end());
    result.median[t] = all[t][num_processes / 2];
    result.least[t] = all[t].front();
  }
  return result;
}

int run() {
  const NamedKey key("bench");
  const NamedTrust keys{key.trusted(), key.path()};
  RedisServer redis;
  const NginxServer nginx;
  const auto tell = [&](const char* name, const Figures& f, std::initializer_list<const char*> what) {
    std::printf("%-20s", name);
    std::size_t t = 0;
    for (const char* one : what) {
      if (*one) std::printf(" %s %.3g ms, least %.3g;", one, f.median[t], f.least[t]);
      ++t;
    }
    std::printf("\n");
  };
  for (const std::string& url : {redis.url(), nginx.url()}) {
    run_child("store", url, keys);
    tell(url.substr(0, url.find(':')).c_str(), figures_of("get", url, keys),
         {"open", "one kernel", "40 kernels"});
  }
  tell("from the folder", figures_of("disk", redis.url(), keys), {"", "one kernel", "40 kernels"});
  tell("nobody listens", figures_of("lost", "redis://127.0.0.1:" + std::to_string(free_port()), keys),
       {"first get", "next"});
  redis.process.signal(SIGSTOP);
  tell("the server hangs", figures_of("lost", redis.url(), keys), {"first get", "next"});
  redis.process.signal(SIGCONT);
  return 0;
}

}  // namespace
}  // namespace flashjit::testing

int main(int argc, char** argv) {
  if (argc == 5) return flashjit::testing::child(argv[1], argv[2], {argv[3], argv[4]});
  return flashjit::testing::run();
}
