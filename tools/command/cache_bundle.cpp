// flashjit cache export and import: a cache as one file.
#include <fcntl.h>
#include <unistd.h>
#include <cerrno>
#include <iostream>
#include <memory>

#include "cache/bundle.hpp"
#include "tools/command/cache.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/progress.hpp"

namespace flashjit::command {
namespace {

// Opens the file; "-" means standard input or output.
File open_archive(const std::string& path, int flags, int standard) {
  File file(path == "-" ? ::fcntl(standard, F_DUPFD_CLOEXEC, 0)
                        : ::open(path.c_str(), flags | O_CLOEXEC, 0644));
  if (!file) {
    throw Error(ErrorCode::invalid_argument, "archive '" + path + "' cannot be opened: " + error_text(errno) +
                                                 "; a file, or '-', would work");
  }
  return file;
}

int export_to(const std::string& path, const CacheOptions& options) {
  const DiskCache cache = options.cache();
  const File file = open_archive(path, O_WRONLY | O_CREAT | O_TRUNC, STDOUT_FILENO);
  const Progress progress("exporting " + cache.folder());
  const Exported result = export_bundle(
      cache, [&](const char* from, std::size_t size) { return write_fully(file.get(), from, size); });
  for (const std::string& reason : result.left_out) tell_progress("left out: " + reason);
  const Json summary = {{"folder", cache.folder()},
                        {"archive", path},
                        {"entries", result.entries},
                        {"tune_records", result.records},
                        {"left_out", result.left_out}};
  if (path == "-") return exit_ok;
  if (options.json) {
    print_json(summary);
  } else {
    std::cout << result.entries << " entries and " << result.records << " tune records in " << path << '\n';
  }
  return exit_ok;
}

int import_from(const std::string& path, const CacheOptions& options) {
  const File file = open_archive(path, O_RDONLY, STDIN_FILENO);
  const DiskCache cache = options.cache(true);
  const Progress progress("importing " + path);
  int error = 0;  // errno of a read error; an archive that ends early is no error
  Imported result = import_bundle(cache, [&](char* to, std::size_t size) {
    const bool complete = read_fully(file.get(), to, size);
    if (!complete) error = errno;
    return complete;
  });
  if (error != 0) result.damage = error_text(error);
  if (options.json) {
    print_json({{"folder", cache.folder()},
                {"entries", result.entries},
                {"tune_records", result.records},
                {"refused", result.refused},
                {"damage", result.damage}});
  } else {
    for (const std::string& reason : result.refused) std::cerr << "refused: " << reason << '\n';
    if (!result.damage.empty()) std::cerr << "the rest was not read: " << result.damage << '\n';
    std::cout << result.entries << " entries and " << result.records << " tune records imported into "
              << cache.folder() << ", " << result.refused.size() << " members refused\n";
  }
  const bool good = result.refused.empty() && result.damage.empty();
  return good ? exit_ok : static_cast<int>(ErrorCode::cache_failed);
}

}  // namespace

CacheAction add_export(const Arguments& app) {
  const auto path = std::make_shared<std::string>();
  app.add_option("ARCHIVE", *path, "The file to write, or '-' for standard output").required();
  app.footer("Examples:\n  flashjit cache export kernels.tar --cache-dir kernels\n");
  return [path](const CacheOptions& options) { return export_to(*path, options); };
}

CacheAction add_import(const Arguments& app) {
  const auto path = std::make_shared<std::string>();
  app.add_option("ARCHIVE", *path, "The file to read, or '-' for standard input").required();
  app.footer(
      "Examples:\n  flashjit cache import kernels.tar --cache-dir kernels\n\n"
      "A member that is damaged, foreign or no plain file is refused with the reason, and the rest "
      "imported;\n"
      "exit code 7 then. Checksums show damage, not who made the kernels: import from those whose code you "
      "run.\n");
  return [path](const CacheOptions& options) { return import_from(*path, options); };
}

}  // namespace flashjit::command
