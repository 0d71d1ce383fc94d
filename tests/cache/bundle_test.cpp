// Export and import: exports are plain tars, and imports store only verified files.
#include <fcntl.h>
#include <gmock/gmock.h>

#include "cache/bundle.hpp"
#include "cache/kernel_entry.hpp"
#include "codegen/base/error.hpp"
#include "tests/cache/support.hpp"

namespace flashjit::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

CacheEntry kernel_entry(int n) {
  KernelSource source;
  source.target = Target::parse("x86-64-v3");
  source.config = {.block_m = 48, .block_n = 64, .num_stages = 1, .num_warps = 1};
  source.steps = {{.function = "flashjit_forward", .threads = 0, .shared_memory = 0, .scratch = 64}};
  CompiledKernel compiled;
  compiled.code = make_entry(n, 700).payload;
  return pack_kernel(make_key(n), compiled, source);
}

TuneRecord record(const std::string& device) {
  TuneRecord r;
  r.key = {R"({"op": "forward"})", "x86-64-v3", device, {1, 64, 64, 2, 1}};
  r.chosen = r.heuristic = {.block_m = 48, .block_n = 64, .num_stages = 1, .num_warps = 1};
  r.shape = r.key.bucket;
  r.candidates = {{r.chosen, Verdict::measured, "", {1.5, 1.25}}};
  return r;
}

ByteSink to(std::string& archive) {
  return [&archive](const char* from, std::size_t size) {
    archive.append(from, size);
    return true;
  };
}

ByteSource from(const std::string& archive, std::size_t& at) {
  return [&archive, &at](char* bytes, std::size_t size) {
    if (size > archive.size() - at) return false;
    archive.copy(bytes, size, at);
    at += size;
    return true;
  };
}

Imported import(const DiskCache& cache, const std::string& archive) {
  std::size_t at = 0;
  return import_bundle(cache, from(archive, at));
}

struct Bundle : ::testing::Test {
  Bundle() : source(scratch / "source"), target(scratch / "target") {
    for (int n = 1; n <= 3; ++n) EXPECT_TRUE(source.publish(kernel_entry(n)));
    EXPECT_TRUE(TuneStore(source.folder()).publish(record("NVIDIA H200")));
  }
  std::string exported() const {
    std::string archive;
    export_bundle(source, to(archive));
    return archive;
  }
  // An archive with this one member.
  std::string with(const std::string& name, const std::string& content, char type = '0') const {
    std::string archive;
    EXPECT_TRUE(write_member(to(archive), name, content));
    set_type(archive, type);
    EXPECT_TRUE(write_archive_end(to(archive)));
    return archive;
  }
  // Sets the first member's type and corrects its checksum.
  static void set_type(std::string& archive, char type) {
    archive[156] = type;
    std::fill_n(archive.begin() + 148, 8, ' ');
    unsigned sum = 0;
    for (int i = 0; i < 512; ++i) sum += static_cast<unsigned char>(archive[i]);
    char text[8];
    std::snprintf(text, sizeof text, "%06o", sum);
    archive.replace(148, 7, text, 7);
  }
  std::string name_of(const CacheKey& key) const {
    return source.path(key).substr(source.folder().size() + 1);
  }
  void expect_refused(const std::string& archive, const std::string& reason) {
    const Imported result = import(target, archive);
    EXPECT_EQ(result.entries + result.records, 0u) << reason;
    ASSERT_THAT(result.refused, SizeIs(1)) << reason;
    EXPECT_THAT(result.refused[0], HasSubstr(reason));
    EXPECT_EQ(result.damage, "");
    EXPECT_THAT(target.list(true), IsEmpty());
  }

  const Scratch scratch;
  const DiskCache source, target;
};

TEST_F(Bundle, RoundTrip) {
  std::string archive;
  const Exported exported = export_bundle(source, to(archive));
  EXPECT_EQ(exported.entries, 3u);
  EXPECT_EQ(exported.records, 1u);
  EXPECT_THAT(exported.left_out, IsEmpty());
  const Imported imported = import(target, archive);
  EXPECT_EQ(imported.entries, 3u);
  EXPECT_EQ(imported.records, 1u);
  EXPECT_THAT(imported.refused, IsEmpty());
  EXPECT_EQ(imported.damage, "");
  for (int n = 1; n <= 3; ++n) EXPECT_TRUE(same(target.lookup(make_key(n)).value(), kernel_entry(n)));
  const auto found = TuneStore(target.folder()).lookup(record("NVIDIA H200").key, {});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->record, record("NVIDIA H200"));
  EXPECT_EQ(exported.entries, 3u);
  std::string again;
  export_bundle(target, to(again));
  EXPECT_TRUE(again == archive) << "the same content, the same bytes";
}

TEST_F(Bundle, IsAPlainTar) {
  if (std::system("tar --version >/dev/null 2>&1") != 0) GTEST_SKIP() << "no tar";
  write_file(scratch / "bundle.tar", exported());
  const std::string unpacked = scratch / "unpacked";
  ::mkdir(unpacked.c_str(), 0700);
  ASSERT_EQ(std::system(("tar xf " + (scratch / "bundle.tar") + " -C " + unpacked).c_str()), 0);
  // A folder unpacked by tar is a cache; a folder packed by tar can be imported.
  EXPECT_THAT(DiskCache(unpacked).list(true), SizeIs(3));
  ASSERT_EQ(std::system(("tar cf " + (scratch / "ours.tar") + " -C " + unpacked + " v3 tune").c_str()), 0);
  const Imported imported = import(target, read_file(scratch / "ours.tar"));
  EXPECT_EQ(imported.entries, 3u);
  EXPECT_EQ(imported.records, 1u);
  EXPECT_THAT(imported.refused, IsEmpty());
}

