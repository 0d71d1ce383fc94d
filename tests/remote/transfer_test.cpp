// Whole folders to a store and back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cache/bundle.hpp"
#include "cache/kernel_entry.hpp"
#include "cache/transfer.hpp"
#include "tests/remote/memory_store.hpp"

namespace flashjit::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// An entry whose metadata describe a kernel.
CacheEntry kernel_entry(const std::string& target) {
  KernelSource source;
  source.target = Target::parse(target);
  source.config = {.block_m = 48, .block_n = 64, .num_stages = 1, .num_warps = 1};
  source.steps = {{.function = "flashjit_forward", .threads = 0, .shared_memory = 0, .scratch = 64}};
  CompiledKernel compiled;
  compiled.code = "code for " + target;
  return pack_kernel(some_entry("", target).key, compiled, source);
}

TuneRecord some_record(bool complete) {
  return {.key = {"a spec", "x86-64-v3", "A CPU", {1, 16, 16, 1, 1}},
          .chosen = {},
          .heuristic = {},
          .shape = {1, 16, 16, 1, 1},
          .complete = complete,
          .environment = {},
          .candidates = {}};
}

struct Hosts {
  Transferred push(const Scratch& folder, const NamedKey& key) {
    RemoteCache::Options options = fleet.options(true);
    options.signer = key.sign();
    options.verifier = verifier(trust);
    RemoteCache remote(std::move(options));
    return push_folder(DiskCache(folder.path()), remote, key.sign(), key.key.public_key);
  }
  Transferred pull(const Scratch& folder) {
    RemoteCache::Options options = fleet.options(false);
    options.verifier = verifier(trust);
    RemoteCache remote(std::move(options));
    return pull_folder(DiskCache(folder.path()), remote, trust);
  }
  Fleet fleet;
  const NamedKey second{"second"};
  const Trust trust = Trust::parse(fleet.key.trusted() + ":" + second.trusted());
};

TEST(Transfer, PushesAndPullsEverything) {
  Hosts hosts;
  const Scratch one, two, empty;
  ASSERT_TRUE(DiskCache(one.path()).publish(kernel_entry("sm_80")));
  ASSERT_TRUE(DiskCache(one.path()).publish(kernel_entry("sm_90")));
  ASSERT_TRUE(TuneStore(one.path()).publish(some_record(false)));
  ASSERT_TRUE(DiskCache(two.path()).publish(kernel_entry("x86-64-v3")));

  Transferred result = hosts.push(one, hosts.fleet.key);
  EXPECT_THAT(result.failed, IsEmpty());
  EXPECT_EQ(result.entries, 2u);
  EXPECT_EQ(result.records, 1u);
  EXPECT_EQ(hosts.push(one, hosts.fleet.key).present, 3u);
  EXPECT_EQ(hosts.push(two, hosts.second).entries, 1u);
  EXPECT_EQ(hosts.push(two, hosts.fleet.key).present, 1u) << "it joins the others in the index of that key";

  result = hosts.pull(empty);
  EXPECT_THAT(result.failed, IsEmpty());
  EXPECT_EQ(result.entries, 3u);
  EXPECT_EQ(result.records, 1u);
  EXPECT_EQ(hosts.pull(empty).present, 4u);
  for (const char* target : {"sm_80", "sm_90", "x86-64-v3"}) {
    const auto entry = DiskCache(empty.path()).lookup(kernel_entry(target).key);
    ASSERT_TRUE(entry) << target;
    EXPECT_EQ(entry->payload, kernel_entry(target).payload);
    EXPECT_FALSE(entry->signature.empty());
  }
}

TEST(Transfer, NewerRecordsReplaceOlderOnesAndNotTheOtherWayRound) {
  Hosts hosts;
  const Scratch folder;
  const TuneStore records(folder.path());
  const std::string name = TuneStore::name(some_record(true).key);
  const auto line_of = [&](const TuneRecord& record, const std::string& time) {
    Signature signature = *parse_signature(hosts.fleet.key.sign()(name, to_json(record)));
    signature.time = time;
    return to_line(signature);
  };
  ASSERT_TRUE(records.publish(some_record(true)));
  ASSERT_EQ(hosts.push(folder, hosts.fleet.key).records, 1u);
  // The folder's is of the same key and later: the line's signature is not looked at here.
  ASSERT_TRUE(
      records.publish(some_record(false), nullptr, line_of(some_record(false), "2999-01-01T00:00:00Z")));
  EXPECT_EQ(hosts.pull(folder).records, 0u);
  EXPECT_FALSE(records.lookup(some_record(true).key, {})->record.complete);
  ASSERT_TRUE(
      records.publish(some_record(false), nullptr, line_of(some_record(false), "2001-01-01T00:00:00Z")));
  EXPECT_EQ(hosts.push(folder, hosts.fleet.key).records, 0u);
  EXPECT_EQ(hosts.pull(folder).records, 1u);
  EXPECT_TRUE(records.lookup(some_record(true).key, {})->record.complete);
}

TEST(Transfer, AStepBackIsOlderAndOfTheSameKey) {
  const auto line = [](char key, const char* day) {
    return to_line({std::string("2026-11-") + day + "T05:00:00Z", std::string(public_key_digits, key),
                    std::string(signature_digits, '0')});
  };
  EXPECT_TRUE(is_step_back(line('a', "26"), line('a', "27")));
  EXPECT_FALSE(is_step_back(line('a', "27"), line('a', "27")));
  EXPECT_FALSE(is_step_back(line('a', "28"), line('a', "27")));
  EXPECT_FALSE(is_step_back(line('a', "26"), line('b', "27")));
  EXPECT_FALSE(is_step_back("", line('a', "27")));
  EXPECT_FALSE(is_step_back(line('a', "26"), ""));
}

TEST(Transfer, ALyingStoreGivesNothing) {
  Hosts hosts;
  const Scratch folder, empty;
  ASSERT_TRUE(DiskCache(folder.path()).publish(kernel_entry("sm_80")));
  ASSERT_EQ(hosts.push(folder, hosts.fleet.key).entries, 1u);
  auto& objects = hosts.fleet.servers[0].objects;
  const std::string name = DiskCache::name(kernel_entry("sm_80").key),
                    index = "index/" + hosts.fleet.key.key.public_key;
  const std::string good = objects[name];
  objects[name][good.size() / 2] ^= 1;
  EXPECT_THAT(hosts.pull(empty).failed, ElementsAre(HasSubstr("not what key ci has signed")));
  objects.erase(name);
  EXPECT_THAT(hosts.pull(empty).failed, ElementsAre(HasSubstr("in the index, but not there")));
  objects[name] = good;
  const std::string names = objects[index];
  objects[index] = "v3/../../etc/passwd\n";
  EXPECT_EQ(hosts.pull(empty).entries, 0u);
  const std::string climbing = "../signed\nv3/x\ntune/../../x.json\n";
  objects[index] = climbing + hosts.fleet.key.sign()(index, climbing);
  EXPECT_EQ(hosts.pull(empty).failed.size(), 3u) << "whoever signed it";
  objects[index] = names;
  EXPECT_EQ(hosts.pull(empty).entries, 1u);
  hosts.fleet.servers[0].down = true;
  EXPECT_THAT(hosts.pull(empty).failed, ElementsAre(HasSubstr("down")));
  EXPECT_THAT(hosts.push(folder, hosts.fleet.key).failed, ElementsAre(HasSubstr("down")));
}

}  // namespace
}  // namespace flashjit::testing
