// Folders that others could write to are refused, however a path leads there.
#include "cache/trust.hpp"

#include <gmock/gmock.h>

#include "codegen/base/error.hpp"
#include "tests/cache/support.hpp"

namespace flashjit::testing {
namespace {

using ::testing::HasSubstr;

// Why a cache in this folder is refused; empty if it is not.
std::string refusal(const std::string& folder) {
  try {
    const DiskCache cache(folder);
    return {};
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::cache_failed);
    EXPECT_THAT(error.message(), HasSubstr("FLASHJIT_CACHE_DIR"));  // the message says what would work
    return error.message();
  }
}

std::string make_folder(const std::string& path, mode_t mode) {
  std::filesystem::create_directories(path);
  EXPECT_EQ(::chmod(path.c_str(), mode), 0);
  return path;
}

TEST(Trust, ModeOfTheFolder) {
  const Scratch scratch;
  EXPECT_THAT(refusal(make_folder(scratch / "all", 0777)), HasSubstr("others may write to it (mode 0777)"));
  EXPECT_THAT(refusal(make_folder(scratch / "group", 0770)), HasSubstr("chmod go-w"));
  EXPECT_THAT(refusal(make_folder(scratch / "sticky", 01777)), HasSubstr("others may write"));
  EXPECT_EQ(refusal(make_folder(scratch / "readable", 0755)), "");
  EXPECT_EQ(refusal(make_folder(scratch / "private", 0700)), "");
}

// Another writable folder does not mend what is wrong with one of prebuilt kernels.
TEST(Trust, LayersHaveARemedyOfTheirOwn) {
  const Scratch scratch;
  for (const std::string& folder : {make_folder(scratch / "all", 0777), scratch / "missing"}) {
    try {
      const DiskCache cache(folder, DiskCache::Access::read_only);
      ADD_FAILURE() << folder;
    } catch (const Error& error) {
      EXPECT_THAT(error.message(), HasSubstr("FLASHJIT_CACHE_PATH"));
      EXPECT_THAT(error.message(), ::testing::Not(HasSubstr("FLASHJIT_CACHE_DIR")));
    }
  }
}

TEST(Trust, FoldersOnTheWay) {
  const Scratch scratch;
  make_folder(scratch / "all/cache", 0700);
  make_folder(scratch / "all", 0777);
  EXPECT_THAT(refusal(scratch / "all/cache"), HasSubstr("everybody may rename what is in"));
  EXPECT_THAT(refusal(scratch / "all/new"), HasSubstr("everybody may rename what is in"));
  EXPECT_FALSE(std::filesystem::exists(scratch / "all/new"));
  EXPECT_THAT(refusal(scratch / "all/../cache"), HasSubstr("everybody may rename what is in"));
  make_folder(scratch / "all", 01777);  // like /tmp
  EXPECT_EQ(refusal(scratch / "all/cache"), "");
  make_folder(scratch / "all", 0775);  // writable by a group, as umask 002 makes them
  EXPECT_EQ(refusal(scratch / "all/cache"), "");
}

TEST(Trust, SymbolicLinks) {
  const Scratch scratch;
  make_folder(scratch / "good", 0700);
  make_folder(scratch / "all/inside", 0700);
  make_folder(scratch / "all", 0777);
  std::filesystem::create_symlink("good", scratch / "to-good");
  std::filesystem::create_symlink(scratch / "all", scratch / "to-all");
  std::filesystem::create_symlink("loop", scratch / "loop");
  EXPECT_EQ(refusal(scratch / "to-good"), "");
  EXPECT_EQ(DiskCache(scratch / "to-good/./x/../y").folder(),
            std::filesystem::canonical(scratch.path()).string() + "/good/y");
  EXPECT_THAT(refusal(scratch / "to-all"), HasSubstr("others may write"));
  EXPECT_THAT(refusal(scratch / "to-all/inside"), HasSubstr("everybody may rename what is in"));
  EXPECT_THAT(refusal(scratch / "loop"), HasSubstr("cannot follow"));
}

TEST(Trust, OtherOwners) {
  if (::geteuid() != 0) GTEST_SKIP() << "giving files to another user takes root";
  const Scratch scratch;
  const std::string theirs = make_folder(scratch / "theirs", 0700);
  ASSERT_EQ(::chown(theirs.c_str(), 65534, 65534), 0);
  EXPECT_THAT(refusal(theirs), HasSubstr("belongs to user 65534"));

  make_folder(scratch / "shared", 01777);
  make_folder(scratch / "good", 0700);
  std::filesystem::create_symlink(scratch / "good", scratch / "shared/link");
  EXPECT_EQ(refusal(scratch / "shared/link"), "");
  ASSERT_EQ(::lchown((scratch / "shared/link").c_str(), 65534, 65534), 0);
  EXPECT_THAT(refusal(scratch / "shared/link"), HasSubstr("symbolic link of another user"));

  // An entry of another user in a folder of ours.
  const DiskCache cache(scratch / "good");
  ASSERT_TRUE(cache.publish(make_entry(1)));
  ASSERT_EQ(::chown(cache.path(make_key(1)).c_str(), 65534, 65534), 0);
  std::string why;
  EXPECT_FALSE(cache.lookup(make_key(1), &why));
  EXPECT_THAT(why, HasSubstr("belongs to user 65534"));
}

TEST(Trust, NotAFolder) {
  const Scratch scratch;
  write_file(scratch / "file", "");
  EXPECT_THAT(refusal(scratch / "file"), HasSubstr("is not a folder"));
  EXPECT_THAT(refusal(scratch / "file/below"), HasSubstr("is not a folder"));
  EXPECT_THAT(refusal(""), HasSubstr("not a path"));
  EXPECT_THAT(refusal("/proc/flashjit"), HasSubstr("cannot make"));
}

TEST(Trust, RelativePaths) {
  const Scratch scratch;
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(scratch.path());
  const DiskCache cache("here");
  std::filesystem::current_path(before);
  EXPECT_TRUE(cache.publish(make_entry(1)));
  EXPECT_TRUE(std::filesystem::exists(scratch / "here/v3"));
}

// A folder that was safe at the start is checked again at every use.
TEST(Trust, ChangesWhileInUse) {
  const Scratch scratch;
  const DiskCache cache(scratch / "cache");
  ASSERT_TRUE(cache.publish(make_entry(1)));
  const auto expect_refused = [&cache](const std::string& reason) {
    std::string why;
    EXPECT_FALSE(cache.lookup(make_key(1), &why));
    EXPECT_THAT(why, HasSubstr(reason));
    EXPECT_FALSE(cache.publish(make_entry(1), &why));
    EXPECT_THAT(why, HasSubstr(reason));
    EXPECT_FALSE(cache.lock(make_key(1), std::chrono::milliseconds(0), &why).held());
    EXPECT_THAT(why, HasSubstr(reason));
  };
  make_folder(scratch / "cache", 0777);
  expect_refused("others may write to it");
  make_folder(scratch / "cache", 0700);
  make_folder(scratch / "cache/v3", 0777);
  expect_refused("others may write to it");
  make_folder(scratch / "cache/v3", 0700);
  EXPECT_TRUE(cache.lookup(make_key(1)));

  // Entries that are reached through a link out of the cache.
  std::filesystem::rename(scratch / "cache/v3", scratch / "outside");
  std::filesystem::create_symlink(scratch / "outside", scratch / "cache/v3");
  expect_refused("Not a directory");
  std::filesystem::rename(scratch / "cache", scratch / "moved");
  std::filesystem::create_symlink(scratch / "moved", scratch / "cache");
  expect_refused("Not a directory");
}

}  // namespace
}  // namespace flashjit::testing
