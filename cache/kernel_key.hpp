// The cache keys of a kernel.
#pragma once

#include <string_view>

#include "cache/key.hpp"
#include "codegen/families/kernel_source.hpp"

namespace flashjit {

struct AttentionSpec;

// The key of a request: the spec, the target, the config, the steps, and the digests
// of the rendered text and of each header that it reaches. Needs no compiler. `spec`
// is validated; its pins are left out, since the config holds their effect.
CacheKey request_key(const AttentionSpec& spec, const KernelSource& source);

// The key of an entry: the request and everything else that decides the machine code
// and its file: compile options, the compiler's identity, the entry format's version.
CacheKey entry_key(const CacheKey& request, std::string_view options, std::string_view compiler_identity);

// The request that an entry's key contains.
CacheKey request_of(const CacheKey& key);

}  // namespace flashjit
