#include "cache/trust.hpp"

#include <fcntl.h>
#include <limits.h>
#include <deque>
#include <filesystem>

#include "cache/file.hpp"
#include "codegen/base/error.hpp"

namespace flashjit {
namespace {

constexpr int max_links = 40;  // the same as Linux

std::string octal(mode_t mode) {
  std::string digits;
  for (int shift = 9; shift >= 0; shift -= 3) digits += static_cast<char>('0' + (mode >> shift & 7));
  return digits;
}

[[noreturn]] void refuse_folder(const std::string& folder, const std::string& reason,
                                const std::string& remedy) {
  throw Error(ErrorCode::cache_failed, "cache folder " + folder + ": " + reason + "; " + remedy);
}

// Inserts the components of a path before those that are still to be walked.
void push_components(std::deque<std::string>& todo, const std::string& path) {
  auto position = todo.begin();
  for (const std::filesystem::path& part : std::filesystem::path(path)) {
    if (part.empty() || part == "." || part == "/") continue;
    position = std::next(todo.insert(position, part.string()));
  }
}

// The rest of a walk that ended at `at`.
std::string path_below(std::string at, const std::deque<std::string>& todo) {
  for (const std::string& name : todo) at += "/" + name;
  return at;
}

}  // namespace

std::string distrust(const struct stat& status, mode_t tolerated) {
  if (status.st_uid != ::geteuid() && status.st_uid != 0) {
    return "it belongs to user " + std::to_string(status.st_uid) + ", while this process runs as user " +
           std::to_string(::geteuid());
  }
  if (status.st_mode & (S_IWGRP | S_IWOTH) & ~tolerated)
    return "others may write to it (mode " + octal(status.st_mode) + ")";
  return {};
}

std::string prepare_folder(const std::string& folder, Missing missing) {
  // A folder to write to is made where it is missing; one to read from was named as it is.
  const std::string another_folder = missing != Missing::refuse
                                         ? "or set FLASHJIT_CACHE_DIR to a folder of your own"
                                         : "or name another folder where FLASHJIT_CACHE_PATH or an option "
                                           "names this one";
  std::error_code failed;
  const std::string absolute = std::filesystem::absolute(folder, failed).string();
  if (failed || folder.empty())
    refuse_folder("'" + folder + "'", "not a path", "give a folder that can be reached, " + another_folder);

  std::deque<std::string> todo;
  push_components(todo, absolute);
  std::string at;  // the path resolved so far; empty: the root
  for (int links = 0; !todo.empty();) {
    struct stat here, next;
    if (::lstat(at.empty() ? "/" : at.c_str(), &here) != 0) {
      refuse_folder(folder, at + ": " + error_text(errno),
                    "choose a folder that can be reached, " + another_folder);
    }
    const bool shared = here.st_mode & S_IWOTH;
    if (shared && !(here.st_mode & S_ISVTX)) {
      refuse_folder(folder, "everybody may rename what is in " + at + " (mode " + octal(here.st_mode) + ")",
                    "run chmod o-w on it, " + another_folder);
    }
    const std::string name = todo.front();
    if (name == "..") {
      todo.pop_front();
      at.erase(at.empty() ? 0 : at.rfind('/'));
      continue;
    }
    const std::string path = at + "/" + name;
    if (::lstat(path.c_str(), &next) != 0) {
      // If another process makes the folder at the same moment, the next round checks that one.
      if (errno == ENOENT && missing == Missing::leave) return path_below(at, todo);
      if (errno == ENOENT && missing == Missing::make &&
          (::mkdir(path.c_str(), 0700) == 0 || errno == EEXIST))
        continue;
      if (missing == Missing::refuse)
        refuse_folder(folder, path + ": " + error_text(errno), "make it with prebuild -o, " + another_folder);
      refuse_folder(folder, "cannot make " + path + ": " + error_text(errno),
                    "choose a folder that can be written, " + another_folder);
    }
    todo.pop_front();
    if (S_ISLNK(next.st_mode)) {
      if (shared && next.st_uid != ::geteuid() && next.st_uid != 0 && next.st_uid != here.st_uid) {
        refuse_folder(folder,
                      path + " is a symbolic link of another user in a folder that everybody may write to",
                      "remove the link, " + another_folder);
      }
      char target[PATH_MAX];
      const ssize_t size = ::readlink(path.c_str(), target, sizeof target);
      if (size <= 0 || size == sizeof target || ++links > max_links) {
        refuse_folder(folder, "cannot follow the symbolic link " + path,
                      "remove the link, " + another_folder);
      }
      if (target[0] == '/') at.clear();
      push_components(todo, std::string(target, static_cast<std::size_t>(size)));
    } else if (S_ISDIR(next.st_mode)) {
      at = path;
    } else {
      refuse_folder(folder, path + " is not a folder", "remove it, " + another_folder);
    }
  }

  struct stat status;
  if (at.empty()) at = "/";
  if (::lstat(at.c_str(), &status) != 0) refuse_folder(folder, error_text(errno), "choose another folder");
  if (const std::string reason = distrust(status); !reason.empty()) {
    const bool ours = status.st_uid == ::geteuid();
    refuse_folder(at, reason + ", and the machine code in it would be run",
                  (ours ? "run chmod go-w on it, " : "let its owner use it, ") + another_folder);
  }
  return at;
}

}  // namespace flashjit
