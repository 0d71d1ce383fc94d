// Tune records: a damaged one is a miss, the first folder's
// record wins, and a record measured elsewhere is marked.
#include "cache/tune_store.hpp"

#include <gmock/gmock.h>

#include <thread>

#include "cache/trust.hpp"
#include "tests/cache/support.hpp"

namespace flashjit::testing {
namespace {

using ::testing::HasSubstr;

constexpr char json_spec[] = R"({"op": "forward", "dtype": "bf16", "head_dim": 128})";

TuneRecord make_record(int block_m = 64) {
  const KernelConfig heuristic{.block_m = 128, .block_n = 64, .num_stages = 2, .num_warps = 4};
  KernelConfig chosen = heuristic;
  chosen.block_m = block_m;
  chosen.tile_order = TileOrder::sections;
  chosen.ping_pong = true;
  return {.key = {.spec = json_spec,
                  .target = "sm_90a",
                  .device = "NVIDIA H200",
                  .bucket = {.batch = 4, .seqlen_q = 1024, .seqlen_k = 2048, .num_heads_q = 8}},
          .chosen = chosen,
          .heuristic = heuristic,
          .shape = {.batch = 1, .seqlen_q = 1000, .seqlen_k = 2000, .num_heads_q = 32, .num_heads_kv = 4},
          .complete = true,
          .environment = {.driver = "13.0", .compiler = "nvrtc 13.0", .flashjit = "0.1.0"},
          .candidates = {{.config = heuristic, .samples_ms = {0.1, 1.0 / 3, 7e-5, 2}},
                         {.config = chosen, .samples_ms = {0.1}},
                         {.config = {.block_m = 16, .block_n = 16},
                          .verdict = Verdict::wrong,
                          .reason = "o[0, 1]: \"nan\"\n"}}};
}

std::string file_of(const TuneStore& store, const TuneRecord& record) {
  const auto found = store.lookup(record.key, record.environment);
  return found ? found->path : "";
}

TEST(TuneStore, RoundTrip) {
  const Scratch scratch;
  const TuneStore store(scratch.path());
  const TuneRecord record = make_record();
  std::string why = "?";
  EXPECT_FALSE(store.lookup(record.key, record.environment, &why));
  EXPECT_EQ(why, "");
  ASSERT_TRUE(store.publish(record, &why)) << why;
  const auto found = store.lookup(record.key, record.environment, &why);
  ASSERT_TRUE(found) << why;
  EXPECT_EQ(found->record, record);
  EXPECT_FALSE(found->bundled);
  EXPECT_EQ(found->first_guess, "");
  EXPECT_THAT(found->path, HasSubstr(scratch / "tune/nvidia-h200/"));
  EXPECT_EQ(read_file(found->path), to_json(record));
  EXPECT_EQ(names_in(scratch / "tune/nvidia-h200/tmp").size(), 0u);
}

// A record of version 0.1.0 stays one, and is written so again: later choices are left out where they are not
// taken.
TEST(TuneStore, ReadsRecordsThatKnowNoLaterChoice) {
  const std::string text =
      R"({"format":1,"spec":"{\"op\": \"forward\", \"dtype\": \"bf16\", \"head_dim\": 128}","target":"sm_)"
      R"(90a","device":"NVIDIA H200","bucket":{"batch":4,"seqlen_q":1024,"seqlen_k":2048,"num_heads_q":8,)"
      R"("num_heads_kv":1},"chosen":{"block_m":128,"block_n":64,"num_stages":2,"num_warps":12,"q_in_regis)"
      R"(ters":false,"ping_pong":true,"tile_order":"sections","pack_gqa":false},"heuristic":{"block_m":12)"
      R"(8,"block_n":64,"num_stages":2,"num_warps":12,"q_in_registers":false,"ping_pong":false,"tile_orde)"
      R"(r":"heads","pack_gqa":false},"shape":{"batch":1,"seqlen_q":1000,"seqlen_k":2000,"num_heads_q":32)"
      R"(,"num_heads_kv":4},"complete":true,"environment":{"driver":"13.0","compiler":"nvrtc 13.0","flash)"
      R"(jit":"0.1.0","num_threads":0},"candidates":[{"config":{"block_m":128,"block_n":64,"num_stages":2)"
      R"(,"num_warps":12,"q_in_registers":false,"ping_pong":false,"tile_order":"heads","pack_gqa":false},)"
      R"("verdict":"measured","reason":"","samples_ms":[0.5]},{"config":{"block_m":128,"block_n":64,"num_)"
      R"(stages":2,"num_warps":12,"q_in_registers":false,"ping_pong":true,"tile_order":"sections","pack_g)"
      R"(qa":false},"verdict":"measured","reason":"","samples_ms":[0.25]}],"checksum":"7d535abb14ef8009db)"
      R"(a0f1b9d03e7840"})"
      "\n";
  std::string why;
  const std::optional<TuneRecord> record = parse_tune_record(text, why);
  ASSERT_TRUE(record) << why;
  EXPECT_EQ(record->chosen, (KernelConfig{.block_m = 128,
                                          .block_n = 64,
                                          .num_stages = 2,
                                          .num_warps = 12,
                                          .ping_pong = true,
                                          .tile_order = TileOrder::sections}));
}

