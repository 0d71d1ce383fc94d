// The remote layer with stores in memory: what is believed, what a failure costs, who makes an object.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "cache/remote_cache.hpp"
#include "tests/remote/memory_store.hpp"

namespace flashjit::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

RemoteCache::Note into(std::string& text) {
  return [&text](const std::string& why) { text += why + "\n"; };
}

TEST(Remotes, AreNamedByAText) {
  const auto stores = parse_remotes(" redis://a:1/0#read_only,timeout_ms=50\n https://b/cache/ ");
  ASSERT_EQ(stores.size(), 2u);
  EXPECT_EQ(stores[0], (RemoteAddress{"redis://a:1/0", true, milliseconds(200), milliseconds(50)}));
  EXPECT_EQ(stores[1], (RemoteAddress{"https://b/cache"}));
  for (const char* bad :
       {"ftp://a", "redis:a", "a", "http://a#slow", "http://a#timeout_ms=0", "http://a#answer_ms=x"})
    EXPECT_THROW(parse_remotes(bad), Error) << bad;
  try {
    parse_remotes("redis://user:secret@host");
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_THAT(error.message(), HasSubstr("FLASHJIT_REMOTE_TOKEN"));
    EXPECT_THAT(error.message(), Not(HasSubstr("secret")));
  }
}

TEST(RemoteCache, StoresSignedAndGetsSigned) {
  Fleet fleet;
  const CacheEntry entry = some_entry("code");
  const std::string name = DiskCache::name(entry.key);
  std::string why;
  {
    RemoteCache writer(fleet.options(true));
    EXPECT_EQ(writer.get(name, into(why)).answer, Answer::no);
    writer.put(name, bytes_of(entry));
  }  // the end stores it
  RemoteCache reader(fleet.options(false));
  const RemoteCache::Got got = reader.get(name, into(why));
  ASSERT_EQ(got.answer, Answer::yes) << why;
  EXPECT_EQ(split_signature(got.bytes).body, bytes_of(entry));
  reader.put(name, bytes_of(entry));
  ASSERT_TRUE(reader.flush(milliseconds(1000)));
  EXPECT_EQ(fleet.servers[0].objects[name], got.bytes) << "who has no key stores nothing";
  RemoteCache no_writer(fleet.options(true, true));
  EXPECT_FALSE(no_writer.may_store(name));
}

// Bit flips, cut and longer bytes, swapped names, other and revoked keys, no signature: none is given out.
TEST(RemoteCache, TenThousandForgeriesAreRefused) {
  Fleet fleet;
  std::vector<std::pair<std::string, std::string>> good;
  for (const char* target : {"sm_80", "sm_90", "sm_90a", "x86-64-v3"}) {
    const CacheEntry entry = signed_by(fleet.key, some_entry(std::string(300, 'c') + target, target));
    good.emplace_back(DiskCache::name(entry.key), bytes_of(entry));
  }
  RemoteCache cache(fleet.options(true));
  std::mt19937 random(50);
  std::string why;
  for (int i = 0; i < 10'000; ++i) {
    const auto& [name, bytes] = good[random() % good.size()];
    std::string bad = bytes;
    switch (i % 8) {
      case 0:
      case 1:
      case 2:
        bad[random() % bad.size()] ^= static_cast<char>(1 << random() % 8);
        break;
      case 3:
        bad.resize(random() % bad.size());
        break;
      case 4:
        bad += static_cast<char>(random());
        break;
      case 5:
        bad = good[(static_cast<std::size_t>(&bytes - &good[0].second) + 1) % good.size()].second;
        for (const auto& [other_name, other] : good)
          if (other_name != name) bad = other;
        break;
      case 6: {
        CacheEntry other = some_entry(std::to_string(i), "sm_80");
        bad = bytes_of(i % 16 == 6 ? signed_by(fleet.fired, other) : signed_by(fleet.stranger, other));
        break;
      }
      case 7: {
        CacheEntry other = some_entry(std::to_string(i), "sm_80");
        if (i % 16 == 7) other.signature = split_signature(bytes).line;
        bad = bytes_of(other);
        break;
      }
    }
    fleet.servers[0].objects[name] = bad;
    ASSERT_EQ(cache.get(name, into(why), true).answer, Answer::no) << i;
  }
  fleet.servers[0].objects[good[0].first] = good[0].second;
  EXPECT_EQ(cache.get(good[0].first, into(why), true).answer, Answer::yes);
}

