// Engines of many hosts (processes with folders of their own) that share real stores.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <csignal>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "cache/remote_cache.hpp"
#include "cache/tune_store.hpp"
#include "codegen/families/search_space.hpp"
#include "runtime/flashjit.h"
#include "runtime/flashjit.hpp"
#include "runtime/remote/remote_client.hpp"
#include "runtime/tune/environment.hpp"
#include "tests/remote/keys.hpp"
#include "tests/remote/servers.hpp"
#include "tests/support/sample_seed.hpp"

namespace flashjit::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int num_kernels = 40;
const Shape small_shape{1, 16, 16, 1, 1};
// After a store's URL: on a busy machine an answer may take long, and none of these tests is about that.
const std::string patient = "#answer_ms=60000,timeout_ms=60000";

// Small specs, quick to compile, all different.
AttentionSpec small_spec(int n) {
  AttentionSpec spec{.dtype = DType::fp32, .head_dim = 8 * (n % 10 + 1)};
  if (n / 10 % 2) spec.mask = {CausalMask{}};
  spec.lse = n / 20 % 2;
  return spec.validated();
}

class RemoteEngines : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* program : {"redis-server", "nginx", "openssl"})
      if (!is_installed(program)) GTEST_SKIP() << program << " is not installed: tools/setup test";
  }

  EngineOptions host(const Scratch& folder, const std::string& url, bool signs = true) const {
    EngineOptions options;
    options.cache_dir = folder.path();
    options.cache_path = "";
    options.num_threads = 1;
    options.cache_remote = url;
    options.cache_trust = key.trusted();
    options.signing_key = signs ? key.path() : std::string();
    return options;
  }

  struct Tally {
    std::atomic<int> compiled, remote, disk;
  };
  // One host: gets every kernel.
  bool run_host(const std::string& url, int kernels, Tally& tally) const {
    const Scratch folder;
    Engine engine(host(folder, url));
    for (int n = 0; n < kernels; ++n) {
      const Origin origin = engine.get(small_spec(n), small_shape).info().origin;
      ++(origin == Origin::compiled ? tally.compiled : origin == Origin::remote ? tally.remote : tally.disk);
    }
    return true;
  }
  void run_fleet(const std::string& url, int hosts, int kernels, Tally& tally,
                 const std::function<void()>& meanwhile = {}) const {
    std::vector<pid_t> children;
    for (int i = 0; i < hosts; ++i)
      children.push_back(start_child([&] { return run_host(url, kernels, tally); }));
    if (meanwhile) meanwhile();
    for (const pid_t child : children) EXPECT_TRUE(child_succeeded(child));
  }

  const NamedKey key{"fleet"};
};

TEST_F(RemoteEngines, ManyProcessesCompileEachKernelOnce) {
  const int hosts = testing_support::test_all() ? 64 : 16;
  const RedisServer server;
  Shared<Tally> tally;
  run_fleet(server.url() + patient, hosts, num_kernels, *tally);
  EXPECT_EQ((*tally).compiled, num_kernels);
  EXPECT_EQ((*tally).remote, (hosts - 1) * num_kernels);
}

TEST_F(RemoteEngines, OneOfSixteenCompilesThroughNginx) {
  const NginxServer server;
  Shared<Tally> tally;
  run_fleet(server.url() + patient, 16, 10, *tally);
  EXPECT_EQ((*tally).compiled, 10);
  EXPECT_EQ((*tally).remote, 15 * 10);
}

TEST_F(RemoteEngines, AServerKilledAndRestartedCostsCompiles) {
  RedisServer server;
  Shared<Tally> tally;
  run_fleet(server.url(), 6, 20, *tally, [&] {
    for (int i = 0; i < 3; ++i) {
      while ((*tally).compiled + (*tally).remote < (i + 1) * 20) std::this_thread::sleep_for(milliseconds(5));
      server.process.stop(SIGKILL);
      std::this_thread::sleep_for(milliseconds(100));
      server.start();
    }
  });
  EXPECT_EQ((*tally).compiled + (*tally).remote + (*tally).disk, 6 * 20);
  EXPECT_GE((*tally).compiled, 20);
}

