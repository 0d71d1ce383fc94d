// An engine tells the host's function, the log and the record of kernels that it did not have in memory.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "cache/disk_cache.hpp"
#include "codegen/families/search_space.hpp"
#include "runtime/build.hpp"
#include "tests/cache/support.hpp"
#include "tools/manifest/manifest.hpp"

namespace flashjit::testing {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class KernelEvents : public ::testing::Test {
 protected:
  EngineOptions options(Policy policy = Policy::heuristic) {
    return {.cache_dir = user.path(),
            .cache_path = "",
            .num_threads = 1,
            .policy = policy,
            .on_kernel = [this](const KernelEvent& event) { events.push_back(event); },
            .log = user / "log",
            .record = user / "record.json"};
  }
  std::vector<KernelEvent::Kind> kinds() const {
    std::vector<KernelEvent::Kind> all;
    for (const KernelEvent& event : events) all.push_back(event.kind);
    return all;
  }

  const Scratch user;
  const AttentionSpec spec = AttentionSpec{.dtype = DType::fp32, .head_dim = 16}.validated();
  const Shape shape{.batch = 3, .seqlen_q = 60, .seqlen_k = 90, .num_heads_q = 4, .num_heads_kv = 2};
  std::vector<KernelEvent> events;
};

TEST_F(KernelEvents, TellWhatWasCompiledLoadedAndMissed) {
  using enum KernelEvent::Kind;
  {
    Engine engine(options());
    engine.get(spec, shape);
    engine.get(spec, shape);  // in memory: no event
    EXPECT_THAT(kinds(), ElementsAre(compiled));
    EXPECT_EQ(events[0].spec, spec);
    EXPECT_EQ(events[0].shape, shape);
    EXPECT_EQ(events[0].target, Target::native());
    EXPECT_GT(events[0].ms, 0);
    EXPECT_EQ(events[0].path, engine.get(spec, shape).info().path);
    EXPECT_EQ(events[0].reason, "");
    // Another bucket of the same config has the same kernel.
    Shape more = shape;
    more.batch = 64;
    const Kernel& same = engine.get(spec, more);
    EXPECT_EQ(&same, &engine.get(spec, shape));
    EXPECT_THAT(kinds(), ElementsAre(compiled, loaded));
    events.pop_back();
  }
  Engine(options()).get(spec, shape);
  AttentionSpec other = spec;
  other.head_dim = other.head_dim_v = 24;
  EXPECT_THROW(Engine(options(Policy::require_prebuilt)).get(other, shape), Error);
  EXPECT_THAT(kinds(), ElementsAre(compiled, loaded, failed));
  EXPECT_THAT(events[2].reason, HasSubstr("no cache folder has the kernel"));

  std::istringstream log(read_file(user / "log"));
  std::vector<std::string> told;
  for (std::string line; std::getline(log, line);) {
    const json event = json::parse(line);
    told.push_back(event.at("event"));
    EXPECT_EQ(event.at("shape").at("num_heads_kv"), 2);
    EXPECT_EQ(event.at("target"), Target::native().str());
    EXPECT_EQ(event.at("pid"), ::getpid());
    EXPECT_TRUE(event.contains("reason") && event.contains("path") && event.contains("ms"));
  }
  EXPECT_THAT(told, ElementsAre("compiled", "loaded", "loaded", "failed"));

  // The record is a manifest of all that was asked for, each once.
  const std::vector<ManifestItem> items = parse_manifest(read_file(user / "record.json"));
  ASSERT_EQ(items.size(), 2u);
  EXPECT_EQ(items[0].spec, spec);
  EXPECT_EQ(items[1].spec, other.validated());
  for (const ManifestItem& item : items) {
    ASSERT_FALSE(item.shapes.empty());
    EXPECT_EQ(bucket(item.shapes[0]), bucket(shape));
    EXPECT_FALSE(item.any_shape);
  }
  EXPECT_EQ(items[0].shapes.size(), 2u);
  EXPECT_EQ(items[1].shapes.size(), 1u);
}

// Who waits for another process hears so at once, and not that it compiles.
TEST_F(KernelEvents, TellThatAnotherProcessIsWaitedFor) {
  using enum KernelEvent::Kind;
  const Scratch elsewhere;
  compile(spec, Target::native(), shape, elsewhere.path(), "");
  const std::vector<DiskCache::Listing> listed = DiskCache(elsewhere.path()).list(false);
  ASSERT_EQ(listed.size(), 1u);
  const DiskCache cache(user.path());
  const KeyLock stopped = cache.lock(listed[0].entry->key);
  ASSERT_TRUE(stopped.held());
  EngineOptions given = options();
  given.compile.cancelled = [&] { return !events.empty(); };
  Engine engine(given);
  EXPECT_THROW(engine.get(spec, shape), Error);
  EXPECT_THAT(kinds(), ElementsAre(waiting, failed));
  EXPECT_THAT(events.front().reason, HasSubstr("another process builds the kernel"));
}

// Processes and threads share a record, and lose nothing.
TEST_F(KernelEvents, ManyWriteOneRecord) {
  constexpr int processes = 4, shapes = 6;
  const OpenedCache cache = open_cache(user.path(), "");
  for (const KernelConfig& config : heuristic_configs(spec, Target::native()))
    build_kernel(spec, Target::native(), config, cache);
  std::vector<pid_t> children;
  for (int process = 0; process < processes; ++process)
    children.push_back(start_child([&, process] {
      EngineOptions own = options();
      own.on_kernel = [](const KernelEvent&) { throw std::runtime_error("of the host: it is ignored"); };
      Engine engine(own);
      for (int i = 0; i < shapes; ++i) {
        Shape one = shape;
        one.seqlen_k = 1 << (process % 2 * shapes + i + 4);
        engine.get(spec, one);
      }
      return true;
    }));
  for (const pid_t child : children) EXPECT_TRUE(child_succeeded(child));
  const std::vector<ManifestItem> items = parse_manifest(read_file(user / "record.json"));
  ASSERT_EQ(items.size(), 1u);
  EXPECT_EQ(items[0].shapes.size(), std::size_t{2 * shapes});
}

TEST_F(KernelEvents, FilesThatCannotBeWrittenAreRefused) {
  const auto refusal = [&](const EngineOptions& given) -> std::string {
    try {
      Engine engine(given);
      return {};
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return error.message();
    }
  };
  EngineOptions given = options();
  given.log = user / "missing/log";
  EXPECT_THAT(refusal(given), HasSubstr("log names \""));
  given = options();
  write_file(user / "record.json", "not a manifest");
  EXPECT_THAT(refusal(given), HasSubstr("which holds something else than a manifest"));
  EXPECT_EQ(read_file(user / "record.json"), "not a manifest");
  given.record = user.path();
  EXPECT_THAT(refusal(given), HasSubstr("record names"));
  given.record = given.log = "";
  EXPECT_EQ(refusal(given), "");
  ::setenv("FLASHJIT_LOG", (user / "missing/log").c_str(), 1);
  given.log.reset();
  EXPECT_THAT(refusal(given), HasSubstr("FLASHJIT_LOG names \""));
  ::unsetenv("FLASHJIT_LOG");
}

}  // namespace
}  // namespace flashjit::testing
