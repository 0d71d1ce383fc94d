#include "tools/command/progress.hpp"

#include <sys/ioctl.h>
#include <unistd.h>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <utility>

namespace flashjit::command {
namespace {

bool as_json = false;

}  // namespace

bool& is_quiet() {
  static bool quiet = false;
  return quiet;
}

std::size_t terminal_columns(int descriptor) {
  if (::isatty(descriptor) != 1) return 0;
  winsize size{};
  return ::ioctl(descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col != 0 ? size.ws_col : 80;
}

void write_progress_as_json(bool json) {
  as_json = json;
}

void tell_progress(const std::string& text) {
  if (is_quiet()) return;
  using Json = nlohmann::json;
  const std::string line =
      as_json ? Json{{"progress", text}}.dump(-1, ' ', false, Json::error_handler_t::replace) : text;
  std::fprintf(stderr, "%s\n", line.c_str());
}

Progress::Progress(std::string what) : what_(std::move(what)) {
  watcher_ = std::thread([this] {
    std::unique_lock lock(mutex_);
    if (over_.wait_for(lock, std::chrono::seconds(1), [this] { return finished_; })) return;
    shown_ = true;
    tell_progress(what_ + " ...");
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
  char text[32];
  std::snprintf(text, sizeof text, ": %.1f s", seconds.count());
  tell_progress(what_ + text);
}

}  // namespace flashjit::command