// A backward on a CPU has no block_m.
TEST(TuneStore, RoundTripOfConfigsWithoutSizes) {
  const Scratch scratch;
  const TuneStore store(scratch.path());
  TuneRecord record = make_record();
  record.heuristic.block_m = record.chosen.block_m = 0;
  for (TuneCandidate& candidate : record.candidates) candidate.config.block_m = 0;
  ASSERT_TRUE(store.publish(record));
  std::string why;
  const auto found = store.lookup(record.key, record.environment, &why);
  ASSERT_TRUE(found) << why;
  EXPECT_EQ(found->record, record);
}

TEST(TuneStore, EveryPartOfTheKeyCounts) {
  const Scratch scratch;
  const TuneStore store(scratch.path());
  const TuneRecord record = make_record();
  ASSERT_TRUE(store.publish(record));
  TuneKey key = record.key;
  key.spec += " ";
  EXPECT_FALSE(store.lookup(key, {}));
  key = record.key;
  key.target = "sm_90";
  EXPECT_FALSE(store.lookup(key, {}));
  key = record.key;
  key.device = "NVIDIA  H200";  // has the same folder
  EXPECT_FALSE(store.lookup(key, {}));
  key = record.key;
  key.bucket.seqlen_k *= 2;
  EXPECT_FALSE(store.lookup(key, {}));
}

TEST(TuneStore, MeasuredElsewhereIsAFirstGuess) {
  const Scratch scratch;
  const TuneStore store(scratch.path());
  TuneRecord record = make_record();
  record.environment.num_threads = 4;
  ASSERT_TRUE(store.publish(record));
  const auto first_guess = [&](const TuneEnvironment& here) {
    const auto found = store.lookup(record.key, here);
    return found ? found->first_guess : "missing";
  };
  TuneEnvironment here = record.environment;
  here.driver = "13.1";
  EXPECT_EQ(first_guess(here), "driver 13.0, here 13.1");
  here = record.environment;
  here.compiler = "nvrtc 13.1";
  here.flashjit = "0.2.0";
  EXPECT_EQ(first_guess(here), "compiler nvrtc 13.0, here nvrtc 13.1; flashjit 0.1.0, here 0.2.0");
  here = record.environment;
  here.num_threads = 8;
  EXPECT_EQ(first_guess(here), "num_threads 4, here 8");
  here = {};  // nothing is known
  EXPECT_EQ(first_guess(here), "");
}

TEST(TuneStore, LayersComeFirst) {
  const Scratch first, second, user;
  const TuneRecord from_first = make_record(64), from_second = make_record(192), own = make_record(256);
  ASSERT_TRUE(TuneStore(first.path()).publish(from_first));
  ASSERT_TRUE(TuneStore(second.path()).publish(from_second));
  const TuneStore store(user.path(), {first.path(), second.path()});
  ASSERT_TRUE(store.publish(own));
  TuneEnvironment here = own.environment;
  here.driver = "14.0";
  auto found = store.lookup(own.key, here);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->record, from_first);
  EXPECT_TRUE(found->bundled);
  EXPECT_THAT(found->first_guess, HasSubstr("driver"));  // marked, but it wins
  EXPECT_EQ(store.list().size(), 3u);

  // A damaged record in a layer is passed over and stays.
  write_file(found->path, "{}");
  std::string why;
  const std::string damaged = found->path;
  found = store.lookup(own.key, here, &why);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->record, from_second);
  EXPECT_EQ(read_file(damaged), "{}");
  EXPECT_NE(why, "");
  std::filesystem::remove(found->path);
  found = store.lookup(own.key, own.environment);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->record, own);
  EXPECT_FALSE(found->bundled);
}

TEST(TuneStore, DamageIsAMissSetAside) {
  const Scratch scratch;
  const TuneStore store(scratch.path());
  const TuneRecord record = make_record();
  ASSERT_TRUE(store.publish(record));
  const std::string path = file_of(store, record), good = read_file(path);
  TuneRecord other = make_record(), timeless = make_record();
  other.key.target = "sm_80";
  timeless.candidates[0].samples_ms[1] = 0;
  std::string wrong_version = good, spaced = good, twice = good;
  wrong_version.replace(good.find("\"format\":1"), 10, "\"format\":2");
  spaced.insert(1, " ");
  twice.insert(1, "\"format\":1,");
  const std::pair<std::string, const char*> damages[] = {
      {"", "empty file"},
      {good.substr(0, good.size() / 2), "not a tune record"},
      {good + "x", "not a tune record"},
      {wrong_version, "format version 2"},
      {spaced, "its form"},
      {twice, "its form"},
      {"[1, 2]", "not a tune record"},
      {"{}", "not a tune record"},
      {std::string(100000, '['), "not a tune record"},
      {std::string(5 << 20, ' '), "larger than"},
      {to_json(timeless), "a sample of 0"},
      {to_json(other), "another key"}};
  for (const auto& [bytes, reason] : damages) {
    write_file(path, bytes);
    const auto listed = store.list();
    ASSERT_EQ(listed.size(), 1u);
    EXPECT_THAT(listed[0].damage, HasSubstr(reason));
    std::string why;
    EXPECT_FALSE(store.lookup(record.key, record.environment, &why)) << reason;
    EXPECT_THAT(why, HasSubstr("was set aside")) << reason;
    EXPECT_THAT(why, HasSubstr(reason));
    EXPECT_FALSE(std::filesystem::exists(path));
    EXPECT_FALSE(store.lookup(record.key, record.environment, &why));
    EXPECT_EQ(why, "");
  }
  EXPECT_EQ(names_in(scratch / "tune/nvidia-h200/quarantine").size(), std::size(damages));
  ASSERT_TRUE(store.publish(record));
  EXPECT_TRUE(store.lookup(record.key, record.environment));
}

