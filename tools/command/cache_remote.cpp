// flashjit cache push, pull and sync: a whole folder to the remote stores, and back.
#include <iostream>
#include <memory>

#include "cache/transfer.hpp"
#include "runtime/remote/plugin_client.hpp"
#include "runtime/remote/remote_client.hpp"
#include "tools/command/cache.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/progress.hpp"

namespace flashjit::command {
namespace {

struct RemoteOptions {
  std::optional<std::string> remote;
  std::string key;
};

std::shared_ptr<RemoteCache> open_stores(const std::optional<std::string>& list, const Signer& signer) {
  auto stores = remote_cache(list, verifier(trusted_keys({})), signer, "", "");
  if (!stores)
    throw Error(ErrorCode::invalid_argument,
                "there is no remote store: give --remote URL, or set FLASHJIT_CACHE_REMOTE");
  return stores;
}

int report(const DiskCache& cache, const char* done, const Transferred& result, bool json) {
  for (const std::string& reason : result.failed) tell_progress("failed: " + reason);
  if (json) {
    print_json({{"folder", cache.folder()},
                {"entries", result.entries},
                {"tune_records", result.records},
                {"present", result.present},
                {"failed", result.failed}});
  } else {
    std::cout << result.entries << " entries and " << result.records << " tune records " << done << ", "
              << result.present << " were there already\n";
  }
  return result.failed.empty() ? exit_ok : static_cast<int>(ErrorCode::cache_failed);
}

int pull(const RemoteOptions& options, const CacheOptions& cache_options) {
  const Trust trust = trusted_keys({});
  if (trust.names().empty())
    throw Error(ErrorCode::invalid_argument,
                "no key is trusted, so nothing of a store is used; FLASHJIT_TRUST lists the keys");
  const DiskCache cache = cache_options.cache(true);
  const auto stores = open_stores(options.remote, {});
  const Progress progress("pulling into " + cache.folder());
  return report(cache, "pulled", pull_folder(cache, *stores, trust), cache_options.json);
}

int sync(const RemoteOptions& options, const CacheOptions& cache_options) {
  const int pulled = pull(options, cache_options);
  const int pushed = push_cache(cache_options.cache(), options.remote, options.key, cache_options.json);
  return pulled != exit_ok ? pulled : pushed;
}

std::shared_ptr<RemoteOptions> declare(const Arguments& app, bool signs) {
  const auto options = std::make_shared<RemoteOptions>();
  app.add_option("--remote", options->remote, "The stores [FLASHJIT_CACHE_REMOTE]").type_name("URL");
  if (signs)
    app.add_option("--key", options->key, "File of the secret key [FLASHJIT_SIGNING_KEY]").type_name("FILE");
  return options;
}

}  // namespace

int push_cache(const DiskCache& cache, const std::optional<std::string>& remote, const std::string& key_file,
               bool json) {
  const std::string path = key_file.empty() ? signing_key_path({}) : key_file;
  if (path.empty())
    throw Error(
        ErrorCode::invalid_argument,
        "there is no key to sign with: give --key FILE, or set FLASHJIT_SIGNING_KEY; flashjit cache keygen "
        "makes a key");
  const std::string public_key = read_signing_key(path).public_key;
  const Signer sign = signer(path);
  const auto stores = open_stores(remote, sign);
  const Progress progress("pushing " + cache.folder());
  return report(cache, "pushed", push_folder(cache, *stores, sign, public_key), json);
}

CacheAction add_push(const Arguments& app) {
  const auto options = declare(app, true);
  app.footer(
      "Examples:\n  flashjit cache push --cache-dir kernels --remote redis://kernels:6379 --key ci.key\n");
  return [options](const CacheOptions& cache) {
    return push_cache(cache.cache(), options->remote, options->key, cache.json);
  };
}

CacheAction add_pull(const Arguments& app) {
  const auto options = declare(app, false);
  app.footer(
      "Takes what push has stored with the keys of FLASHJIT_TRUST.\n\n"
      "Examples:\n  flashjit cache pull --cache-dir kernels --remote redis://kernels:6379\n");
  return [options](const CacheOptions& cache) { return pull(*options, cache); };
}

CacheAction add_sync(const Arguments& app) {
  const auto options = declare(app, true);
  app.footer("Pulls, then pushes.\n\nExamples:\n  flashjit cache sync --cache-dir kernels\n");
  return [options](const CacheOptions& cache) { return sync(*options, cache); };
}

}  // namespace flashjit::command