// The engine works, says what is wrong, and does not ask again for a while.
TEST_F(RemoteEngines, AStoreThatIsDownIsToldAndCostsLittle) {
  const Scratch folder;
  Engine engine(host(folder, "redis://127.0.0.1:" + std::to_string(free_port())));
  for (int n = 0; n < 2; ++n) {
    const KernelInfo& info = engine.get(small_spec(n), small_shape).info();
    EXPECT_EQ(info.origin, Origin::compiled);
    EXPECT_THAT(info.cache_note, HasSubstr(n == 0 ? "cannot connect" : "is not asked for a while"));
    EXPECT_THAT(info.path, HasSubstr(folder.path()));
  }
}

TEST_F(RemoteEngines, TheCInterfaceHasTheOptions) {
  const RedisServer server;
  const std::string url = server.url() + patient, trust = key.trusted(), path = key.path();
  const NamedKey other("other");
  // The origin of a kernel in a host with these options.
  const auto origin = [&](const std::function<void(flashjit_engine_options&)>& set) -> std::string {
    const Scratch folder;
    flashjit_engine_options options{};
    options.struct_size = sizeof options;
    const std::string own = folder.path();
    options.cache_dir = own.c_str();
    options.cache_path = options.signing_key = "";
    options.num_threads = 1;
    options.cache_remote = url.c_str();
    options.cache_trust = trust.c_str();
    set(options);
    flashjit_engine* engine = nullptr;
    flashjit_spec* spec = nullptr;
    const flashjit_kernel* kernel = nullptr;
    const char* info = nullptr;
    flashjit_shape shape{};
    shape.struct_size = sizeof shape;
    shape.batch = shape.num_heads_q = shape.num_heads_kv = 1;
    shape.seqlen_q = shape.seqlen_k = 16;
    flashjit_status status = flashjit_engine_create(&options, &engine);
    if (status == FLASHJIT_OK) status = flashjit_spec_create(small_spec(0).to_json().c_str(), &spec);
    if (status == FLASHJIT_OK) status = flashjit_engine_get(engine, spec, &shape, &kernel);
    if (status == FLASHJIT_OK) status = flashjit_kernel_info(kernel, &info);
    const std::string found = status == FLASHJIT_OK
                                  ? nlohmann::json::parse(info).at("origin").get<std::string>()
                                  : "code " + std::to_string(status);
    flashjit_spec_destroy(spec);
    flashjit_engine_destroy(engine);
    return found;
  };
  const auto store_configs = [](flashjit_engine_options& options) { options.store_configs = 1; };
  EXPECT_EQ(origin(store_configs), "code " + std::to_string(FLASHJIT_NOT_PREBUILT));
  EXPECT_EQ(origin([&](flashjit_engine_options& options) { options.signing_key = path.c_str(); }),
            "compiled");
  EXPECT_EQ(origin(store_configs), "remote");
  const std::string untrusted = other.trusted();
  EXPECT_EQ(origin([&](flashjit_engine_options& options) { options.cache_trust = untrusted.c_str(); }),
            "compiled");
  // Without the options the environment says the same, and empty ones say that there is none.
  ::setenv("FLASHJIT_CACHE_REMOTE", url.c_str(), 1);
  ::setenv("FLASHJIT_TRUST", trust.c_str(), 1);
  EXPECT_EQ(
      origin([](flashjit_engine_options& options) { options.cache_remote = options.cache_trust = nullptr; }),
      "remote");
  EXPECT_EQ(origin([](flashjit_engine_options& options) { options.cache_remote = ""; }), "compiled");
  ::unsetenv("FLASHJIT_CACHE_REMOTE");
  ::unsetenv("FLASHJIT_TRUST");
  EXPECT_EQ(origin([](flashjit_engine_options& options) { options.cache_remote = "ftp://kernels"; }),
            "code " + std::to_string(FLASHJIT_CACHE_FAILED));
}

