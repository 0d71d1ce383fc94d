// Runs the command on a terminal of its own.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "tests/cli/command_line.hpp"

namespace flashjit::cli_test {

// The columns of the longest line that a terminal has shown.
inline std::size_t widest_line(const std::string& text) {
  std::istringstream lines(text);
  std::size_t widest = 0;
  for (std::string line; std::getline(lines, line, '\n');) {
    if (line.ends_with('\r')) line.pop_back();  // a terminal's end of line
    line.erase(0, line.rfind('\r') + 1);
    widest = std::max(widest, line.size());
  }
  return widest;
}

// Runs the command with a terminal of so many columns as stderr, and as stdout unless that is the file `out`.
class OnTerminal {
 public:
  OnTerminal(const CommandLine& flashjit, const std::vector<std::string>& arguments, unsigned short columns,
             const std::string& out = "") {
    std::vector<const char*> argv = {FLASHJIT_COMMAND};
    for (const std::string& argument : arguments) argv.push_back(argument.c_str());
    argv.push_back(nullptr);
    winsize size{.ws_row = 50, .ws_col = columns, .ws_xpixel = 0, .ws_ypixel = 0};
    child_ = ::forkpty(&terminal_, nullptr, nullptr, &size);
    if (child_ != 0) return;
    for (const auto& [name, value] : flashjit.environment) setenv(name.c_str(), value.c_str(), 1);
    if (!out.empty()) dup2(open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), 1);
    execv(argv[0], const_cast<char**>(argv.data()));
    _exit(127);
  }
  OnTerminal(const OnTerminal&) = delete;
  OnTerminal& operator=(const OnTerminal&) = delete;
  ~OnTerminal() { ::close(terminal_); }

  // Reads until the text is shown; false if the command ends before.
  bool wait_for(const std::string& text) {
    while (shown_.find(text) == std::string::npos) {
      char bytes[4096];
      const ssize_t count = ::read(terminal_, bytes, sizeof bytes);
      if (count <= 0) return false;
      shown_.append(bytes, static_cast<std::size_t>(count));
    }
    return true;
  }
  // All that the command shows.
  const std::string& wait() {
    char bytes[4096];
    for (ssize_t count; (count = ::read(terminal_, bytes, sizeof bytes)) > 0;)
      shown_.append(bytes, static_cast<std::size_t>(count));
    return shown_;
  }
  void press_ctrl_c() { EXPECT_EQ(::write(terminal_, "\x03", 1), 1); }
  int exit_code() {
    int status = 0;
    EXPECT_EQ(waitpid(child_, &status, 0), child_);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  const std::string& shown() const { return shown_; }

 private:
  int terminal_ = -1;
  pid_t child_ = -1;
  std::string shown_;
};

}  // namespace flashjit::cli_test
