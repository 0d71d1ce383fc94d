// Many processes and threads on one folder: each key is built once,
// results are always right, and a process that dies blocks no other.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/file.h>
#include <sys/time.h>
#include <algorithm>
#include <atomic>
#include <csignal>
#include <memory>
#include <thread>

#include "tests/cache/support.hpp"

namespace flashjit::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::IsEmpty;

constexpr int num_processes = 10;
constexpr int num_threads = 4;
constexpr int num_keys = 20;

using Counts = std::array<std::atomic<int>, num_keys>;

CacheEntry expected(int n) {
  return make_entry(n, 1000 + 3000 * static_cast<std::size_t>(n));
}

// Every thread of every process asks for every key, each in an order of its own.
void race(const DiskCache& cache, unsigned seed, Counts& builds) {
  expected(0);
  std::vector<pid_t> children;
  for (int process = 0; process < num_processes; ++process) {
    children.push_back(start_child([&, process] {
      std::atomic<bool> good = true;
      const auto work = [&](int thread) {
        std::mt19937 random(seed + static_cast<unsigned>(process * num_threads + thread));
        std::vector<int> order(num_keys);
        for (int n = 0; n < num_keys; ++n) order[n] = n;
        std::shuffle(order.begin(), order.end(), random);
        for (const int n : order) {
          const auto result = get_or_build(cache, make_key(n), [&] {
            ++builds[n];
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 5000));
            return expected(n);
          });
          if (!same(result.entry, expected(n)) || !result.on_disk) good = false;
        }
      };
      std::vector<std::thread> threads;
      for (int thread = 0; thread < num_threads; ++thread) threads.emplace_back(work, thread);
      for (std::thread& thread : threads) thread.join();
      return good.load();
    }));
  }
  for (const pid_t child : children) EXPECT_TRUE(child_succeeded(child));
  EXPECT_EQ(cache.list(true).size(), std::size_t{num_keys});
  for (const DiskCache::Listing& item : cache.list(true)) EXPECT_EQ(item.damage, "");
  EXPECT_THAT(names_in(cache.folder() + "/v3/tmp"), IsEmpty());
}

TEST(Race, BuiltOnceInTotal) {
  const Scratch scratch;
  const Shared<Counts> builds;
  race(DiskCache(scratch.path()), test_seed(), *builds);
  for (int n = 0; n < num_keys; ++n) EXPECT_EQ((*builds)[n], 1) << "key " << n;
}

TEST(Race, OverDamagedEntries) {
  const Scratch scratch;
  const DiskCache cache(scratch.path());
  for (int n = 0; n < num_keys; ++n) {
    ASSERT_TRUE(cache.publish(expected(n)));
    std::filesystem::resize_file(cache.path(make_key(n)), static_cast<std::uintmax_t>(n) * 50);
  }
  const Shared<Counts> builds;
  race(cache, test_seed(), *builds);
  for (int n = 0; n < num_keys; ++n) EXPECT_GE((*builds)[n], 1) << "key " << n;
}

TEST(Race, CreationOfTheFolder) {
  const Scratch scratch;
  std::vector<pid_t> children;
  for (int process = 0; process < num_processes; ++process) {
    children.push_back(
        start_child([&, process] { return DiskCache(scratch / "a/b/c/d").publish(make_entry(process)); }));
  }
  for (const pid_t child : children) EXPECT_TRUE(child_succeeded(child));
  EXPECT_EQ(DiskCache(scratch / "a/b/c/d").list(true).size(), std::size_t{num_processes});
}

TEST(Race, ClearAgainstPublish) {
  const Scratch scratch;
  const DiskCache cache(scratch.path());
  const pid_t child = start_child([&] {
    for (int i = 0; i < 100; ++i) FLASHJIT_CHECK(cache.publish(make_entry(i % 5)));
    return true;
  });
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) cache.clear();
  EXPECT_EQ(status, 0);
  for (const DiskCache::Listing& item : cache.list(true)) EXPECT_EQ(item.damage, "");
}

