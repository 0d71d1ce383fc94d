// flashjit reference: prints a page of the reference.
#include "tools/command/reference.hpp"

#include <algorithm>
#include <iostream>
#include <memory>
#include <sstream>
#include <utility>

#include "cache/environment.hpp"
#include "codegen/base/error_table.hpp"
#include "codegen/base/suggest.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/verbs.hpp"

namespace flashjit::command {
namespace {

std::string joined(const std::vector<std::string>& texts, const char* between) {
  std::string all;
  for (const std::string& text : texts) all += (all.empty() ? "" : between) + text;
  return all;
}

std::string code_text(const std::string& text) {
  return text.empty() ? "" : "`" + text + "`";
}

// The line in as many lines of at most 120 columns.
std::string filled(const std::string& line) {
  std::istringstream words(line);
  std::string text = line.substr(0, line.find_first_not_of(' '));
  std::size_t columns = text.size();
  bool begins = true;
  for (std::string word; words >> word; begins = false) {
    const bool fits = columns + 1 + word.size() <= 120;
    if (!begins) text += fits ? " " : "\n";
    columns = begins ? columns + word.size() : fits ? columns + 1 + word.size() : word.size();
    text += word;
  }
  return text + "\n";
}

// Lines that fit stay as they are.
std::string block(const std::string& lines) {
  std::istringstream all(lines);
  std::string text = "\n```text\n";
  for (std::string line; std::getline(all, line);) text += line.size() > 120 ? filled(line) : line + "\n";
  return text + "```\n";
}

std::string verb_text(const VerbInfo& verb, const std::string& path) {
  std::string text =
      "\n## " + path + "\n\n" + verb.description + (verb.description.ends_with('.') ? "\n" : ".\n");
  std::vector<std::string> groups;
  for (const OptionInfo& option : verb.options)
    if (std::find(groups.begin(), groups.end(), option.group) == groups.end()) groups.push_back(option.group);
  for (const std::string& group : groups) {
    std::vector<std::vector<std::string>> rows;
    for (const OptionInfo& option : verb.options) {
      if (option.group != group) continue;
      std::vector<std::string> names = option.names;
      for (std::string& name : names) name = code_text(name);
      rows.push_back({joined(names, ", "), code_text(option.value),
                      option.required ? "required" : code_text(option.initial), option.description});
    }
    if (group != "Options") text += "\n" + group + ":\n";
    text += "\n" + markdown_table({"option", "value", "default", "meaning"}, rows);
  }
  if (!verb.footer.empty()) text += block(verb.footer);
  for (const VerbInfo& inner : verb.verbs) text += verb_text(inner, path + " " + inner.name);
  return text;
}

struct Page {
  const char* name;
  std::string (*text)(const VerbInfo& command);
};
constexpr Page pages[] = {
    {"spec", [](const VerbInfo&) { return spec_page(); }},
    {"arguments", [](const VerbInfo&) { return arguments_page(); }},
    {"environment", [](const VerbInfo&) { return environment_page(); }},
    {"codes", [](const VerbInfo&) { return codes_page(); }},
    {"command", command_page},
};

}  // namespace

std::string page_head(const std::string& title, const std::string& page,
                      const std::vector<std::string>& about) {
  std::string text = "# " + title + "\n\n<!-- `flashjit reference " + page +
                     "` writes this page; tests/checks/reference.sh compares both. -->\n";
  for (const std::string& paragraph : about) text += "\n" + filled(paragraph);
  return text;
}

std::string markdown_table(const std::vector<std::string>& heads,
                           const std::vector<std::vector<std::string>>& rows) {
  const auto row_text = [](const std::vector<std::string>& cells) {
    std::string text = "|";
    for (const std::string& cell : cells) {
      text += cell.empty() ? " " : " ";
      for (const char c : cell) text += c == '|' ? "\\|" : c == '\n' ? " " : std::string(1, c);
      text += cell.empty() ? "|" : " |";
    }
    return text + "\n";
  };
  std::string text = row_text(heads) + "|";
  for (std::size_t i = 0; i < heads.size(); ++i) text += " --- |";
  text += "\n";
  for (const std::vector<std::string>& row : rows) text += row_text(row);
  return text;
}

std::string environment_page() {
  std::vector<std::vector<std::string>> rows;
  for (const VariableInfo& row : environment_table)
    rows.push_back({code_text(row.name), row.meaning, row.otherwise});
  return page_head("Environment variables", "environment",
                   {"These are the variables that the library and the command read. An option of "
                    "`EngineOptions` or of "
                    "the command goes before its variable. Set-user-id programs ignore all of them."}) +
         "\n" + markdown_table({"variable", "meaning", "without it"}, rows);
}

std::string codes_page() {
  std::vector<std::vector<std::string>> errors, exits;
  for (const ErrorInfo& row : error_table) {
    std::string name = row.name;
    std::transform(name.begin(), name.end(), name.begin(),
                   [](char c) { return c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c; });
    errors.push_back({std::to_string(static_cast<int>(row.code)), code_text(row.name),
                      code_text("FLASHJIT_" + name), row.meaning});
  }
  for (const ExitCode& code : exit_codes())
    exits.push_back({std::to_string(code.code), code_text(code.name), code.meaning});
  return page_head("Error codes and exit codes", "codes",
                   {"The library's errors have these codes. The command ends with the same number."}) +
         "\n## Error codes\n\nIn C++ they are enumerators of `flashjit::ErrorCode`, in C of "
         "`flashjit_status`.\n\n" +
         markdown_table({"code", "name", "in C", "meaning"}, errors) + "\n## Exit codes of the command\n\n" +
         markdown_table({"code", "name", "meaning"}, exits);
}

std::string command_page(const VerbInfo& command) {
  return page_head("The command", "command",
                   {"A SPEC is a file, `-` for standard input, or the JSON text itself. Options that a verb "
                    "shares with "
                    "others mean the same in all of them."}) +
         verb_text(command, command.name);
}

Verb add_reference(const Arguments& parent) {
  const Arguments app = parent.add_subcommand("reference", "Print a page of the reference, in Markdown");
  const auto wanted = std::make_shared<std::string>();
  std::vector<std::string_view> names;
  for (const Page& page : pages) names.emplace_back(page.name);
  app.add_option("PAGE", *wanted, listed(names)).required();
  app.footer("Examples:\n  flashjit reference environment\n  flashjit reference spec > spec.md\n");
  return {app, [parent, wanted, names] {
            for (const Page& page : pages)
              if (*wanted == page.name) {
                std::cout << page.text(parent.described());
                return exit_ok;
              }
            throw Error(ErrorCode::invalid_argument, "the reference has no page " + in_quotes(*wanted) +
                                                         "; its pages are " + listed(names) +
                                                         did_you_mean(*wanted, names));
          }};
}

}  // namespace flashjit::command
