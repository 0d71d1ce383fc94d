// Entries with valid checksums whose code cannot be loaded, for example because it was damaged before the
// checksum was made. With a compiler they cost another build; without one they cause an error that says so.
#include <elf.h>
#include <gmock/gmock.h>

#include <atomic>
#include <cstddef>
#include <cstring>

#include "cache/kernel_key.hpp"
#include "codegen/families/search_space.hpp"
#include "runtime/build.hpp"
#include "tests/cache/support.hpp"
#include "tests/runtime/memory_policy.hpp"

namespace flashjit::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class BadEntries : public ::testing::Test {
 protected:
  EngineOptions options(Policy policy = Policy::heuristic) const {
    return {.cache_dir = user.path(), .cache_path = "", .num_threads = 1, .policy = policy};
  }
  KernelInfo get(const EngineOptions& given) const { return Engine(given).get(spec, shape).info(); }
  KernelInfo get() const { return get(options()); }

  using Spoil = void (*)(CacheEntry&);
  static void garbage(CacheEntry& entry) { entry.payload = "no object at all"; }
  static void of_another_machine(CacheEntry& entry) {
    Elf64_Half machine = EM_AARCH64;
    std::memcpy(entry.payload.data() + offsetof(Elf64_Ehdr, e_machine), &machine, sizeof machine);
  }
  static void without_entry(CacheEntry& entry) {
    for (std::size_t at; (at = entry.payload.find("flashjit_")) != std::string::npos;)
      entry.payload[at] = 'x';
  }
  static void other_metadata(CacheEntry& entry) { entry.metadata = R"({"target": "of another version"})"; }

  // Changes the folder's only entry by `spoil`, with valid checksums; returns its path.
  static std::string spoil(const std::string& folder, Spoil spoil) {
    const DiskCache cache(folder);
    const std::vector<DiskCache::Listing> list = cache.list(false);
    if (list.size() != 1 || !list[0].entry) throw std::runtime_error("not one good entry");
    std::optional<CacheEntry> entry = cache.lookup(list[0].entry->key);
    spoil(*entry);
    if (!cache.publish(*entry)) throw std::runtime_error("cannot publish");
    return list[0].path;
  }
  // Fills the folder with one such entry, compiled by another process.
  void fill(const std::string& folder, Spoil how) const {
    ASSERT_TRUE(child_succeeded(start_child([&] {
      compile(spec, Target::native(), shape, folder, "");
      return true;
    })));
    spoil(folder, how);
  }
  static std::vector<std::string> set_aside(const std::string& folder) {
    return names_in(folder + "/v3/quarantine");
  }

  const Scratch user, layer;
  const AttentionSpec spec = AttentionSpec{.dtype = DType::fp32, .head_dim = 16}.validated();
  const Shape shape{.batch = 1, .seqlen_q = 20, .seqlen_k = 20, .num_heads_q = 1, .num_heads_kv = 1};
};

TEST_F(BadEntries, AreSetAsideAndBuiltAnew) {
  const std::pair<Spoil, const char*> ways[] = {
      {garbage, "cannot be loaded: it ends early"},
      {of_another_machine, "not a relocatable ELF object for x86-64"},
      {without_entry, "has no function flashjit_"},
      {other_metadata, "does not describe a kernel"}};
  const KernelInfo first = get();
  std::size_t times = 0;
  for (const auto& [way, reason] : ways) {
    EXPECT_EQ(spoil(user.path(), way), first.path);
    const KernelInfo rebuilt = get();
    EXPECT_EQ(rebuilt.origin, Origin::compiled) << reason;
    EXPECT_EQ(rebuilt.path, first.path);
    EXPECT_THAT(rebuilt.cache_note, AllOf(HasSubstr("was set aside: "), HasSubstr(reason)));
    EXPECT_EQ(set_aside(user.path()).size(), ++times);
    const KernelInfo after = get();
    EXPECT_EQ(after.origin, Origin::disk);
    EXPECT_EQ(after.cache_note, "");
  }
}

