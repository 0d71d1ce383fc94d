#include "tests/cli/command_line.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

namespace flashjit::cli_test {
namespace {

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

nlohmann::json parse(const std::string& text) {
  nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  EXPECT_FALSE(json.is_discarded()) << "not JSON: " << text;
  return json.is_discarded() ? nlohmann::json() : json;
}

}  // namespace

nlohmann::json Outcome::json() const {
  EXPECT_EQ(exit_code, 0) << err;
  return parse(out);
}

nlohmann::json Outcome::error() const {
  return parse(err).value("error", nlohmann::json::object());
}

CommandLine::CommandLine()
    : folder_((std::filesystem::temp_directory_path() / "flashjit-cli-XXXXXX").string()) {
  if (!mkdtemp(folder_.data())) ADD_FAILURE() << "cannot make " << folder_;
  environment["FLASHJIT_CACHE_DIR"] = cache();
}

CommandLine::~CommandLine() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

std::string CommandLine::file(const std::string& name, const std::string& text) const {
  const std::string path = folder_ + "/" + name;
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

Outcome CommandLine::operator()(const std::vector<std::string>& arguments,
                                const std::string& standard_input) const {
  const std::string in = file("stdin", standard_input), err = folder_ + "/stderr",
                    out = standard_output.empty() ? folder_ + "/stdout" : standard_output;
  std::vector<const char*> argv = {FLASHJIT_COMMAND};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  argv.push_back(nullptr);

  const pid_t child = fork();
  if (child == 0) {
    for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
    dup2(open(in.c_str(), O_RDONLY), 0);
    dup2(open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), 1);
    dup2(open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), 2);
    execv(argv[0], const_cast<char**>(argv.data()));
    _exit(127);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
          standard_output.empty() ? read(out) : "", read(err)};
}

std::vector<std::string> operator+(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

std::string slurp(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

}  // namespace flashjit::cli_test
