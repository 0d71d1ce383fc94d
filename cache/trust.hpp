// Who could change what we are about to run.
//
// A cache holds machine code, so what decides is checked on the open descriptor at every use: a folder or
// file must belong to this process's user or to root, and nobody else may write to it (the group bits also
// show what POSIX ACLs allow). Whoever swaps a folder on the way to it can then at worst lead us to another
// folder that only we can write to. The walk at the start says early, and in words, what is wrong with a
// path. The environment is another user's where a set-user-id program runs.
#pragma once

#include <sys/stat.h>
#include <string>

namespace flashjit {

// A variable of the environment; empty where there is none, and in set-user-id programs, whose environment is
// their caller's.
std::string environment_variable(const char* name);

// Why another user could change what `status` describes; empty if none could. Mode bits in `tolerated` do not
// count.
std::string distrust(const struct stat& status, mode_t tolerated = 0);

// The absolute path of the folder without symbolic links. Folders that are missing are made (0700) if
// `create` is set. Throws cache_failed where one is missing or cannot be made; where the folder itself is not
// to be trusted; where a folder on the way, also through symbolic links, may be written by everybody and is
// not sticky; and at another user's symbolic link in a sticky one.
std::string prepare_folder(const std::string& folder, bool create = true);

}  // namespace flashjit
