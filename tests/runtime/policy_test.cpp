// The source of an engine's configs, and its behaviour without a record or a kernel.
#include <gmock/gmock.h>

#include "cache/tune_store.hpp"
#include "codegen/families/search_space.hpp"
#include "runtime/compiler.hpp"
#include "runtime/tune/environment.hpp"
#include "tests/cache/support.hpp"

namespace flashjit::testing {
namespace {

using ::testing::HasSubstr;

class PolicyTest : public ::testing::Test {
 protected:
  static AttentionSpec small_spec() {
    return AttentionSpec{.dtype = DType::fp32, .head_dim = 16}.validated();
  }

  // A record like that of tuning on this machine with this result.
  TuneRecord record(const KernelConfig& chosen) const {
    TuneRecord r{.key = tune_key(spec, Target::native(), {}, shape),
                 .chosen = chosen,
                 .heuristic = heuristic,
                 .shape = shape,
                 .complete = true,
                 .environment = tune_environment({.num_threads = 1}),
                 .candidates = {{.config = heuristic, .samples_ms = {1}}}};
    r.environment.compiler = clang_compiler()->identity();
    return r;
  }
  EngineOptions options(Policy policy = Policy::heuristic) const {
    return {
        .cache_dir = user.path(), .cache_path = "", .num_threads = 1, .policy = policy, .tune_seconds = 20};
  }
  KernelInfo get(const EngineOptions& options_) const { return Engine(options_).get(spec, shape).info(); }