TEST_F(BadEntries, OfALayerArePassedOver) {
  for (const Spoil way : {garbage, other_metadata}) {
    const Scratch prebuilt;
    fill(prebuilt.path(), way);
    EngineOptions with_layer = options();
    with_layer.cache_path = prebuilt.path();
    const KernelInfo info = get(with_layer);
    EXPECT_EQ(info.path.substr(0, user.path().size()), user.path());
    EXPECT_THAT(info.cache_note, HasSubstr("cannot be used: "));
    EXPECT_TRUE(set_aside(prebuilt.path()).empty());
    EXPECT_EQ(DiskCache(prebuilt.path()).list(true).size(), 1u);
  }
  // An older entry of another compiler is used instead.
  fill(layer.path(),
       [](CacheEntry& entry) { entry.key = entry_key(request_of(entry.key), "-O2", "another compiler"); });
  const DiskCache prebuilt(layer.path());
  ASSERT_EQ(prebuilt.list(false).size(), 2u);
  for (const DiskCache::Listing& item : prebuilt.list(false)) {
    CacheEntry entry = *prebuilt.lookup(item.entry->key);
    if (*entry.key.find("compiler") == "another compiler") {
      std::filesystem::last_write_time(item.path,
                                       std::filesystem::file_time_type::clock::now() - std::chrono::hours(1));
    } else {
      garbage(entry);
      ASSERT_TRUE(prebuilt.publish(entry));
    }
  }
  EngineOptions strict = options(Policy::require_prebuilt);
  strict.cache_dir = "";
  strict.cache_path = layer.path();
  const KernelInfo info = get(strict);
  EXPECT_EQ(info.origin, Origin::disk);
  EXPECT_THAT(info.cache_note, HasSubstr("cannot be used: "));
}

TEST_F(BadEntries, DoNotCountAsPrebuilt) {
  const KernelConfig config = heuristic_config(spec, Target::native(), bucket(shape));
  const auto prebuilt = [&] {
    return find_prebuilt(spec, Target::native(), config,
                         {DiskCache(layer.path(), DiskCache::Access::read_only)});
  };
  fill(layer.path(), [](CacheEntry&) {});
  EXPECT_NE(prebuilt(), "");
  spoil(layer.path(), other_metadata);
  EXPECT_EQ(prebuilt(), "");
}

TEST_F(BadEntries, AreAnErrorWhereNothingMayBeCompiled) {
  fill(user.path(), garbage);
  try {
    get(options(Policy::require_prebuilt));
    FAIL() << "it loaded";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::not_prebuilt);
    EXPECT_THAT(error.message(), AllOf(HasSubstr("cannot be used: "), HasSubstr("it ends early"),
                                       HasSubstr("flashjit prebuild '")));
  }
  EXPECT_TRUE(set_aside(user.path()).empty()) << "who cannot build it anew leaves it";
  EXPECT_EQ(get().origin, Origin::compiled);
  EXPECT_EQ(set_aside(user.path()).size(), 1u);
}

// Runs in a process that has not opened the compiler before.
TEST_F(BadEntries, AreAnErrorWhereThereIsNoCompiler) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  fill(user.path(), garbage);
  const auto report = [&] {
    ::setenv("FLASHJIT_LLVM_PLUGIN", (user / "missing/libflashjit-llvm.so").c_str(), 1);
    try {
      get();
    } catch (const Error& error) {
      std::fprintf(stderr, "%s: %s", to_string(error.code()), error.what());
    }
    std::exit(set_aside(user.path()).empty() ? 0 : 1);
  };
  EXPECT_EXIT(report(), ::testing::ExitedWithCode(0),
              AllOf(HasSubstr("compiler_unavailable"), HasSubstr("/missing/libflashjit-llvm.so"),
                    HasSubstr("cannot be used: "), HasSubstr("it ends early")));
}

TEST_F(BadEntries, MetByManyProcessesAtOnce) {
  fill(user.path(), of_another_machine);
  const Shared<std::atomic<int>> compiled, told;
  std::vector<pid_t> children;
  for (int process = 0; process < 16; ++process) {
    children.push_back(start_child([&] {
      const KernelInfo info = get();
      *compiled += info.origin == Origin::compiled;
      *told += info.cache_note.find("was set aside") != std::string::npos;
      return !info.path.empty();
    }));
  }
  for (const pid_t child : children) EXPECT_TRUE(child_succeeded(child));
  EXPECT_GE(*compiled, 1);
  EXPECT_GE(*told, 1);
  const KernelInfo after = get();
  EXPECT_EQ(after.origin, Origin::disk);
  EXPECT_EQ(after.cache_note, "");
}

TEST_F(BadEntries, GoodOnesStayWhereTheHostRefusesToLoadThem) {
  ASSERT_EQ(get().origin, Origin::compiled);
  EXPECT_TRUE(child_succeeded(start_child([&] {
    FLASHJIT_CHECK(get().origin == Origin::disk);
    FLASHJIT_CHECK(forbid_executable_memory(false));
    try {
      get();
    } catch (const Error& error) {
      FLASHJIT_CHECK(error.code() == ErrorCode::device_failed);
      FLASHJIT_CHECK(contains(error.message(), "cannot be made executable (Permission denied)"));
      return true;
    }
    return false;
  })));
  EXPECT_TRUE(set_aside(user.path()).empty());
  EXPECT_EQ(get().origin, Origin::disk);
}

}  // namespace
}  // namespace flashjit::testing
