#include "runtime/library_file.hpp"

#include <dlfcn.h>
#include <link.h>
#include <sys/stat.h>
#include <sys/xattr.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "cache/file.hpp"
#include "cache/trust.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;

// The library or program that holds this code.
struct OwnFile {
  fs::path path;
  struct stat status{};
  bool known = false;
};

OwnFile own_file() {
  OwnFile own;
  Dl_info info{};
  link_map* map = nullptr;
  if (dladdr1(reinterpret_cast<const void*>(&own_folder), &info, reinterpret_cast<void**>(&map),
              RTLD_DL_LINKMAP) == 0)
    return own;
  // A program has no name in the link map, and the name that it was started by need not be a path.
  const char* const name = map->l_name != nullptr && *map->l_name != 0 ? map->l_name : "/proc/self/exe";
  std::error_code error;
  own.path = fs::canonical(name, error);
  own.known = !error && ::stat(own.path.c_str(), &own.status) == 0;
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
  const bool own_group = own.known && own.status.st_mode & S_IWGRP && own.status.st_gid == status.st_gid;
  // In a sticky folder users may rename only their own files.
  const bool sticky = S_ISDIR(status.st_mode) && status.st_mode & S_ISVTX;
  mode_t tolerated = 0;
  if (on_the_way || sticky || own_group || is_private_group(path, status)) tolerated |= S_IWGRP;
  if (sticky) tolerated |= S_IWOTH;
  if (own.known && status.st_uid == own.status.st_uid) status.st_uid = ::geteuid();
  return distrust(status, tolerated);
}

std::string last_dl_error() {
  const char* const text = dlerror();
  return text != nullptr ? text : "unknown error";
}

}  // namespace

fs::path own_folder() {
  return own_file().path.parent_path();
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
    if (!leads_to(at, own.path)) {
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
