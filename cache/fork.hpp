// Rules for state that a child made by fork() inherits. The child has the thread that forked and no
// other: threads of a pool, compiles under way and holders of a mutex are gone, while their state is there.
//
// - State that is changed in microseconds is changed under process_mutex(). fork() waits for it, so a child
//   never finds it half changed.
// - State that holds threads, or is locked for longer, is PerProcess: the child makes its own.
// - Files whose locks say that their process is at work are HeldFile: the child closes them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "cache/file.hpp"

namespace flashjit {

// How often a process has forked between the one that loaded the library and this one.
std::uint32_t forks() noexcept;

// Held for microseconds. The owner neither calls the host nor forks.
std::mutex& process_mutex() noexcept;

// A mutex that its owner may lock again. The owner of a std::recursive_mutex is a number of a thread that a
// forked child does not share; of this one it is what the thread that forked is in its child, too.
class NestedMutex {
 public:
  void lock() {
    if (owner_.load(std::memory_order_relaxed) != std::this_thread::get_id()) {
      mutex_.lock();
      owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    }
    ++depth_;
  }
  void unlock() {
    if (--depth_ > 0) return;
    owner_.store({}, std::memory_order_relaxed);
    mutex_.unlock();
  }

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> owner_;
  int depth_ = 0;  // under mutex_
};

// Held while a library is opened and initialised, once for each; fork() waits for that, too, since a library
// that is half initialised serves nobody. Taken before process_mutex().
NestedMutex& opening_mutex() noexcept;

// The first call makes it by `make`, in `place`. Nobody destroys it, since other threads may use it until
// the process has ended. After an exception the next call tries again.
template <class T, class Make>
const T& opened_once(std::atomic<const T*>& place, Make&& make) {
  if (const T* const found = place.load(std::memory_order_acquire)) return *found;
  const std::lock_guard lock(opening_mutex());
  if (!place.load(std::memory_order_relaxed)) place.store(new T(make()), std::memory_order_release);
  return *place.load(std::memory_order_relaxed);
}

// An object that a forked child does not share: its first use there makes a new one. The child leaves the
// inherited one as it is for ever, since threads that it lacks were using it.
template <class T>
class PerProcess {
 public:
  using Make = std::function<std::unique_ptr<T>()>;
  explicit PerProcess(Make make) : make_(std::move(make)), object_(make_()), of_(forks()) {}
  PerProcess() : PerProcess([] { return std::make_unique<T>(); }) {}
  PerProcess(const PerProcess&) = delete;
  PerProcess& operator=(const PerProcess&) = delete;
  ~PerProcess() {
    if (!is_ours()) (void)object_.release();
  }

  bool is_ours() const noexcept { return of_.load(std::memory_order_acquire) == forks(); }
  T& get() {
    if (!is_ours()) renew();
    return *object_;
  }

 private:
  [[gnu::noinline]] void renew() {
    const std::lock_guard lock(process_mutex());
    if (is_ours()) return;
    (void)object_.release();
    object_ = make_();
    of_.store(forks(), std::memory_order_release);
  }

  const Make make_;
  std::unique_ptr<T> object_;
  std::atomic<std::uint32_t> of_;
};

// An open file that a forked child closes at once: its locks end with the process that took them.
class HeldFile {
 public:
  HeldFile() = default;
  // open() returns a descriptor, or -1 with errno. No child is forked meanwhile.
  template <class Open>
  explicit HeldFile(Open&& open) {
    const std::lock_guard lock(process_mutex());
    const int descriptor = open();
    if (descriptor >= 0) hold(descriptor);
  }
  HeldFile(HeldFile&& other) noexcept { *this = std::move(other); }
  HeldFile& operator=(HeldFile&& other) noexcept;
  ~HeldFile();

  explicit operator bool() const { return file_ != nullptr; }
  int get() const { return file_ ? file_->descriptor.get() : -1; }
  // Whether this process opened it: otherwise the descriptor is closed, and its number may be another file's.
  bool is_ours() const { return file_ && file_->of == forks(); }

 private:
  struct Held {
    File descriptor;
    std::uint32_t of;
    Held *next, *previous;
  };
  friend void close_held_files() noexcept;
  void hold(int descriptor);

  static Held* first;  // of this process; changes under process_mutex()
  Held* file_ = nullptr;
};

}  // namespace flashjit
