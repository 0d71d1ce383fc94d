// flashjit cache keygen, sign and trust: who made what a cache holds, and whose work is used.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <iostream>
#include <memory>
#include <vector>

#include "cache/tune_store.hpp"
#include "codegen/base/suggest.hpp"
#include "runtime/remote/plugin_client.hpp"
#include "tools/command/cache.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/progress.hpp"

namespace flashjit::command {
namespace {

int keygen(const std::string& path, const std::string& name, bool json) {
  const SigningKey key = make_signing_key(path, name);
  if (json)
    print_json({{"file", path}, {"name", key.name}, {"key", key.public_key}});
  else
    std::cout << key.name << '=' << key.public_key << '\n';
  return exit_ok;
}

struct SignOptions {
  std::string key;
  bool again = false, ask = false;
};

int sign_folder(const SignOptions& options, const CacheOptions& cache_options) {
  const std::string path = options.key.empty() ? signing_key_path({}) : options.key;
  if (path.empty())
    throw Error(
        ErrorCode::invalid_argument,
        "there is no key to sign with: give --key FILE, or set FLASHJIT_SIGNING_KEY; flashjit cache keygen "
        "makes a key");
  read_signing_key(path);
  const Signer sign = signer(path);
  DiskCache cache = cache_options.cache();
  cache = DiskCache(cache.folder());
  TuneStore records(cache.folder());
  // An entry signed here was not signed before, or not by a key that is trusted.
  const Verifier any = [](std::string_view, std::string_view) { return std::string(); };
  cache.use_signatures(any, sign);
  records.use_signatures(any, sign);

  const Progress progress("signing " + cache.folder());
  std::size_t signed_entries = 0, signed_records = 0;
  std::vector<std::string> left_out;
  for (const DiskCache::Listing& item : cache.list(false)) {
    std::string why = item.damage;
    std::optional<CacheEntry> entry = item.entry ? cache.lookup(item.entry->key, &why) : std::nullopt;
    if (entry && !entry->signature.empty() && !options.again) continue;
    if (entry) {
      entry->signature.clear();
      entry->signature = sign(DiskCache::name(entry->key), *encode_entry(*entry, why));
    }
    if (entry && cache.publish(*entry, &why))
      ++signed_entries;
    else
      left_out.push_back(item.path + ": " + why);
  }
  for (const TuneStore::Listing& item : records.list()) {
    if (item.record && !item.signature.empty() && !options.again) continue;
    std::string why = item.damage;
    if (item.record &&
        records.publish(*item.record, &why, sign(TuneStore::name(item.record->key), to_json(*item.record))))
      ++signed_records;
    else
      left_out.push_back(item.path + ": " + why);
  }
  if (options.ask) {
    const std::string marker = cache.folder() + "/signed";
    if (!File(::open(marker.c_str(), O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644)))
      throw Error(ErrorCode::cache_failed, marker + " cannot be made: " + error_text(errno));
  }
  for (const std::string& reason : left_out) tell_progress("left out: " + reason);
  if (cache_options.json) {
    print_json({{"folder", cache.folder()},
                {"signed_entries", signed_entries},
                {"signed_tune_records", signed_records},
                {"left_out", left_out}});
  } else {
    std::cout << signed_entries << " entries and " << signed_records << " tune records signed in "
              << cache.folder() << '\n';
  }
  return left_out.empty() ? exit_ok : static_cast<int>(ErrorCode::cache_failed);
}

struct TrustOptions {
  std::vector<std::string> items;
  std::string file;
};

int trust(const TrustOptions& options, bool json) {
  if (!options.items.empty()) {
    if (options.file.empty())
      throw Error(ErrorCode::invalid_argument,
                  "keys are added to a file: give --file FILE, and name it in FLASHJIT_TRUST");
    std::string lines;
    for (const std::string& item : options.items) {
      if (item.find('/') != std::string::npos)
        throw Error(ErrorCode::invalid_argument,
                    in_quotes(item) + " is no key: NAME=KEY or -NAME=KEY would be");
      Trust::parse(item);
      lines += item + "\n";
    }
    const File file(::open(options.file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
    if (!file || !write_fully(file.get(), lines.data(), lines.size()))
      throw Error(ErrorCode::cache_failed, options.file + " cannot be written: " + error_text(errno));
  }
  std::string list = options.file;
  if (!list.empty() && list.find('/') == std::string::npos) list = "./" + list;
  const Trust keys = list.empty() ? trusted_keys({}) : Trust::parse(list);
  Json rows = Json::array();
  const auto add = [&](const auto& names, bool revoked) {
    for (const auto& [key, name] : names) {
      rows.push_back({{"name", name}, {"key", key}, {"revoked", revoked}});
      if (!json) std::cout << (revoked ? "-" : "") << name << '=' << key << '\n';
    }
  };
  add(keys.names(), false);
  add(keys.revoked(), true);
  if (json) print_json(rows);
  return exit_ok;
}

}  // namespace

CacheAction add_keygen(const Arguments& app) {
  const auto path = std::make_shared<std::string>(), name = std::make_shared<std::string>("key");
  app.add_option("FILE", *path, "The new file of the secret key").required();
  app.add_option("--name", *name, "What the key is called where it is trusted").capture_default_str();
  app.footer(
      "Prints the public key as FLASHJIT_TRUST takes it. Whoever has the file can make code that those who "
      "trust the "
      "key run.\n\n"
      "Examples:\n  flashjit cache keygen ci.key --name ci\n");
  return [path, name](const CacheOptions& options) { return keygen(*path, *name, options.json); };
}

CacheAction add_sign(const Arguments& app) {
  const auto sign = std::make_shared<SignOptions>();
  app.add_option("--key", sign->key, "File of the secret key [FLASHJIT_SIGNING_KEY]").type_name("FILE");
  app.add_flag("--again", sign->again, "Sign what is signed already, too");
  app.add_flag("--ask", sign->ask, "From now on the folder gives and takes nothing unsigned");
  app.footer("Examples:\n  flashjit cache sign --key ci.key --cache-dir kernels --ask\n");
  return [sign](const CacheOptions& options) { return sign_folder(*sign, options); };
}

CacheAction add_trust(const Arguments& app) {
  const auto options = std::make_shared<TrustOptions>();
  app.add_option("KEY", options->items, "NAME=KEY to trust, -NAME=KEY to revoke; before a revoked one, --");
  app.add_option("--file", options->file, "The file of keys [those of FLASHJIT_TRUST are listed]")
      .type_name("FILE");
  app.footer(
      "Examples:\n  flashjit cache trust ci=$KEY --file /etc/flashjit/trust\n  flashjit cache trust\n");
  return [options](const CacheOptions& cache) { return trust(*options, cache.json); };
}

}  // namespace flashjit::command
