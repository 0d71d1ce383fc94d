#include "tools/command/progress.hpp"

#include <cstdio>
#include <utility>

namespace flashjit::command {

Progress::Progress(std::string what) : what_(std::move(what)) {
  watcher_ = std::thread([this] {
    std::unique_lock lock(mutex_);
    if (over_.wait_for(lock, std::chrono::seconds(1), [this] { return finished_; })) return;
    shown_ = true;
    std::fprintf(stderr, "%s ...\n", what_.c_str());
  });
}

Progress::~Progress() {
  {
    const std::lock_guard lock(mutex_);
    finished_ = true;
  }
  over_.notify_one();
  watcher_.join();
  if (!shown_) return;
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start_;
  std::fprintf(stderr, "%s: %.1f s\n", what_.c_str(), seconds.count());
}

}  // namespace flashjit::command
