// Tells on stderr what the command does while it works. With --json each line is a JSON object {"progress":
// TEXT}.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <string>
#include <thread>

namespace flashjit::command {

// The form of all lines to come; text until it is called.
void write_progress_as_json(bool json);
// Whether nothing is told: the flag --quiet.
bool& is_quiet();
// The columns of a terminal, 80 if it does not say; 0 for a file or a pipe.
std::size_t terminal_columns(int descriptor);
// Writes a line.
void tell_progress(const std::string& text);

// A step that lasts from construction to destruction. If it takes longer than a second, a line tells that it
// began, and another one that it ended.
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