TEST(Lock, ExcludesThreadsOfTheSameKeyOnly) {
  const Scratch scratch;
  const DiskCache cache(scratch.path());
  KeyLock first = cache.lock(make_key(1));
  ASSERT_TRUE(first.held());
  std::string why;
  std::thread([&] {
    EXPECT_FALSE(cache.lock(make_key(1), 0ms, &why).held());
    EXPECT_TRUE(cache.lock(make_key(2), 0ms).held());
    EXPECT_FALSE(cache.lock(make_key(1), 200ms, &why, [] { return true; }).held());
    EXPECT_THAT(why, ::testing::HasSubstr("was ended"));
  }).join();
  EXPECT_NE(why, "");
  KeyLock moved = std::move(first);
  EXPECT_FALSE(first.held());  // NOLINT(bugprone-use-after-move)
  EXPECT_FALSE(cache.lock(make_key(1), 0ms).held());
  moved = KeyLock();
  EXPECT_TRUE(cache.lock(make_key(1), 0ms).held());
}

TEST(Lock, WaitsForItsHolderEvenUnderSignals) {
  const Scratch scratch;
  const DiskCache cache(scratch.path());
  EXPECT_TRUE(child_succeeded(start_child([&] {
    std::signal(SIGALRM, [](int) {});
    const itimerval often = {{0, 1000}, {0, 1000}};
    ::setitimer(ITIMER_REAL, &often, nullptr);
    std::atomic<bool> released = false;
    KeyLock held = cache.lock(make_key(1));
    std::thread holder([&, lock = std::move(held)]() mutable {
      std::this_thread::sleep_for(50ms);
      released = true;
      lock = KeyLock();
    });
    const KeyLock next = cache.lock(make_key(1));
    const bool in_order = released;
    holder.join();
    return next.held() && in_order;
  })));
}

// A process forks while it holds a lock: the child neither ends the lock nor prolongs it beyond its release.
TEST(Lock, Fork) {
  const Scratch scratch;
  const DiskCache cache(scratch.path());
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  auto lock = std::make_unique<KeyLock>(cache.lock(make_key(1)));
  const pid_t drops = start_child([&] {
    lock.reset();
    return true;
  });
  EXPECT_TRUE(child_succeeded(drops));
  EXPECT_FALSE(cache.lock(make_key(1), 0ms).held());
  const pid_t lives_on = start_child([&] {
    char byte;
    return ::close(pipe[1]) == 0 && ::read(pipe[0], &byte, 1) == 0;
  });
  lock.reset();
  EXPECT_TRUE(cache.lock(make_key(1), 0ms).held());
  ::close(pipe[1]);
  EXPECT_TRUE(child_succeeded(lives_on));
  ::close(pipe[0]);
}

// A child that outlives the process that held a lock, or was writing a file, keeps neither.
TEST(Lock, DiesWithItsHolderThoughAChildLives) {
  const Scratch scratch;
  const DiskCache cache(scratch.path());
  int begun[2], over[2];
  ASSERT_EQ(::pipe(begun), 0);
  ASSERT_EQ(::pipe(over), 0);
  const pid_t holder = start_child([&] {
    const KeyLock lock = cache.lock(make_key(1));
    const pid_t lives_on = start_child([&] {
      char byte;
      if (::write(begun[1], "b", 1) == 1) ::close(over[1]);
      return ::read(over[0], &byte, 1) == 0;
    });
    if (lives_on > 0) ::pause();
    return lock.held();
  });
  char byte;
  ASSERT_EQ(::read(begun[0], &byte, 1), 1);
  EXPECT_FALSE(cache.lock(make_key(1), 0ms).held());
  ::kill(holder, SIGKILL);
  EXPECT_FALSE(child_succeeded(holder));
  EXPECT_TRUE(cache.lock(make_key(1), 0ms).held());
  ::close(over[1]);
  for (const int descriptor : {begun[0], begun[1], over[0]}) ::close(descriptor);
}