TEST_F(Bundle, LongNamesAreSplit) {
  const std::string device(200, 'd');
  ASSERT_TRUE(TuneStore(source.folder()).publish(record(device)));
  EXPECT_EQ(import(target, exported()).records, 2u);
  std::string archive;
  EXPECT_FALSE(write_member(to(archive), std::string(101, 'x'), ""));
  EXPECT_FALSE(write_member(to(archive), std::string(200, 'x') + "/" + "y", ""));
  EXPECT_FALSE(write_member(to(archive), "", ""));
}

TEST_F(Bundle, DamagedFilesAreNotExported) {
  std::string bytes = read_file(source.path(make_key(2)));
  bytes.back() ^= 1;
  write_file(source.path(make_key(2)), bytes);
  std::string archive;
  const Exported exported = export_bundle(source, to(archive));
  EXPECT_EQ(exported.entries, 2u);
  ASSERT_THAT(exported.left_out, SizeIs(1));
  EXPECT_THAT(exported.left_out[0], HasSubstr("checksum of the payload"));
  EXPECT_EQ(import(target, archive).entries, 2u);
}

TEST_F(Bundle, RefusesEachWithItsReason) {
  const std::string good = read_file(source.path(make_key(1))), name = name_of(make_key(1));
  ASSERT_EQ(import(DiskCache(scratch / "other"), with(name, good)).entries, 1u);
  expect_refused(with("../" + name, good), "a path that climbs out");
  expect_refused(with("v3/../../" + name, good), "a path that climbs out");
  expect_refused(with("/" + name, good), "an absolute path");
  expect_refused(with(name, good, '1'), "a link");
  expect_refused(with(name, good, '2'), "a link");
  expect_refused(with(name, good, '3'), "not a regular file");
  expect_refused(with(name, good, '6'), "not a regular file");
  expect_refused(with("v1/" + name.substr(3), good), "not of a cache of this version");
  expect_refused(with("README", "text"), "not of a cache of this version");
  expect_refused(with("v3/lock", ""), "empty file");
  expect_refused(with(name_of(make_key(2)), good), "holds another key");
  expect_refused(with("v3/tmp/" + name.substr(3), good), "holds another key");
  expect_refused(with(name, std::string(4000, 'x')), "not a flashjit entry");
  std::string damaged = good;
  damaged.back() ^= 1;
  expect_refused(with(name, damaged), "checksum of the payload");
  expect_refused(with(name, good.substr(0, good.size() - 1)), "do not add up");
  std::string why;
  const CacheEntry no_kernel = make_entry(1);
  expect_refused(with(name, *encode_entry(no_kernel, why)), "does not describe a kernel");

  const std::string text = to_json(record("a")),
                    place = "tune/a/" + cache_key(record("a").key).digest() + ".json";
  ASSERT_EQ(import(DiskCache(scratch / "other"), with(place, text)).records, 1u);
  expect_refused(with("tune/b/" + cache_key(record("a").key).digest() + ".json", text), "another key");
  expect_refused(with(place, text + " "), "not that of a tune record");
  expect_refused(with(place, "{}"), "not a tune record");
  EXPECT_FALSE(std::filesystem::exists(scratch / "v3"));
}

TEST_F(Bundle, TheRestIsImported) {
  std::string archive;
  const std::string good = read_file(source.path(make_key(1)));
  ASSERT_TRUE(write_member(to(archive), "../../etc/passwd", "x"));
  ASSERT_TRUE(write_member(to(archive), name_of(make_key(2)), "damaged"));
  ASSERT_TRUE(write_member(to(archive), name_of(make_key(1)), good));
  ASSERT_TRUE(write_archive_end(to(archive)));
  const Imported result = import(target, archive);
  EXPECT_EQ(result.entries, 1u);
  EXPECT_THAT(result.refused,
              ElementsAre(AllOf(HasSubstr("passwd"), HasSubstr("climbs out")), HasSubstr("too short")));
}

TEST_F(Bundle, DamagedArchives) {
  const std::string good = exported();
  EXPECT_THAT(import(target, "").damage, HasSubstr("ends early"));
  EXPECT_THAT(import(target, std::string(512, 'x')).damage, HasSubstr("not a ustar archive"));
  std::string flipped = good;
  flipped[5] ^= 1;
  EXPECT_THAT(import(target, flipped).damage, HasSubstr("checksum of a member's header"));
  for (std::size_t size = 1; size < good.size() - 1024; size += 97)
    EXPECT_THAT(import(target, good.substr(0, size)).damage, HasSubstr("ends early")) << size;
  for (const DiskCache::Listing& item : target.list(true)) EXPECT_EQ(item.damage, "");
}

TEST_F(Bundle, ASinkThatFailsIsAnError) {
  for (std::size_t room : {0, 600, 3000}) {
    std::size_t left = room;
    const ByteSink full = [&](const char*, std::size_t size) {
      if (size > left) return false;
      left -= size;
      return true;
    };
    EXPECT_THROW(export_bundle(source, full), Error);
  }
}

}  // namespace
}  // namespace flashjit::testing
