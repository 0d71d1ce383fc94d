// The core library's side of the plugin for remote stores and signatures.
#pragma once

#include <optional>
#include <string>

#include "cache/signature.hpp"
#include "runtime/remote/plugin.h"

namespace flashjit {

// The plugin, opened at the first call and kept open. Throws cache_failed; the message says where it was
// looked for and what helps, and the next call looks again. FLASHJIT_REMOTE_PLUGIN names its file; otherwise
// the places are those of plugin_places() (library_file.hpp).
const flashjit_remote_plugin_api& remote_plugin();

// Converts a plugin's text to a string and frees it.
std::string take_text(const flashjit_remote_plugin_api& plugin, flashjit_remote_text& text);

// A key to sign with: its file has one line, "secret NAME=SEED", with 64 hexadecimal digits.
struct SigningKey {
  std::string name;
  std::string seed;        // 32 octets
  std::string public_key;  // 64 hexadecimal digits
};
// Throws cache_failed if the file is no such key, or if others may read it.
SigningKey read_signing_key(const std::string& path);
// A new key, written to the file, which must not exist.
SigningKey make_signing_key(const std::string& path, const std::string& name);

// Checks signatures by the trusted keys. Opens the plugin when it is first asked.
Verifier verifier(Trust trust);
// Signs with the key of that file, which is read when it is first asked; empty without a path.
Signer signer(const std::string& path);

// The keys of a list as in FLASHJIT_TRUST, which it is if absent; the file of FLASHJIT_SIGNING_KEY, empty:
// none.
Trust trusted_keys(const std::optional<std::string>& list);
std::string signing_key_path(const std::optional<std::string>& path);

}  // namespace flashjit
