// Caches that cannot be written: callers still get their
// kernels, nothing is left behind, and no process dies.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/resource.h>

#include "codegen/base/error.hpp"
#include "tests/cache/support.hpp"

namespace flashjit::testing {
namespace {

using ::testing::HasSubstr;

// Mounts an empty file system of this size for this process only. False if that is not permitted.
bool mount_scratch(const std::string& at, const std::string& size) {
  const uid_t user = ::geteuid();
  const gid_t group = ::getegid();
  if (user != 0) {
    if (::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
    write_file("/proc/self/setgroups", "deny");
    write_file("/proc/self/uid_map", "0 " + std::to_string(user) + " 1");
    write_file("/proc/self/gid_map", "0 " + std::to_string(group) + " 1");
  } else if (::unshare(CLONE_NEWNS) != 0) {
    return false;
  }
  return ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         ::mount("flashjit", at.c_str(), "tmpfs", 0, ("mode=0700,size=" + size).c_str()) == 0;
}

// Runs `body` in a child on a file system of this size; skips the test if none can be mounted.
#define FLASHJIT_RUN_MOUNTED(scratch, size, body)                                                       \
  do {                                                                                                  \
    if (!child_succeeded(start_child([&] { return mount_scratch((scratch).path(), size); }))) {         \
      GTEST_SKIP() << "mounting a scratch file system is not permitted here";                           \
    }                                                                                                   \
    EXPECT_TRUE(                                                                                        \
        child_succeeded(start_child([&] { return mount_scratch((scratch).path(), size) && body(); }))); \
  } while (false)

// Checks a cache that can be read and not written, and that holds entry 1.
bool works_without_writing(const DiskCache& cache, const std::string& reason) {
  const auto found = cache.lookup(make_key(1));
  FLASHJIT_CHECK(found && same(*found, make_entry(1)));
  FLASHJIT_CHECK(!cache.lookup(make_key(2)));
  std::string why;
  FLASHJIT_CHECK(!cache.publish(make_entry(2), &why));
  FLASHJIT_CHECK(contains(why, reason));
  FLASHJIT_CHECK(!cache.lock(make_key(2), std::chrono::minutes(1), &why).held());
  FLASHJIT_CHECK(contains(why, reason));
  const auto built = get_or_build(cache, make_key(2), [] { return make_entry(2); });
  FLASHJIT_CHECK(same(built.entry, make_entry(2)) && !built.from_disk && !built.on_disk);
  FLASHJIT_CHECK(contains(built.why, reason));
  FLASHJIT_CHECK(get_or_build(cache, make_key(1), [] { return CacheEntry(); }).from_disk);
  FLASHJIT_CHECK(cache.list(true).size() == 1);
  try {
    cache.clear();
    FLASHJIT_CHECK(false);
  } catch (const Error& error) {
    FLASHJIT_CHECK(contains(error.message(), reason));
  }
  return true;
}

TEST(Faults, FolderWithoutWritePermission) {
  EXPECT_TRUE(child_succeeded(start_child([] {
    FLASHJIT_CHECK(become_ordinary_user());
    const Scratch scratch;
    const DiskCache cache(scratch / "cache");
    FLASHJIT_CHECK(cache.publish(make_entry(1)));
    std::filesystem::remove(scratch / "cache/v3/lock");
    for (const std::string folder : {"v3/tmp", "v3", ""})
      ::chmod((scratch / "cache/" + folder).c_str(), 0500);
    const bool good = works_without_writing(DiskCache(scratch / "cache"), "Permission denied");
    // A damaged file stays in its place and remains a miss.
    ::chmod(cache.path(make_key(1)).c_str(), 0600);
    write_file(cache.path(make_key(1)), "broken");
    std::string why;
    FLASHJIT_CHECK(!cache.lookup(make_key(1), &why));
    FLASHJIT_CHECK(contains(why, "cannot be used") && !contains(why, "set aside"));
    FLASHJIT_CHECK(get_or_build(cache, make_key(1), [] { return make_entry(1); }).entry.key == make_key(1));
    for (const std::string folder : {"", "v3", "v3/tmp"})
      ::chmod((scratch / "cache/" + folder).c_str(), 0700);
    return good;
  })));
}

TEST(Faults, FolderOfRootReadByAUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "takes root";
  const Scratch scratch;
  ::chmod(scratch.path().c_str(), 0755);
  ::mkdir((scratch / "cache").c_str(), 0755);
  ASSERT_TRUE(DiskCache(scratch / "cache").publish(make_entry(1)));
  EXPECT_TRUE(child_succeeded(start_child([&] {
    return become_ordinary_user() && works_without_writing(DiskCache(scratch / "cache"), "Permission denied");
  })));
}

TEST(Faults, UnreadableEntryIsAMissAndStays) {
  EXPECT_TRUE(child_succeeded(start_child([] {
    FLASHJIT_CHECK(become_ordinary_user());
    const Scratch scratch;
    const DiskCache cache(scratch.path());
    FLASHJIT_CHECK(cache.publish(make_entry(1)));
    ::chmod(cache.path(make_key(1)).c_str(), 0);
    std::string why;
    FLASHJIT_CHECK(!cache.lookup(make_key(1), &why));
    FLASHJIT_CHECK(contains(why, "Permission denied"));
    FLASHJIT_CHECK(std::filesystem::exists(cache.path(make_key(1))));
    return true;
  })));
}

TEST(Faults, ReadOnlyFileSystem) {
  const Scratch scratch;
  FLASHJIT_RUN_MOUNTED(scratch, "1m", [&] {
    const DiskCache cache(scratch / "cache");
    FLASHJIT_CHECK(cache.publish(make_entry(1)));
    FLASHJIT_CHECK(::mount(nullptr, scratch.path().c_str(), nullptr, MS_REMOUNT | MS_RDONLY, nullptr) == 0);
    FLASHJIT_CHECK(works_without_writing(cache, "Read-only file system"));
    FLASHJIT_CHECK(works_without_writing(DiskCache(scratch / "cache"), "Read-only file system"));
    try {
      const DiskCache missing(scratch / "missing");
      FLASHJIT_CHECK(false);
    } catch (const Error& error) {
      FLASHJIT_CHECK(error.code() == ErrorCode::cache_failed &&
                     contains(error.message(), "Read-only file system"));
    }
    return true;
  });
}

TEST(Faults, FullDisk) {
  const Scratch scratch;
  FLASHJIT_RUN_MOUNTED(scratch, "64k", [&] {
    const DiskCache cache(scratch / "cache");
    std::string why;
    FLASHJIT_CHECK(!cache.publish(make_entry(1, 200'000), &why));
    FLASHJIT_CHECK(contains(why, "No space left on device"));
    FLASHJIT_CHECK(names_in(scratch / "cache/v3/tmp").empty());
    FLASHJIT_CHECK(cache.list(true).empty());
    const auto built = get_or_build(cache, make_key(1), [] { return make_entry(1, 200'000); });
    FLASHJIT_CHECK(same(built.entry, make_entry(1, 200'000)) && !built.on_disk);

    // Publishes until the disk is full to the last block: stored entries stay undamaged.
    int stored = 0;
    while (cache.publish(make_entry(stored, 5'000))) ++stored;
    FLASHJIT_CHECK(stored > 2 && stored < 64);
    FLASHJIT_CHECK(names_in(scratch / "cache/v3/tmp").empty());
    for (int n = 0; n < stored; ++n)
      FLASHJIT_CHECK(same(cache.lookup(make_key(n)).value(), make_entry(n, 5'000)));
    FLASHJIT_CHECK(!cache.lookup(make_key(stored)));
    FLASHJIT_CHECK(cache.clear() == static_cast<std::size_t>(stored));
    FLASHJIT_CHECK(cache.publish(make_entry(1)));
    return true;
  });
}

TEST(Faults, FileSizeLimit) {
  EXPECT_TRUE(child_succeeded(start_child([] {
    const Scratch scratch;
    const DiskCache cache(scratch.path());
    const rlimit limit = {4096, 4096};
    // SIGXFSZ keeps its default, which ends the process.
    FLASHJIT_CHECK(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
    std::string why;
    FLASHJIT_CHECK(!cache.publish(make_entry(1, 200'000), &why));
    FLASHJIT_CHECK(contains(why, "File too large"));
    FLASHJIT_CHECK(names_in(scratch / "v3/tmp").empty());
    FLASHJIT_CHECK(cache.publish(make_entry(1)));
    return true;
  })));
}

TEST(Faults, NoFileDescriptorsLeft) {
  EXPECT_TRUE(child_succeeded(start_child([] {
    const Scratch scratch;
    const DiskCache cache(scratch.path());
    FLASHJIT_CHECK(cache.publish(make_entry(1)));
    const rlimit limit = {16, 16};
    FLASHJIT_CHECK(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
    std::vector<int> taken;
    for (int file; (file = ::open("/dev/null", O_RDONLY)) >= 0;) taken.push_back(file);
    // With no or few descriptors left, each operation fails somewhere else; none throws or leaks.
    for (; !taken.empty(); taken.pop_back()) {
      const auto result = get_or_build(cache, make_key(1), [] { return make_entry(1); });
      FLASHJIT_CHECK(same(result.entry, make_entry(1)));
      cache.publish(make_entry(2));
      cache.list(true);
      ::close(taken.back());
    }
    FLASHJIT_CHECK(cache.lookup(make_key(1)) && cache.lookup(make_key(2)));
    FLASHJIT_CHECK(names_in(scratch / "v3/tmp").empty());
    return true;
  })));
}

TEST(Faults, EntryBeyondTheFormat) {
  const Scratch scratch;
  const DiskCache cache(scratch.path());
  CacheEntry entry = make_entry(1);
  entry.key.add("long", std::string(2 << 20, 'x'));
  std::string why;
  EXPECT_FALSE(cache.publish(entry, &why));
  EXPECT_THAT(why, HasSubstr("larger than the format allows"));
}

}  // namespace
}  // namespace flashjit::testing