TEST_F(RemoteEngines, AHostWithoutACompilerTakesAnyEntryOfTheRequest) {
  const RedisServer server;
  const Scratch folder, other;
  {
    Engine maker(host(folder, server.url()));
    EXPECT_EQ(maker.get(small_spec(0), small_shape).info().origin, Origin::compiled);
  }
  EngineOptions options = host(other, server.url(), false);
  options.policy = Policy::require_prebuilt;
  {
    Engine engine(options);
    const KernelInfo& info = engine.get(small_spec(0), small_shape).info();
    EXPECT_EQ(info.origin, Origin::remote);
    EXPECT_THAT(info.path, HasSubstr(other.path()));
    try {
      engine.get(small_spec(1), small_shape);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::not_prebuilt);
      EXPECT_THAT(error.message(), HasSubstr(server.url()));
    }
  }
  EXPECT_EQ(remote_counts(other.path()).hits, 1u);
  options.cache_remote = "";
  EXPECT_EQ(Engine(options).get(small_spec(0), small_shape).info().origin, Origin::disk) << "read through";
}

// A kernel that nobody trusted has signed is compiled instead, and said.
TEST_F(RemoteEngines, ForgeriesAreNotLoaded) {
  const RedisServer server;
  const NamedKey stranger("stranger");
  EngineOptions strange;
  {
    const Scratch folder;
    strange = host(folder, server.url());
    strange.cache_trust = stranger.trusted();
    strange.signing_key = stranger.path();
    EXPECT_EQ(Engine(strange).get(small_spec(0), small_shape).info().origin, Origin::compiled);
  }
  for (const bool signs : {false, true}) {
    const Scratch folder;
    const KernelInfo info = Engine(host(folder, server.url(), signs)).get(small_spec(0), small_shape).info();
    EXPECT_EQ(info.origin, Origin::compiled);
    EXPECT_THAT(info.cache_note, HasSubstr("signed by the unknown key " + stranger.key.public_key));
  }
  const Scratch folder;
  EngineOptions options = host(folder, server.url());
  EXPECT_EQ(Engine(options).get(small_spec(0), small_shape).info().origin, Origin::remote)
      << "the last of them has put a good one in its place";
  const Scratch another;
  options.cache_dir = another.path();
  *options.cache_trust += ":" + key.revoked();
  EXPECT_EQ(Engine(options).get(small_spec(0), small_shape).info().origin, Origin::compiled);
}

class RemoteRecords : public RemoteEngines {
 protected:
  TuneRecord record(const KernelConfig& chosen) const {
    return {.key = tune_key(spec, Target::native(), {}, small_shape),
            .chosen = chosen,
            .heuristic = heuristic,
            .shape = small_shape,
            .complete = true,
            .environment = tune_environment({.num_threads = 1}),
            .candidates = {{.config = heuristic, .samples_ms = {1}}}};
  }
  void store(const std::string& url, const TuneRecord& record, const std::string& time) const {
    const std::string name = TuneStore::name(record.key), body = to_json(record);
    Signature signature{time, key.key.public_key, {}};
    const std::string message = signed_message(name, time, body);
    unsigned char unused[32], value[64];
    ASSERT_EQ(remote_plugin().sign(reinterpret_cast<const unsigned char*>(key.key.seed.data()),
                                   message.data(), message.size(), unused, value),
              0);
    for (const unsigned char octet : value) {
      char digits[3];
      std::snprintf(digits, sizeof digits, "%02x", octet);
      signature.value += digits;
    }
    std::string why;
    ASSERT_EQ(open_remote_store({url})->put(name, body + to_line(signature), why), Answer::yes) << why;
  }
  KernelInfo get(const EngineOptions& options) const { return Engine(options).get(spec, small_shape).info(); }

