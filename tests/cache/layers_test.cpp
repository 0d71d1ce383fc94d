// Prebuilt kernels are found by their request, in folders that are never written to.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <map>

#include "cache/kernel_key.hpp"
#include "codegen/base/error.hpp"
#include "tests/cache/support.hpp"

namespace flashjit::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Entry n as this compiler would make it.
CacheEntry made_by(int n, const std::string& compiler) {
  CacheEntry entry = make_entry(n);
  CacheKey request;
  request.add("spec", "spec " + std::to_string(n));
  entry.key = entry_key(request, "-O2", compiler);
  return entry;
}

CacheKey request(int n) {
  return request_of(make_key(n));
}

void set_written(const std::string& path, int seconds_ago) {
  const timespec now = {::time(nullptr) - seconds_ago, 0};
  const timespec times[] = {now, now};
  ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
}

TEST(Request, LeadsToTheNewestEntryOfAnyCompiler) {
  const Scratch scratch;
  const DiskCache cache(scratch.path());
  EXPECT_FALSE(cache.lookup_request(request(1)));
  for (const char* compiler : {"a", "b", "c"}) ASSERT_TRUE(cache.publish(made_by(1, compiler)));
  ASSERT_TRUE(cache.publish(made_by(2, "d")));
  set_written(cache.path(made_by(1, "a").key), 200);
  set_written(cache.path(made_by(1, "b").key), 100);
  set_written(cache.path(made_by(1, "c").key), 300);
  EXPECT_EQ(cache.lookup_request(request(1))->key, made_by(1, "b").key);
  EXPECT_EQ(cache.lookup_request(request(2))->key, made_by(2, "d").key);
  EXPECT_FALSE(cache.lookup_request(request(3)));
}

TEST(Request, DamageFallsBackToTheNextOne) {
  const Scratch scratch;
  const DiskCache cache(scratch.path());
  for (const char* compiler : {"a", "b"}) ASSERT_TRUE(cache.publish(made_by(1, compiler)));
  set_written(cache.path(made_by(1, "a").key), 100);
  write_file(cache.path(made_by(1, "b").key), "broken");
  std::string why;
  EXPECT_EQ(cache.lookup_request(request(1), &why)->key, made_by(1, "a").key);
  EXPECT_THAT(why, HasSubstr("was set aside")) << "said, although another was found";
  EXPECT_FALSE(std::filesystem::exists(cache.path(made_by(1, "b").key)));
  // An undamaged entry under another entry's name.
  std::filesystem::rename(cache.path(made_by(1, "a").key), cache.path(made_by(1, "c").key));
  EXPECT_FALSE(cache.lookup_request(request(1), &why));
  EXPECT_THAT(why, HasSubstr("another key"));
}

TEST(Layer, IsNeverWrittenTo) {
  const Scratch scratch;
  const DiskCache cache(scratch.path());
  for (int n = 1; n <= 3; ++n) ASSERT_TRUE(cache.publish(make_entry(n)));
  write_file(cache.path(make_key(2)), std::string(1000, 'x'));
  for (int n = 1; n <= 3; ++n) set_written(cache.path(make_key(n)), 100'000);
  const auto state = [&] {
    std::map<std::string, std::int64_t> times;
    for (const auto& item : std::filesystem::recursive_directory_iterator(scratch.path())) {
      struct stat status;
      if (::lstat(item.path().c_str(), &status) == 0) times[item.path()] = status.st_ctim.tv_nsec;
    }
    return times;
  };
  const auto before = state();
  const DiskCache layer(scratch.path(), DiskCache::Access::read_only);
  EXPECT_TRUE(same(layer.lookup_request(request(1)).value(), make_entry(1)));
  EXPECT_TRUE(same(layer.lookup(make_key(3)).value(), make_entry(3)));
  std::string why;
  EXPECT_FALSE(layer.lookup_request(request(2), &why));
  EXPECT_THAT(why, HasSubstr(".kernel cannot be used: not a flashjit entry"));
  EXPECT_FALSE(layer.lookup(make_key(2)));
  EXPECT_EQ(state(), before);
}

TEST(Layer, IsRefusedWhereItIsMissingOrOthersCanWrite) {
  const Scratch scratch;
  const auto refusal = [&](const std::string& folder) -> std::string {
    try {
      const DiskCache layer(folder, DiskCache::Access::read_only);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::cache_failed);
      return error.message();
    }
    return {};
  };
  EXPECT_THAT(refusal(scratch / "missing"), HasSubstr("No such file"));
  EXPECT_FALSE(std::filesystem::exists(scratch / "missing"));
  ::mkdir((scratch / "open").c_str(), 0700);
  ::chmod((scratch / "open").c_str(), 0777);
  EXPECT_THAT(refusal(scratch / "open"), HasSubstr("others may write"));
  ::chmod((scratch / "open").c_str(), 0755);
  EXPECT_THAT(refusal(scratch / "open"), IsEmpty());
  // A folder that was safe at the start is checked again at every use.
  const DiskCache cache(scratch / "open");
  ASSERT_TRUE(cache.publish(make_entry(1)));
  const DiskCache layer(scratch / "open", DiskCache::Access::read_only);
  ::chmod((scratch / "open").c_str(), 0775);
  std::string why;
  EXPECT_FALSE(layer.lookup_request(request(1), &why));
  EXPECT_THAT(why, HasSubstr("others may write"));
}

}  // namespace
}  // namespace flashjit::testing
