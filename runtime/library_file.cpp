#include "runtime/library_file.hpp"

#include <dlfcn.h>
#include <link.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <sys/xattr.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "cache/environment.hpp"
#include "cache/file.hpp"
#include "cache/trust.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;

// The library or program that holds this code.
struct OwnFile {
  fs::path path;         // empty if unknown
  std::string why;       // why it is unknown
  bool certain = false;  // nothing that happened since it was opened can have changed which file that is
  struct stat status{};  // if it is certain
};

OwnFile unknown(std::string why) {
  OwnFile own;
  own.why = std::move(why);
  return own;
}

OwnFile own_file() {
  Dl_info info{};
  link_map* map = nullptr;
  if (dladdr1(reinterpret_cast<const void*>(&own_folder), &info, reinterpret_cast<void**>(&map),
              RTLD_DL_LINKMAP) == 0)
    return unknown("the loader does not know this code");
  // A program has no name in the link map, and its first argument need not be its path.
  const bool is_library = map->l_name != nullptr && *map->l_name != 0;
  fs::path name = is_library ? map->l_name : "/proc/self/exe";
  std::error_code error;
  if (!is_library && !fs::is_symlink(name, error)) {
    // The path that the kernel was given. It is the caller's choice, who may have changed where it leads.
    const unsigned long path = ::getauxval(AT_EXECFN);
    if (path == 0 || ::getauxval(AT_SECURE) != 0)
      return unknown("there is no /proc, and set-user-id programs do not ask their caller");
    name = reinterpret_cast<const char*>(path);
  }
  OwnFile own;
  own.path = fs::canonical(name, error);
  if (error) return unknown(name.string() + ": " + error.message());
  // A relative path leads elsewhere if the working directory has changed.
  own.certain = name.is_absolute() && ::stat(own.path.c_str(), &own.status) == 0;
  return own;
}

bool leads_to(const fs::path& folder, const fs::path& file) {
  return std::mismatch(folder.begin(), folder.end(), file.begin(), file.end()).first == folder.end();
}

// Whether only the owner can write as the group, as far as user and group numbers
// tell. (The group's permission bits also show the entries of a POSIX ACL.)
bool is_private_group(const fs::path& path, const struct stat& status) {
  return status.st_gid == status.st_uid &&
         ::lgetxattr(path.c_str(), "system.posix_acl_access", nullptr, 0) < 0;
}

// Why another user could change the file or folder; empty if none could.
std::string distrust_at(const fs::path& path, bool on_the_way, const OwnFile& own) {
  struct stat status;
  if (::lstat(path.c_str(), &status) != 0) return error_text(errno);
  const bool own_group = own.certain && own.status.st_mode & S_IWGRP && own.status.st_gid == status.st_gid;
  // In a sticky folder users may rename only their own files.
  const bool sticky = S_ISDIR(status.st_mode) && status.st_mode & S_ISVTX;
  mode_t tolerated = 0;
  if (on_the_way || sticky || own_group || is_private_group(path, status)) tolerated |= S_IWGRP;
  if (sticky) tolerated |= S_IWOTH;
  if (own.certain && status.st_uid == own.status.st_uid) status.st_uid = ::geteuid();
  return distrust(status, tolerated);
}

std::string last_dl_error() {
  const char* const text = dlerror();
  return text != nullptr ? text : "unknown error";
}

}  // namespace

fs::path own_folder(std::string* why) {
  const OwnFile own = own_file();
  *why = own.why;
  return own.path.parent_path();
}

std::vector<std::string> plugin_places(Variable variable, const std::string& file, std::string& problems) {
  if (std::string chosen = environment_variable(variable); !chosen.empty()) return {std::move(chosen)};
  std::vector<std::string> result;
  std::string why;
  if (const fs::path folder = own_folder(&why); !folder.empty()) {
    result.push_back((folder / file).string());
    result.push_back((folder.parent_path() / "lib" / file).string());
  } else {
    problems += "beside the flashjit library or program, whose folder is unknown: " + why + "\n";
  }
  result.push_back(file);
  return result;
}

std::string trusted_library(const std::string& path, std::string* why) {
  std::error_code error;
  const fs::path file = fs::canonical(path, error);
  if (error || !fs::is_regular_file(file, error)) {
    *why = "cannot open: " + (error ? error.message() : "not a regular file");
    return {};
  }
  const OwnFile own = own_file();
  const fs::path folder = file.parent_path();
  for (fs::path at = file;; at = at.parent_path()) {
    if (!own.certain || !leads_to(at, own.path)) {
      if (const std::string reason = distrust_at(at, at != file && at != folder, own); !reason.empty()) {
        *why = "refused, since its code would be run: " + (at == file ? "" : "folder " + at.string() + ": ") +
               reason + "; let it belong to this user or to root, and run chmod go-w on it";
        return {};
      }
    }
    if (at == at.root_path()) return file.string();
  }
}

void* open_library(const std::string& name, std::string* why) {
  std::string path = name;
  if (name.find('/') != std::string::npos) {
    path = trusted_library(name, why);
    if (path.empty()) return nullptr;
  }
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) *why = last_dl_error();
  return library;
}

std::string path_of(void* library) {
  link_map* map = nullptr;
  return dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 ? map->l_name : "";
}

}  // namespace flashjit
