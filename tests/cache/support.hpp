// Scratch folders, child processes and keys for the cache tests.
#pragma once

#include <dirent.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "cache/disk_cache.hpp"

namespace flashjit::testing {

// A folder of our own (0700), which is removed with everything in it.
class Scratch {
 public:
  Scratch() {
    std::string pattern = (std::filesystem::temp_directory_path() / "flashjit-cache-XXXXXX").string();
    if (!::mkdtemp(pattern.data())) throw std::runtime_error("mkdtemp");
    path_ = pattern;
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code missing;
  for (const auto& item : std::filesystem::directory_iterator(folder, missing)) {
    names.push_back(item.path().filename().string());
  }
  return names;
}

inline CacheKey make_key(int n) {
  CacheKey key;
  key.add("spec", "spec " + std::to_string(n)).add("compiler", "test 1.0");
  return key;
}

// The entry that building key n gives. The payload is a function of n and of the size.
inline CacheEntry make_entry(int n, std::size_t payload_size = 200) {
  CacheEntry entry{make_key(n), "{\"n\": " + std::to_string(n) + "}", std::string(payload_size, '\0')};
  std::minstd_rand random(static_cast<unsigned>(n) + 1);
  for (char& byte : entry.payload) byte = static_cast<char>(random());
  return entry;
}

struct Obtained {
  CacheEntry entry;
  bool from_disk = false, on_disk = false;
  std::string why;  // why an existing entry was not used, or the built one is not stored
};

// Gets an entry as an engine does.
inline Obtained get_or_build(const DiskCache& cache, const CacheKey& key,
                             const std::function<CacheEntry()>& build) {
  std::string why;
  if (auto entry = cache.lookup(key, &why)) return {std::move(*entry), true, true, why};
  const KeyLock lock = cache.lock(key);
  if (auto entry = cache.lookup(key)) return {std::move(*entry), true, true, why};
  CacheEntry entry = build();
  const bool stored = cache.publish(entry, why.empty() ? &why : nullptr);
  return {std::move(entry), false, stored, why};
}

inline bool same(const CacheEntry& a, const CacheEntry& b) {
  return a.key == b.key && a.metadata == b.metadata && a.payload == b.payload;
}

// A seed that differs from run to run; it is printed, and FLASHJIT_SEED repeats a run.
inline unsigned test_seed() {
  const char* fixed = std::getenv("FLASHJIT_SEED");
  const unsigned seed = fixed ? static_cast<unsigned>(std::atoi(fixed)) : std::random_device()();
  std::printf("FLASHJIT_SEED=%u\n", seed);
  return seed;
}

// Runs `body` in a child process, which exits with its result; an
// exception counts as false. `body` must not use gtest macros.
inline pid_t start_child(const std::function<bool()>& body) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child != 0) return child;
  bool good = false;
  try {
    good = body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "child: %s\n", error.what());
  }
  std::fflush(nullptr);
  ::_exit(good ? 0 : 1);
}

inline bool child_succeeded(pid_t child) {
  int status = 0;
  return ::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// Zeroed memory that children share with us.
template <class T>
class Shared {
 public:
  Shared()
      : value_(static_cast<T*>(
            ::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    if (value_ == MAP_FAILED) throw std::runtime_error("mmap");
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  ~Shared() { ::munmap(value_, sizeof(T)); }
  T& operator*() const { return *value_; }

 private:
  T* value_;
};

// For children: prints the check that failed.
#define FLASHJIT_CHECK(condition)                                                  \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      return false;                                                                \
    }                                                                              \
  } while (false)

// Becomes an ordinary user: root may write everywhere, so permissions can only be tested as another user.
inline bool become_ordinary_user() {
  constexpr uid_t nobody = 65534;
  if (::geteuid() != 0) return true;
  return ::setgroups(0, nullptr) == 0 && ::setgid(nobody) == 0 && ::setuid(nobody) == 0;
}

}  // namespace flashjit::testing
