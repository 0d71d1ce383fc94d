#include "runtime/remote/plugin_client.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <utility>

#include "cache/environment.hpp"
#include "cache/file.hpp"
#include "cache/fork.hpp"
#include "cache/trust.hpp"
#include "codegen/base/error.hpp"
#include "codegen/base/suggest.hpp"
#include "runtime/library_file.hpp"

namespace flashjit {
namespace {

constexpr const char* remote_plugin_file = "libflashjit-remote.so";
constexpr std::size_t seed_size = 32;
constexpr std::string_view secret_word = "secret ";

[[noreturn]] void no_remote_plugin(const std::string& problems) {
  throw Error(
      ErrorCode::cache_failed,
      std::string("remote stores and signatures need a plugin, and ") + remote_plugin_file +
          " could not be opened. Build flashjit with -DFLASHJIT_REMOTE=ON, keep the plugin beside the "
          "flashjit library, or set FLASHJIT_REMOTE_PLUGIN to its file. Tried:\n" +
          problems);
}

flashjit_remote_plugin_api open_remote_plugin() {
  std::string problems;
  for (const std::string& place : plugin_places(Variable::remote_plugin, remote_plugin_file, problems)) {
    std::string why;
    if (void* const library = open_library(place, &why)) {
      using GetApi = const flashjit_remote_plugin_api* (*)(std::uint32_t);
      const auto get_api = reinterpret_cast<GetApi>(::dlsym(library, "flashjit_remote_plugin"));
      const flashjit_remote_plugin_api* const api = get_api ? get_api(FLASHJIT_REMOTE_PLUGIN_ABI) : nullptr;
      if (api) return *api;
      why = get_api ? "belongs to another version of flashjit" : "is not this plugin";
    }
    problems += place + ": " + why + "\n";
  }
  no_remote_plugin(problems);
}

std::string to_hex(const unsigned char* octets, std::size_t size) {
  std::string text;
  for (std::size_t i = 0; i < size; ++i) {
    text += "0123456789abcdef"[octets[i] >> 4];
    text += "0123456789abcdef"[octets[i] & 15];
  }
  return text;
}

// For text that is_hex() has accepted.
std::string from_hex(std::string_view text) {
  const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  std::string octets;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2)
    octets += static_cast<char>(digit(text[i]) << 4 | digit(text[i + 1]));
  return octets;
}

const unsigned char* octets(const std::string& text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

[[noreturn]] void refuse_key(const std::string& path, const std::string& reason) {
  throw Error(ErrorCode::cache_failed, "signing key " + path + ": " + reason);
}

// The key of the seed; the plugin computes its public part.
SigningKey key_of(const std::string& path, std::string name, std::string seed) {
  unsigned char key[32], unused[64];
  if (remote_plugin().sign(octets(seed), nullptr, 0, key, unused) != 0)
    refuse_key(path, "the plugin cannot use it");
  return {std::move(name), std::move(seed), to_hex(key, sizeof key)};
}

}  // namespace

const flashjit_remote_plugin_api& remote_plugin() {
  static constinit std::atomic<const flashjit_remote_plugin_api*> plugin = nullptr;
  return opened_once(plugin, open_remote_plugin);
}

std::string take_text(const flashjit_remote_plugin_api& plugin, flashjit_remote_text& text) {
  std::string result(text.data != nullptr ? text.data : "", text.size);
  plugin.free_text(&text);
  return result;
}

SigningKey read_signing_key(const std::string& path) {
  const File file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat status;
  if (!file || ::fstat(file.get(), &status) != 0)
    refuse_key(path, error_text(errno) + "; flashjit cache keygen makes one");
  if (!S_ISREG(status.st_mode) || status.st_size > 4096) refuse_key(path, "not a file of one key");
  if (const std::string reason = distrust(status); !reason.empty()) refuse_key(path, reason);
  if (status.st_mode & (S_IRGRP | S_IROTH))
    refuse_key(path, "others may read it, and could sign as you; run chmod 600 on it, or make another key");
  std::string text(static_cast<std::size_t>(status.st_size), '\0');
  if (!read_fully(file.get(), text.data(), text.size()))
    refuse_key(path, errno ? error_text(errno) : "ends early");
  // The text is never shown.
  const std::string_view all = text;
  const std::size_t equals = all.find('=');
  if (!all.starts_with(secret_word) || equals == std::string_view::npos || !all.ends_with('\n'))
    refuse_key(path, "is no signing key; flashjit cache keygen makes one");
  const std::string_view name = all.substr(secret_word.size(), equals - secret_word.size());
  const std::string_view digits = all.substr(equals + 1, all.size() - equals - 2);
  if (!is_key_name(name) || !is_hex(digits, 2 * seed_size))
    refuse_key(path, "is no signing key; flashjit cache keygen makes one");
  return key_of(path, std::string(name), from_hex(digits));
}

SigningKey make_signing_key(const std::string& path, const std::string& name) {
  if (!is_key_name(name))
    throw Error(ErrorCode::invalid_argument,
                in_quotes(name) +
                    " is no name of a key: up to 64 letters, digits, '.', '_' and '-' would be, no "
                    "'-' first");
  std::string seed(seed_size, '\0');
  if (remote_plugin().random_seed(reinterpret_cast<unsigned char*>(seed.data())) != 0)
    refuse_key(path, "the plugin has no random numbers");
  SigningKey key = key_of(path, name, std::move(seed));
  const File file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file)
    refuse_key(
        path, error_text(errno) + (errno == EEXIST ? "; a key is never overwritten: name another file" : ""));
  const std::string text = std::string(secret_word) + name + "=" + to_hex(octets(key.seed), seed_size) + "\n";
  if (!write_fully(file.get(), text.data(), text.size()) || ::fsync(file.get()) != 0)
    refuse_key(path, "cannot be written: " + error_text(errno));
  return key;
}

