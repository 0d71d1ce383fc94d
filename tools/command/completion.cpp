// flashjit completion: prints a shell's script that completes verbs, options and their values.
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "codegen/base/suggest.hpp"
#include "codegen/base/target.hpp"
#include "codegen/spec/operation.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/verbs.hpp"
#include "tools/manifest/models.hpp"

namespace flashjit::command {
namespace {

using Words = std::vector<std::string>;

std::string joined(const Words& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

// The words that an option takes; empty: a file's name completes it, as it does no harm to a number.
Words values_of(const std::string& option) {
  Words words;
  if (option == "--op")
    for (const OperationInfo& row : operation_table) words.emplace_back(row.name);
  if (option == "--target") {
    for (const Target& target : Target::all()) words.push_back(target.str());
    words.emplace_back("native");
  }
  if (option == "--device") words = {"cpu", "cuda:0", "all"};
  if (option == "--use") words.assign(std::begin(purposes), std::end(purposes));
  if (option == "--ops")
    for (const OperationInfo& row : operation_table)
      if (row.of_models) words.emplace_back(row.name);
  if (option == "--kv-dtype")
    for (const DType dtype : kv_dtypes)
      if (size_of(dtype) == 1) words.emplace_back(to_string(dtype));
  if (option == "--kv-scale")
    for (const KvScale scale : kv_scales) words.emplace_back(to_string(scale));
  return words;
}

// A place in the command line: the words before it, and what may follow.
struct Place {
  std::string path;  // "", "cache", "cache ls"
  Words verbs, options;
};

void add_places(const VerbInfo& verb, const std::string& path, std::vector<Place>& places) {
  Place place{.path = path, .verbs = {}, .options = {}};
  for (const OptionInfo& option : verb.options)
    for (const std::string& name : option.names)
      if (name.starts_with("--")) place.options.push_back(name);
  for (const VerbInfo& inner : verb.verbs) place.verbs.push_back(inner.name);
  places.push_back(std::move(place));
  for (const VerbInfo& inner : verb.verbs)
    add_places(inner, path + (path.empty() ? "" : " ") + inner.name, places);
}

// Options with words of their own, each once.
std::map<std::string, Words> known_values(const std::vector<Place>& places) {
  std::map<std::string, Words> known;
  for (const Place& place : places)
    for (const std::string& option : place.options)
      if (Words words = values_of(option); !words.empty()) known[option] = std::move(words);
  return known;
}

// Both shells have the same words in $words and $verbs then; `reply` sets the candidates.
std::string cases(const std::vector<Place>& places) {
  std::string text;
  for (const Place& place : places)
    text += "    '" + place.path + "') verbs='" + joined(place.verbs) + "' options='" +
            joined(place.options) + "' ;;\n";
  return text;
}

std::string value_cases(const std::vector<Place>& places) {
  std::string text;
  for (const auto& [option, words] : known_values(places))
    text += "    " + option + ") values='" + joined(words) + "' ;;\n";
  return text;
}

std::string bash(const std::vector<Place>& places) {
  return R"(# Completion of flashjit for bash, written by "flashjit completion bash".
_flashjit() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} place= verbs= options= values= i
  local next
  _flashjit_place ''
  for ((i = 1; i < COMP_CWORD; ++i)); do
    case " $verbs " in
      *" ${COMP_WORDS[i]} "*)
        place=${place:+$place }${COMP_WORDS[i]}
        _flashjit_place "$place"
        ;;
    esac
  done
  case $before in
)" + value_cases(places) +
         R"(  esac
  COMPREPLY=()
  if [[ $values ]]; then
    next=$values
  elif [[ $word == -* ]]; then
    next=$options
  else
    next=$verbs
  fi
  [[ $next ]] && mapfile -t COMPREPLY < <(compgen -W "$next" -- "$word")
  [[ $values || $verbs || $word == -* ]] || mapfile -t COMPREPLY < <(compgen -f -- "$word")
}
_flashjit_place() {
  case $1 in
)" + cases(places) +
         R"(  esac
}
complete -o filenames -F _flashjit flashjit
)";
}

std::string zsh(const std::vector<Place>& places) {
  return R"(#compdef flashjit
# Completion of flashjit for zsh, written by "flashjit completion zsh".
_flashjit_place() {
  case $1 in
)" + cases(places) +
         R"(  esac
}
_flashjit() {
  local place= verbs= options= values= i
  _flashjit_place ''
  for ((i = 2; i < CURRENT; ++i)); do
    if [[ " $verbs " == *" ${words[i]} "* ]]; then
      place=${place:+$place }${words[i]}
      _flashjit_place "$place"
    fi
  done
  case ${words[CURRENT-1]} in
)" + value_cases(places) +
         R"(  esac
  if [[ -n $values ]]; then
    compadd -- ${=values}
  elif [[ $PREFIX == -* ]]; then
    compadd -- ${=options}
  elif [[ -n $verbs ]]; then
    compadd -- ${=verbs}
  else
    _files
  fi
}
_flashjit "$@"
)";
}

std::string in_single_quotes(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' || c == '\\' ? std::string("\\") + c : std::string(1, c);
  return quoted + "'";
}

// fish asks for one line for each verb and option.
void add_fish(const VerbInfo& verb, const std::string& path, std::string& text) {
  const std::string here = path.empty() ? "__fish_use_subcommand" : "__fish_seen_subcommand_from " + path;
  for (const VerbInfo& inner : verb.verbs) {
    text += "complete -c flashjit -n '" + here + "' -f -a " + inner.name + " -d " +
            in_single_quotes(inner.description) + "\n";
    add_fish(inner, inner.name, text);
  }
  for (const OptionInfo& option : verb.options)
    for (const std::string& name : option.names) {
      if (!name.starts_with("--")) continue;
      text += "complete -c flashjit -n '" + here + "' -l " + name.substr(2);
      if (!option.value.empty()) text += " -r";
      if (const Words words = values_of(name); !words.empty()) text += " -f -a '" + joined(words) + "'";
      text += " -d " + in_single_quotes(option.description) + "\n";
    }
}

struct Shell {
  const char* name;
  std::string (*script)(const VerbInfo& command);
};

std::vector<Place> places_of(const VerbInfo& command) {
  std::vector<Place> places;
  add_places(command, "", places);
  return places;
}

constexpr Shell shells[] = {
    {"bash", [](const VerbInfo& command) { return bash(places_of(command)); }},
    {"zsh", [](const VerbInfo& command) { return zsh(places_of(command)); }},
    {"fish",
     [](const VerbInfo& command) {
       std::string text = "# Completion of flashjit for fish, written by \"flashjit completion fish\".\n";
       add_fish(command, "", text);
       return text;
     }},
};

}  // namespace

Verb add_completion(const Arguments& parent) {
  const Arguments app = parent.add_subcommand("completion", "Print a shell's script that completes commands");
  const auto wanted = std::make_shared<std::string>();
  std::vector<std::string_view> names;
  for (const Shell& shell : shells) names.emplace_back(shell.name);
  app.add_option("SHELL", *wanted, listed(names)).required();
  app.footer("Examples:\n  source <(flashjit completion bash)\n");
  return {app, [parent, wanted, names] {
            for (const Shell& shell : shells)
              if (*wanted == shell.name) {
                std::cout << shell.script(parent.described());
                return exit_ok;
              }
            throw Error(ErrorCode::invalid_argument, "there is no completion for the shell " +
                                                         in_quotes(*wanted) + "; there is one for " +
                                                         listed(names) + did_you_mean(*wanted, names));
          }};
}

}  // namespace flashjit::command
