// Opens shared libraries at run time, if their code may run in this process.
//
// The rule of cache/trust.hpp decides: the file and its folder must belong to this
// process's user or to root, and nobody else may write to them. The folders above must
// belong to the same users, and must not let everybody rename their content. Two
// exceptions differ from a cache, whose files flashjit makes itself with modes of its own:
// - Users who can change the library or program that holds this code are trusted with
//   other code, too. These are its owner, a group that may write to it, and those who
//   can change the folders that lead to it. So code that a software account installs,
//   or that a checkout holds, works for the users who run it from there. Code that was
//   opened by a relative path is no such case where /proc does not tell its place.
// - A group with the same number as the owner is the owner's private group, for
//   which the default umask is 002. Its right to write counts as the owner's.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "cache/environment.hpp"

namespace flashjit {

// The folder of the library or program that holds this code, without symbolic links. Empty, with the reason
// in *why, if it is unknown.
std::filesystem::path own_folder(std::string* why);

// Where a plugin may be, in the order of search: the file that the variable names and no other,
// else beside the library or program that holds this code, in ../lib of that folder, and where the dynamic
// loader looks for the file's name. `problems` gets a line for each place that is unknown.
std::vector<std::string> plugin_places(Variable variable, const std::string& file, std::string& problems);

// The library's path without symbolic links, so that the checked path is the opened
// path. Empty, with the reason in *why, if there is no such file or it is not trusted.
std::string trusted_library(const std::string& path, std::string* why);

// Opens a library with dlopen; it stays open. Null, with the reason in *why, if that fails or
// trusted_library refuses the path; then none of its code has run. Only the loader knows where a
// name without a slash leads: to folders that root configured, and to those of LD_LIBRARY_PATH,
// which serve this process's other libraries as well and are ignored in set-user-id programs.
void* open_library(const std::string& name, std::string* why);

// The path that an open library was loaded from.
std::string path_of(void* library);

}  // namespace flashjit