Verifier verifier(Trust trust) {
  return [shared = std::make_shared<const Trust>(std::move(trust))](std::string_view name,
                                                                    std::string_view bytes) -> std::string {
    const SignedBytes parts = split_signature(bytes);
    if (parts.line.empty()) return "not signed";
    const std::optional<Signature> signature = parse_signature(parts.line);
    if (!signature) return "not signed";
    if (std::string reason = shared->distrust(signature->key); !reason.empty()) return reason;
    const std::string message = signed_message(name, signature->time, parts.body);
    const std::string key = from_hex(signature->key), value = from_hex(signature->value);
    try {
      if (remote_plugin().verify(octets(key), message.data(), message.size(), octets(value)) == 0) return {};
    } catch (const Error& error) {
      return "not checked: " + error.message();
    }
    return "not what key " + shared->names().at(signature->key) + " has signed under this name";
  };
}

Signer signer(const std::string& path) {
  if (path.empty()) return {};
  const auto key = std::make_shared<std::optional<SigningKey>>();
  return [path, key](std::string_view name, std::string_view body) {
    {
      const std::lock_guard lock(opening_mutex());
      if (!*key) *key = read_signing_key(path);
    }
    Signature signature{signing_time(), (*key)->public_key, {}};
    const std::string message = signed_message(name, signature.time, body);
    unsigned char unused[32], value[64];
    if (remote_plugin().sign(octets((*key)->seed), message.data(), message.size(), unused, value) != 0)
      refuse_key(path, "the plugin cannot sign with it");
    signature.value = to_hex(value, sizeof value);
    return to_line(signature);
  };
}

Trust trusted_keys(const std::optional<std::string>& list) {
  return Trust::parse(list ? *list : environment_variable(Variable::trust));
}

std::string signing_key_path(const std::optional<std::string>& path) {
  return path ? *path : environment_variable(Variable::signing_key);
}

}  // namespace flashjit
