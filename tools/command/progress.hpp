// Tells on stderr about a step that takes longer than a second.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace flashjit::command {

// The step lasts from construction to destruction. A line begins after one second and ends with the step.
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
