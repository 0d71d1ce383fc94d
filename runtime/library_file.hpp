// Shared libraries that are opened at run time, and whether their code may run in this process.
//
// The rule of cache/trust.hpp decides: the file and its folder belong to this process's user or to root,
// and nobody else may write to them; the folders above belong to the same, and not everybody may rename what
// is in them. Two things differ from a cache, whose files flashjit makes itself, with modes of its own:
// - Whoever can change the library or program that holds this code is trusted with other code, too: its
//   owner, a group that may write to it, the folders that lead to it. So what a software account installs, or
//   a checkout holds, works for those who run it from there.
// - A group of its owner's own number is the owner's private group, for which the default umask is 002: its
//   right to write counts as the owner's.
#pragma once

#include <filesystem>
#include <string>

namespace flashjit {

// The folder of the library or program that holds this code, without symbolic links; empty if it cannot be
// told.
std::filesystem::path own_folder();

// The library's path without symbolic links, so that the path checked is the path opened. Empty, with the
// reason in *why, where there is no such file or it is not to be trusted.
std::string trusted_library(const std::string& path, std::string* why);

// dlopen of a library that stays open. Null with the reason in *why where that fails or trusted_library
// refuses the path; its code has not run then. Where a name without a slash leads only the loader knows: to
// folders that root names, and to those of LD_LIBRARY_PATH, which serve this process's other libraries as
// well and which the loader ignores in set-user-id programs.
void* open_library(const std::string& name, std::string* why);

// The path that an open library was loaded from.
std::string path_of(void* library);

}  // namespace flashjit
