#include "tools/command/device_counters.hpp"

#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <utility>

#include "codegen/base/error.hpp"

namespace flashjit::command {
namespace {

constexpr const char *metric_read = "dram__bytes_read.sum", *metric_written = "dram__bytes_write.sum";

// The fields of a line of CSV, without their quotes.
std::vector<std::string> fields_of(const std::string& line) {
  std::vector<std::string> fields(1);
  bool quoted = false;
  for (const char c : line) {
    if (c == '"')
      quoted = !quoted;
    else if (c == ',' && !quoted)
      fields.emplace_back();
    else if (c != '\r')
      fields.back() += c;
  }
  return fields;
}

// "1,234.5" in base units; nothing else is a number.
bool read_number(std::string text, double& number) {
  std::erase(text, ',');
  char* end = nullptr;
  number = std::strtod(text.c_str(), &end);
  return !text.empty() && *end == '\0';
}

std::string for_shell(const std::string& word) {
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? "'\\''" : std::string(1, c);
  return text + "'";
}

// The output of a command of the shell, and how it ended.
std::pair<std::string, int> said_by(const std::string& command) {
  std::FILE* const pipe = ::popen(command.c_str(), "r");
  if (!pipe) throw Error(ErrorCode::device_failed, "no program can be started");
  std::string output;
  std::array<char, 4096> part;
  while (const std::size_t bytes = std::fread(part.data(), 1, part.size(), pipe))
    output.append(part.data(), bytes);
  return {output, ::pclose(pipe)};
}

}  // namespace

std::string find_ncu() {
  std::string path = said_by(
                         "command -v ncu || ls -d /opt/nvidia/nsight-compute/*/ncu /usr/local/cuda/bin/ncu "
                         "2>/dev/null | tail -n 1")
                         .first;
  if (path.ends_with('\n')) path.pop_back();
  if (!path.empty()) return path;
  throw Error(ErrorCode::device_failed,
              "the counters of a GPU are read by ncu of Nsight Compute, which is not on this machine: "
              "CUDA's toolkit has it, and --ncu names it elsewhere");
}

CountedBytes read_counts(const std::string& output) {
  CountedBytes counted;
  std::istringstream lines(output);
  std::size_t read = 0, written = 0;
  for (std::string line; std::getline(lines, line);) {
    const std::vector<std::string> fields = fields_of(line);
    const auto column = [&](const char* name) {
      return static_cast<std::size_t>(std::find(fields.begin(), fields.end(), name) - fields.begin());
    };
    if (column(metric_read) < fields.size() && column(metric_written) < fields.size()) {
      read = column(metric_read), written = column(metric_written);
      continue;
    }
    // The line of units has no numbers.
    double bytes_read = 0, bytes_written = 0;
    if (read == written || std::max(read, written) >= fields.size() ||
        !read_number(fields[read], bytes_read) || !read_number(fields[written], bytes_written))
      continue;
    counted.read += bytes_read;
    counted.written += bytes_written;
    ++counted.kernels;
  }
  return counted;
}

CountedBytes count_device_bytes(const std::string& ncu, const std::vector<std::string>& program) {
  // Clocks and caches stay as they are: a launch finds what the one before it left, as in a program.
  std::string command = for_shell(ncu) + " --csv --page raw --print-units base --profile-from-start off " +
                        "--cache-control none --clock-control none --metrics " + metric_read + "," +
                        metric_written;
  for (const std::string& word : program) command += " " + for_shell(word);
  command += " 2>&1";
  const auto [output, status] = said_by(command);
  const CountedBytes counted = read_counts(output);
  if (status == 0 && counted.kernels > 0) return counted;
  if (output.find("ERR_NVGPUCTRPERM") != std::string::npos)
    throw Error(
        ErrorCode::device_failed,
        "this host lets nobody but root read the counters of its GPU (ERR_NVGPUCTRPERM); root may, or "
        "anybody once its driver is loaded with NVreg_RestrictProfilingToAdminUsers=0",
        output);
  throw Error(ErrorCode::device_failed,
              "ncu counted no bytes: " +
                  (WIFEXITED(status) ? "it ended with exit code " + std::to_string(WEXITSTATUS(status))
                                     : std::string("it was ended")) +
                  "; the detail is what it said",
              output);
}

}  // namespace flashjit::command