TEST(RemoteCache, ALostStoreIsAskedOnce) {
  Fleet fleet;
  fleet.servers[0].down = true;
  RemoteCache cache(fleet.options(true));
  std::string why;
  EXPECT_EQ(cache.get("v3/a", into(why)).answer, Answer::failed);
  EXPECT_THAT(why, HasSubstr("redis://store0: down"));
  for (int i = 0; i < 10; ++i) EXPECT_EQ(cache.get("v3/a", into(why)).answer, Answer::failed);
  const RemoteCache::Fetched fetched = cache.fetch("v3/b", cache.fetch_limits(), into(why));
  EXPECT_EQ(fetched.got.answer, Answer::failed);
  EXPECT_FALSE(fetched.lease.held());
  EXPECT_EQ(fleet.servers[0].questions, 1);
}

// After each rest the store is asked again; a success ends the doubling of rests.
TEST(RemoteCache, ALostStoreIsAskedAgain) {
  Fleet fleet;
  RemoteCache::Options options = fleet.options(true);
  options.limits.first_rest = milliseconds(1);
  const auto fail = [&](RemoteCache& cache) {
    fleet.servers[0].down = true;
    EXPECT_EQ(cache.get("v3/a", {}, true).answer, Answer::failed);
    fleet.servers[0].down = false;
    std::this_thread::sleep_for(milliseconds(2));  // a rest is at most half as long again
  };
  options.limits.longest_rest = std::chrono::hours(1);
  RemoteCache alternating(options);
  for (int i = 0; i < 16; ++i) {
    fail(alternating);
    ASSERT_EQ(alternating.get("v3/a", {}, true).answer, Answer::no) << i;
  }
  options.limits.longest_rest = milliseconds(1);
  RemoteCache failing(options);
  fleet.servers[0].questions = 0;
  for (int i = 0; i < 16; ++i) fail(failing);
  EXPECT_EQ(fleet.servers[0].questions, 16);
}