TEST(Lock, DiesWithAKilledBuilder) {
  const Scratch scratch;
  const DiskCache cache(scratch.path());
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const pid_t child = start_child([&] {
    get_or_build(cache, make_key(1), [&] {
      if (::write(pipe[1], "b", 1) == 1) ::pause();
      return make_entry(1);
    });
    return true;
  });
  char byte;
  ASSERT_EQ(::read(pipe[0], &byte, 1), 1);
  EXPECT_FALSE(cache.lock(make_key(1), 0ms).held());
  ::kill(child, SIGKILL);
  EXPECT_FALSE(child_succeeded(child));
  EXPECT_TRUE(cache.lock(make_key(1), 0ms).held());
  const auto result = get_or_build(cache, make_key(1), [] { return make_entry(1); });
  EXPECT_FALSE(result.from_disk);
  EXPECT_TRUE(result.on_disk);
  ::close(pipe[0]);
  ::close(pipe[1]);
}

// A holder that is alive but stopped delays others no longer than their patience.
TEST(Lock, StoppedHolder) {
  const Scratch scratch;
  const DiskCache cache(scratch.path());
  const KeyLock held = cache.lock(make_key(1));
  std::string why;
  EXPECT_FALSE(cache.lock(make_key(1), 30ms, &why).held());
  EXPECT_THAT(why, ::testing::HasSubstr("another process"));
}

TEST(Kill, AtRandomPoints) {
  const Scratch scratch;
  const DiskCache cache(scratch.path());
  std::mt19937 random(test_seed());
  int leftovers = 0;
  expected(0);
  for (int round = 0; round < 200; ++round) {
    const pid_t child = start_child([&] {
      for (int n = round;; ++n) {
        const CacheEntry entry = expected(n % num_keys);
        if (n % 3 == 0) cache.publish(entry);
        get_or_build(cache, entry.key, [&] { return entry; });
        if (n % 5 == 0) std::filesystem::remove(cache.path(entry.key));
      }
      return true;
    });
    ::usleep(random() % 8000);
    ::kill(child, SIGKILL);
    EXPECT_FALSE(child_succeeded(child));
    leftovers += static_cast<int>(names_in(scratch / "v3/tmp").size());
    for (const DiskCache::Listing& item : cache.list(true)) EXPECT_EQ(item.damage, "") << item.path;
  }
  std::printf("unfinished files seen: %d\n", leftovers);
  for (int n = 0; n < num_keys; ++n) {
    EXPECT_TRUE(cache.lock(make_key(n), 0ms).held());
    EXPECT_TRUE(same(get_or_build(cache, make_key(n), [&] { return expected(n); }).entry, expected(n)));
  }
  ASSERT_TRUE(cache.publish(expected(0)));
  EXPECT_THAT(names_in(scratch / "v3/tmp"), IsEmpty());
  EXPECT_FALSE(std::filesystem::exists(scratch / "v3/quarantine"));
}

TEST(Kill, UnfinishedFilesGoWhenTheirWriterDoes) {
  const Scratch scratch;
  const DiskCache cache(scratch.path());
  ASSERT_TRUE(cache.publish(make_entry(1)));
  const std::string unfinished = scratch / "v3/tmp/123";
  write_file(unfinished, "partial");
  {
    const File writer(::open(unfinished.c_str(), O_RDWR | O_CLOEXEC));
    ASSERT_EQ(::flock(writer.get(), LOCK_EX), 0);
    ASSERT_TRUE(cache.publish(make_entry(2)));
    EXPECT_EQ(cache.clear(), 2u);
    EXPECT_TRUE(std::filesystem::exists(unfinished));
  }
  ASSERT_TRUE(cache.publish(make_entry(3)));
  EXPECT_FALSE(std::filesystem::exists(unfinished));
}

}  // namespace
}  // namespace flashjit::testing
