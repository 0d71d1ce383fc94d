#include "tools/command/arguments.hpp"

#include <CLI/CLI.hpp>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "codegen/base/suggest.hpp"

namespace flashjit::command {

Argument Argument::required() const {
  return Argument(option_->required());
}

Argument Argument::at_least(int least) const {
  const auto refusal = [least](const std::string& text) -> std::string {
    std::int64_t value = 0;
    const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (failed == std::errc{} && end == text.data() + text.size() && value >= least) return {};
    return in_quotes(text) + " is not a whole number of " + std::to_string(least) + " or more";
  };
  return Argument(option_->check(refusal));  // the check has no description, so that --help says N only
}

Argument Argument::between(int least, int most) const {
  return Argument(option_->check(CLI::Range(least, most)));
}

Argument Argument::between(double least, double most) const {
  return Argument(option_->check(CLI::Range(least, most)));
}

Argument Argument::expected(int least, int most) const {
  return Argument(option_->expected(least, most));
}

Argument Argument::repeated() const {
  return Argument(option_->allow_extra_args(false));
}
Argument Argument::delimiter(char between_values) const {
  return Argument(option_->delimiter(between_values));
}

Argument Argument::needs(Argument other) const {
  return Argument(option_->needs(other.option_));
}

Argument Argument::excludes(Argument other) const {
  return Argument(option_->excludes(other.option_));
}

Argument Argument::description(const std::string& text) const {
  return Argument(option_->description(text));
}

Argument Argument::type_name(const std::string& name) const {
  return Argument(option_->type_name(name));
}

Argument Argument::group(const std::string& name) const {
  return Argument(option_->group(name));
}

Argument Argument::capture_default_str() const {
  return Argument(option_->capture_default_str());
}

Arguments Arguments::add_subcommand(const std::string& name, const std::string& description) const {
  return Arguments(*app_->add_subcommand(name, description));
}

Arguments Arguments::add_choice(const std::string& name) const {
  return Arguments(*app_->add_option_group(name)->require_option(1));
}

void Arguments::require_subcommand(int count) const {
  app_->require_subcommand(count);
}

namespace {

// CLI11 silently replaces a number beyond 64 bits by the largest one.
std::string beyond_64_bits(const std::string& text) {
  errno = 0;
  std::strtoull(text.c_str(), nullptr, 0);
  return errno == ERANGE ? in_quotes(text) + " is beyond 64 bits, the largest number is 18446744073709551615"
                         : std::string();
}

}  // namespace

template <class T>
Argument Arguments::add_option(const std::string& name, T& value, const std::string& description) const {
  CLI::Option* const option = app_->add_option(name, value, description);
  if constexpr (std::is_same_v<T, std::uint64_t> || std::is_same_v<T, std::optional<std::uint64_t>>)
    option->check(beyond_64_bits);  // the check has no description, as above
  return Argument(option);
}
using std::string, std::optional, std::vector;
template Argument Arguments::add_option(const string&, int&, const string&) const;
template Argument Arguments::add_option(const string&, std::int64_t&, const string&) const;
template Argument Arguments::add_option(const string&, std::uint64_t&, const string&) const;
template Argument Arguments::add_option(const string&, double&, const string&) const;
template Argument Arguments::add_option(const string&, string&, const string&) const;
template Argument Arguments::add_option(const string&, optional<int>&, const string&) const;
template Argument Arguments::add_option(const string&, optional<std::uint64_t>&, const string&) const;
template Argument Arguments::add_option(const string&, optional<float>&, const string&) const;
template Argument Arguments::add_option(const string&, optional<double>&, const string&) const;
template Argument Arguments::add_option(const string&, optional<string>&, const string&) const;
template Argument Arguments::add_option(const string&, vector<int>&, const string&) const;
template Argument Arguments::add_option(const string&, vector<std::size_t>&, const string&) const;
template Argument Arguments::add_option(const string&, vector<string>&, const string&) const;

Argument Arguments::add_flag(const std::string& name, bool& value, const std::string& description) const {
  return Argument(app_->add_flag(name, value, description));
}

Argument Arguments::get_option(const std::string& name) const {
  return Argument(app_->get_option(name));
}

void Arguments::remove_option(const std::string& name) const {
  app_->remove_option(app_->get_option(name));
}

void Arguments::footer(const std::string& text) const {
  app_->footer(text);
}

void Arguments::callback(std::function<void()> when_parsed) const {
  app_->callback(std::move(when_parsed));
}

bool Arguments::parsed() const {
  return app_->parsed();
}

namespace {

OptionInfo info_of(const CLI::Option& option) {
  OptionInfo info{.names = {},
                  .value = {},
                  .description = option.get_description(),
                  .initial = option.get_default_str(),
                  .group = option.get_group(),
                  .required = option.get_required(),
                  .positional = option.get_positional()};
  if (option.get_items_expected_max() != 0) info.value = option.get_type_name();
  for (const std::string& name : option.get_snames()) info.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) info.names.push_back("--" + name);
  if (info.positional) info.names.push_back(option.get_name(true));
  return info;
}

VerbInfo info_of(const CLI::App& app) {
  VerbInfo info{.name = app.get_name(),
                .description = app.get_description(),
                .footer = app.get_footer(),
                .options = {},
                .verbs = {}};
  for (const CLI::Option* option : app.get_options()) info.options.push_back(info_of(*option));
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
    VerbInfo verb = info_of(*sub);
    if (!verb.name.empty()) {
      info.verbs.push_back(std::move(verb));
    } else {  // a group of options
      for (OptionInfo& option : verb.options)
        if (option.names.back() != "--help") info.options.push_back(std::move(option));
    }
  }
  return info;
}

}  // namespace

VerbInfo Arguments::described() const {
  return info_of(*app_);
}

}  // namespace flashjit::command
