#include "cache/disk_cache.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <thread>

#include "codegen/base/error.hpp"
#include "tests/cache/support.hpp"

namespace flashjit::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(DiskCache, RoundTrip) {
  const Scratch scratch;
  const DiskCache cache(scratch / "a/b/cache");
  const CacheEntry entry = make_entry(1, 60'000);
  std::string why = "?";
  EXPECT_FALSE(cache.lookup(entry.key, &why));
  EXPECT_EQ(why, "");
  ASSERT_TRUE(cache.publish(entry, &why)) << why;
  const auto found = DiskCache(scratch / "a/b/cache").lookup(entry.key, &why);
  ASSERT_TRUE(found) << why;
  EXPECT_TRUE(same(*found, entry));
  EXPECT_TRUE(std::filesystem::is_regular_file(cache.path(entry.key)));
  EXPECT_THAT(names_in(cache.folder() + "/v3/tmp"), IsEmpty());
  struct stat status;
  ASSERT_EQ(::stat(cache.folder().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0700u);
}

TEST(DiskCache, EmptyPartsAndLatestWins) {
  const Scratch scratch;
  const DiskCache cache(scratch.path());
  const CacheEntry nothing{make_key(1), "", ""};
  ASSERT_TRUE(cache.publish(nothing));
  EXPECT_TRUE(same(cache.lookup(nothing.key).value(), nothing));
  ASSERT_TRUE(cache.publish(make_entry(1)));
  EXPECT_TRUE(same(cache.lookup(nothing.key).value(), make_entry(1)));
}

// Tests that replace an entry's file by something that is not that entry.
class Damage : public ::testing::Test {
 protected:
  Damage() : cache_(scratch_.path()), entry_(make_entry(1)) {
    EXPECT_TRUE(cache_.publish(entry_));
    good_ = read_file(path());
  }
  std::string path() const { return cache_.path(entry_.key); }

  // The file is a miss with a reason, is gone from its place, and the entry can be built anew.
  void expect_set_aside(const std::string& reason) {
    std::string why;
    EXPECT_FALSE(cache_.lookup(entry_.key, &why)) << reason;
    EXPECT_THAT(why, HasSubstr("set aside"));
    EXPECT_THAT(why, HasSubstr(reason));
    EXPECT_FALSE(std::filesystem::exists(std::filesystem::symlink_status(path()))) << reason;
    EXPECT_FALSE(names_in(cache_.folder() + "/v3/quarantine").empty());
    EXPECT_FALSE(cache_.lookup(entry_.key, &why));
    EXPECT_EQ(why, "");
  }

  Scratch scratch_;
  DiskCache cache_;
  CacheEntry entry_;
  std::string good_;
};

TEST_F(Damage, EveryTruncation) {
  for (std::size_t size = 0; size < good_.size(); ++size) {
    write_file(path(), good_.substr(0, size));
    expect_set_aside("");
  }
  write_file(path(), good_ + '\0');
  expect_set_aside("do not add up");
  EXPECT_LE(names_in(cache_.folder() + "/v3/quarantine").size(), 16u);
  ASSERT_TRUE(cache_.publish(entry_));
  EXPECT_TRUE(same(cache_.lookup(entry_.key).value(), entry_));
}

TEST_F(Damage, EveryByteFlipped) {
  std::mt19937 random(test_seed());
  for (std::size_t at = 0; at < good_.size(); ++at) {
    std::string bytes = good_;
    bytes[at] = static_cast<char>(bytes[at] ^ 1 << random() % 8);
    write_file(path(), bytes);
    expect_set_aside("");
  }
}

TEST_F(Damage, ZeroLengthForeignAndOtherVersion) {
  write_file(path(), "");
  expect_set_aside("empty file");
  write_file(path(), std::string(4096, 'x'));
  expect_set_aside("not a flashjit entry");
  std::string bytes = good_;
  bytes[8] = 9;
  write_file(path(), bytes);
  expect_set_aside("format version 9 instead of 3");
  ASSERT_TRUE(cache_.publish(make_entry(2)));
  std::filesystem::rename(cache_.path(make_key(2)), path());
  expect_set_aside("holds another key");
}

TEST_F(Damage, NotARegularFile) {
  std::filesystem::remove(path());
  write_file(scratch_ / "elsewhere", good_);
  std::filesystem::create_symlink(scratch_ / "elsewhere", path());
  expect_set_aside("not a regular file");
  EXPECT_EQ(read_file(scratch_ / "elsewhere"), good_);  // the link was moved, not its target

  ASSERT_EQ(::mkfifo(path().c_str(), 0600), 0);
  expect_set_aside("not a regular file");

  std::filesystem::create_directory(path());
  expect_set_aside("not a regular file");
}

TEST_F(Damage, FileThatOthersMayWrite) {
  ASSERT_EQ(::chmod(path().c_str(), 0666), 0);
  expect_set_aside("others may write to it");
}

TEST_F(Damage, HugeSizesAllocateNothing) {
  // A sparse file of 1 TiB whose header claims 4 GiB in every part.
  std::string bytes = good_.substr(0, 12) + std::string(12, '\xff') + good_.substr(24);
  write_file(path(), bytes);
  expect_set_aside("do not add up");
  write_file(path(), bytes);
  if (::truncate(path().c_str(), off_t{1} << 40) == 0) expect_set_aside("do not add up");
}

// A reader that finds an entry damaged must leave a good file
// alone that another process has meanwhile put in its place.
TEST_F(Damage, ReplacedWhileBeingRead) {
  // The file is so large that it is still being read when this
  // thread acts. Its last byte does not match the checksum.
  CacheEntry large{entry_.key, "", std::string(std::size_t{32} << 20, '\0')};
  large.payload.back() = 1;
  std::string why;
  const std::string bytes = encode_entry(large, why).value();
  std::filesystem::rename(path(), scratch_ / "good");
  write_file(path(), bytes.substr(0, bytes.size() - large.payload.size()));
  std::filesystem::resize_file(path(), bytes.size());

  std::thread reader([this] { EXPECT_FALSE(cache_.lookup(entry_.key)); });
  const auto being_read = [this] {
    std::error_code gone;
    for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
      if (std::filesystem::read_symlink(file, gone) == path()) return true;
    }
    return false;
  };
  while (!being_read() && std::filesystem::exists(path())) {
  }
  std::filesystem::rename(scratch_ / "good", path());
  reader.join();
  EXPECT_TRUE(same(cache_.lookup(entry_.key, &why).value(), entry_)) << why;
}

TEST_F(Damage, ListingNamesItAndMovesNothing) {
  ASSERT_TRUE(cache_.publish(make_entry(2)));
  ASSERT_TRUE(cache_.publish(make_entry(3)));
  std::string bytes = good_;
  bytes.back() = static_cast<char>(bytes.back() ^ 1);  // in the payload
  write_file(path(), bytes);
  write_file(cache_.path(make_key(2)), "foreign");
  write_file(cache_.folder() + "/v3/README", "not an entry");

  for (const bool verify : {false, true}) {
    int good = 0, damaged = 0;
    for (const DiskCache::Listing& item : cache_.list(verify)) {
      EXPECT_EQ(item.entry.has_value(), item.damage.empty());
      EXPECT_EQ(item.size, std::filesystem::file_size(item.path));
      ++(item.entry ? good : damaged);
      if (item.entry) {
        EXPECT_EQ(item.path, cache_.path(item.entry->key));
        EXPECT_EQ(item.entry->payload, "");
      }
    }
    EXPECT_EQ(good, verify ? 1 : 2);
    EXPECT_EQ(damaged, verify ? 2 : 1);
  }
  EXPECT_FALSE(std::filesystem::exists(cache_.folder() + "/v3/quarantine"));
}

TEST_F(Damage, ClearRemovesOursOnly) {
  write_file(path(), "broken");
  expect_set_aside("");
  ASSERT_TRUE(cache_.publish(make_entry(2)));
  ASSERT_TRUE(cache_.publish(make_entry(3)));
  write_file(cache_.folder() + "/v3/tmp/of a dead writer", "partial");
  write_file(cache_.folder() + "/v3/README", "not ours");
  write_file(cache_.folder() + "/notes", "not ours");
  const std::string other_version =
      cache_.folder() + "/v1000/" + std::filesystem::path(path()).filename().string();
  std::filesystem::create_directory(cache_.folder() + "/v1000");
  write_file(other_version, "another version's");
  EXPECT_EQ(cache_.clear(), 4u);
  EXPECT_THAT(cache_.list(true), IsEmpty());
  EXPECT_THAT(names_in(cache_.folder() + "/v3/quarantine"), IsEmpty());
  EXPECT_TRUE(std::filesystem::exists(cache_.folder() + "/v3/README"));
  EXPECT_TRUE(std::filesystem::exists(cache_.folder() + "/notes"));
  EXPECT_TRUE(std::filesystem::exists(other_version));
  EXPECT_EQ(cache_.clear(), 0u);
}

TEST_F(Damage, AnotherVersionsFolderIsLeftAlone) {
  std::filesystem::create_directory(cache_.folder() + "/v3");
  std::string bytes = good_;
  bytes[8] = 9;
  const std::string theirs = cache_.folder() + "/v3/" + entry_.key.digest() + ".kernel";
  write_file(theirs, bytes);
  std::filesystem::remove(path());
  std::string why;
  EXPECT_FALSE(cache_.lookup(entry_.key, &why));
  EXPECT_EQ(why, "");
  EXPECT_EQ(read_file(theirs), bytes);
}

TEST(DiskCache, GetOrBuild) {
  const Scratch scratch;
  const DiskCache cache(scratch.path());
  int builds = 0;
  const auto build = [&builds] {
    ++builds;
    return make_entry(1);
  };
  const auto first = get_or_build(cache, make_key(1), build);
  EXPECT_FALSE(first.from_disk);
  EXPECT_TRUE(first.on_disk);
  EXPECT_TRUE(same(first.entry, make_entry(1)));
  const auto second = get_or_build(cache, make_key(1), build);
  EXPECT_TRUE(second.from_disk);
  EXPECT_TRUE(same(second.entry, make_entry(1)));
  EXPECT_EQ(builds, 1);

  write_file(cache.path(make_key(1)), "broken");
  const auto third = get_or_build(cache, make_key(1), build);
  EXPECT_FALSE(third.from_disk);
  EXPECT_THAT(third.why, HasSubstr("set aside"));
  EXPECT_EQ(builds, 2);

  // A failed build frees the key.
  EXPECT_THROW(
      get_or_build(cache, make_key(2), []() -> CacheEntry { throw Error(ErrorCode::compile_failed, "no"); }),
      Error);
  EXPECT_TRUE(cache.lock(make_key(2), std::chrono::milliseconds(0)).held());
}

TEST(DiskCache, SurvivesRemovalOfItsFolder) {
  const Scratch scratch;
  const DiskCache cache(scratch / "cache");
  ASSERT_TRUE(cache.publish(make_entry(1)));
  std::filesystem::remove_all(scratch / "cache");
  EXPECT_FALSE(cache.lookup(make_key(1)));
  std::string why;
  EXPECT_TRUE(cache.publish(make_entry(1), &why)) << why;
  EXPECT_TRUE(cache.lookup(make_key(1)));
}

TEST(DiskCache, DefaultFolder) {
  const auto folder = [](const char* own, const char* xdg, const char* home) {
    const auto set = [](const char* name, const char* value) {
      if (value) {
        ::setenv(name, value, 1);
      } else {
        ::unsetenv(name);
      }
    };
    set("FLASHJIT_CACHE_DIR", own);
    set("XDG_CACHE_HOME", xdg);
    set("HOME", home);
    return DiskCache::default_folder();
  };
  EXPECT_EQ(folder("/own", "/xdg", "/home/a"), "/own");
  EXPECT_EQ(folder(nullptr, "/xdg", "/home/a"), "/xdg/flashjit");
  EXPECT_EQ(folder("", "/xdg", "/home/a"), "/xdg/flashjit");
  EXPECT_EQ(folder(nullptr, "relative", "/home/a"), "/home/a/.cache/flashjit");
  EXPECT_EQ(folder(nullptr, "", "/home/a"), "/home/a/.cache/flashjit");
  EXPECT_EQ(folder(nullptr, nullptr, nullptr), "");
}

}  // namespace
}  // namespace flashjit::testing
