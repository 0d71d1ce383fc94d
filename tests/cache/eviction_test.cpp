// The size limit: which entries are removed and which stay, whatever the clock does.
#include <fcntl.h>
#include <gmock/gmock.h>

#include <chrono>
#include <thread>

#include "codegen/base/error.hpp"
#include "tests/cache/support.hpp"

namespace flashjit::testing {
namespace {

using ::testing::HasSubstr;

constexpr std::size_t payload = 10'000;

// The time in seconds. ::time() would not do: it may be a tick behind the clock that the cache reads.
std::time_t now() {
  return std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
}

class Eviction : public ::testing::Test {
 protected:
  // Publishes entry n, used so long ago.
  void publish(int n, std::int64_t seconds_ago) {
    ASSERT_TRUE(cache_.publish(make_entry(n, payload)));
    set_used(n, seconds_ago);
  }
  void set_used(int n, std::int64_t seconds_ago) {
    const timespec time = {::time(nullptr) - seconds_ago, 0};
    const timespec times[] = {time, time};
    ASSERT_EQ(::utimensat(AT_FDCWD, cache_.path(make_key(n)).c_str(), times, 0), 0);
  }
  std::vector<int> present() const {
    std::vector<int> found;
    for (int n = 0; n < 100; ++n) {
      if (std::filesystem::exists(cache_.path(make_key(n)))) found.push_back(n);
    }
    return found;
  }
  std::uint64_t bytes() const {
    std::uint64_t sum = 0;
    for (const DiskCache::Listing& item : cache_.list(false)) sum += item.size;
    return sum;
  }

