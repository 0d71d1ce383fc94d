// Whether another user could change the machine code that this process is about to run.
//
// Every use of a cache checks the open descriptor: a folder or file must belong to this process's user or
// to root, and nobody else may write to it. (The group bits also show the rights that POSIX ACLs give.) A
// user who swaps a folder on the way to it can then at worst lead us to another folder that only we can
// write to. The walk along a path at the start serves to say early, and in words, what is wrong with it.
#pragma once

#include <sys/stat.h>
#include <string>

namespace flashjit {

// Why another user could change the file or folder that `status` describes;
// empty if none could. Write permissions in `tolerated` do not count.
std::string distrust(const struct stat& status, mode_t tolerated = 0);

// A folder that is missing is made (0700), refused, or left so.
enum class Missing { make, refuse, leave };

// The folder's absolute path without symbolic links. Throws cache_failed in these cases: a folder is missing
// and to be refused, or cannot be made; the folder itself is not trusted; a folder on the way, also through
// symbolic links, may be written by everybody and is not sticky; a sticky folder on the way holds another
// user's symbolic link.
std::string prepare_folder(const std::string& folder, Missing missing = Missing::make);

}  // namespace flashjit
