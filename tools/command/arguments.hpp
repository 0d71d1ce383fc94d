// The verbs' interface to the command line. CLI11 does the work and lends the names. Only arguments.cpp and
// main.cpp include its header, which takes longer to compile than the rest of a verb.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace flashjit::command {

// A handle to an option, a flag or a positional argument. A copy refers to the same one.
class Argument {
 public:
  explicit Argument(CLI::Option* option) : option_(option) {}

  Argument required() const;
  // Refuses a value that is not a whole number of `least` or more, and says so in words.
  Argument at_least(int least) const;
  Argument between(int least, int most) const;
  Argument between(double least, double most) const;
  Argument expected(int least, int most) const;
  // A list whose values each have the option's name before them.
  Argument repeated() const;
  Argument delimiter(char between_values) const;
  Argument needs(Argument other) const;
  Argument excludes(Argument other) const;
  Argument description(const std::string& text) const;
  Argument type_name(const std::string& name) const;
  Argument group(const std::string& name) const;
  Argument capture_default_str() const;

 private:
  CLI::Option* option_;
};

// The contents of --help, as data.
struct OptionInfo {
  std::vector<std::string> names;  // "-h", "--help"; of a positional argument its name alone
  std::string value;               // what it takes: "INT"; empty: a flag
  std::string description, initial, group;
  bool required = false, positional = false;
};
struct VerbInfo {
  std::string name, description, footer;
  std::vector<OptionInfo> options;
  std::vector<VerbInfo> verbs;
};

// The arguments of the command, of a verb or of an action. A copy refers to the same ones.
class Arguments {
 public:
  explicit Arguments(CLI::App& app) : app_(&app) {}

  Arguments add_subcommand(const std::string& name, const std::string& description) const;
  // A group of options that exclude each other; one of them is required.
  Arguments add_choice(const std::string& name) const;
  void require_subcommand(int count) const;
  // T is a type for which arguments.cpp instantiates this.
  template <class T>
  Argument add_option(const std::string& name, T& value, const std::string& description = "") const;
  Argument add_flag(const std::string& name, bool& value, const std::string& description) const;
  Argument get_option(const std::string& name) const;
  void remove_option(const std::string& name) const;
  void footer(const std::string& text) const;
  void callback(std::function<void()> when_parsed) const;
  bool parsed() const;
  // The verbs that were added so far, with their options.
  VerbInfo described() const;

 private:
  CLI::App* app_;
};

}  // namespace flashjit::command
