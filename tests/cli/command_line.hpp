// Runs the command as a user would.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace flashjit::cli_test {

struct Outcome {
  int exit_code = -1;  // 128 + n: signal n killed the process
  std::string out, err;

  // stdout as JSON, and the "error" object of stderr. If the
  // text is no JSON, the test fails and the result is null.
  nlohmann::json json() const;
  nlohmann::json error() const;
};

// The command with a private folder for files and a private
// cache inside it. The folder is removed at the end.
class CommandLine {
 public:
  CommandLine();
  ~CommandLine();
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  Outcome operator()(const std::vector<std::string>& arguments, const std::string& standard_input = "") const;

  const std::string& folder() const { return folder_; }
  std::string cache() const { return folder_ + "/cache"; }
  // Writes a file into the folder and returns its path.
  std::string file(const std::string& name, const std::string& text) const;

  // The file that standard output goes to, if not empty; Outcome::out is then empty.
  std::string standard_output;
  // Variables set in addition to this process's environment.
  std::map<std::string, std::string> environment;

 private:
  std::string folder_;
};

// A small kernel, quick to compile.
inline const std::string small_spec =
    R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "mask": ["causal"]})";

}  // namespace flashjit::cli_test
