// Runs the command as a user would.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace flashjit::cli_test {

struct Outcome {
  int exit_code = -1;  // 128 + n: killed by signal n
  std::string out, err;

  // The JSON of stdout, and the "error" object of stderr. If the text is not JSON: a failed expectation, and
  // null.
  nlohmann::json json() const;
  nlohmann::json error() const;
};

// Each object has its own folder for files, with a cache for the command in it. The destructor removes it.
class CommandLine {
 public:
  CommandLine();
  ~CommandLine();
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  Outcome operator()(const std::vector<std::string>& arguments, const std::string& standard_input = "") const;

  const std::string& folder() const { return folder_; }
  std::string cache() const { return folder_ + "/cache"; }
  // A path in a folder that does not exist.
  std::string missing(const std::string& name) const { return folder_ + "/missing/" + name; }
  // Writes a file into the folder and gives its path.
  std::string file(const std::string& name, const std::string& text) const;

  // If set, the path to which standard output goes; Outcome::out is empty then.
  std::string standard_output;
  // Variables that are added to this process's environment.
  std::map<std::string, std::string> environment;

 private:
  std::string folder_;
};

// Arguments, and more of them.
std::vector<std::string> operator+(std::vector<std::string> a, const std::vector<std::string>& b);

// A file's bytes.
std::string slurp(const std::string& path);

// A small kernel, quick to compile.
inline const std::string small_spec =
    R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "mask": ["causal"]})";
// The sizes of a small problem for it.
inline const std::vector<std::string> tiny = {"--batch",   "2", "--seqlen-q", "48",
                                              "--heads-q", "4", "--heads-kv", "2"};

}  // namespace flashjit::cli_test