  const Scratch scratch_;
  const DiskCache cache_{scratch_.path()};
  const std::uint64_t one_ = encode_entry(make_entry(1, payload), why_)->size();
  std::string why_;
};

TEST_F(Eviction, LeastRecentlyUsedGoesFirst) {
  for (int n = 1; n <= 6; ++n) publish(n, 1000 * n);
  ASSERT_TRUE(cache_.lookup(make_key(6)));  // used again
  ASSERT_TRUE(cache_.lookup(make_key(4)));
  const auto result = cache_.gc(4 * one_ + one_ / 2);
  EXPECT_THAT(present(), ::testing::ElementsAre(1, 2, 4, 6));
  EXPECT_EQ(result.removed, 2u);
  EXPECT_EQ(result.removed_bytes, 6 * one_ - bytes());
  EXPECT_EQ(result.left_bytes, bytes());
  EXPECT_EQ(cache_.gc(1'000'000).removed, 0u);
}

TEST_F(Eviction, WhatIsInUseStays) {
  for (int n = 1; n <= 4; ++n) publish(n, 1000);
  publish(5, 0);   // a moment ago
  publish(6, 30);  // still a moment ago
  const KeyLock building = cache_.lock(make_key(2));
  ASSERT_TRUE(building.held());
  EXPECT_EQ(cache_.gc(1).spared, 3u);
  EXPECT_THAT(present(), ::testing::ElementsAre(2, 5, 6));
}

TEST_F(Eviction, WhoHasOpenedAnEntryKeepsIt) {
  publish(1, 1000);
  const File reader(::open(cache_.path(make_key(1)).c_str(), O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(cache_.gc(1).removed, 1u);
  std::string bytes(one_, '\0');
  std::string why;
  ASSERT_TRUE(read_fully(reader.get(), bytes.data(), bytes.size()));
  EXPECT_EQ(bytes, *encode_entry(make_entry(1, payload), why));
}

// The clock was a year ahead for a while. Entries used then do not crowd out all later ones.
TEST_F(Eviction, TimesFromTheFutureAreCorrected) {
  constexpr std::int64_t year = 365 * 86400;
  for (int n = 1; n <= 3; ++n) publish(n, -year);
  publish(4, 70);
  publish(5, 10);
  cache_.gc(1'000'000);
  for (int n = 1; n <= 3; ++n) {
    struct stat status;
    ASSERT_EQ(::stat(cache_.path(make_key(n)).c_str(), &status), 0);
    EXPECT_LE(status.st_mtime, now());
  }
  for (int n = 1; n <= 3; ++n) set_used(n, -year);
  cache_.gc(3 * one_);
  const std::vector<int> left = present();
  EXPECT_EQ(left.size(), 2u);
  EXPECT_EQ(left.back(), 5) << "used a moment ago";
  // A use corrects the time as well.
  set_used(5, -year);
  ASSERT_TRUE(cache_.lookup(make_key(5)));
  struct stat status;
  ASSERT_EQ(::stat(cache_.path(make_key(5)).c_str(), &status), 0);
  EXPECT_LE(status.st_mtime, now());
}

// The clock jumps ahead between publishing and the next sweep: every entry looks old, and nothing breaks.
TEST_F(Eviction, AfterAJumpAheadTheNewestStillGoesLast) {
  for (int n = 1; n <= 4; ++n) publish(n, 1'000'000 - n);
  cache_.gc(2 * one_ + one_ / 2);
  EXPECT_THAT(present(), ::testing::ElementsAre(3, 4));
  EXPECT_TRUE(same(cache_.lookup(make_key(4)).value(), make_entry(4, payload)));
}

TEST_F(Eviction, PublishingKeepsToTheCap) {
  const DiskCache small(scratch_.path(), DiskCache::Access::read_write, 10 * one_);
  for (int n = 0; n < 60; ++n) {
    ASSERT_TRUE(small.publish(make_entry(n, payload)));
    set_used(n, 10'000 - n);  // no entry was used within the last minute
    EXPECT_LE(bytes(), 10 * one_ + one_) << n;
  }
  EXPECT_TRUE(small.lookup(make_key(59)));
  EXPECT_GE(present().size(), 8u);
}

// Whoever publishes alone never exceeds the limit: what a sweep leaves bounds the room until the next one.
TEST_F(Eviction, LimitHoldsForOneWriter) {
  const std::uint64_t limit = 64 * one_;
  const DiskCache cache(scratch_.path(), DiskCache::Access::read_write, limit);
  for (int n = 0; n < 72; ++n) {
    ASSERT_TRUE(cache.publish(make_entry(n, payload)));
    set_used(n, 10'000 - n);
    EXPECT_LE(bytes(), limit) << n;
  }
}

// Another process fills the folder while this one still has room of its own: it uses up no more than that.
TEST_F(Eviction, LimitHoldsBesideAnotherWriter) {
  const std::uint64_t limit = 64 * one_;
  const DiskCache ours(scratch_.path(), DiskCache::Access::read_write, limit);
  const DiskCache others(scratch_.path(), DiskCache::Access::read_write, limit);
  const auto publish_to = [&](const DiskCache& cache, int n) {
    ASSERT_TRUE(cache.publish(make_entry(n, payload)));
    set_used(n, 10'000 - n);
  };
  publish_to(ours, 0);
  for (int n = 1; n < 64; ++n) publish_to(others, n);
  for (int n = 64; n < 76; ++n) {
    publish_to(ours, n);
    EXPECT_LE(bytes(), limit + limit / 16 + one_) << n;
  }
}

TEST_F(Eviction, OthersFilesAreNotCounted) {
  publish(1, 1000);
  write_file(cache_.folder() + "/v3/README", std::string(1'000'000, 'x'));
  EXPECT_EQ(cache_.gc(one_).removed, 0u);
}

// Processes publish, look up and sweep with a limit far too small; each gets the entries that it asked for.
TEST_F(Eviction, UnderRace) {
  std::vector<pid_t> children;
  for (int process = 0; process < 4; ++process) {
    children.push_back(start_child([&, process] {
      const DiskCache small(scratch_.path(), DiskCache::Access::read_write, 3 * one_);
      std::mt19937 random(static_cast<unsigned>(process));
      for (int i = 0; i < 60; ++i) {
        const int n = static_cast<int>(random() % 12);
        const auto got = get_or_build(small, make_key(n), [&] { return make_entry(n, payload); });
        FLASHJIT_CHECK(same(got.entry, make_entry(n, payload)));
        const timespec times[] = {{1000, 0}, {1000, 0}};  // old enough to be removed
        ::utimensat(AT_FDCWD, small.path(make_key(n)).c_str(), times, 0);
        small.gc(3 * one_);
      }
      return true;
    }));
  }
  for (const pid_t child : children) EXPECT_TRUE(child_succeeded(child));
  for (const DiskCache::Listing& item : cache_.list(true)) EXPECT_EQ(item.damage, "");
}

TEST(CacheSize, IsANumberOfBytes) {
  EXPECT_TRUE(child_succeeded(start_child([] {
    ::unsetenv("FLASHJIT_CACHE_MAX_BYTES");
    FLASHJIT_CHECK(DiskCache::default_max_bytes() == 1u << 30);
    ::setenv("FLASHJIT_CACHE_MAX_BYTES", "5000000000", 1);
    FLASHJIT_CHECK(DiskCache::default_max_bytes() == 5'000'000'000);
    for (const char* wrong : {"0", "-1", "x", "1 GB", "99999999999999999999"}) {
      ::setenv("FLASHJIT_CACHE_MAX_BYTES", wrong, 1);
      try {
        DiskCache::default_max_bytes();
        FLASHJIT_CHECK(!"accepted");
      } catch (const Error& error) {
        FLASHJIT_CHECK(error.code() == ErrorCode::cache_failed);
      }
    }
    return true;
  })));
}

}  // namespace
}  // namespace flashjit::testing
