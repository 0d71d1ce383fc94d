#include "cache/fork.hpp"

#include <pthread.h>

namespace flashjit {
namespace {

std::atomic<std::uint32_t> forked = 0;

}  // namespace

std::uint32_t forks() noexcept {
  return forked.load(std::memory_order_relaxed);
}

// Neither is ever destroyed: threads may be at work until the process has ended.
std::mutex& process_mutex() noexcept {
  alignas(std::mutex) static constinit std::mutex mutex;
  return mutex;
}
NestedMutex& opening_mutex() noexcept {
  static auto& mutex = *new NestedMutex;
  return mutex;
}

HeldFile::Held* HeldFile::first = nullptr;

void HeldFile::hold(int descriptor) {
  file_ = new Held{File(descriptor), forks(), first, nullptr};
  if (first) first->previous = file_;
  first = file_;
}

HeldFile& HeldFile::operator=(HeldFile&& other) noexcept {
  std::swap(file_, other.file_);
  return *this;
}

HeldFile::~HeldFile() {
  if (!file_) return;
  if (is_ours()) {
    const std::lock_guard lock(process_mutex());
    (file_->previous ? file_->previous->next : first) = file_->next;
    if (file_->next) file_->next->previous = file_->previous;
  }
  delete file_;
}

// In a child: the objects stay where they are, on stacks of threads that are gone.
void close_held_files() noexcept {
  for (HeldFile::Held* held = HeldFile::first; held; held = held->next) held->descriptor = File();
  HeldFile::first = nullptr;
}

namespace {

// `= File()` swaps, and the temporary closes.
const bool registered = [] {
  opening_mutex();
  return ::pthread_atfork(
             [] {
               opening_mutex().lock();
               process_mutex().lock();
             },
             [] {
               process_mutex().unlock();
               opening_mutex().unlock();
             },
             [] {
               forked.fetch_add(1, std::memory_order_relaxed);
               close_held_files();
               process_mutex().unlock();
               opening_mutex().unlock();
             }) == 0;
}();

}  // namespace
}  // namespace flashjit
