// Engines whose store is a compile service.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/flashjit.hpp"
#include "tests/serve/service.hpp"

namespace flashjit::testing {
namespace {

using ::testing::HasSubstr;

const Shape small_shape{1, 16, 16, 1, 1};

// The outcome of a get, in memory that processes share.
struct Outcome {
  Origin origin = Origin::memory;
  bool failed = false, launched = false;
  char note[2000] = "";
};

// One host, in a process of its own.
struct Host {
  std::string url, trust, signing_key{};
  bool has_compiler = false;
  std::string folder{};
  Policy policy = Policy::heuristic;

  void get(const AttentionSpec& spec, Outcome& outcome) const {
    const pid_t child = start_child([&] {
      if (!has_compiler) ::setenv("FLASHJIT_LLVM_PLUGIN", "/nonexistent", 1);
      const Scratch own;
      EngineOptions options{.target = "x86-64-v3"};
      options.cache_dir = folder.empty() ? own.path() : folder;
      options.cache_path = "";
      options.num_threads = 1;
      options.policy = policy;
      options.cache_remote = url;
      options.cache_trust = trust;
      options.signing_key = signing_key;
      try {
        Engine engine(options);
        const Kernel& kernel = engine.get(spec, small_shape);
        outcome.origin = kernel.info().origin;
        std::snprintf(outcome.note, sizeof outcome.note, "%s", kernel.info().cache_note.c_str());
        std::vector<float> in(16 * spec.head_dim, 0.5f), out(in.size());
        const auto tensor = [&](std::vector<float>& of) {
          return Tensor::contiguous(of.data(), DType::fp32, {}, {1, 16, 1, spec.head_dim});
        };
        AttentionArgs args{.q = tensor(in), .k = tensor(in), .v = tensor(in), .o = tensor(out)};
        std::vector<float> lse(16);
        if (spec.lse) args.lse = Tensor::contiguous(lse.data(), DType::fp32, {}, {1, 1, 16});
        kernel.launch(args);
        outcome.launched = out.front() == 0.5f && out.back() == 0.5f;
      } catch (const Error& error) {
        outcome.failed = true;
        std::snprintf(outcome.note, sizeof outcome.note, "%s", error.what());
      }
      return true;
    });
    EXPECT_TRUE(child_succeeded(child));
  }
};

TEST(ServedEngine, WithoutACompilerGetsItsKernelsAndKeepsThem) {
  const Service service;
  const Scratch folder;
  const Host host{.url = service.url(), .trust = service.key.trusted(), .folder = folder.path()};
  Shared<Outcome> outcome;
  host.get(small_spec(0), *outcome);
  EXPECT_EQ((*outcome).origin, Origin::remote) << (*outcome).note;
  EXPECT_TRUE((*outcome).launched);
  host.get(small_spec(0), *outcome);
  EXPECT_EQ((*outcome).origin, Origin::disk);
  // Another host finds it there, by GET.
  Host{.url = service.url(), .trust = service.key.trusted()}.get(small_spec(0), *outcome);
  EXPECT_EQ((*outcome).origin, Origin::remote);
  EXPECT_EQ(service.metric("flashjit_compiles_total{target=\"x86-64-v3\",result=\"compiled\"}"), 1);
  EXPECT_EQ(service.metric("flashjit_requests_total{method=\"PUT\",status=\"405\"}"), 0);
}

TEST(ServedEngine, WithoutACompilerAndAKernelSaysWhy) {
  const Service service;
  const NamedKey other("other");
  Shared<Outcome> outcome;
  Host{.url = service.url(), .trust = other.trusted()}.get(small_spec(0), *outcome);
  EXPECT_TRUE((*outcome).failed);
  EXPECT_THAT((*outcome).note, HasSubstr("made what is signed by"));
  // require_prebuilt asks nobody to compile.
  Host{.url = service.url(), .trust = service.key.trusted(), .policy = Policy::require_prebuilt}.get(
      small_spec(1), *outcome);
  EXPECT_TRUE((*outcome).failed);
  EXPECT_THAT((*outcome).note, HasSubstr("require_prebuilt"));
  EXPECT_EQ(service.metric("flashjit_requests_total{method=\"POST\",status=\"200\"}"), 1);
}

TEST(ServedEngine, WithACompilerAsksFirstAndHelpsItself) {
  Service service({"--compile-seconds", "0.1"});
  // A key to sign with, with which a store would be written to.
  const Host host{.url = service.url(),
                  .trust = service.key.trusted(),
                  .signing_key = service.key.path(),
                  .has_compiler = true};
  Shared<Outcome> outcome;
  const Asked asked(small_spec(0));
  host.get(small_spec(0), *outcome);
  EXPECT_FALSE((*outcome).failed) << (*outcome).note;
  EXPECT_TRUE((*outcome).launched);
  if ((*outcome).origin == Origin::compiled) {
    EXPECT_THAT((*outcome).note, HasSubstr("longer than its limit"));
  }
  EXPECT_EQ(service.metric("flashjit_requests_total{method=\"PUT\",status=\"405\"}"), 0);
  EXPECT_EQ(service.metric("flashjit_requests_total{method=\"DELETE\",status=\"405\"}"), 0);
  service.process.stop(SIGKILL);
  host.get(small_spec(1), *outcome);
  EXPECT_EQ((*outcome).origin, Origin::compiled);
  EXPECT_TRUE((*outcome).launched);
}

}  // namespace
}  // namespace flashjit::testing
