// Keys and entries to sign with them.
#pragma once

#include <string>

#include "cache/disk_cache.hpp"
#include "cache/kernel_key.hpp"
#include "codegen/families/search_space.hpp"
#include "codegen/render.hpp"
#include "runtime/remote/plugin_client.hpp"
#include "tests/cache/support.hpp"

namespace flashjit::testing {

// A key in a file of its own.
struct NamedKey {
  explicit NamedKey(const std::string& name) : key(make_signing_key(folder / "key", name)) {}
  std::string path() const { return folder / "key"; }
  std::string trusted() const { return key.name + "=" + key.public_key; }
  std::string revoked() const { return "-" + trusted(); }
  Signer sign() const { return signer(path()); }

  Scratch folder;
  const SigningKey key;
};

inline CacheEntry some_entry(const std::string& payload, const std::string& target = "x86-64-v3") {
  CacheEntry entry{CacheKey(), "{}", payload};
  entry.key.add("spec", "a spec").add("target", target).add("options", "-O2").add("compiler", "a compiler");
  return entry;
}

inline std::string bytes_of(const CacheEntry& entry) {
  std::string why;
  return encode_entry(entry, why).value();
}

inline CacheEntry signed_by(const NamedKey& key, CacheEntry entry) {
  entry.signature = key.sign()(DiskCache::name(entry.key), bytes_of(entry));
  return entry;
}

}  // namespace flashjit::testing