  const Scratch user, layer;
  const AttentionSpec spec = small_spec();
  const Shape shape{.batch = 1, .seqlen_q = 60, .seqlen_k = 60, .num_heads_q = 2, .num_heads_kv = 2};
  const KernelConfig heuristic = heuristic_config(spec, Target::native(), bucket(shape));
  const KernelConfig other{.block_m = 96, .block_n = 512, .num_stages = 1, .num_warps = 1};
};

TEST_F(PolicyTest, WithoutARecordItIsTheHeuristic) {
  const KernelInfo info = get(options());
  EXPECT_EQ(info.config, heuristic);
  EXPECT_EQ(info.config_source, ConfigSource::heuristic);
  EXPECT_EQ(info.config_note, "");
  EXPECT_TRUE(TuneStore(user.path()).list().empty());  // nothing is tuned unasked
}

TEST_F(PolicyTest, ARecordIsUsed) {
  ASSERT_TRUE(TuneStore(user.path()).publish(record(other)));
  Engine engine(options());
  const Kernel& kernel = engine.get(spec, shape);
  EXPECT_EQ(kernel.info().config, other);
  EXPECT_EQ(kernel.info().config_source, ConfigSource::record);
  EXPECT_EQ(kernel.info().config_note, TuneStore(user.path()).path(record(other).key));
  EXPECT_THAT(kernel.info_json(), HasSubstr(R"("config_source":"record")"));
  EXPECT_EQ(&engine.get(spec, shape), &kernel);
  // The record says nothing about other buckets.
  Shape longer = shape;
  longer.seqlen_k = 1000;
  EXPECT_EQ(engine.get(spec, longer).info().config_source, ConfigSource::heuristic);
}

TEST_F(PolicyTest, SameConfigFromTwoSources) {
  ASSERT_TRUE(TuneStore(user.path()).publish(record(heuristic)));
  Engine engine(options());
  Shape longer = shape;
  longer.seqlen_k = 1000;
  const Kernel &recorded = engine.get(spec, shape), &untuned = engine.get(spec, longer);
  EXPECT_EQ(recorded.info().config, untuned.info().config);
  EXPECT_EQ(recorded.info().config_source, ConfigSource::record);
  EXPECT_EQ(untuned.info().config_source, ConfigSource::heuristic);
}

TEST_F(PolicyTest, FirstGuessesAreMarked) {
  TuneRecord r = record(other);
  r.environment.compiler = "clang 1.0";
  ASSERT_TRUE(TuneStore(user.path()).publish(r));
  KernelInfo info = get(options());
  EXPECT_EQ(info.config, other);
  EXPECT_EQ(info.config_source, ConfigSource::first_guess);
  EXPECT_THAT(info.config_note, HasSubstr(".json: compiler clang 1.0, here LLVM plugin"));
  r.environment.flashjit = "0.0.1";
  r.environment.num_threads = 3;
  ASSERT_TRUE(TuneStore(user.path()).publish(r));
  info = get(options());
  EXPECT_EQ(info.config_source, ConfigSource::first_guess);
  EXPECT_THAT(info.config_note, HasSubstr("flashjit 0.0.1, here"));
  EXPECT_THAT(info.config_note, HasSubstr("num_threads 3, here 1; compiler clang 1.0, here LLVM plugin"));
}

TEST_F(PolicyTest, RecordsThatCannotBeUsed) {
  ASSERT_TRUE(TuneStore(user.path()).publish(record({.block_m = 20, .block_n = 64})));
  KernelInfo info = get(options());
  EXPECT_EQ(info.config, heuristic);
  EXPECT_EQ(info.config_source, ConfigSource::heuristic);
  EXPECT_THAT(info.config_note, HasSubstr("is not used: "));
  write_file(TuneStore(user.path()).path(record(other).key), "{");
  info = get(options());
  EXPECT_EQ(info.config_source, ConfigSource::heuristic);
  EXPECT_THAT(info.config_note, HasSubstr("set aside"));
}

TEST_F(PolicyTest, WhatALayerHoldsWins) {
  ASSERT_TRUE(TuneStore(user.path()).publish(record(other)));
  EngineOptions with_layer = options();
  with_layer.cache_path = layer.path();
  EXPECT_EQ(get(with_layer).config, other) << "the layer holds nothing";
  compile(spec, Target::native(), shape, layer.path(), "");
  for (const Policy policy : {Policy::heuristic, Policy::tune_on_first_use, Policy::require_prebuilt}) {
    with_layer.policy = policy;
    const KernelInfo info = get(with_layer);
    EXPECT_EQ(info.config, heuristic);
    EXPECT_EQ(info.config_source, ConfigSource::heuristic);
    EXPECT_EQ(info.origin, Origin::disk);
    EXPECT_THAT(info.config_note, HasSubstr("is prebuilt"));
  }
  // The layer's own records come first.
  ASSERT_TRUE(TuneStore(layer.path()).publish(record(other)));
  EXPECT_EQ(get(options()).config, other);
  with_layer.policy = Policy::heuristic;
  EXPECT_EQ(get(with_layer).config, other);
}

TEST_F(PolicyTest, PinsWin) {
  ASSERT_TRUE(TuneStore(user.path()).publish(record(other)));
  AttentionSpec all = spec;
  all.config = pinned(KernelConfig{.block_m = 48, .block_n = 256, .num_stages = 1, .num_warps = 1});
  Engine engine(options());
  EXPECT_EQ(engine.get(all, shape).info().config_source, ConfigSource::pinned);
  EXPECT_EQ(engine.get(all, shape).info().config.block_n, 256);
  AttentionSpec some = spec;  // a spec with records of its own
  some.config.block_n = 256;
  EXPECT_EQ(engine.get(some, shape).info().config_source, ConfigSource::heuristic);
}

TEST_F(PolicyTest, ABundlesRecordWins) {
  TuneRecord bundled = record({.block_m = 48, .block_n = 256, .num_stages = 1, .num_warps = 1});
  bundled.environment.flashjit = "0.0.1";
  ASSERT_TRUE(TuneStore(layer.path()).publish(bundled));
  ASSERT_TRUE(TuneStore(user.path()).publish(record(other)));
  for (const Policy policy : {Policy::heuristic, Policy::tune_on_first_use}) {
    EngineOptions with_layer = options(policy);
    with_layer.cache_path = layer.path();
    const KernelInfo info = get(with_layer);
    EXPECT_EQ(info.config, bundled.chosen);
    EXPECT_EQ(info.config_source, ConfigSource::first_guess);
    EXPECT_THAT(info.config_note, HasSubstr(layer.path()));
  }
}

TEST_F(PolicyTest, RequirePrebuiltNeitherCompilesNorTunes) {
  EngineOptions strict = options(Policy::require_prebuilt);
  strict.cache_path = layer.path();
  try {
    get(strict);
    FAIL() << "nothing was built";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::not_prebuilt);
    // The command makes the configs of every shape.
    EXPECT_THAT(error.message(), HasSubstr("flashjit prebuild '" + spec.to_json() + "' --target " +
                                           Target::native().str() + " -o " + layer.path()));
    EXPECT_THAT(error.message(), HasSubstr(layer.path() + ", " + user.path()));
  }
  EXPECT_TRUE(DiskCache(user.path()).list(false).empty());
  get(options());  // another engine builds the kernel
  const KernelInfo info = get(strict);
  EXPECT_EQ(info.origin, Origin::disk);
  // A record chooses another kernel, which is none of those.
  ASSERT_TRUE(TuneStore(user.path()).publish(record(other)));
  try {
    get(strict);
    FAIL() << "nothing was built";
  } catch (const Error& error) {
    AttentionSpec one = spec;
    one.config = pinned(other);
    EXPECT_THAT(error.message(), HasSubstr("flashjit prebuild '" + one.to_json()));
    EXPECT_THAT(error.message(), HasSubstr("; the closest is " + info.path + ", which differs in config"));
  }
  compile(
      [&] {
        AttentionSpec s = spec;
        s.config = pinned(other);
        return s;
      }(),
      Target::native(), shape, layer.path(), "");
  EXPECT_EQ(get(strict).config, other);
}

// After an upgrade the kernel of the version before is there, and the error says so.
TEST_F(PolicyTest, RequirePrebuiltNamesTheKernelOfAnotherVersion) {
  compile(spec, Target::native(), shape, user.path(), "");
  const DiskCache cache(user.path());
  ASSERT_EQ(cache.list(false).size(), 1u);
  CacheEntry entry = *cache.lookup(cache.list(false)[0].entry->key);
  CacheKey before;
  for (const CacheKeyField& field : entry.key.fields())
    before.add(field.label, field.label == "header cpu/forward.h" ? "another" : field.value);
  entry.key = before;
  ASSERT_EQ(cache.clear(), 1u);
  ASSERT_TRUE(cache.publish(entry));
  try {
    get(options(Policy::require_prebuilt));
    FAIL() << "it loaded";
  } catch (const Error& error) {
    EXPECT_THAT(error.message(),
                HasSubstr(cache.path(before) + " is of another version of flashjit: it differs "
                                               "in header cpu/forward.h, and"));
    EXPECT_THAT(error.detail(), HasSubstr("header cpu/forward.h: "));
    EXPECT_THAT(error.detail(), HasSubstr(" | another"));
  }
}

TEST_F(PolicyTest, WhatFailedMayWorkTheNextTime) {
  Engine engine(options(Policy::require_prebuilt));
  for (int time = 0; time < 2; ++time) EXPECT_THROW(engine.get(spec, shape), Error);
  compile(spec, Target::native(), shape, user.path(), "");
  EXPECT_EQ(engine.get(spec, shape).info().origin, Origin::disk);
}

TEST_F(PolicyTest, TuneOnFirstUse) {
  const KernelInfo first = get(options(Policy::tune_on_first_use));
  EXPECT_EQ(first.config_source, ConfigSource::record);
  const auto listed = TuneStore(user.path()).list();
  ASSERT_EQ(listed.size(), 1u);
  ASSERT_TRUE(listed[0].record);
  EXPECT_EQ(listed[0].path, first.config_note);
  EXPECT_EQ(listed[0].record->chosen, first.config);
  // The record is known from now on, also to engines that do not tune.
  const std::string before = read_file(listed[0].path);
  EXPECT_EQ(get(options(Policy::tune_on_first_use)).config_source, ConfigSource::record);
  EXPECT_EQ(get(options()).config, first.config);
  EXPECT_EQ(read_file(listed[0].path), before);
}

// A record whose budget ended early is an answer like any other:
// if the next engine continued it, it might get another config.
TEST_F(PolicyTest, FirstUseDoesNotGoOnWithWhatEndedEarly) {
  TuneRecord early = record(other);
  early.complete = false;
  ASSERT_TRUE(TuneStore(user.path()).publish(early));
  EXPECT_EQ(get(options(Policy::tune_on_first_use)).config, other);
  ASSERT_EQ(TuneStore(user.path()).list().size(), 1u);
  EXPECT_EQ(to_json(*TuneStore(user.path()).list()[0].record), to_json(early));
}

// Processes of one job share a folder like this.
TEST_F(PolicyTest, ProcessesThatShareAFolderGetTheSameConfig) {
  constexpr int ranks = 3;
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    children.push_back(start_child([&, rank] {
      const KernelInfo info = get(options(Policy::tune_on_first_use));
      write_file(layer / std::to_string(rank), to_json(info.config));
      return info.config_source == ConfigSource::record;
    }));
  }
  for (const pid_t child : children) EXPECT_TRUE(child_succeeded(child));
  const auto listed = TuneStore(user.path()).list();
  ASSERT_EQ(listed.size(), 1u);
  ASSERT_TRUE(listed[0].record);
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_EQ(read_file(layer / std::to_string(rank)), to_json(listed[0].record->chosen));
  }
}

TEST_F(PolicyTest, BadOptions) {
  EngineOptions bad = options(Policy::tune_on_first_use);
  bad.tune_seconds = -1;
  EXPECT_THROW(get(bad), Error);
}

}  // namespace
}  // namespace flashjit::testing