  const AttentionSpec spec = small_spec(0);
  const KernelConfig heuristic = heuristic_config(spec, Target::native(), bucket(small_shape));
  const KernelConfig other{.block_m = 96, .block_n = 512, .num_stages = 1, .num_warps = 1};
};

TEST_F(RemoteRecords, AreUsedAndKept) {
  const RedisServer server;
  const Scratch folder;
  store(server.url(), record(other), "2026-01-02T00:00:00Z");
  EngineOptions options = host(folder, server.url(), false);
  EXPECT_EQ(get(options).config, other);
  EXPECT_EQ(get(options).config_source, ConfigSource::record);
  options.cache_remote = "";
  EXPECT_EQ(get(options).config, other) << "read through";
  // Under another environment the folder's is no more than a guess, and the store is asked.
  TuneRecord old = record(heuristic);
  old.environment.flashjit = "0.0.1";
  store(server.url(), old, "2026-01-01T00:00:00Z");
  options.cache_remote = server.url();
  options.num_threads = 2;
  const KernelInfo info = get(options);
  EXPECT_EQ(info.config, other) << "an older record is no step back";
  EXPECT_THAT(info.config_note, HasSubstr("num_threads"));
  store(server.url(), old, "2026-01-03T00:00:00Z");
  const Scratch empty;
  options.cache_dir = empty.path();
  EXPECT_EQ(get(options).config, heuristic);
}

TEST_F(RemoteRecords, StoreConfigsComeFromTheStoreAlone) {
  const RedisServer server;
  const Scratch folder;
  EngineOptions options = host(folder, server.url());
  options.store_configs = true;
  ASSERT_TRUE(TuneStore(folder.path()).publish(record(other)));
  const auto refused = [&] {
    try {
      get(options);
    } catch (const Error& error) {
      return error.code() == ErrorCode::not_prebuilt ? error.message() : "another code: " + error.message();
    }
    return std::string();
  };
  EXPECT_THAT(refused(), HasSubstr("no store has a config")) << "a record of this host alone does not count";
  {
    const Scratch maker;
    EXPECT_EQ(get(host(maker, server.url())).origin, Origin::compiled);
  }
  EXPECT_EQ(get(options).config, heuristic) << "its kernel is in the store";
  store(server.url(), record(other), "2026-01-02T00:00:00Z");
  EXPECT_EQ(get(options).config, other);
  options.cache_remote = "redis://127.0.0.1:" + std::to_string(free_port());
  EXPECT_THAT(refused(), AllOf(HasSubstr("no store has a config"), HasSubstr("cannot connect")));
}

TEST_F(RemoteRecords, OneHostTunesForAll) {
  const RedisServer server;
  AttentionSpec few = spec;  // configs
  few.config.block_m = heuristic.block_m;
  few.config.num_warps = heuristic.num_warps;
  struct Choices {
    std::atomic<int> measured, done;
    KernelConfig chosen[6];
  };
  Shared<Choices> choices;
  std::vector<pid_t> children;
  for (int i = 0; i < 6; ++i)
    children.push_back(start_child([&, i] {
      const Scratch folder;
      const TuneResult result = tune(few, {small_shape},
                                     {.engine = host(folder, server.url() + patient),
                                      .budget_seconds = 60,
                                      .jobs = 1,
                                      .resume = false})
                                    .front();
      (*choices).measured += result.measured;
      (*choices).chosen[i] = result.record.chosen;
      return true;
    }));
  for (const pid_t child : children) EXPECT_TRUE(child_succeeded(child));
  EXPECT_EQ((*choices).measured, 1);
  for (const KernelConfig& config : (*choices).chosen) EXPECT_EQ(config, (*choices).chosen[0]);
}

}  // namespace
}  // namespace flashjit::testing
