// flashjit: the command. Every verb is a file of this folder.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "codegen/base/suggest.hpp"
#include "runtime/flashjit.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/progress.hpp"
#include "tools/command/verbs.hpp"

namespace flashjit::command {
namespace {

// Names of the verb's options, those of its groups included.
void add_option_names(const CLI::App& verb, std::vector<std::string>& names) {
  for (const CLI::Option* option : verb.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back(name);
  for (const CLI::App* group :
       verb.get_subcommands([](const CLI::App* sub) { return sub->get_name().empty(); }))
    add_option_names(*group, names);
}

// Says what is wrong with words that no verb took, and what was probably meant; empty if all were taken.
std::string unknown_words(const CLI::App& app) {
  const std::vector<std::string> words = app.remaining(true);
  if (words.empty()) return {};
  const CLI::App* verb = &app;
  std::string name = app.get_name();
  while (!verb->get_subcommands().empty()) {
    verb = verb->get_subcommands().front();
    name += " " + verb->get_name();
  }
  const auto hint = [](std::string_view word, const std::vector<std::string>& names, const char* dashes) {
    const std::vector<std::string_view> known(names.begin(), names.end());
    const std::string_view near = closest(word, known);
    return near.empty() ? std::string() : "; did you mean " + (dashes + std::string(near)) + "?";
  };
  std::vector<std::string> verbs, options;
  for (const CLI::App* sub : verb->get_subcommands([](const CLI::App* s) { return !s->get_name().empty(); }))
    verbs.push_back(sub->get_name());
  add_option_names(*verb, options);
  const std::string& word = words.front();
  if (!verbs.empty() && word.front() != '-') {
    const std::string meant = hint(word, verbs, "");
    const std::vector<std::string_view> known(verbs.begin(), verbs.end());
    return name + " has no verb " + in_quotes(word) +
           (meant.empty() ? "; the verbs are " + listed(known) : meant);
  }
  for (const std::string& other : words) {
    if (other.size() < 2 || other.front() != '-') continue;
    const std::string option = other.substr(0, other.find('='));
    return name + " has no option " + option +
           hint(option.substr(option.find_first_not_of('-')), options, "--");
  }
  return in_quotes(word) + " is one argument more than " + name + " takes";
}

// Help in 80 columns. An option that excludes many others would hide its own description behind their names;
// the group that it stands in says with what it goes.
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option_opts(const CLI::Option* option) const override {
    std::string text = Formatter::make_option_opts(option);
    if (option->get_excludes().size() > 3) text.erase(text.find(" " + get_label("Excludes") + ":"));
    return text;
  }
  std::string make_option_desc(const CLI::Option* option) const override {
    std::string text = option->get_description();
    const std::size_t width = 80 - get_column_width();
    for (std::size_t begin = 0; text.size() - begin > width;) {
      std::size_t space = text.rfind(' ', begin + width);
      if (space == std::string::npos || space < begin) space = text.find(' ', begin);
      if (space == std::string::npos) break;
      text[space] = '\n';
      begin = space + 1;
    }
    return text;
  }
};

int run(int argc, char** argv, bool json) {
  CLI::App app{"Attention kernels from specs, at run time.", "flashjit"};
  app.formatter(std::make_shared<HelpFormatter>());
  app.set_version_flag("--version", std::string("flashjit ") + version());
  app.require_subcommand(1);
  app.footer(
      "A SPEC is a file, '-' for standard input, or the JSON text itself.\n"
      "'flashjit VERB --help' shows a verb's options and examples.\n\n"
      "Examples:\n"
      "  flashjit run '{\"op\": \"forward\", \"dtype\": \"bf16\", \"head_dim\": 64, \"mask\": [\"causal\"]}' "
      "--verify\n"
      "  flashjit mask tools/examples/causal_bf16.json --seqlen-q 2048 --svg mask.svg\n"
      "  flashjit bench tools/examples/causal_bf16.json --device cuda:0 --seqlens 1024,4096,16384\n\n" +
      exit_code_help());

  const Arguments arguments(app);
  const std::vector<Verb> verbs = {
      add_doctor(arguments), add_render(arguments),    add_compile(arguments),   add_generate(arguments),
      add_mask(arguments),   add_run(arguments),       add_bench(arguments),     add_audit(arguments),
      add_bits(arguments),   add_tune(arguments),      add_prebuild(arguments),  add_serve(arguments),
      add_cache(arguments),  add_reference(arguments), add_completion(arguments)};
  try {
    app.parse(argc, argv);
    for (const Verb& verb : verbs) {
      if (verb.arguments.parsed()) return verb.run();
    }
    return exit_usage;
  } catch (const CLI::Success& wanted) {  // --help, --version
    return app.exit(wanted);
  } catch (const CLI::ParseError& error) {
    const std::string unknown = unknown_words(app);
    return report_usage_error((unknown.empty() ? error.what() : unknown) + "; see flashjit --help", json);
  } catch (const Error& error) {
    return report_error(error, json);
  } catch (const std::bad_alloc&) {
    return report_error(Error(ErrorCode::device_failed, "out of memory on the host"), json);
  } catch (const std::exception& error) {
    return report_error(Error(ErrorCode::internal, error.what()), json);
  }
}

}  // namespace
}  // namespace flashjit::command

int main(int argc, char** argv) {
  // Errors of parsing are reported in JSON, too, so this cannot wait for it.
  const bool json = std::any_of(argv, argv + argc, [](std::string_view word) { return word == "--json"; });
  flashjit::command::write_progress_as_json(json);
  return flashjit::command::finish_output(flashjit::command::run(argc, argv, json), json);
}