TEST(TuneStore, NoBitFlipSurvives) {
  const TuneRecord record = make_record();
  const std::string good = to_json(record);
  std::minstd_rand random(test_seed());
  std::string why;
  ASSERT_EQ(parse_tune_record(good, why), record);
  for (std::size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ (1 << random() % 8));
    EXPECT_FALSE(parse_tune_record(bad, why)) << i;
    EXPECT_FALSE(parse_tune_record(good.substr(0, i), why)) << i;
  }
}

TEST(TuneStore, FoldersThatOthersMayWriteAreRefused) {
  const Scratch scratch;
  const TuneStore store(scratch.path());
  const TuneRecord record = make_record();
  ASSERT_TRUE(store.publish(record));
  const std::string path = file_of(store, record);
  for (const std::string& place : {scratch.path(), scratch / "tune", scratch / "tune/nvidia-h200", path}) {
    const mode_t mode = place == path ? 0644 : 0700;
    std::string why;
    ASSERT_EQ(::chmod(place.c_str(), mode | 0022), 0);
    EXPECT_FALSE(store.lookup(record.key, record.environment, &why)) << place;
    EXPECT_THAT(why, HasSubstr("others may write")) << place;
    if (place != path) {
      EXPECT_FALSE(store.publish(record, &why)) << place;
    }
    ASSERT_EQ(::chmod(place.c_str(), mode), place == path ? -1 : 0);  // the file was set aside
  }
}

TEST(TuneStore, LinksAreNotFollowed) {
  const Scratch scratch, elsewhere;
  const TuneStore store(scratch.path()), other(elsewhere.path());
  const TuneRecord record = make_record();
  ASSERT_TRUE(other.publish(record));
  ASSERT_TRUE(store.publish(record));
  const std::string path = file_of(store, record);
  std::filesystem::remove(path);
  std::filesystem::create_symlink(file_of(other, record), path);
  EXPECT_FALSE(store.lookup(record.key, record.environment));
  std::filesystem::remove_all(scratch / "tune");
  std::filesystem::create_directory_symlink(elsewhere / "tune", scratch / "tune");
  EXPECT_FALSE(store.lookup(record.key, record.environment));
}

TEST(TuneStore, FailuresSayWhy) {
  const TuneRecord record = make_record();
  std::string why;
  EXPECT_FALSE(TuneStore("").publish(record, &why));
  EXPECT_THAT(why, HasSubstr("no cache folder"));
  EXPECT_FALSE(TuneStore("").lookup(record.key, {}, &why));
  EXPECT_EQ(why, "");
  const Scratch scratch;
  write_file(scratch / "tune", "in the way");
  EXPECT_FALSE(TuneStore(scratch.path()).publish(record, &why));
  EXPECT_THAT(why, HasSubstr("tune"));
}

// A concurrent reader sees one of the records, undamaged.
TEST(TuneStore, ConcurrentWriters) {
  const Scratch scratch;
  constexpr int writers = 4, times = 50;
  std::vector<pid_t> children;
  const TuneKey key = make_record().key;
  const TuneStore store(scratch.path());
  ASSERT_TRUE(store.publish(make_record(64)));
  for (int i = 1; i <= writers; ++i) {
    children.push_back(start_child([&, i] {
      for (int n = 0; n < times; ++n) FLASHJIT_CHECK(store.publish(make_record(64 * i)));
      return true;
    }));
  }
  for (int n = 0; n < times; ++n) {
    std::string why;
    const auto found = store.lookup(key, {}, &why);
    ASSERT_TRUE(found) << why;
    EXPECT_EQ(found->record, make_record(found->record.chosen.block_m));
  }
  for (const pid_t child : children) EXPECT_TRUE(child_succeeded(child));
  EXPECT_EQ(store.list().size(), 1u);
  EXPECT_EQ(names_in(scratch / "tune/nvidia-h200/tmp").size(), 0u);
}

}  // namespace
}  // namespace flashjit::testing
