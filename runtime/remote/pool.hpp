// Objects that are taken for one request and given back, and made where there is none.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace flashjit::remote_plugin {

template <class T>
class Pool {
 public:
  // Null if there is none.
  std::unique_ptr<T> take() {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) return nullptr;
    std::unique_ptr<T> taken = std::move(idle_.back());
    idle_.pop_back();
    return taken;
  }
  void give_back(std::unique_ptr<T> object) {
    const std::lock_guard lock(mutex_);
    if (idle_.size() < most_idle) idle_.push_back(std::move(object));
  }
  void clear() {
    const std::lock_guard lock(mutex_);
    idle_.clear();
  }

 private:
  static constexpr std::size_t most_idle = 8;
  std::mutex mutex_;
  std::vector<std::unique_ptr<T>> idle_;
};

}  // namespace flashjit::remote_plugin
