// The pages of the reference, in Markdown. The tables that the code walks are their only source.
#pragma once

#include <string>
#include <vector>

#include "tools/command/arguments.hpp"

namespace flashjit::command {

// Fields of a spec, what they may be, and which operations have kernels for them on which targets.
std::string spec_page();
// Arguments of each operation's launches.
std::string arguments_page();
std::string environment_page();
// Error codes and exit codes.
std::string codes_page();
// Verbs and their options. `command` is what Arguments::described() says of the whole.
std::string command_page(const VerbInfo& command);

// "# TITLE", who writes the page, and its first paragraphs.
std::string page_head(const std::string& title, const std::string& page,
                      const std::vector<std::string>& about);
// A table in Markdown, whose cells may have any text.
std::string markdown_table(const std::vector<std::string>& heads,
                           const std::vector<std::vector<std::string>>& rows);

}  // namespace flashjit::command
