// `flashjit serve` in a process of its own, and requests to it.
#pragma once

#include <gtest/gtest.h>
#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "cache/kernel_key.hpp"
#include "codegen/families/search_space.hpp"
#include "codegen/render.hpp"
#include "runtime/build.hpp"
#include "tests/remote/keys.hpp"
#include "tests/serve/http_client.hpp"

namespace flashjit::testing {

// A request for a kernel: the text, and the digest of its key.
struct Asked {
  explicit Asked(const AttentionSpec& spec, const char* name = "x86-64-v3") {
    const Target target = Target::parse(name);
    const KernelConfig config = heuristic_configs(spec, target).front();
    key = request_key(spec, render(spec, target, config));
    text = compile_request_text(spec, target, config, key.digest());
  }
  CacheKey key;
  std::string text;
};

// Small specs, quick to compile, all different.
inline AttentionSpec small_spec(int n) {
  AttentionSpec spec{.dtype = DType::fp32, .head_dim = 8 * (n % 10 + 1)};
  if (n / 10 % 2) spec.mask = {CausalMask{}};
  spec.lse = n / 20 % 2;
  return spec.validated();
}
// One that compiles for a second or more.
inline AttentionSpec large_spec() {
  return AttentionSpec::from_json(
      R"({"op": "backward", "dtype": "bf16", "head_dim": 256, "mask": ["causal", "sliding_window", "key % 3 != 1"]})");
}

class Service {
 public:
  // `shell` is run before the service in its shell.
  explicit Service(std::vector<std::string> options = {}, const std::string& shell = "") {
    for (const char* name : {"FLASHJIT_CACHE_REMOTE", "FLASHJIT_TRUST"}) ::unsetenv(name);
    ::setenv("FLASHJIT_NVRTC", "/nonexistent", 1);  // a nursery without it is warm sooner
    command_ = {"sh",
                "-c",
                shell + "exec \"$0\" \"$@\"",
                FLASHJIT_COMMAND,
                "serve",
                "--listen",
                "127.0.0.1:" + std::to_string(port),
                "--key",
                key.path(),
                "--cache-dir",
                folder / "cache"};
    command_.insert(command_.end(), options.begin(), options.end());
    start();
  }
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;
  // A test that has failed leaves the service's log behind.
  ~Service() {
    const ::testing::TestInfo* const test = ::testing::UnitTest::GetInstance()->current_test_info();
    if (!test || !::testing::Test::HasFailure()) return;
    const std::string kept = ::testing::TempDir() + "flashjit-" + test->test_suite_name() + "." +
                             test->name() + "-" + std::to_string(port) + ".log";
    std::error_code failed;
    std::filesystem::copy_file(folder / "log", kept, std::filesystem::copy_options::overwrite_existing,
                               failed);
    std::cerr << "the service's log: " << (failed ? failed.message() : kept) << '\n';
  }
  void start() { process.start(command_, port, folder / "log"); }

  HttpReply compile(const Asked& asked, int wait_ms = 60'000, const std::string& headers = "") const {
    return HttpClient(port).ask("POST", "/compile?wait_ms=" + std::to_string(wait_ms), asked.text, headers);
  }
  // For engines. On a busy machine an answer may take long, and none of the tests is about that.
  std::string url() const {
    return "http://127.0.0.1:" + std::to_string(port) + "#answer_ms=20000,timeout_ms=60000";
  }
  // The number of a metric, with its labels.
  double metric(const std::string& name) const {
    const std::string page = HttpClient(port).get("/metrics").body;
    const std::size_t at = page.find("\n" + name + " ");
    return at == std::string::npos ? 0 : std::strtod(page.c_str() + at + name.size() + 2, nullptr);
  }
  bool becomes(const std::string& name, double value) const {
    for (int i = 0; i < 2000; ++i) {
      if (metric(name) == value) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }
  std::string log() const { return read_file(folder / "log"); }
  // The service's process, its nursery, and the children of that.
  std::vector<pid_t> children_of(pid_t parent) const {
    std::vector<pid_t> children;
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      if (entry.path().filename().string().find_first_not_of("0123456789") != std::string::npos) continue;
      std::ifstream status(entry.path() / "stat");
      std::string text((std::istreambuf_iterator<char>(status)), {});
      const std::size_t end = text.rfind(')');
      if (end == std::string::npos) continue;
      std::istringstream rest(text.substr(end + 1));
      std::string state;
      pid_t of = 0;
      if (rest >> state >> of && of == parent && state != "Z")
        children.push_back(std::atoi(entry.path().filename().c_str()));
    }
    return children;
  }

  const NamedKey key{"service"};
  const Scratch folder;
  const int port = free_port();
  ServerProcess process;

 private:
  std::vector<std::string> command_;
};

}  // namespace flashjit::testing
