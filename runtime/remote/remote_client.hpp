// The remote stores of this process.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "cache/remote_cache.hpp"

namespace flashjit {

// A store of the plugin. Throws Error without the plugin, for a URL that it cannot use, and for a token's
// file that cannot be read or that others may read.
std::unique_ptr<RemoteStore> open_remote_store(const RemoteAddress& address);

// The stores that `list` names, FLASHJIT_CACHE_REMOTE if it is absent; null if there are none. Engines of the
// same stores, keys and folder share one. Throws cache_failed for a list that cannot be read; opens nothing
// yet.
std::shared_ptr<RemoteCache> remote_cache(const std::optional<std::string>& list, const Verifier& verifier,
                                          const Signer& signer, const std::string& keys,
                                          const std::string& folder);

}  // namespace flashjit
