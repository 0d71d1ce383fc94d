// Says on stderr what is going on once it has taken over a second.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace flashjit::command {

// From construction to destruction. One line when a second has passed, its end when it is over.
class Progress {
 public:
  explicit Progress(std::string what);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

 private:
  const std::string what_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  std::condition_variable over_;
  bool finished_ = false;
  bool shown_ = false;
  std::thread watcher_;
};

}  // namespace flashjit::command