TEST(RemoteCache, AMissIsRememberedForAWhile) {
  Fleet fleet;
  RemoteCache::Options options = fleet.options(true);
  std::atomic<int>& questions = fleet.servers[0].questions;
  std::string why;
  RemoteCache cache(options);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(cache.get("v3/a", {}).answer, Answer::no);
  EXPECT_EQ(questions, 1);
  cache.put("v3/a", "bytes");
  ASSERT_TRUE(cache.flush(milliseconds(10'000)));
  EXPECT_EQ(cache.get("v3/a", into(why)).answer, Answer::yes) << "this host has stored it since: " << why;

  options.limits.miss = milliseconds(1);
  RemoteCache forgetful(options);
  questions = 0;
  for (int i = 1; i <= 3; ++i) {
    EXPECT_EQ(forgetful.get("v3/b", {}).answer, Answer::no);
    EXPECT_EQ(questions, i);
    std::this_thread::sleep_for(milliseconds(2));
  }
}

TEST(RemoteCache, ARequestLeadsToAnEntry) {
  Fleet fleet;
  const CacheEntry entry = signed_by(fleet.key, some_entry("code"));
  const std::string digest = entry.key.digest(), name = DiskCache::name(entry.key),
                    pointer = DiskCache::request_name(request_of(entry.key));
  std::string why;
  const auto ask = [&](RemoteCache& cache) {
    return cache.get_request(
        pointer, [&](const std::string& one) { return one == digest ? name : "v3/" + one; }, into(why));
  };
  RemoteCache early(fleet.options(true));
  for (int i = 0; i < 10; ++i) EXPECT_EQ(ask(early).answer, Answer::no);
  EXPECT_EQ(fleet.servers[0].questions, 1) << "a miss is remembered";
  early.put(name, bytes_of(entry));
  early.put_pointer(pointer, digest);
  ASSERT_TRUE(early.flush(milliseconds(10'000)));
  RemoteCache later(fleet.options(false));
  EXPECT_EQ(ask(later).bytes, fleet.servers[0].objects.at(name)) << why;
  for (const std::string& bad :
       {std::string(), digest.substr(1), digest + "0", digest.substr(2) + "G/", "../" + digest.substr(3)}) {
    fleet.servers[0].objects[pointer] = bad;
    fleet.servers[0].questions = 0;
    RemoteCache misled(fleet.options(false));
    why.clear();
    EXPECT_EQ(ask(misled).answer, Answer::no) << bad;
    EXPECT_THAT(why, HasSubstr("as " + pointer + " is no digest")) << bad;
    EXPECT_EQ(fleet.servers[0].questions, 1) << bad << ": no name is made of it";
  }
}

TEST(RemoteCache, AKeyThatIsNotTrustedHereStoresNothing) {
  Fleet fleet;
  RemoteCache::Options options = fleet.options(true);
  options.signer = fleet.stranger.sign();
  RemoteCache cache(options);
  cache.put("v3/a", "bytes");
  ASSERT_TRUE(cache.flush(milliseconds(10'000)));
  EXPECT_THAT(fleet.servers[0].objects, IsEmpty());
}

TEST(RemoteCache, NamesAreSharedOutAndMoveOnlyFromALostStore) {
  Fleet fleet(4);
  RemoteCache::Options options = fleet.options(true);
  const auto places = [&] {
    std::map<std::string, std::size_t> result;
    for (std::size_t i = 0; i < fleet.servers.size(); ++i)
      for (const auto& [name, bytes] : fleet.servers[i].objects) result[name] = i;
    return result;
  };
  const auto store_all = [&] {
    for (Server& server : fleet.servers) server.objects.clear();
    RemoteCache cache(options);
    cache.put("v3/first", "to learn which store is down");
    cache.flush(milliseconds(10'000));
    for (int i = 0; i < 64; ++i) cache.get("v3/" + std::to_string(i), {});
    for (int i = 0; i < 64; ++i) cache.put("v3/" + std::to_string(i), "bytes");
    EXPECT_TRUE(cache.flush(milliseconds(10'000)));
    auto result = places();
    result.erase("v3/first");
    return result;
  };
  const auto before = store_all();
  ASSERT_EQ(before.size(), 64u);
  for (const Server& server : fleet.servers) EXPECT_GT(server.objects.size(), 4u);
  fleet.servers[2].down = true;
  const auto after = store_all();
  ASSERT_EQ(after.size(), 64u);
  for (const auto& [name, place] : before) {
    if (place != 2) {
      EXPECT_EQ(after.at(name), place) << name;
    }
    EXPECT_NE(after.at(name), 2u);
  }
}

TEST(RemoteCache, OneOfManyMakesAnObject) {
  Fleet fleet;
  std::atomic<int> made{0}, got{0};
  const CacheEntry entry = some_entry("code");
  const std::string name = DiskCache::name(entry.key);
  std::vector<std::thread> hosts;
  for (int i = 0; i < 16; ++i)
    hosts.emplace_back([&] {
      RemoteCache host(fleet.options(true));
      RemoteCache::Fetched fetched = host.fetch(name, host.fetch_limits(), {});
      if (fetched.got.answer == Answer::yes) {
        ++got;
        return;
      }
      EXPECT_TRUE(fetched.lease.held());
      std::this_thread::sleep_for(milliseconds(20));  // a compile
      ++made;
      host.put(name, bytes_of(entry));
    });
  for (std::thread& host : hosts) host.join();
  EXPECT_EQ(made, 1);
  EXPECT_EQ(got, 15);
  EXPECT_THAT(fleet.servers[0].leases, IsEmpty());
}

TEST(RemoteCache, WaitsAreBounded) {
  Fleet fleet;
  fleet.servers[0].leases["lease/v3/a"] = "of a host that is gone";
  for (const bool signs : {false, true}) {
    RemoteCache host(fleet.options(signs));
    FetchLimits limits = host.fetch_limits();
    limits.patience = milliseconds(30);
    std::string why;
    const RemoteCache::Fetched fetched = host.fetch("v3/a", limits, into(why));
    EXPECT_EQ(fetched.got.answer, Answer::no);
    EXPECT_FALSE(fetched.lease.held());
    EXPECT_THAT(why, HasSubstr("more than 30 ms"));
    int asked = 0;
    host.fetch("v3/a", host.fetch_limits(), {}, [&] { return ++asked < 3; });
    EXPECT_EQ(asked, 3);
  }
}

// A host without a key takes no lease, waits while another has it, and then gets what that one has made.
TEST(RemoteCache, AHostWithoutAKeyWaitsForOthers) {
  Fleet fleet;
  const CacheEntry entry = some_entry("code");
  const std::string name = DiskCache::name(entry.key);
  FetchLimits limits = fleet.options(false).limits.fetch;
  limits.lease = milliseconds(1234);
  RemoteCache maker(fleet.options(true)), reader(fleet.options(false));
  const RemoteCache::Fetched nobodys = reader.fetch(name, limits, {});
  EXPECT_EQ(nobodys.got.answer, Answer::no);
  EXPECT_FALSE(nobodys.lease.held());
  EXPECT_EQ(fleet.servers[0].questions, 2) << "for the object and for the lease";
  EXPECT_THAT(fleet.servers[0].leases, IsEmpty());

  RemoteCache::Fetched made = maker.fetch(name, limits, {});
  ASSERT_TRUE(made.lease.held());
  EXPECT_EQ(fleet.servers[0].lease_time.load(), limits.lease);
  int waits = 0;
  std::string why;
  const RemoteCache::Fetched got = reader.fetch(name, limits, into(why), [&] {
    if (++waits == 3) {
      maker.put(name, bytes_of(entry));
      made.lease = {};
      EXPECT_TRUE(maker.flush(milliseconds(10'000)));
    }
    return true;
  });
  EXPECT_EQ(got.got.answer, Answer::yes) << why;
  EXPECT_EQ(waits, 3);
}

TEST(RemoteCache, WhatWaitsToBeStoredIsBounded) {
  Fleet fleet;
  RemoteCache::Options options = fleet.options(true);
  options.limits.queued = 1000;
  RemoteCache cache(options);
  const auto put = [&](const std::string& name, std::size_t size) {
    cache.put(name, std::string(size, 'x'));
  };
  Server& server = fleet.servers[0];
  {
    const std::lock_guard busy(server.mutex);
    put("v3/large", 1001);
    put("v3/under way", 900);
    while (server.questions == 0) std::this_thread::yield();
    EXPECT_FALSE(cache.flush(milliseconds(0)));
    put("v3/first", 600);
    put("v3/second", 600);
  }
  EXPECT_TRUE(cache.flush(milliseconds(10'000)));
  for (const char* name : {"v3/under way", "v3/first"}) EXPECT_TRUE(server.objects.contains(name)) << name;
  for (const char* name : {"v3/large", "v3/second"}) EXPECT_FALSE(server.objects.contains(name)) << name;
  put("v3/second", 1000);
  EXPECT_TRUE(cache.flush(milliseconds(10'000)));
  EXPECT_TRUE(server.objects.contains("v3/second")) << "nothing waits now";
}

TEST(RemoteCache, CountsAreKeptInTheFolder) {
  Fleet fleet;
  Scratch folder;
  RemoteCache::Options options = fleet.options(true);
  options.folder = folder.path();
  for (int i = 0; i < 2; ++i) {
    RemoteCache cache(options);
    cache.get("v3/a", {}, true);
    cache.put("v3/a", "bytes");
    cache.put_pointer("v3/pointer", "a digest");
    cache.flush(milliseconds(10'000));
    cache.get("v3/a", {}, true);
    fleet.servers[0].objects["v3/b"] = "unsigned";
    cache.get("v3/b", {}, true);
    fleet.servers[0].down = true;
    cache.get("v3/a", {}, true);
    fleet.servers[0].down = false;
  }
  const RemoteCounts counts = remote_counts(folder.path());
  EXPECT_EQ(counts.hits, 3u);
  EXPECT_EQ(counts.stored, 2u) << "without the pointers";
  EXPECT_EQ(counts.refused, 2u);
  EXPECT_EQ(counts.misses, 3u);
  EXPECT_EQ(counts.failed, 2u);
}

TEST(RemoteCache, AForkedChildBeginsAnew) {
  Fleet fleet;
  RemoteCache cache(fleet.options(true));
  cache.put("v3/parent", "bytes");
  cache.flush(milliseconds(10'000));
  const pid_t child = start_child([&] {
    // The parent's thread is not here.
    cache.put("v3/child", "bytes");
    return cache.flush(milliseconds(10'000));
  });
  EXPECT_TRUE(child_succeeded(child));
}

}  // namespace
}  // namespace flashjit::testing
